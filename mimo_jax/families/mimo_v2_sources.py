"""MiMo-V2 in Hugging Face folders: which tensors are behind each parameter, in every published layout."""

import re
from dataclasses import dataclass, replace
from typing import Any

from mimo_jax.config import AttentionDims, FfnKind, LayerKind, ModelConfig
from mimo_jax.families.family import hf_attention
from mimo_jax.families.qkv import Chunks, fused_fp8, split_fp8
from mimo_jax.families.source import FP8, Forms, Source, needed_block, tensor, weight
from mimo_jax.params import Attention, Dense, Layer, Moe, MtpHead, Params

_HEAD_NAME = re.compile(r"model\.mtp\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Layout:
    """How a checkpoint stores its matrices."""

    forms: Forms
    fused: bool  # q, k and v are one tensor
    block: tuple[int, int] | None  # of fp8 weights; None: the config announces none
    chunks: int = 1  # what fp8 q, k and v were cut into


def draft_heads(forms: Forms) -> int:
    """How many draft heads the tensors are for. No config key says it. Raises ValueError for a gap."""
    found = {int(match.group(1)) for match in map(_HEAD_NAME.match, forms) if match}
    for index in range(len(found)):
        if index not in found:
            raise ValueError(f"model.mtp.layers.{index} is missing, model.mtp.layers.{max(found)} is there")
    return len(found)


def hf_sources(config: ModelConfig, layout: Layout) -> Params:
    """Sources in the shape of `param_specs`. Raises ValueError for a layout that is not known."""
    layout = replace(layout, chunks=_count_chunks(config, layout))
    return Params(
        embedding=tensor("model.embed_tokens.weight"),
        layers=tuple(_layer(index, config, layout) for index in range(config.layers)),
        final_norm=tensor("model.norm.weight"),
        head=None if config.tied_head else tensor("lm_head.weight"),
        mtp=tuple(_head(index, config, layout) for index in range(config.draft_heads)),
    )


def _layer(index: int, config: ModelConfig, layout: Layout) -> Layer:
    prefix = f"model.layers.{index}."
    moe = config.ffn_kinds[index] is FfnKind.MOE
    return Layer(
        attention_norm=tensor(f"{prefix}input_layernorm.weight"),
        attention=_attention(f"{prefix}self_attn.", config, config.dims(config.layer_kinds[index]), layout),
        ffn_norm=tensor(f"{prefix}post_attention_layernorm.weight"),
        ffn=_experts(f"{prefix}mlp.", config, layout) if moe else _dense(f"{prefix}mlp.", layout),
    )


def _head(index: int, config: ModelConfig, layout: Layout) -> MtpHead:
    assert config.mtp is not None
    prefix = f"model.mtp.layers.{index}."
    return MtpHead(
        embed_norm=tensor(f"{prefix}enorm.weight"),
        hidden_norm=tensor(f"{prefix}hnorm.weight"),
        projection=weight([f"{prefix}eh_proj.weight"], layout.forms, layout.block),
        layer=Layer(
            attention_norm=tensor(f"{prefix}input_layernorm.weight"),
            attention=_attention(f"{prefix}self_attn.", config, config.dims(config.mtp.kind), layout),
            ffn_norm=tensor(f"{prefix}pre_mlp_layernorm.weight"),
            ffn=_dense(f"{prefix}mlp.", layout),
        ),
        final_norm=tensor(f"{prefix}final_layernorm.weight"),
    )


def _dense(prefix: str, layout: Layout) -> Dense:
    def part(name: str) -> Any:
        return weight([f"{prefix}{name}_proj.weight"], layout.forms, layout.block)

    return Dense(gate=part("gate"), up=part("up"), down=part("down"))


def _experts(prefix: str, config: ModelConfig, layout: Layout) -> Moe:
    assert config.moe is not None
    experts = range(config.moe.experts)

    def part(name: str) -> Any:
        names = [f"{prefix}experts.{expert}.{name}_proj.weight" for expert in experts]
        return weight(names, layout.forms, layout.block, stacked=True)

    return Moe(
        router=tensor(f"{prefix}gate.weight"),
        router_bias=tensor(f"{prefix}gate.e_score_correction_bias"),
        gate=part("gate"),
        up=part("up"),
        down=part("down"),
    )


# ---- q, k and v ----


def _attention(prefix: str, config: ModelConfig, dims: AttentionDims, layout: Layout) -> Attention:
    attention = hf_attention(prefix, config)
    attention = replace(attention, output=weight([f"{prefix}o_proj.weight"], layout.forms, layout.block))
    query, key, value = _qkv(prefix, dims, layout)
    sink = tensor(f"{prefix}attention_sink_bias") if dims.has_sink else None
    return replace(attention, query=query, key=key, value=value, sink=sink)


def _qkv(prefix: str, dims: AttentionDims, layout: Layout) -> tuple[Any, ...]:
    name = _named(prefix, layout)
    fp8 = name in layout.forms and layout.forms[name].dtype == FP8
    if layout.fused:
        chunks = _chunks(prefix, dims, layout.chunks if fp8 else 1)
        if fp8:
            return fused_fp8(name, chunks, needed_block(name, layout.block))
        return tuple(Source(chunks.pieces(name, part)) for part in range(3))
    if fp8 and layout.chunks > 1:
        return split_fp8(prefix, _chunks(prefix, dims, layout.chunks), needed_block(name, layout.block))
    return tuple(weight([f"{prefix}{part}_proj.weight"], layout.forms, layout.block) for part in "qkv")


def _named(prefix: str, layout: Layout) -> str:
    """The tensor that tells how a layer's projections are stored."""
    return f"{prefix}{'qkv' if layout.fused else 'k'}_proj.weight"


def _chunks(where: str, dims: AttentionDims, count: int) -> Chunks:
    if dims.heads % count or dims.kv_heads % count:
        raise ValueError(f"{where}: {dims.heads} heads and {dims.kv_heads} KV heads do not make {count} chunks")
    kv_heads = dims.kv_heads // count
    return Chunks(count, (dims.heads // count, kv_heads, kv_heads), (dims.head_dim, dims.head_dim, dims.v_dim))


def _count_chunks(config: ModelConfig, layout: Layout) -> int:
    """What the fp8 projections were cut into: as many chunks as full layers have KV heads, or one.

    Decided by the number of scale rows, once, and where possible by a full layer: in a window layer of V2.5 both give
    116 rows. Where both give the same, fused projections are in chunks (as published) and split ones are not.
    """
    assert config.full is not None  # this family's configs have both kinds of dims
    order = sorted(range(config.layers), key=lambda index: config.layer_kinds[index] is not LayerKind.FULL)
    for index in order:
        prefix = f"model.layers.{index}.self_attn."
        name = _named(prefix, layout)
        if name in layout.forms and layout.forms[name].dtype == FP8:
            dims = config.dims(config.layer_kinds[index])
            published = _chunks(prefix, dims, config.full.kv_heads)
            whole = _chunks(prefix, dims, 1)
            return _decide(prefix, published, whole, layout, needed_block(name, layout.block)[0])
    return 1


def _decide(prefix: str, published: Chunks, whole: Chunks, layout: Layout, block: int) -> int:
    parts = ("qkv",) if layout.fused else ("q", "k", "v")
    names = [f"{prefix}{part}_proj.weight_scale_inv" for part in parts]
    if any(name not in layout.forms for name in names):
        return published.count  # the check of the tensors will name what is missing
    got = [layout.forms[name].shape[0] if layout.forms[name].shape else 0 for name in names]
    if layout.fused:
        chunked, apart = [published.count * published.chunk_blocks(block)], [whole.chunk_blocks(block)]
        choices = {tuple(apart): 1, tuple(chunked): published.count}
    else:
        chunked = [published.count * published.owned(part, block) for part in range(3)]
        apart = [-(-rows // block) for rows in whole.rows]
        choices = {tuple(chunked): published.count, tuple(apart): 1}
    if tuple(got) not in choices:
        raise ValueError(
            f"{', '.join(names)}: {got} rows; {chunked} ({published.count} chunks) or {apart} are possible"
        )
    return choices[tuple(got)]

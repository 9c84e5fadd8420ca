"""MiMo-V2 in GGUF files (`mimo2`), as llama.cpp's converter writes them.

Draft heads are the blocks behind the trunk's; `block_count` counts them. Projections are split, or rows [Q; K; V] of
one tensor. All experts of a layer are one tensor. Which layers have experts, sinks and draft heads, the tensors say.
"""

from typing import Any

from mimo_jax.checkpoint.gguf import GgufFile
from mimo_jax.config import AttentionDims, FfnKind, LayerKind, ModelConfig, MoeDims, MtpDims
from mimo_jax.families.llama import vocab_from_gguf
from mimo_jax.families.qkv import PARTS, Chunks
from mimo_jax.families.reader import ConfigReader
from mimo_jax.families.source import Forms, Source, tensor
from mimo_jax.params import Attention, Dense, Layer, Moe, MtpHead, Params

_SIGMOID = 2
_IGNORED = ("vocab_size", "leading_dense_block_count", "interleave_moe_layer_step")


def config_from_gguf(file: GgufFile, reader: ConfigReader) -> ModelConfig:
    heads = reader.optional("mimo2.nextn_predict_layers", int, 0)
    layers = reader.count("mimo2.block_count") - heads
    if heads < 0 or layers < 1:
        raise reader.error(f"mimo2.nextn_predict_layers={heads}, and mimo2.block_count={layers + heads} counts them")
    if f"blk.{layers}.nextn.eh_proj.weight" not in file.tensors:
        heads = 0  # the converter writes the key for files without draft heads too
    _expect_fixed(reader)
    kinds = tuple(LayerKind.WINDOW if one else LayerKind.FULL for one in _pattern(reader, layers))
    moe = tuple(f"blk.{index}.ffn_gate_inp.weight" in file.tensors for index in range(layers))
    config = ModelConfig(
        family="mimo_v2",
        vocab=vocab_from_gguf(file, reader),
        embed=reader.require("mimo2.embedding_length", int),
        layer_kinds=kinds,
        ffn_kinds=tuple(FfnKind.MOE if one else FfnKind.DENSE for one in moe),
        full=_dims(file, reader, kinds, LayerKind.FULL),
        window=_dims(file, reader, kinds, LayerKind.WINDOW),
        ffn=reader.require("mimo2.feed_forward_length", int),
        max_position_tokens=reader.require("mimo2.context_length", int),
        moe=MoeDims(
            experts=reader.count("mimo2.expert_count"),
            experts_per_token=reader.require("mimo2.expert_used_count", int),
            ffn=reader.require("mimo2.expert_feed_forward_length", int),
            routed_scale=reader.optional("mimo2.expert_weights_scale", float, 1.0),
        ),
        norm_epsilon=reader.require("mimo2.attention.layer_norm_rms_epsilon", float),
        tied_head="output.weight" not in file.tensors,
        mtp=MtpDims(heads=heads, kind=LayerKind.WINDOW) if heads else None,
    )
    reader.ignore(f"mimo2.{key}" for key in _IGNORED)
    reader.finish()
    return config


def _expect_fixed(reader: ConfigReader) -> None:
    """What every converted file says, or leaves out; anything else would be another forward pass."""
    head_dim, rotary = "mimo2.attention.key_length", "mimo2.rope.dimension_count"
    reader.expect("mimo2.expert_gating_func", _SIGMOID)
    reader.expect("mimo2.expert_weights_norm", True)
    reader.expect("mimo2.expert_shared_count", 0)
    reader.expect("mimo2.expert_group_count", 0, 1)
    reader.expect("mimo2.expert_group_used_count", 0, 1)
    reader.expect("mimo2.rope.scaling.type", "none")
    reader.expect("mimo2.attention.key_length_swa", reader.require(head_dim, int))
    reader.expect("mimo2.attention.value_length_swa", reader.require("mimo2.attention.value_length", int))
    reader.expect("mimo2.rope.dimension_count_swa", reader.require(rotary, int))


def _pattern(reader: ConfigReader, layers: int) -> list[bool]:
    key = "mimo2.attention.sliding_window_pattern"
    values = reader.require(key, list)
    if len(values) < layers or any(value not in (0, 1) for value in values):
        raise reader.error(f"{key}={values!r}; an entry of 0 or 1 for each of {layers} layers is needed")
    return [bool(value) for value in values[:layers]]


def _dims(file: GgufFile, reader: ConfigReader, kinds: tuple[LayerKind, ...], kind: LayerKind) -> AttentionDims | None:
    """The numbers of one kind of layer; None where there is none."""
    window = kind is LayerKind.WINDOW
    theta = reader.require("mimo2.rope.freq_base_swa" if window else "mimo2.rope.freq_base", float)
    window_tokens = reader.require("mimo2.attention.sliding_window", int)
    own = [index for index, other in enumerate(kinds) if other is kind]
    if not own:
        return None
    head_dim = reader.require("mimo2.attention.key_length", int)
    return AttentionDims(
        heads=_of_layers(reader, "mimo2.attention.head_count", own),
        kv_heads=_of_layers(reader, "mimo2.attention.head_count_kv", own),
        head_dim=head_dim,
        v_dim=reader.require("mimo2.attention.value_length", int),
        rotary_dims=reader.require("mimo2.rope.dimension_count", int),
        rope_theta=theta,
        scale=head_dim**-0.5,
        window_tokens=window_tokens if window else None,
        has_sink=f"blk.{own[0]}.attn_sinks.weight" in file.tensors,
        # Files from before the converter knew this key would run, as a silently worse model.
        value_scale=reader.require("mimo2.attention.value_scale", float),
    )


def _of_layers(reader: ConfigReader, key: str, layers: list[int]) -> int:
    """A number, or one of a list with a number a block; the given layers must agree."""
    try:
        return reader.require(key, int)
    except ValueError:
        values = reader.require(key, list)
    found = {values[index] if index < len(values) else None for index in layers}
    (value,) = found if len(found) == 1 else (None,)
    if not isinstance(value, int):
        raise reader.error(f"{key}={values!r}; one number for all layers of a kind is needed")
    return value


def gguf_sources(config: ModelConfig, forms: Forms) -> Params:
    return Params(
        embedding=tensor("token_embd.weight"),
        layers=tuple(
            _layer(f"blk.{index}.", config.dims(kind), ffn, forms)
            for index, (kind, ffn) in enumerate(zip(config.layer_kinds, config.ffn_kinds, strict=True))
        ),
        final_norm=tensor("output_norm.weight"),
        head=None if config.tied_head else tensor("output.weight"),
        mtp=tuple(_head(f"blk.{config.layers + index}.", config, forms) for index in range(config.draft_heads)),
    )


def _layer(prefix: str, dims: AttentionDims, ffn: FfnKind, forms: Forms) -> Layer:
    return Layer(
        attention_norm=tensor(f"{prefix}attn_norm.weight"),
        attention=_attention(prefix, dims, forms),
        ffn_norm=tensor(f"{prefix}ffn_norm.weight"),
        ffn=_ffn(prefix, ffn),
    )


def _head(prefix: str, config: ModelConfig, forms: Forms) -> MtpHead:
    assert config.mtp is not None
    return MtpHead(
        embed_norm=tensor(f"{prefix}nextn.enorm.weight"),
        hidden_norm=tensor(f"{prefix}nextn.hnorm.weight"),
        projection=tensor(f"{prefix}nextn.eh_proj.weight"),
        layer=_layer(prefix, config.dims(config.mtp.kind), FfnKind.DENSE, forms),
        final_norm=tensor(f"{prefix}layer_output_norm.weight"),
    )


def _attention(prefix: str, dims: AttentionDims, forms: Forms) -> Attention:
    query, key, value = (tensor(f"{prefix}attn_{part}.weight") for part in PARTS)
    fused = f"{prefix}attn_qkv.weight"
    if fused in forms:
        heads = (dims.heads, dims.kv_heads, dims.kv_heads)
        whole = Chunks(1, heads, (dims.head_dim, dims.head_dim, dims.v_dim))
        query, key, value = (Source(whole.pieces(fused, part)) for part in range(3))
    return Attention(
        query=query,
        key=key,
        value=value,
        output=tensor(f"{prefix}attn_output.weight"),
        sink=tensor(f"{prefix}attn_sinks.weight") if dims.has_sink else None,
    )


def _ffn(prefix: str, kind: FfnKind) -> Any:
    if kind is FfnKind.DENSE:
        return Dense(*(tensor(f"{prefix}ffn_{part}.weight") for part in ("gate", "up", "down")))
    return Moe(
        router=tensor(f"{prefix}ffn_gate_inp.weight"),
        router_bias=tensor(f"{prefix}exp_probs_b.bias"),
        gate=tensor(f"{prefix}ffn_gate_exps.weight"),
        up=tensor(f"{prefix}ffn_up_exps.weight"),
        down=tensor(f"{prefix}ffn_down_exps.weight"),
    )

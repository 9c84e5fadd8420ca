"""MiMo-V2: V2-Flash (`mimo_v2_flash`), V2.5 and V2.5-Pro (`mimo_v2`). The trunk, unquantised, split or fused q/k/v.

The layer kinds are read from `hybrid_layer_pattern` (0 full, 1 window), the FFN kinds from `moe_layer_freq`: no formula
gives both published patterns.
"""

from dataclasses import replace
from typing import TypeVar

from mimo_jax.config import AttentionDims, FfnKind, LayerKind, ModelConfig, MoeDims
from mimo_jax.families.family import Family, hf_attention, hf_dense, rope_from_hf
from mimo_jax.families.reader import HF_IGNORED, ConfigReader
from mimo_jax.families.source import stack, tensor
from mimo_jax.params import Attention, Layer, Moe, Params

Kind = TypeVar("Kind", LayerKind, FfnKind)

# No engine reads attention_chunk_size; sliding_window_size repeats sliding_window.
_IGNORED_KEYS = (
    "attention_chunk_size",
    "sliding_window_size",
    "hybrid_block_size",
    "vision_config",
    "audio_config",
    "processor_config",
    "image_token_id",
    "video_token_id",
    "audio_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)
# The draft heads, then what V2.5 has beside the text model.
_IGNORED_TENSORS = ("model.mtp.", "visual.", "audio_encoder.", "speech_embeddings.", "audio_tokenizer.")


def _config_from_hf(reader: ConfigReader) -> ModelConfig:
    if reader.present("quantization_config"):
        method = reader.require("quantization_config", dict).get("quant_method")
        raise reader.error(f"quantization_config: quant_method={method!r} is not supported; unquantised weights are")
    layers = reader.count("num_hidden_layers")
    _expect_fixed(reader)
    layer_kinds = _per_layer(reader, "hybrid_layer_pattern", layers, (LayerKind.FULL, LayerKind.WINDOW))
    ffn_kinds = _per_layer(reader, "moe_layer_freq", layers, (FfnKind.DENSE, FfnKind.MOE))
    config = ModelConfig(
        family="mimo_v2",
        vocab=reader.require("vocab_size", int),
        embed=reader.require("hidden_size", int),
        layer_kinds=layer_kinds,
        ffn_kinds=ffn_kinds,
        full=_dims(reader, ""),
        window=_dims(reader, "swa_"),
        ffn=reader.require("intermediate_size", int),
        max_position_tokens=reader.require("max_position_embeddings", int),
        moe=MoeDims(
            experts=reader.count("n_routed_experts"),
            experts_per_token=reader.require("num_experts_per_tok", int),
            ffn=reader.require("moe_intermediate_size", int),
            normalise_top_k=reader.require("norm_topk_prob", bool),
            routed_scale=reader.optional("routed_scaling_factor", float, 1.0),
        ),
        norm_epsilon=reader.require("layernorm_epsilon", float),
        tied_head=reader.require("tie_word_embeddings", bool),
    )
    reader.ignore(_IGNORED_KEYS)
    reader.ignore(HF_IGNORED)
    reader.finish()
    return config


def _expect_fixed(reader: ConfigReader) -> None:
    """What every published checkpoint says; anything else would be another forward pass."""
    reader.expect("hidden_act", "silu")
    reader.expect("attention_bias", False)
    reader.expect("scoring_func", "sigmoid")
    reader.expect("topk_method", "noaux_tc")
    reader.expect("n_group", 1, None)
    reader.expect("topk_group", 1, None)
    reader.expect("n_shared_experts", None, 0)
    reader.expect("attention_projection_layout", None, "fused_qkv", "split")
    reader.expect("moe_router_dtype", None, "float32")


def _dims(reader: ConfigReader, prefix: str) -> AttentionDims:
    window = prefix == "swa_"
    head_dim = reader.require(f"{prefix}head_dim", int)
    theta, scaling = rope_from_hf(reader, default_theta=0.0)
    if theta == 0.0:
        raise reader.error("key 'rope_theta' is missing")
    sink = "add_swa_attention_sink_bias" if window else "add_full_attention_sink_bias"
    return AttentionDims(
        heads=reader.require(f"{prefix}num_attention_heads", int),
        kv_heads=reader.require(f"{prefix}num_key_value_heads", int),
        head_dim=head_dim,
        v_dim=reader.require(f"{prefix}v_head_dim", int),
        rotary_dims=int(head_dim * reader.require("partial_rotary_factor", float)),
        rope_theta=reader.require("swa_rope_theta", float) if window else theta,
        scale=head_dim**-0.5,
        window_tokens=reader.require("sliding_window", int) if window else None,
        has_sink=reader.require(sink, bool),
        value_scale=reader.require("attention_value_scale", float),
        rope_scaling=None if window else scaling,
    )


def _per_layer(reader: ConfigReader, key: str, layers: int, kinds: tuple[Kind, Kind]) -> tuple[Kind, ...]:
    values = reader.require(key, list)
    if len(values) != layers or any(value not in (0, 1) for value in values):
        raise reader.error(f"{key}={values!r}; {layers} entries of 0 or 1 are needed")
    return tuple(kinds[value] for value in values)


def _hf_sources(config: ModelConfig, reader: ConfigReader) -> Params:
    fused = reader.optional("attention_projection_layout", str, "split") == "fused_qkv"
    return Params(
        embedding=tensor("model.embed_tokens.weight"),
        layers=tuple(_layer(index, config, fused) for index in range(config.layers)),
        final_norm=tensor("model.norm.weight"),
        head=None if config.tied_head else tensor("lm_head.weight"),
    )


def _layer(index: int, config: ModelConfig, fused: bool) -> Layer:
    prefix = f"model.layers.{index}."
    dims = config.dims(config.layer_kinds[index])
    attention = hf_attention(f"{prefix}self_attn.", config)
    if fused:
        attention = _fused(attention, f"{prefix}self_attn.qkv_proj.weight", dims)
    if dims.has_sink:
        attention = replace(attention, sink=tensor(f"{prefix}self_attn.attention_sink_bias"))
    moe = config.ffn_kinds[index] is FfnKind.MOE
    return Layer(
        attention_norm=tensor(f"{prefix}input_layernorm.weight"),
        attention=attention,
        ffn_norm=tensor(f"{prefix}post_attention_layernorm.weight"),
        ffn=_experts(f"{prefix}mlp.", config) if moe else hf_dense(f"{prefix}mlp."),
    )


def _fused(attention: Attention, name: str, dims: AttentionDims) -> Attention:
    """Rows [Q; K; V] of one unquantised tensor."""
    query_end = dims.heads * dims.head_dim
    key_end = query_end + dims.kv_heads * dims.head_dim
    value_end = key_end + dims.kv_heads * dims.v_dim
    return replace(
        attention,
        query=tensor(name, rows=(0, query_end)),
        key=tensor(name, rows=(query_end, key_end)),
        value=tensor(name, rows=(key_end, value_end)),
    )


def _experts(prefix: str, config: ModelConfig) -> Moe:
    assert config.moe is not None
    experts = range(config.moe.experts)

    def part(name: str) -> object:
        return stack([f"{prefix}experts.{expert}.{name}_proj.weight" for expert in experts])

    return Moe(
        router=tensor(f"{prefix}gate.weight"),
        router_bias=tensor(f"{prefix}gate.e_score_correction_bias"),
        gate=part("gate"),
        up=part("up"),
        down=part("down"),
    )


MIMO_V2 = Family(_config_from_hf, _hf_sources, ignored_tensors=_IGNORED_TENSORS)

"""MiMo-V2: V2-Flash (`mimo_v2_flash`), V2.5, V2.5-Pro and V2.6 (`mimo_v2`), the text model with its draft heads.

The layer kinds are read from `hybrid_layer_pattern` (0 full, 1 window), the FFN kinds from `moe_layer_freq`: no formula
gives both published patterns.
"""

from typing import Any, TypeVar

from mimo_jax.config import AttentionDims, FfnKind, LayerKind, ModelConfig, MoeDims, MtpDims
from mimo_jax.families.family import Family, rope_from_hf
from mimo_jax.families.mimo_v2_gguf import config_from_gguf, gguf_sources
from mimo_jax.families.mimo_v2_sources import Layout, draft_heads, hf_sources
from mimo_jax.families.reader import HF_IGNORED, ConfigReader
from mimo_jax.families.source import Forms
from mimo_jax.params import Params
from pallas_kernels.formats import MXFP4_GROUP

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
# Our own, for hf_overrides: how heads are fed, where engines read the report differently (see `MtpDims`).
_MTP_KEYS = ("mtp_normed_hidden", "mtp_chained")
# What V2.5 has beside the text model.
_IGNORED_TENSORS = ("visual.", "audio_encoder.", "speech_embeddings.", "audio_tokenizer.")


def _config_from_hf(reader: ConfigReader, forms: Forms) -> ModelConfig:
    layers = reader.count("num_hidden_layers")
    heads = draft_heads(forms)
    _expect_fixed(reader)
    _fp8_block(reader)
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
        mtp=_mtp(reader, heads) if heads else None,
    )
    reader.ignore(_IGNORED_KEYS)
    reader.ignore(_MTP_KEYS)
    reader.ignore(HF_IGNORED)
    reader.finish()
    return config


def _mtp(reader: ConfigReader, heads: int) -> MtpDims:
    return MtpDims(
        heads=heads,
        kind=LayerKind.WINDOW,
        normed_hidden=reader.optional("mtp_normed_hidden", bool, True),
        chained=reader.optional("mtp_chained", bool, False),
    )


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
    reader.expect("moe_router_dtype", None, "float32", "bfloat16")  # V2.6 says bfloat16; the router stays float32


def _fp8_block(reader: ConfigReader) -> tuple[int, int] | None:
    """The rows and columns that share a factor, from `quantization_config`. None: it is not there.

    `store_dtype` says "mxfp4" where the experts are (V2.6). Which tensors are what is not read from here: see
    `families.source.weight`.
    """
    values: dict[str, Any] = reader.optional("quantization_config", dict, {})
    if not values:
        return None
    nested = ConfigReader(values, reader.where("quantization_config"))
    nested.require("quant_method", str)
    nested.expect("quant_method", "fp8")
    nested.expect("fmt", "e4m3", None)
    nested.expect("activation_scheme", "dynamic", None)
    nested.expect("store_dtype", "fp8", "mxfp4", None)
    nested.expect("mxfp4_block_size", MXFP4_GROUP, None)
    nested.ignore(("ignored_layers",))
    block = nested.require("weight_block_size", list)
    if len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        raise nested.error(f"weight_block_size={block!r}; two whole numbers from 1 are needed")
    nested.finish()
    return block[0], block[1]


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


def _hf_sources(config: ModelConfig, reader: ConfigReader, forms: Forms) -> Params:
    fused = reader.optional("attention_projection_layout", str, "split") == "fused_qkv"
    return hf_sources(config, Layout(forms, fused, _fp8_block(reader)))


MIMO_V2 = Family(_config_from_hf, _hf_sources, config_from_gguf, gguf_sources, ignored_tensors=_IGNORED_TENSORS)

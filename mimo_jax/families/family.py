"""What every family provides, and the names that all Hugging Face decoders share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mimo_jax.checkpoint.gguf import GgufFile, read_tensor
from mimo_jax.config import ModelConfig, RopeScaling
from mimo_jax.families.reader import ConfigReader
from mimo_jax.families.source import Convert, Forms, Source, tensor
from mimo_jax.params import Attention, Dense, Layer, Params


@dataclass(frozen=True)
class Family:
    """One checkpoint family. `*_sources` return `Params` filled with Source, in the shape of `param_specs`.

    A matrix may be an Fp8Block or MxFp4 of Sources. The tensors that are there are known to all of them: what is
    stored in which form, and how many draft heads there are, stands in no config. `ignored_tensors` are name prefixes
    that are knowingly not loaded.
    """

    config_from_hf: Callable[[ConfigReader, Forms], ModelConfig]
    hf_sources: Callable[[ModelConfig, ConfigReader, Forms], Params]
    config_from_gguf: Callable[[GgufFile, ConfigReader], ModelConfig] | None = None
    gguf_sources: Callable[[ModelConfig, Forms], Params] | None = None
    ignored_tensors: tuple[str, ...] = ()


def hf_decoder_sources(config: ModelConfig, norm: Convert = None) -> Params:
    """Sources of a decoder with separate q, k, v and a dense gated FFN under the names that Llama set.

    `norm` converts every norm weight (Gemma stores weight - 1).
    """
    layers = tuple(_hf_layer(f"model.layers.{index}.", config, norm) for index in range(config.layers))
    return Params(
        embedding=tensor("model.embed_tokens.weight"),
        layers=layers,
        final_norm=tensor("model.norm.weight", convert=norm),
        head=None if config.tied_head else tensor("lm_head.weight"),
    )


def _hf_layer(prefix: str, config: ModelConfig, norm: Convert) -> Layer:
    # With post norms, Gemma's post_attention_layernorm stands behind attention, elsewhere it is the FFN's own norm.
    ffn_norm = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
    post = config.post_norms
    return Layer(
        attention_norm=tensor(f"{prefix}input_layernorm.weight", convert=norm),
        attention=hf_attention(f"{prefix}self_attn.", config, norm),
        ffn_norm=tensor(f"{prefix}{ffn_norm}.weight", convert=norm),
        ffn=hf_dense(f"{prefix}mlp."),
        post_attention_norm=tensor(f"{prefix}post_attention_layernorm.weight", convert=norm) if post else None,
        post_ffn_norm=tensor(f"{prefix}post_feedforward_layernorm.weight", convert=norm) if post else None,
    )


def hf_attention(prefix: str, config: ModelConfig, norm: Convert = None) -> Attention:
    def bias(part: str) -> Source | None:
        return tensor(f"{prefix}{part}_proj.bias") if config.qkv_bias else None

    def head_norm(part: str) -> Source | None:
        return tensor(f"{prefix}{part}_norm.weight", convert=norm) if config.qk_norm else None

    return Attention(
        query=tensor(f"{prefix}q_proj.weight"),
        key=tensor(f"{prefix}k_proj.weight"),
        value=tensor(f"{prefix}v_proj.weight"),
        output=tensor(f"{prefix}o_proj.weight"),
        query_bias=bias("q"),
        key_bias=bias("k"),
        value_bias=bias("v"),
        query_norm=head_norm("q"),
        key_norm=head_norm("k"),
    )


def hf_dense(prefix: str) -> Dense:
    return Dense(
        gate=tensor(f"{prefix}gate_proj.weight"),
        up=tensor(f"{prefix}up_proj.weight"),
        down=tensor(f"{prefix}down_proj.weight"),
    )


def gguf_decoder_sources(config: ModelConfig, *, query: Convert = None, key: Convert = None) -> Params:
    """Sources of a dense decoder under GGUF's names; `query` and `key` convert those projections."""
    return Params(
        embedding=tensor("token_embd.weight"),
        layers=tuple(_gguf_layer(f"blk.{index}.", config, query, key) for index in range(config.layers)),
        final_norm=tensor("output_norm.weight"),
        head=None if config.tied_head else tensor("output.weight"),
    )


def _gguf_layer(prefix: str, config: ModelConfig, query: Convert, key: Convert) -> Layer:
    def bias(part: str) -> Source | None:
        return tensor(f"{prefix}attn_{part}.bias") if config.qkv_bias else None

    def head_norm(part: str) -> Source | None:
        return tensor(f"{prefix}attn_{part}_norm.weight") if config.qk_norm else None

    attention = Attention(
        query=tensor(f"{prefix}attn_q.weight", convert=query),
        key=tensor(f"{prefix}attn_k.weight", convert=key),
        value=tensor(f"{prefix}attn_v.weight"),
        output=tensor(f"{prefix}attn_output.weight"),
        query_bias=bias("q"),
        key_bias=bias("k"),
        value_bias=bias("v"),
        query_norm=head_norm("q"),
        key_norm=head_norm("k"),
    )
    ffn = Dense(
        gate=tensor(f"{prefix}ffn_gate.weight"),
        up=tensor(f"{prefix}ffn_up.weight"),
        down=tensor(f"{prefix}ffn_down.weight"),
    )
    return Layer(
        attention_norm=tensor(f"{prefix}attn_norm.weight"),
        attention=attention,
        ffn_norm=tensor(f"{prefix}ffn_norm.weight"),
        ffn=ffn,
        post_attention_norm=tensor(f"{prefix}post_attention_norm.weight") if config.post_norms else None,
        post_ffn_norm=tensor(f"{prefix}post_ffw_norm.weight") if config.post_norms else None,
    )


def rope_from_hf(
    reader: ConfigReader, default_theta: float, kind: str | None = None
) -> tuple[float, RopeScaling | None]:
    """theta and scaling, from `rope_theta` and `rope_scaling` or from the newer `rope_parameters`.

    `kind` ("full_attention", "sliding_attention") picks an entry where `rope_parameters` has one a layer kind.
    """
    if reader.present("rope_parameters"):
        values: dict[str, Any] = reader.require("rope_parameters", dict)
        if kind is not None and kind in values:
            values = values[kind]
        reader.ignore(("rope_theta", "rope_scaling"))
        nested = ConfigReader(values, "config.json: rope_parameters")
        theta = nested.optional("rope_theta", float, default_theta)
        return theta, rope_scaling(nested)
    theta = reader.optional("rope_theta", float, default_theta)
    scaling: dict[str, Any] = reader.optional("rope_scaling", dict, {})
    return theta, rope_scaling(ConfigReader(scaling, "config.json: rope_scaling"))


def rope_scaling(reader: ConfigReader) -> RopeScaling | None:
    """A `rope_scaling` block: none, "default", "linear" or "llama3"; any other kind is refused by name."""
    kind = reader.optional("rope_type", str, reader.optional("type", str, "default"))
    reader.ignore(("type", "partial_rotary_factor"))
    if kind == "default":
        scaling = None
    elif kind == "linear":
        scaling = RopeScaling("linear", reader.require("factor", float))
    elif kind == "llama3":
        scaling = RopeScaling(
            "llama3",
            factor=reader.require("factor", float),
            low_frequency_factor=reader.require("low_freq_factor", float),
            high_frequency_factor=reader.require("high_freq_factor", float),
            original_max_position_tokens=reader.require("original_max_position_embeddings", int),
        )
    else:
        raise reader.error(f"rope_type={kind!r} is not supported; 'default', 'linear' and 'llama3' are")
    reader.finish()
    return scaling


def rope_scaling_from_gguf(file: GgufFile, reader: ConfigReader, rotary_dims: int) -> RopeScaling | None:
    """GGUF keeps linear scaling as keys, and Llama 3's as a tensor of one divisor per frequency."""
    prefix = f"{file.architecture}.rope.scaling."
    kind = reader.optional(f"{prefix}type", str, "none")
    factor = reader.optional(f"{prefix}factor", float, 1.0)
    reader.ignore((f"{prefix}original_context_length", f"{prefix}finetuned"))
    if "rope_freqs.weight" in file.tensors:
        divisors = read_tensor(file, "rope_freqs.weight").reshape(-1)
        if divisors.size != rotary_dims // 2:
            raise reader.error(f"rope_freqs.weight has {divisors.size} entries; {rotary_dims // 2} are needed")
        return RopeScaling("divisors", factor=1.0, divisors=tuple(divisors.tolist()))
    if kind not in ("none", "linear"):
        raise reader.error(f"{prefix}type={kind!r} is not supported; 'none' and 'linear' are")
    return RopeScaling("linear", factor) if kind == "linear" and factor != 1.0 else None


def unpermute_heads(heads: int) -> Callable[[np.ndarray], np.ndarray]:
    """Undoes the row order of llama-type GGUFs, which pair neighbours (2i, 2i + 1) instead of halves (i, i + half).

    In a head of 6 rows the file holds 0 3 1 4 2 5 of the original; this returns them to 0 1 2 3 4 5.
    """

    def convert(weight: np.ndarray) -> np.ndarray:
        pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
        return np.swapaxes(pairs, 1, 2).reshape(weight.shape)

    return convert

"""Gemma 3, text only: window layers and full ones, norms before and behind each half, GeGLU, scaled embedding."""

import numpy as np

from mimo_jax.checkpoint.gguf import GgufFile
from mimo_jax.config import AttentionDims, FfnKind, LayerKind, ModelConfig, RopeScaling
from mimo_jax.families.family import (
    Family,
    gguf_decoder_sources,
    hf_decoder_sources,
    rope_from_hf,
    rope_scaling_from_gguf,
)
from mimo_jax.families.llama import vocab_from_gguf
from mimo_jax.families.reader import HF_IGNORED, ConfigReader
from mimo_jax.families.source import Forms
from mimo_jax.params import Params

_KINDS = {"full_attention": LayerKind.FULL, "sliding_attention": LayerKind.WINDOW}
# Neither is written into a gemma3 GGUF: the architecture stands for them.
_GGUF_PATTERN = 6
_GGUF_WINDOW_THETA = 10000.0


def _gemma3(
    *,
    layer_kinds: tuple[LayerKind, ...],
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    window_tokens: int,
    full_rope: tuple[float, RopeScaling | None],
    window_theta: float,
    vocab: int,
    embed: int,
    ffn: int,
    max_position_tokens: int,
    norm_epsilon: float,
    tied_head: bool,
) -> ModelConfig:
    def dims(theta: float, scaling: RopeScaling | None, window: int | None) -> AttentionDims:
        return AttentionDims(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            v_dim=head_dim,
            rotary_dims=head_dim,
            rope_theta=theta,
            scale=scale,
            window_tokens=window,
            rope_scaling=scaling,
        )

    return ModelConfig(
        family="gemma3_text",
        vocab=vocab,
        embed=embed,
        layer_kinds=layer_kinds,
        ffn_kinds=(FfnKind.DENSE,) * len(layer_kinds),
        full=dims(*full_rope, None),
        window=dims(window_theta, None, window_tokens),
        ffn=ffn,
        max_position_tokens=max_position_tokens,
        activation="gelu_tanh",
        norm_epsilon=norm_epsilon,
        tied_head=tied_head,
        qk_norm=True,
        post_norms=True,
        embedding_scale=embed**0.5,
    )


def _periodic(layers: int, period: int) -> tuple[LayerKind, ...]:
    """Every period-th layer is full."""
    return tuple(LayerKind.WINDOW if (index + 1) % period else LayerKind.FULL for index in range(layers))


def _layer_kinds(reader: ConfigReader) -> tuple[LayerKind, ...]:
    layers = reader.count("num_hidden_layers")
    reader.ignore(("_sliding_window_pattern",))
    if not reader.present("layer_types"):
        return _periodic(layers, reader.require("sliding_window_pattern", int))
    reader.ignore(("sliding_window_pattern",))
    names = reader.require("layer_types", list)
    if len(names) != layers or any(name not in list(_KINDS) for name in names):
        raise reader.error(f"layer_types={names!r}; {layers} entries of {', '.join(_KINDS)} are needed")
    return tuple(_KINDS[name] for name in names)


def _config_from_hf(reader: ConfigReader, forms: Forms) -> ModelConfig:
    heads, embed = reader.require("num_attention_heads", int), reader.require("hidden_size", int)
    full_rope = rope_from_hf(reader, default_theta=1e6, kind="full_attention")
    window_theta = reader.optional("rope_local_base_freq", float, 10000.0)
    if reader.present("rope_parameters"):
        window_theta, _ = rope_from_hf(reader, default_theta=window_theta, kind="sliding_attention")
    reader.expect("hidden_activation", "gelu_pytorch_tanh")
    reader.expect("hidden_act", "gelu_pytorch_tanh")
    reader.expect("attention_bias", False)
    reader.expect("attn_logit_softcapping", None)
    reader.expect("final_logit_softcapping", None)
    reader.expect("use_bidirectional_attention", False, None)
    reader.ignore(HF_IGNORED)
    config = _gemma3(
        layer_kinds=_layer_kinds(reader),
        heads=heads,
        kv_heads=reader.require("num_key_value_heads", int),
        head_dim=reader.require("head_dim", int),
        scale=reader.require("query_pre_attn_scalar", float) ** -0.5,
        window_tokens=reader.require("sliding_window", int),
        full_rope=full_rope,
        window_theta=window_theta,
        vocab=reader.require("vocab_size", int),
        embed=embed,
        ffn=reader.require("intermediate_size", int),
        max_position_tokens=reader.require("max_position_embeddings", int),
        norm_epsilon=reader.require("rms_norm_eps", float),
        tied_head=reader.optional("tie_word_embeddings", bool, True),
    )
    reader.finish()
    return config


def _config_from_gguf(file: GgufFile, reader: ConfigReader) -> ModelConfig:
    head_dim = reader.require("gemma3.attention.key_length", int)
    reader.expect("gemma3.attention.value_length", head_dim)
    reader.expect("gemma3.rope.dimension_count", head_dim)
    reader.ignore(("gemma3.vocab_size",))
    theta = reader.optional("gemma3.rope.freq_base", float, 1e6)
    config = _gemma3(
        layer_kinds=_periodic(reader.count("gemma3.block_count"), _GGUF_PATTERN),
        heads=reader.require("gemma3.attention.head_count", int),
        kv_heads=reader.require("gemma3.attention.head_count_kv", int),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window_tokens=reader.require("gemma3.attention.sliding_window", int),
        full_rope=(theta, rope_scaling_from_gguf(file, reader, head_dim)),
        window_theta=reader.optional("gemma3.rope.freq_base_swa", float, _GGUF_WINDOW_THETA),
        vocab=vocab_from_gguf(file, reader),
        embed=reader.require("gemma3.embedding_length", int),
        ffn=reader.require("gemma3.feed_forward_length", int),
        max_position_tokens=reader.require("gemma3.context_length", int),
        norm_epsilon=reader.require("gemma3.attention.layer_norm_rms_epsilon", float),
        tied_head="output.weight" not in file.tensors,
    )
    reader.finish()
    return config


def _add_one(weight: np.ndarray) -> np.ndarray:
    """Hugging Face stores weight - 1; GGUF files hold the weight itself."""
    return weight.astype(np.float32) + 1.0


def _hf_sources(config: ModelConfig, reader: ConfigReader, forms: Forms) -> Params:
    return hf_decoder_sources(config, norm=_add_one)


GEMMA3 = Family(_config_from_hf, _hf_sources, _config_from_gguf, lambda config, forms: gguf_decoder_sources(config))

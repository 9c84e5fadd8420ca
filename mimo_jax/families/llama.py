"""Llama and its relatives by shape (SmolLM2): full attention everywhere, dense SwiGLU."""

from mimo_jax.checkpoint.gguf import GgufFile
from mimo_jax.config import AttentionDims, FfnKind, LayerKind, ModelConfig, RopeScaling
from mimo_jax.families.family import (
    Family,
    gguf_decoder_sources,
    hf_decoder_sources,
    rope_from_hf,
    rope_scaling_from_gguf,
    unpermute_heads,
)
from mimo_jax.families.reader import HF_IGNORED, ConfigReader
from mimo_jax.families.source import Forms
from mimo_jax.params import Params


def full_decoder(
    family: str,
    *,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rope_theta: float,
    rope_scaling: RopeScaling | None,
    vocab: int,
    embed: int,
    ffn: int,
    max_position_tokens: int,
    norm_epsilon: float,
    tied_head: bool,
    qkv_bias: bool = False,
    qk_norm: bool = False,
) -> ModelConfig:
    """A decoder with one kind of layer: full attention and a dense FFN."""
    dims = AttentionDims(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_dim=head_dim,
        rotary_dims=head_dim,
        rope_theta=rope_theta,
        scale=head_dim**-0.5,
        rope_scaling=rope_scaling,
    )
    return ModelConfig(
        family=family,
        vocab=vocab,
        embed=embed,
        layer_kinds=(LayerKind.FULL,) * layers,
        ffn_kinds=(FfnKind.DENSE,) * layers,
        full=dims,
        window=None,
        ffn=ffn,
        max_position_tokens=max_position_tokens,
        norm_epsilon=norm_epsilon,
        tied_head=tied_head,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
    )


def full_decoder_from_hf(
    family: str, reader: ConfigReader, *, qkv_bias: bool = False, qk_norm: bool = False
) -> ModelConfig:
    """The keys that Llama, Qwen2 and Qwen3 share."""
    heads, embed = reader.require("num_attention_heads", int), reader.require("hidden_size", int)
    theta, scaling = rope_from_hf(reader, default_theta=10000.0)
    reader.expect("hidden_act", "silu")
    reader.ignore(HF_IGNORED)
    config = full_decoder(
        family,
        layers=reader.count("num_hidden_layers"),
        heads=heads,
        kv_heads=reader.optional("num_key_value_heads", int, heads),
        head_dim=reader.optional("head_dim", int, embed // heads),
        rope_theta=theta,
        rope_scaling=scaling,
        vocab=reader.require("vocab_size", int),
        embed=embed,
        ffn=reader.require("intermediate_size", int),
        max_position_tokens=reader.require("max_position_embeddings", int),
        norm_epsilon=reader.require("rms_norm_eps", float),
        tied_head=reader.optional("tie_word_embeddings", bool, False),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
    )
    reader.finish()
    return config


def full_decoder_from_gguf(
    family: str, file: GgufFile, reader: ConfigReader, *, qkv_bias: bool = False, qk_norm: bool = False
) -> ModelConfig:
    """The keys that GGUF files of these families share. A head is tied when the file has no output.weight."""
    arch = file.architecture
    heads = reader.require(f"{arch}.attention.head_count", int)
    embed = reader.require(f"{arch}.embedding_length", int)
    head_dim = reader.optional(f"{arch}.attention.key_length", int, embed // heads)
    reader.expect(f"{arch}.attention.value_length", head_dim)
    reader.expect(f"{arch}.rope.dimension_count", head_dim)
    reader.expect(f"{arch}.expert_count", 0)
    reader.ignore((f"{arch}.vocab_size", f"{arch}.attention.layer_norm_epsilon", f"{arch}.expert_used_count"))
    config = full_decoder(
        family,
        layers=reader.count(f"{arch}.block_count"),
        heads=heads,
        kv_heads=reader.optional(f"{arch}.attention.head_count_kv", int, heads),
        head_dim=head_dim,
        rope_theta=reader.optional(f"{arch}.rope.freq_base", float, 10000.0),
        rope_scaling=rope_scaling_from_gguf(file, reader, head_dim),
        vocab=vocab_from_gguf(file, reader),
        embed=embed,
        ffn=reader.require(f"{arch}.feed_forward_length", int),
        max_position_tokens=reader.require(f"{arch}.context_length", int),
        norm_epsilon=reader.require(f"{arch}.attention.layer_norm_rms_epsilon", float),
        tied_head="output.weight" not in file.tensors,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
    )
    reader.finish()
    return config


def vocab_from_gguf(file: GgufFile, reader: ConfigReader) -> int:
    """Rows of the embedding: the file's own count of tokens may leave padding out."""
    if "token_embd.weight" not in file.tensors:
        raise reader.error("tensor token_embd.weight is missing")
    return file.tensors["token_embd.weight"].shape[0]


def _config_from_hf(reader: ConfigReader, forms: Forms) -> ModelConfig:
    reader.expect("attention_bias", False)
    reader.expect("mlp_bias", False)
    reader.expect("rope_interleaved", False)
    return full_decoder_from_hf("llama", reader)


def _config_from_gguf(file: GgufFile, reader: ConfigReader) -> ModelConfig:
    return full_decoder_from_gguf("llama", file, reader)


def _gguf_sources(config: ModelConfig, forms: Forms) -> Params:
    assert config.full is not None
    query, key = unpermute_heads(config.full.heads), unpermute_heads(config.full.kv_heads)
    return gguf_decoder_sources(config, query=query, key=key)


LLAMA = Family(
    config_from_hf=_config_from_hf,
    hf_sources=lambda config, reader, forms: hf_decoder_sources(config),
    config_from_gguf=_config_from_gguf,
    gguf_sources=_gguf_sources,
    # Older files carry the rotary frequencies, which follow from the config; rope_freqs.weight is read with it.
    ignored_tensors=("rope_freqs.weight", "model.rotary_emb."),
)

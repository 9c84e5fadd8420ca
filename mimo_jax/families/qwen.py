"""Qwen2 (biases on q, k, v) and Qwen3 (norms on q and k), dense."""

from mimo_jax.checkpoint.gguf import GgufFile
from mimo_jax.config import ModelConfig
from mimo_jax.families.family import Family, gguf_decoder_sources, hf_decoder_sources
from mimo_jax.families.llama import full_decoder_from_gguf, full_decoder_from_hf
from mimo_jax.families.reader import ConfigReader
from mimo_jax.families.source import Forms
from mimo_jax.params import Params


def windows_off(reader: ConfigReader) -> None:
    """Qwen declares a window that its published models switch off; switched on, layers would differ."""
    reader.expect("use_sliding_window", False)
    reader.ignore(("sliding_window", "max_window_layers"))
    for kind in reader.optional("layer_types", list, []):
        if kind != "full_attention":
            raise reader.error(f"layer_types has {kind!r}; 'full_attention' alone is supported")


def _qwen2_from_hf(reader: ConfigReader, forms: Forms) -> ModelConfig:
    windows_off(reader)
    reader.ignore(("use_mrope",))
    return full_decoder_from_hf("qwen2", reader, qkv_bias=True)


def _qwen3_from_hf(reader: ConfigReader, forms: Forms) -> ModelConfig:
    windows_off(reader)
    reader.expect("attention_bias", False)
    return full_decoder_from_hf("qwen3", reader, qk_norm=True)


def _qwen2_from_gguf(file: GgufFile, reader: ConfigReader) -> ModelConfig:
    return full_decoder_from_gguf("qwen2", file, reader, qkv_bias=True)


def _qwen3_from_gguf(file: GgufFile, reader: ConfigReader) -> ModelConfig:
    return full_decoder_from_gguf("qwen3", file, reader, qk_norm=True)


def _hf_sources(config: ModelConfig, reader: ConfigReader, forms: Forms) -> Params:
    return hf_decoder_sources(config)


def _gguf_sources(config: ModelConfig, forms: Forms) -> Params:
    return gguf_decoder_sources(config)


QWEN2 = Family(_qwen2_from_hf, _hf_sources, _qwen2_from_gguf, _gguf_sources)
QWEN3 = Family(_qwen3_from_hf, _hf_sources, _qwen3_from_gguf, _gguf_sources)

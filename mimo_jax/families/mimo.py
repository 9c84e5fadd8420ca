"""MiMo-7B (`mimo`): Qwen2 with biases on q, k, v, and one draft head."""

from dataclasses import replace

from mimo_jax.config import LayerKind, ModelConfig, MtpDims
from mimo_jax.families.family import Family, hf_attention, hf_decoder_sources, hf_dense
from mimo_jax.families.llama import full_decoder_from_hf
from mimo_jax.families.qwen import windows_off
from mimo_jax.families.reader import ConfigReader
from mimo_jax.families.source import Forms, tensor
from mimo_jax.params import Layer, MtpHead, Params

_HEAD = "model.mtp_layers.0."


def _config_from_hf(reader: ConfigReader, forms: Forms) -> ModelConfig:
    windows_off(reader)
    reader.expect("use_mrope", False)
    reader.expect("attention_bias", True)
    reader.expect("num_nextn_predict_layers", 0, 1, None)
    config = full_decoder_from_hf("mimo", reader, qkv_bias=True)
    if not any(name.startswith(_HEAD) for name in forms):
        return config
    # The head is fed the trunk's hidden state before the final norm (so vLLM and exllamav3, with the better drafts).
    mtp = MtpDims(1, LayerKind.FULL, hidden_first=True, zero_first_embedding=True, normed_hidden=False)
    return replace(config, mtp=mtp)


def _hf_sources(config: ModelConfig, reader: ConfigReader, forms: Forms) -> Params:
    trunk = hf_decoder_sources(config)
    return trunk if config.mtp is None else replace(trunk, mtp=(_head(config),))


def _head(config: ModelConfig) -> MtpHead:
    layer = Layer(
        attention_norm=tensor(f"{_HEAD}input_layernorm.weight"),
        attention=hf_attention(f"{_HEAD}self_attn.", config),
        ffn_norm=tensor(f"{_HEAD}post_attention_layernorm.weight"),
        ffn=hf_dense(f"{_HEAD}mlp."),
    )
    return MtpHead(
        embed_norm=tensor(f"{_HEAD}token_layernorm.weight"),
        hidden_norm=tensor(f"{_HEAD}hidden_layernorm.weight"),
        projection=tensor(f"{_HEAD}input_proj.weight"),
        layer=layer,
        final_norm=tensor(f"{_HEAD}final_layernorm.weight"),
    )


MIMO = Family(_config_from_hf, _hf_sources)

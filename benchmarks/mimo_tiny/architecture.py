"""What mimo-tiny is: the config.json of a MiMo-V2.5 with small sizes.

Window layers have as many heads as full ones and twice their KV heads, as in V2.5; products of sizes differ, so that a
matrix that lies the wrong way does not fit.
"""

from typing import Any

from mimo_jax.config import ModelConfig
from mimo_jax.families.mimo_v2 import MIMO_V2
from mimo_jax.families.reader import ConfigReader
from mimo_jax.families.source import Form

PATTERN = "FWWWFWWWF"
DRAFT_HEADS = 3
CONTEXT_TOKENS = 4096


def hub_config() -> dict[str, Any]:
    """The keys that Xiaomi's config.json of MiMo-V2.5 has."""
    windows = [int(letter == "W") for letter in PATTERN]
    return {
        "architectures": ["MiMoV2ForCausalLM"],
        "model_type": "mimo_v2",
        "hidden_size": 128,
        "num_hidden_layers": len(windows),
        "hybrid_layer_pattern": windows,
        "hybrid_block_size": None,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "head_dim": 48,
        "swa_head_dim": 48,
        "v_head_dim": 28,
        "swa_v_head_dim": 28,
        "partial_rotary_factor": 0.334,  # 16 of 48 dims
        "rope_theta": 10000000,
        "swa_rope_theta": 10000,
        "rope_scaling": {"rope_type": "default", "type": "default"},
        "sliding_window": 32,
        "sliding_window_size": 32,
        "attention_chunk_size": 32,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "attention_value_scale": 0.707,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_projection_layout": "fused_qkv",
        "intermediate_size": 288,
        "moe_intermediate_size": 56,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": None,
        "moe_layer_freq": [0] + [1] * (len(windows) - 1),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": None,
        "hidden_act": "silu",
        "layernorm_epsilon": 1e-5,
        "vocab_size": 1024,  # 1000 ids and rows without a token, as the published ones have
        "tie_word_embeddings": False,
        "max_position_embeddings": CONTEXT_TOKENS,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": None,  # the writer fills in the tokenizer's
        "pad_token_id": None,
    }


def model_config() -> ModelConfig:
    """The same as the engine reads it. No key of config.json says that there are draft heads; their tensors do."""
    heads = {f"model.mtp.layers.{head}.enorm.weight": Form("bfloat16", (0,)) for head in range(DRAFT_HEADS)}
    return MIMO_V2.config_from_hf(ConfigReader(hub_config(), "mimo-tiny"), heads)

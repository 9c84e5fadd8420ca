"""Checkpoint families: the only readers of foreign names. One file each; the tables below are how they are found."""

from mimo_jax.families.family import Family
from mimo_jax.families.gemma3 import GEMMA3
from mimo_jax.families.llama import LLAMA
from mimo_jax.families.mimo import MIMO
from mimo_jax.families.mimo_v2 import MIMO_V2
from mimo_jax.families.qwen import QWEN2, QWEN3

__all__ = ["GGUF_FAMILIES", "HF_FAMILIES", "Family"]

# config.json's model_type -> family
HF_FAMILIES: dict[str, Family] = {
    "mimo_v2_flash": MIMO_V2,
    "mimo_v2": MIMO_V2,
    "mimo": MIMO,
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma3_text": GEMMA3,
}

# GGUF's general.architecture -> family
GGUF_FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma3": GEMMA3,
    "mimo2": MIMO_V2,
}

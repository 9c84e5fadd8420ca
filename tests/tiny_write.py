"""How a tiny random checkpoint is drawn and written; `tests/tiny.py` says which ones there are."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Config = dict[str, Any]
Tensors = dict[str, np.ndarray]

VOCAB_SIZE = 101


@dataclass
class Draw:
    """Collects random tensors; each has its own generator, keyed by its name."""

    seed: int
    tensors: Tensors
    norm_center: float = 1.0

    def vector(self, name: str, *shape: int, spread: float, center: float = 0.0) -> None:
        generator = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        self.tensors[name] = (center + spread * generator.standard_normal(shape)).astype(np.float32)

    def norm(self, name: str, size: int, shift: float = 0.0) -> None:
        self.vector(name, size, spread=0.25, center=self.norm_center + shift)

    def linear(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        self.vector(name, rows, columns, spread=gain / math.sqrt(columns))


def trunk_ends(draw: Draw, config: Config) -> None:
    """Embedding, output norm and, unless tied, the head. Scaled so that logits spread over a few units."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    gemma = config["model_type"] == "gemma3_text"
    # Gemma multiplies embeddings by sqrt(hidden): they start small, or the tied head would repeat its input.
    draw.vector("model.embed_tokens.weight", vocab, hidden, spread=0.12 if gemma else 0.4)
    draw.norm("model.norm.weight", hidden, shift=1.5 if gemma else 0.0)
    if not config.get("tie_word_embeddings", gemma):
        draw.linear("lm_head.weight", vocab, hidden, gain=2.5)


def attention(draw: Draw, name: str, hidden: int, heads: int, kv_heads: int, head_dim: int, v_dim: int) -> None:
    """Large q and k, so that attention is peaked enough for a wrong mask to show."""
    name += "self_attn."
    draw.linear(name + "q_proj.weight", heads * head_dim, hidden, gain=1.5)
    draw.linear(name + "k_proj.weight", kv_heads * head_dim, hidden, gain=1.5)
    draw.linear(name + "v_proj.weight", kv_heads * v_dim, hidden, gain=1.5)
    draw.linear(name + "o_proj.weight", hidden, heads * v_dim)


def gated_mlp(draw: Draw, name: str, hidden: int, width: int) -> None:
    draw.linear(name + "gate_proj.weight", width, hidden)
    draw.linear(name + "up_proj.weight", width, hidden)
    draw.linear(name + "down_proj.weight", hidden, width)


def write(folder: Path, config: Config, tensors: Tensors, shards: int, dtype: str) -> Path:
    """One `model.safetensors`, or `shards` files and an index. Neighbours land in different files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}, indent=2) + "\n")
    if dtype == "bfloat16":
        import ml_dtypes  # only here, so that float32 checkpoints need nothing but NumPy

        keep = (".mlp.gate.weight", ".e_score_correction_bias")  # the published router stays in float32
        tensors = {name: t if name.endswith(keep) else t.astype(ml_dtypes.bfloat16) for name, t in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    files = [f"model-{part + 1:05d}-of-{shards:05d}.safetensors" for part in range(shards)]
    weight_map = {name: files[place % shards] for place, name in enumerate(sorted(tensors))}
    for file in files:
        part = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return folder

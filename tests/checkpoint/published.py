"""Tiny checkpoints in exactly the layouts that were published, all from one set of float weights.

Written from the published tensor tables, in loops, and sharing nothing with the product. Beside each folder stands the
truth: what its weights mean, as float32 under the names of a checkpoint that is not quantised, projections split.

The sizes keep the published proportions. Blocks have 16 rows; a chunk of a full layer is Q (whole blocks), K (24 rows,
one block and a half) and V (16 rows), so K and V share a block and V ends in half a one, as 192 and 128 rows of 128 do.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

from tests import tiny
from tests.tiny_write import Config, Draw, Tensors, attention, gated_mlp, write

ROWS, COLUMNS, GROUP = 16, 24, 32  # a block of fp8; a group of mxfp4
HEADS = 3
# Per-tensor sizes: columns are whole groups of 32, and not whole blocks of 24.
SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "swa_num_attention_heads": 8,
    "num_key_value_heads": 2,
    "swa_num_key_value_heads": 4,
    "head_dim": 24,
    "swa_head_dim": 24,
    "v_head_dim": 16,
    "swa_v_head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "rope_theta": 10000000,
}
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# What is not quantised in any layout. The router stays float32, everything else here is bfloat16.
FLOAT32 = (".mlp.gate.weight", ".e_score_correction_bias")
MATRICES = (".mlp.gate_proj.weight", ".mlp.up_proj.weight", ".mlp.down_proj.weight")


@dataclass(frozen=True)
class Published:
    folder: Path
    config: Config
    stored: Tensors
    truth: Tensors


def bf16(weight: np.ndarray) -> np.ndarray:
    return weight.astype(ml_dtypes.bfloat16)


def fp8(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values, factors and meaning; blocks are counted from the first row."""
    rows, columns = weight.shape
    values, wide = np.zeros(weight.shape, ml_dtypes.float8_e4m3fn), np.zeros(weight.shape, np.float32)
    scale = np.zeros((math.ceil(rows / ROWS), math.ceil(columns / COLUMNS)), np.float32)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            place = np.s_[i * ROWS : (i + 1) * ROWS, j * COLUMNS : (j + 1) * COLUMNS]
            scale[i, j] = np.abs(weight[place]).max() / 448
            values[place] = (weight[place] / scale[i, j]).astype(ml_dtypes.float8_e4m3fn)
            wide[place] = values[place].astype(np.float32) * scale[i, j]
    return values, scale, wide


def mxfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes of two values, exponent bytes and meaning."""
    rows, columns = weight.shape
    packed = np.zeros((rows, columns // 2), np.uint8)
    powers = np.zeros((rows, columns // GROUP), np.uint8)
    wide = np.zeros(weight.shape, np.float32)
    for row in range(rows):
        for column in range(columns):
            group = weight[row, column // GROUP * GROUP : (column // GROUP + 1) * GROUP]
            exponent = math.floor(math.log2(np.abs(group).max())) - 2
            powers[row, column // GROUP] = exponent + 127
            code = int(np.argmin(np.abs(np.array(FP4) - abs(weight[row, column]) / 2.0**exponent)))
            negative = weight[row, column] < 0
            wide[row, column] = (-FP4[code] if negative else FP4[code]) * 2.0**exponent
            packed[row, column // 2] |= (code | negative << 3) << (4 * (column % 2))
    return packed, powers, wide


def floats(folder: Path, seed: int, heads: int = HEADS, **overrides: Any) -> tuple[Config, Tensors]:
    """V2-Flash's config and float32 tensors with split projections, draft heads included."""
    tiny.write_mimo_v2_flash(folder, seed, shards=1, **(SIZES | overrides))
    config = json.loads((folder / "config.json").read_text())
    draw = Draw(seed, load_file(folder / "model.safetensors"))
    for index in range(heads):
        name, hidden = f"model.mtp.layers.{index}.", config["hidden_size"]
        for part in ("enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm"):
            draw.norm(f"{name}{part}.weight", hidden)
        draw.linear(f"{name}eh_proj.weight", hidden, 2 * hidden)
        numbers = [config[f"swa_{key}"] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")]
        attention(draw, name, hidden, *numbers, config["swa_v_head_dim"])
        draw.vector(f"{name}self_attn.attention_sink_bias", numbers[0], spread=1.5, center=1.0)
        gated_mlp(draw, f"{name}mlp.", hidden, config["intermediate_size"])
    return config, draw.tensors


def attentions(config: Config, tensors: Tensors) -> Iterator[str]:
    """Prefixes of all attention blocks."""
    yield from sorted({name.rpartition("q_proj")[0] for name in tensors if name.endswith("q_proj.weight")})


def chunks(config: Config, prefix: str, tensors: Tensors) -> list[list[np.ndarray]]:
    """[Q_c, K_c, V_c] for each of num_key_value_heads chunks, in draft heads and window layers too."""
    count = config["num_key_value_heads"]
    parts = [np.split(tensors[f"{prefix}{part}_proj.weight"], count) for part in "qkv"]
    return [list(chunk) for chunk in zip(*parts, strict=True)]


def fused_chunks(config: Config, prefix: str, stored: Tensors, truth: Tensors) -> None:
    """V2.5, Pro, V2.6: each chunk has its own blocks."""
    values, scales, wide = zip(*(fp8(np.concatenate(c)) for c in chunks(config, prefix, stored)), strict=True)
    keep_parts(config, prefix, stored, truth, wide)
    stored[f"{prefix}qkv_proj.weight"] = np.concatenate(values)
    stored[f"{prefix}qkv_proj.weight_scale_inv"] = np.concatenate(scales)


def split_chunks(config: Config, prefix: str, stored: Tensors, truth: Tensors) -> None:
    """V2-Flash: the same chunks cut apart. The block that K and V share lies with K."""
    cut = chunks(config, prefix, stored)
    values, scales, wide = zip(*(fp8(np.concatenate(chunk)) for chunk in cut), strict=True)
    rows = [0, *np.cumsum([len(part) for part in cut[0]])]
    blocks = [math.ceil(row / ROWS) for row in rows]
    keep_parts(config, prefix, stored, truth, wide)
    for index, part in enumerate("qkv"):
        place, factors = slice(rows[index], rows[index + 1]), slice(blocks[index], blocks[index + 1])
        stored[f"{prefix}{part}_proj.weight"] = np.concatenate([chunk[place] for chunk in values])
        stored[f"{prefix}{part}_proj.weight_scale_inv"] = np.concatenate([chunk[factors] for chunk in scales])


def keep_parts(config: Config, prefix: str, stored: Tensors, truth: Tensors, wide: tuple[np.ndarray, ...]) -> None:
    rows = [0, *np.cumsum([len(part) for part in chunks(config, prefix, stored)[0]])]
    for index, part in enumerate("qkv"):
        del stored[f"{prefix}{part}_proj.weight"]
        parts = [chunk[rows[index] : rows[index + 1]] for chunk in wide]
        truth[f"{prefix}{part}_proj.weight"] = np.concatenate(parts)


def fused_flat(config: Config, prefix: str, stored: Tensors, truth: Tensors) -> None:
    """Re-exports: [Q; K; V] with blocks from its first row."""
    parts = [stored.pop(f"{prefix}{part}_proj.weight") for part in "qkv"]
    values, scale, wide = fp8(np.concatenate(parts))
    for part, rows in zip("qkv", np.split(wide, np.cumsum([len(part) for part in parts])[:-1]), strict=True):
        truth[f"{prefix}{part}_proj.weight"] = rows
    stored[f"{prefix}qkv_proj.weight"], stored[f"{prefix}qkv_proj.weight_scale_inv"] = values, scale


def split_plain(config: Config, prefix: str, stored: Tensors, truth: Tensors) -> None:
    """Re-exports: three tensors, each with blocks of its own."""
    for part in "qkv":
        quantise_one(f"{prefix}{part}_proj.weight", stored, truth)


def fused_float(config: Config, prefix: str, stored: Tensors, truth: Tensors) -> None:
    parts = [stored.pop(f"{prefix}{part}_proj.weight") for part in "qkv"]
    for part, rows in zip("qkv", parts, strict=True):
        truth[f"{prefix}{part}_proj.weight"] = bf16(rows).astype(np.float32)
    stored[f"{prefix}qkv_proj.weight"] = bf16(np.concatenate(parts))


def quantise_one(name: str, stored: Tensors, truth: Tensors) -> None:
    stored[name], stored[f"{name}_scale_inv"], truth[name] = fp8(stored[name])


Attend = Callable[[Config, str, Tensors, Tensors], None]
FP8_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [ROWS, COLUMNS],
    # As published: the odd name is how another engine calls the draft heads' projection.
    "ignored_layers": ["model.layers.0.self_attn.o_proj", "model.decoder.self_attn.o_proj"],
}
V25 = {"model_type": "mimo_v2", "architectures": ["MiMoV2ForCausalLM"], "attention_projection_layout": "fused_qkv"}
PRO = {"num_key_value_heads": 4}


@dataclass(frozen=True)
class Layout:
    """`experts`: "fp8", "mxfp4" (exponent bytes), "mxfp4 float" (the same powers of two as numbers) or "bf16"."""

    attend: Attend
    config: Config
    experts: str = "fp8"
    quantised: bool = True


LAYOUTS = {
    "flash": Layout(split_chunks, {}),
    "v2.5": Layout(fused_chunks, V25 | {"store": "fp8"}),
    "pro": Layout(fused_chunks, V25 | PRO),
    "flat": Layout(fused_flat, V25),
    "split plain": Layout(split_plain, {}),
    "v2.6": Layout(fused_chunks, V25 | {"store": "mxfp4", "moe_router_dtype": "bfloat16"}, "mxfp4"),
    "v2.6 float": Layout(fused_chunks, V25 | {"store": "mxfp4", "moe_router_dtype": "bfloat16"}, "mxfp4 float"),
    "bf16": Layout(fused_float, V25, "bf16", quantised=False),
}


def publish(folder: Path, name: str, seed: int = 1, *, heads: int = HEADS, **overrides: Any) -> Published:
    """Writes one layout. Neighbours in the list of names, such as a weight and its factors, are in different shards."""
    layout = LAYOUTS[name]
    values = {key: value for key, value in layout.config.items() if key != "store"}
    config, stored = floats(folder / "floats", seed, heads, **(values | overrides))
    if layout.quantised:
        store = {"store_dtype": layout.config["store"]} if "store" in layout.config else {}
        groups = {"mxfp4_block_size": GROUP} if layout.experts.startswith("mxfp4") else {}
        config["quantization_config"] = FP8_CONFIG | store | groups
    truth: Tensors = {}
    for prefix in attentions(config, stored):
        layout.attend(config, prefix, stored, truth)
    for weight in [weight for weight in stored if "qkv_proj" not in weight]:
        if weight not in truth and not weight.endswith("_scale_inv"):
            _rest(weight, layout, stored, truth)
    write(folder, config, stored, 3, "float32")
    return Published(folder, config, stored, truth)


def _rest(name: str, layout: Layout, stored: Tensors, truth: Tensors) -> None:
    """What is no projection to q, k or v."""
    if ".experts." in name and layout.experts.startswith("mxfp4"):
        stored[name], powers, truth[name] = mxfp4(stored[name])
        as_numbers = np.ldexp(np.float32(1), powers.astype(np.int32) - 127)
        stored[f"{name}_scale"] = as_numbers if layout.experts == "mxfp4 float" else powers
    elif layout.quantised and (".experts." in name or name.endswith(MATRICES)):
        quantise_one(name, stored, truth)
    elif name.endswith(FLOAT32):
        truth[name] = stored[name]
    else:
        stored[name] = bf16(stored[name])
        truth[name] = stored[name].astype(np.float32)


def write_truth(folder: Path, made: Published) -> Path:
    """The truth as a float32 checkpoint of V2-Flash's split layout."""
    config = {key: value for key, value in made.config.items() if key != "quantization_config"}
    config |= {"attention_projection_layout": "split"}
    return write(folder, config, made.truth, 2, "float32")

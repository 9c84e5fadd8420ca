"""Loading holds the finished weights and little else, whatever the form of the checkpoint."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.contracts.source import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc"),
]

# Measured: 16 to 35 MB. Less than the largest tensor, so that one standing twice in memory would show.
ROOM_BYTES = 100 << 20
# Vocabulary, width, FFN, layers, heads of 64: 693 MB in float32, the largest tensor 131 MB.
VOCAB, EMBED, FFN, LAYERS, HEADS = 32000, 1024, 4096, 7, 16

LOAD = """
import gc, json, sys
from pathlib import Path
import jax
from mimo_jax.checkpoint.checkpoint import open_checkpoint
from mimo_jax.checkpoint.load import load_params
from sharding import Rules, make_mesh

def status(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024

mesh = make_mesh(jax.devices()[0])
jax.block_until_ready(jax.numpy.zeros(8) + 1)
before = status("VmRSS")
checkpoint = open_checkpoint(Path(sys.argv[1]))
params = jax.block_until_ready(load_params(checkpoint, sys.argv[2], mesh, Rules(), quantization=sys.argv[3] or None))
weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
print(json.dumps({"before": before, "peak": status("VmHWM"), "weights": weights}))
"""


def measured(path: Path, dtype: str, quantization: str = "") -> tuple[int, int]:
    """(bytes of the weights, the peak's bytes above what was there before loading), of a fresh process."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", LOAD, str(path), dtype, quantization]
    run = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True, timeout=300)
    numbers = json.loads(run.stdout)
    return numbers["weights"], numbers["peak"] - numbers["before"]


@pytest.fixture(scope="module")
def big_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards of noise, written by hand so that nothing is held; pytest keeps the folder, so the files go."""
    folder = tmp_path_factory.mktemp("big")
    config = {
        "model_type": "llama",
        "hidden_size": EMBED,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = list(llama_shapes().items())
    weight_map = {}
    for shard in range(4):
        part = dict(shapes[shard::4])
        file = folder / f"model-{shard + 1:05d}-of-00004.safetensors"
        write_shard(file, part)
        weight_map |= dict.fromkeys(part, file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def llama_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, EMBED),
        "lm_head.weight": (VOCAB, EMBED),
        "model.norm.weight": (EMBED,),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        shapes |= {f"{name}self_attn.{part}_proj.weight": (EMBED, EMBED) for part in "qkvo"}
        shapes |= {f"{name}mlp.{part}_proj.weight": (FFN, EMBED) for part in ("gate", "up")}
        shapes[f"{name}mlp.down_proj.weight"] = (EMBED, FFN)
        shapes |= {f"{name}{part}_layernorm.weight": (EMBED,) for part in ("input", "post_attention")}
    return shapes


def write_shard(file: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    noise = np.random.default_rng(1).random(1 << 20, np.float32).tobytes()
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for start in range(0, end, len(noise)):
            out.write(noise[: end - start])


def test_loading_a_folder_takes_its_weights_and_a_little_more(big_llama: Path) -> None:
    weights, taken = measured(big_llama, "float32")
    assert weights > 650 << 20
    assert weights <= taken * 1.05  # the peak was seen: the weights are there
    assert taken <= weights + ROOM_BYTES


@pytest.mark.parametrize("quantization", ["int8", "int8-g128"])
def test_quantising_while_loading_takes_the_quantised_weights(quantization: str, big_llama: Path) -> None:
    weights, taken = measured(big_llama, "float32", quantization)
    assert weights < 420 << 20  # embedding and head, 262 MB, stay float32
    assert taken <= weights + ROOM_BYTES


def test_loading_a_folder_into_a_narrower_type_takes_the_narrower_weights(big_llama: Path) -> None:
    weights, taken = measured(big_llama, "bfloat16")
    assert weights < 350 << 20
    assert taken <= weights + ROOM_BYTES
    for file in big_llama.glob("*.safetensors"):
        file.unlink()


def test_loading_a_gguf_takes_its_expanded_weights_and_a_little_more(smollm2_path: Path) -> None:
    weights, taken = measured(smollm2_path, "float32")
    assert weights > 500 << 20
    assert taken <= weights + ROOM_BYTES

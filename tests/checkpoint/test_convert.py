"""Converted models: the same model, in another form."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo_jax import CheckpointError
from mimo_jax.checkpoint.checkpoint import open_checkpoint
from mimo_jax.cli import main
from tests import tiny
from tests.checkpoint.converting import assert_same, load
from tests.contracts.source import ROOT

CASES = [("v2.5", None), ("v2.6", None), ("flash", None), ("bf16", None), ("v2.5", "int8"), ("v2.6", "int8-g128")]


@pytest.mark.parametrize(("name", "quantization"), CASES)
def test_a_converted_model_is_the_model(name: str, quantization: str | None, made: Any) -> None:
    original, out = made(name, quantization)
    one, two = open_checkpoint(original), open_checkpoint(out)
    assert two.config == one.config
    assert_same(load(out), load(original, quantization))
    assert_same(load(out, heads=1), load(original, quantization, heads=1))
    assert jax.tree.structure(two.specs(jnp.float32)) == jax.tree.structure(one.specs(jnp.float32, quantization))


@pytest.mark.parametrize("quantization", ["int8", "dequantize"])
@pytest.mark.parametrize("name", ["v2.5", "v2.6"])
def test_it_can_be_quantised_or_widened_as_the_original_can(name: str, quantization: str, made: Any) -> None:
    original, out = made(name, None)
    assert_same(load(out, quantization), load(original, quantization))


def test_plain_matrices_can_be_asked_for_in_another_type(made: Any) -> None:
    original, out = made("bf16", None)
    assert_same(load(out, dtype=jnp.bfloat16), load(original, dtype=jnp.bfloat16))


def test_orbax_restores_it(made: Any) -> None:
    """What this package reads by mapping files is an Orbax checkpoint to everybody else."""
    import orbax.checkpoint as ocp

    _, out = made("v2.5", "int8")
    leaves = jax.tree_util.tree_leaves_with_path(load(out))
    wanted = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    arrays = {}
    with ocp.PyTreeCheckpointer() as checkpointer:
        for part in (out / "weights").iterdir():
            item = {name: leaf for name, leaf in wanted.items() if f"{name}.".startswith(f"{part.name}.")}
            options = ocp.checkpoint_utils.construct_restore_args(item)
            arrays |= checkpointer.restore(part.absolute(), item=item, restore_args=options)
    assert set(arrays) == set(wanted)
    for name, leaf in wanted.items():
        np.testing.assert_array_equal(arrays[name], leaf)


def test_weights_are_used_where_they_lie(made: Any) -> None:
    """On the CPU. Mapped arrays start with a page; the allocator's do so by chance, and not all of them."""
    original, out = made("v2.5", None)
    starts = {
        name: [leaf.unsafe_buffer_pointer() % 4096 for leaf in jax.tree.leaves(load(folder))]
        for name, folder in (("original", original), ("converted", out))
    }
    assert not any(starts["converted"])
    assert any(starts["original"])


def test_an_open_model_keeps_no_files_open(made: Any) -> None:
    """A large model has more arrays than a process may have open files."""
    original, out = made("v2.5", None)
    arrays = len(jax.tree.leaves(load(out)))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_files = len(list(Path("/dev/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files + 8, hard))
    try:
        assert arrays > 20
        assert_same(load(out), load(original))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_shards_are_read_onto_their_devices(made: Any) -> None:
    """Two devices, experts split over them: each holds its half and no other."""
    code = """
import sys
from pathlib import Path
import jax, numpy as np
from jax.sharding import AxisType, Mesh
from mimo_jax.checkpoint.checkpoint import open_checkpoint
from mimo_jax.checkpoint.load import load_params
from sharding import Rules
from sharding.mesh import MESH_AXES
mesh = Mesh(np.array(jax.devices()).reshape(1, 1, 2, 1), MESH_AXES, axis_types=(AxisType.Auto,) * 4)
rules = Rules((("expert_ffn", "tensor"), ("ffn", "tensor")))
folders = [open_checkpoint(Path(name)) for name in sys.argv[1:]]
one, two = [load_params(folder, "float32", mesh, rules) for folder in folders]
for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
    assert left.sharding == right.sharding
    np.testing.assert_array_equal(left, right)
gate = two.layers[1].ffn.gate
assert len(gate.values.addressable_shards) == 2
assert gate.values.addressable_shards[0].data.shape[1] * 2 == gate.values.shape[1]
assert gate.scale.addressable_shards[0].data.shape[1] * 2 == gate.scale.shape[1]
"""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code, *map(str, made("v2.5", None))]
    subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=120)


def test_overrides_are_refused(made: Any) -> None:
    with pytest.raises(CheckpointError, match="hf_overrides"):
        open_checkpoint(made("v2.5", None)[1], hf_overrides={"sliding_window": 3})


def test_the_command_makes_a_model_for_the_other_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--max-model-len", "64", "--max-num-batched-tokens", "16", "--block-size", "8"]
    asked = ["--prompt", "5 6 7 8", "--ignore-eos", "--max-tokens", "6", "--json"]
    original = tiny.write_mimo_v2_flash(tmp_path / "hf", 1)
    answers = []
    assert main(["convert", str(original), str(tmp_path / "out")]) == 0
    for model in (original, tmp_path / "out"):
        capsys.readouterr()
        assert main(["generate", str(model), *small, *asked]) == 0
        answers.append(json.loads(capsys.readouterr().out)["outputs"])
    assert answers[0] == answers[1]
    assert main(["inspect", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == "FWWFW"
    assert main(["convert", str(original), str(tmp_path / "out")]) == 1
    assert main(["convert", str(original), str(tmp_path / "x"), "--quantization", "int3"]) == 1
    assert not (tmp_path / "x").exists()

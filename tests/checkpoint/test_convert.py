"""Converted models: the same model, whole or not at all."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo_jax import CheckpointError, Params
from mimo_jax.checkpoint import converted
from mimo_jax.checkpoint.checkpoint import CONVERTED, open_checkpoint
from mimo_jax.checkpoint.load import load_params
from mimo_jax.cli import main
from mimo_jax.convert import convert_model
from sharding import Rules, make_mesh
from tests import tiny
from tests.checkpoint.published import publish
from tests.checkpoint.rewrite import cut, edit_json
from tests.contracts.source import ROOT


def load(folder: Path, quantization: str | None = None, dtype: Any = jnp.float32, heads: int | None = None) -> Params:
    checkpoint = open_checkpoint(folder)
    checkpoint = checkpoint if heads is None else checkpoint.with_draft_heads(heads)
    return load_params(checkpoint, dtype, make_mesh(jax.devices()[0]), Rules(), quantization=quantization)


def assert_same(one: Params, two: Params) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str | None], tuple[Path, Path]]:
    """The original of a published layout, and what it is converted to."""
    folder = tmp_path_factory.mktemp("converted")

    def make(name: str, quantization: str | None) -> tuple[Path, Path]:
        original, out = folder / name, folder / f"{name} {quantization}"
        if not original.exists():
            publish(original, name)
        if not out.exists():
            convert_model(original, out, quantization=quantization)
        return original, out

    return make


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
    with ocp.PyTreeCheckpointer() as checkpointer:
        options = ocp.checkpoint_utils.construct_restore_args(wanted)
        arrays = checkpointer.restore((out / "weights").absolute(), item=wanted, restore_args=options)
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


def test_an_array_in_another_form_is_refused(made: Any) -> None:
    _, out = made("v2.5", None)
    about = out / "weights" / "final_norm" / ".zarray"
    text = about.read_text()
    try:
        for old, new in (('"C"', '"F"'), ('"order"', '"Order"'), ("{", "[")):
            about.write_text(text.replace(old, new, 1))
            with pytest.raises(CheckpointError, match="final_norm"):
                load(out)
    finally:
        about.write_text(text)


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


# ---- whole or not at all ----


def test_every_file_of_a_converted_model_is_needed(made: Any, tmp_path: Path) -> None:
    """Known before anything is read."""
    _, out = made("v2.5", "int8")
    files = [file for file in (out / "weights").rglob("*") if file.is_file()]
    for file in [files[0], files[-1], out / "weights" / "final_norm" / "0"]:
        data = file.read_bytes()
        for damage in (file.unlink, lambda file=file: cut(file, -1)):
            damage()
            with pytest.raises(CheckpointError, match=re.escape(str(file))):
                open_checkpoint(out)
            file.write_bytes(data)
    assert open_checkpoint(out).config.layers == 5


def test_an_interrupted_conversion_leaves_nothing(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, _ = made("v2.5", None)
    save = converted.save_arrays

    def interrupted(folder: Path, arrays: dict[str, Any]) -> None:
        save(folder, dict(list(arrays.items())[:3]))
        raise KeyboardInterrupt

    monkeypatch.setattr(converted, "save_arrays", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert_model(original, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_conversion_leaves_no_folder_that_loads(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the power failed before the last file and before the folder's name."""
    original, _ = made("v2.5", None)
    monkeypatch.setattr(converted, "config_to_json", lambda config: os.abort())
    monkeypatch.setattr(os, "abort", lambda: (_ for _ in ()).throw(SystemExit))
    monkeypatch.setattr(converted.shutil, "rmtree", lambda *arguments, **options: None)
    with pytest.raises(SystemExit):
        convert_model(original, tmp_path / "out")
    (part,) = tmp_path.iterdir()
    assert (part / "weights" / "embedding").is_dir()
    with pytest.raises(CheckpointError):
        open_checkpoint(part)


def test_of_two_conversions_to_one_folder_one_is_told(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, _ = made("v2.5", None)
    save = converted.save_arrays

    def overtaken(folder: Path, arrays: dict[str, Any]) -> None:
        save(folder, arrays)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "the other's").write_text("")

    monkeypatch.setattr(converted, "save_arrays", overtaken)
    with pytest.raises(CheckpointError, match="out"):
        convert_model(original, tmp_path / "out")
    assert [file.name for file in tmp_path.rglob("*")] == ["out", "the other's"]


def test_a_folder_that_is_there_is_not_touched(made: Any, tmp_path: Path) -> None:
    original, _ = made("v2.5", None)
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(CheckpointError, match="there already"):
        convert_model(original, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda about: about.update(version=2), "version"),
        (lambda about: about.update(twist=1), "version"),
        (lambda about: about["config"].pop("ffn"), "ffn"),
        (lambda about: about["config"].update(twist=1), "twist"),
        (lambda about: about["config"].update(vocab="101"), "vocab"),
        (lambda about: about["config"].update(layer_kinds=["X"]), "X"),
        (lambda about: about["config"].update(vocab=102), "embedding"),
        (lambda about: about["arrays"].pop("layers.0.ffn.up"), "layers.0.ffn.up"),
        (lambda about: about.update(files=[]), "files"),
        (lambda about: about.update(arrays=[]), "arrays"),
        (lambda about: about.update(files={}), "not listed"),
        (lambda about: about["formats"].update({"layers.0.attention.query": ["int3"]}), "int3"),
    ],
)
def test_a_changed_description_is_refused(
    change: Callable[[dict[str, Any]], Any], words: str, made: Any, tmp_path: Path
) -> None:
    _, out = made("bf16", None)
    marker = out / CONVERTED
    text = marker.read_text()
    try:
        edit_json(marker, change)
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(out)
    finally:
        marker.write_text(text)


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

"""MiMo-V2 stores q, k and v apart or fused. Both give the same rows, and a layout nobody stated is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mimo_jax import CheckpointError, Params
from mimo_jax.checkpoint.checkpoint import open_checkpoint
from mimo_jax.checkpoint.load import load_params
from sharding import Rules, make_mesh
from tests import tiny

# Base (both forms state the same rotary base here), the Pro form with as many full KV heads as window ones, and
# heads of different widths.
FORMS: dict[str, dict[str, Any]] = {
    "flash": {},
    "pro": {"num_key_value_heads": 4},
    "own widths": {"swa_head_dim": 18, "swa_v_head_dim": 10, "swa_num_attention_heads": 8},
}


def load(folder: Path) -> Params:
    return load_params(open_checkpoint(folder), np.float32, make_mesh(jax.devices()[0]), Rules())


def assert_equal(one: Params, two: Params) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(left, right)


def split(folder: Path, **overrides: Any) -> Path:
    return tiny.write_mimo_v2_flash(folder, 9, rope_theta=10000000, **overrides)


def fused(folder: Path, **overrides: Any) -> Path:
    return tiny.write_mimo_v2(folder, 9, **overrides)


@pytest.mark.parametrize("form", FORMS)
def test_fused_and_split_projections_load_to_the_same_parameters(form: str, tmp_path: Path) -> None:
    one, two = split(tmp_path / "split", **FORMS[form]), fused(tmp_path / "fused", **FORMS[form])
    assert open_checkpoint(one).config == open_checkpoint(two).config
    assert_equal(load(one), load(two))


@pytest.mark.parametrize("shards", [1, 3, 7])
@pytest.mark.parametrize("write", [split, fused])
def test_how_many_files_and_in_which_order_changes_nothing(
    write: Callable[..., Path], shards: int, tmp_path: Path
) -> None:
    """Neighbouring tensors lie in different files."""
    assert_equal(load(write(tmp_path / "a", shards=2)), load(write(tmp_path / "b", shards=shards)))


def test_the_order_of_tensors_inside_a_file_changes_nothing(tmp_path: Path) -> None:
    folder = fused(tmp_path / "a", shards=1)
    wanted = load(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    # The library sorts by type: half of them in another type come first or last.
    narrow = {name: array.astype(np.float64) if place % 2 else array for place, (name, array) in
              enumerate(tensors.items())}  # fmt: skip
    save_file(narrow, file)
    assert_equal(load(folder), wanted)


@pytest.mark.parametrize(
    ("write", "stated", "wanted"),
    [(fused, "split", "q_proj.weight"), (fused, None, "q_proj.weight"), (split, "fused_qkv", "qkv_proj.weight")],
)
def test_a_layout_that_the_config_does_not_state_is_refused(
    write: Callable[..., Path], stated: str | None, wanted: str, tmp_path: Path
) -> None:
    folder = write(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_projection_layout": stated}))
    with pytest.raises(CheckpointError, match=wanted):
        open_checkpoint(folder)


def test_both_layouts_at_once_are_refused(tmp_path: Path) -> None:
    """Whichever was meant, the other's rows would be silently unused."""
    one, two = split(tmp_path / "a", shards=1), fused(tmp_path / "b", shards=1)
    save_file(load_file(one / "model.safetensors") | load_file(two / "model.safetensors"), two / "model.safetensors")
    with pytest.raises(CheckpointError, match="unknown tensor"):
        open_checkpoint(two)


def test_rows_of_another_head_count_are_refused(tmp_path: Path) -> None:
    """Every loaded row is accounted for: the same file with one KV head less has rows left over."""
    folder = fused(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"swa_num_key_value_heads": 2}))
    with pytest.raises(CheckpointError, match=r"qkv_proj\.weight has \d+ rows"):
        open_checkpoint(folder)

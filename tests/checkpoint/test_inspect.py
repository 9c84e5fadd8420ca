"""What a model is and how big: the published ones without their files, and any that can be opened."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest

from mimo_jax.checkpoint.checkpoint import open_checkpoint
from mimo_jax.checkpoint.load import load_params
from mimo_jax.cli import main
from mimo_jax.families.mimo_v2_published import PUBLISHED, published_forms
from mimo_jax.inspect import inspect_model, published_checkpoint
from mimo_jax.params import param_specs
from pallas_kernels.formats import Fp8Block, is_format
from sharding import Rules, make_mesh
from tests.checkpoint.published import ROWS, publish

# From the published tables, with their scale factors; V2.5's without its vision and audio parts.
ELEMENTS = {
    "mimo-v2-flash": 309_785_318_400,
    "mimo-v2.5": 309_785_318_400,
    "mimo-v2.5-pro": 1_023_244_718_976,
}
PARAMETERS = {"mimo-v2-flash": 309_766_601_088, "mimo-v2.5": 309_766_601_088, "mimo-v2.5-pro": 1_023_182_841_600}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_exactly_the_elements_of_its_files(name: str) -> None:
    summary = inspect_model(name)
    assert summary.checkpoint_elements == ELEMENTS[name]
    assert summary.parameters == PARAMETERS[name]
    assert summary.draft_heads == 3


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_element_of_a_published_model_lands_in_the_parameters(name: str) -> None:
    """Each weight once; the factors of K and V, in blocks half as high, K's first block twice."""
    checkpoint = published_checkpoint(name)
    sources, plain = checkpoint.sources, param_specs(checkpoint.config)
    rows: dict[str, int] = {}
    for source in jax.tree.leaves(sources):
        for piece in source.pieces:
            form = checkpoint.forms[piece.name]
            if not piece.name.endswith("_scale_inv"):
                taken = piece.rows[1] - piece.rows[0] if piece.rows else form.shape[0]
                rows[piece.name] = rows.get(piece.name, 0) + taken
    assert all(checkpoint.forms[tensor].shape[0] == count for tensor, count in rows.items())
    assert sum(math.prod(spec.shape) for spec in jax.tree.leaves(plain)) == PARAMETERS[name]
    specs = checkpoint.specs(np.float32)
    for weight, spec in zip(jax.tree.leaves(specs, is_leaf=is_format), jax.tree.leaves(plain), strict=True):
        assert (weight.values if isinstance(weight, Fp8Block) else weight).shape == spec.shape
    full, window = specs.layers[0].attention, specs.layers[1].attention
    heads = checkpoint.config.full.kv_heads
    assert {full.query.block, full.key.block, full.value.block} == {(64, 128)}
    assert (full.key.scale.shape[0], full.value.scale.shape[0]) == (3 * heads, 2 * heads)
    assert window.value.block == ((64, 128) if name == "mimo-v2.5-pro" else (128, 128))
    # Whatever number of devices the heads divide by, their factors do.
    for attention, dims in ((full, checkpoint.config.full), (window, checkpoint.config.window)):
        assert attention.query.scale.shape[0] % dims.heads == 0
        assert attention.key.scale.shape[0] % dims.kv_heads == 0
        assert attention.value.scale.shape[0] % dims.kv_heads == 0


def test_the_cache_of_the_published_models() -> None:
    """In bfloat16: 9 or 10 full layers, 39 or 60 windows of 128 tokens; K 192 and V 128 wide."""
    flash, pro = inspect_model("mimo-v2.5"), inspect_model("mimo-v2.5-pro")
    assert (flash.full_cache_bytes_per_token, pro.full_cache_bytes_per_token) == (23_040, 51_200)
    assert flash.window_cache_bytes_per_sequence == 39 * 8 * 320 * 2 * 128
    assert pro.window_cache_bytes_per_sequence == 60 * 8 * 320 * 2 * 128
    assert flash.draft_cache_bytes_per_sequence == 3 * 8 * 320 * 2 * 128
    # 309B and 1.02T with 15B and 42B active, as published
    assert round(flash.active_parameters / 1e9) == 15
    assert 40.5 < pro.active_parameters / 1e9 < 42.5


@pytest.mark.parametrize("name", ["flash", "v2.5", "pro"])
def test_the_tables_of_the_published_models_are_those_that_the_tests_write(name: str, tmp_path: Path) -> None:
    """Written twice, from the same sources: the names, shapes and types agree for any sizes."""
    blocks = pytest.MonkeyPatch()
    with blocks.context() as patch:
        patch.setattr("mimo_jax.families.mimo_v2_published._BLOCK", ROWS)
        made = publish(tmp_path / "m", name)
        forms = published_forms(made.config)
    stored = {key: (array.dtype.name, array.shape) for key, array in made.stored.items()}
    assert set(stored) == set(forms)
    for key, form in forms.items():
        columns = not key.endswith("_scale_inv")  # the tests' blocks are not square
        assert stored[key][0] == form.dtype, key
        assert stored[key][1][: None if columns else 1] == form.shape[: None if columns else 1], key


@pytest.mark.parametrize("name", ["v2.5", "v2.6", "bf16"])
def test_the_summary_agrees_with_what_is_loaded(name: str, tmp_path: Path) -> None:
    made = publish(tmp_path / "m", name)
    summary = inspect_model(str(made.folder))
    assert summary.checkpoint_elements == sum(array.size for array in made.stored.values())
    assert summary.parameters == sum(array.size for array in made.truth.values())
    params = load_params(open_checkpoint(made.folder), "bfloat16", make_mesh(jax.devices()[0]), Rules())
    assert sum(summary.bytes_by_format.values()) == sum(array.nbytes for array in jax.tree.leaves(params))
    assert ("mxfp4" in summary.bytes_by_format) == (name == "v2.6")


def test_the_command_prints_text_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "mimo-v2.5", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["checkpoint_elements"] == ELEMENTS["mimo-v2.5"]
    assert set(printed) == {field.name for field in dataclasses.fields(inspect_model("mimo-v2.5"))}
    assert printed["layers"] == "FWWWW" + "FWWWWW" * 7 + "F"
    assert main(["inspect", "mimo-v2.5-pro"]) == 0
    assert "1,023,244,718,976" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "nothing")]) == 1
    assert main(["inspect", "mimo-v2.5", "--hf-overrides", '{"hidden_act": "relu"}']) == 1
    assert "hidden_act" in capsys.readouterr().err

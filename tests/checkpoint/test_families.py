"""The spec tree and the families: one structure everywhere, layer kinds from the checkpoint's own fields."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mimo_jax import FfnKind, LayerKind, ModelConfig, init_params, param_specs, tiny_config
from mimo_jax.checkpoint.checkpoint import open_checkpoint
from mimo_jax.checkpoint.load import load_params
from mimo_jax.params import ArraySpec
from sharding import LOGICAL_AXES, Rules, make_mesh
from tests import tiny

CASES = tiny.cases()

# The published patterns, first layer full and dense. Flash: every sixth full; Pro: every seventh or eighth.
FLASH_PATTERN = [0, *([1] * 4 + [0]), *([1] * 5 + [0]) * 7]
PRO_PATTERN = [0, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 1]  # no formula gives it


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_specs_random_and_loaded_parameters_are_one_tree(case: tiny.Case, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(case.into(tmp_path))
    specs = param_specs(checkpoint.config, np.float32)
    loaded = load_params(checkpoint, np.float32, make_mesh(jax.devices()[0]), Rules())
    drawn = jax.eval_shape(lambda key: init_params(key, checkpoint.config, np.float32), jax.random.key(0))
    for tree in (loaded, drawn):
        assert jax.tree.structure(tree) == jax.tree.structure(specs)
        for spec, array in zip(jax.tree.leaves(specs), jax.tree.leaves(tree), strict=True):
            assert (array.shape, array.dtype) == (spec.shape, spec.dtype)
    assert [spec.size_bytes for spec in jax.tree.leaves(specs)] == [a.nbytes for a in jax.tree.leaves(loaded)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_loaded_parameter_is_set(case: tiny.Case, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(case.into(tmp_path))
    loaded = load_params(checkpoint, np.float32, make_mesh(jax.devices()[0]), Rules())
    for array in jax.tree.leaves(loaded):
        values = np.asarray(array)
        assert np.isfinite(values).all()
        assert values.std() > 0.01  # every tensor of a tiny checkpoint is drawn


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_axis_of_every_parameter_has_a_known_name(case: tiny.Case, tmp_path: Path) -> None:
    for spec in leaves(open_checkpoint(case.into(tmp_path)).config):
        assert len(spec.axes) == len(spec.shape)
        assert set(spec.axes) <= set(LOGICAL_AXES)


def leaves(config: ModelConfig) -> list[ArraySpec]:
    return list(jax.tree.leaves(param_specs(config)))


def test_the_sizes_of_the_tiny_model_differ_pairwise() -> None:
    config = tiny_config()
    assert config.full is not None
    assert config.window is not None
    assert config.moe is not None
    sizes = {"embed": config.embed, "vocab": config.vocab, "ffn": config.ffn, "layers": config.layers}
    sizes |= {"experts": config.moe.experts, "expert_ffn": config.moe.ffn, "chosen": config.moe.experts_per_token}
    for kind, dims in (("full", config.full), ("window", config.window)):
        sizes |= {f"{kind}_{name}": getattr(dims, name) for name in ("heads", "head_dim", "v_dim")}
    # Two small numbers cannot be avoided twice: KV heads divide heads.
    assert config.full.kv_heads != config.window.kv_heads
    assert [count for count in Counter(sizes.values()).values() if count > 1] == []


def test_no_matrix_of_the_tiny_model_is_square() -> None:
    """Whatever is transposed by mistake has another shape."""
    assert [spec for spec in leaves(tiny_config()) if len(spec.shape) > 1 and spec.shape[-1] == spec.shape[-2]] == []


def test_the_tiny_model_has_full_and_window_layers_dense_and_expert_ones() -> None:
    config = tiny_config()
    assert config.pattern == "FWWFW"
    assert config.kinds == (LayerKind.FULL, LayerKind.WINDOW)
    assert config.ffn_kinds[0] is FfnKind.DENSE
    assert set(config.ffn_kinds[1:]) == {FfnKind.MOE}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_config_is_hashable_and_equal_to_its_twin(case: tiny.Case, tmp_path: Path) -> None:
    """So that it can be a static argument, and a second load compiles nothing."""
    one, two = (open_checkpoint(case.into(tmp_path / name)).config for name in "ab")
    assert hash(one) == hash(two)
    assert one == two
    assert one != dataclasses.replace(one, norm_epsilon=0.5)


@pytest.mark.parametrize("write", [tiny.write_mimo_v2_flash, tiny.write_mimo_v2])
@pytest.mark.parametrize("pattern", [FLASH_PATTERN, PRO_PATTERN, [1, 1, 0], [0, 0], [1, 1]], ids=len)
def test_layer_kinds_are_read_from_the_pattern(write: Any, pattern: list[int], tmp_path: Path) -> None:
    small = {"n_routed_experts": 3, "num_experts_per_tok": 2}
    config = open_checkpoint(write(tmp_path, 1, hybrid_layer_pattern=pattern, **small)).config
    assert config.pattern == "".join("FW"[kind] for kind in pattern)


def test_ffn_kinds_are_read_from_their_own_field(tmp_path: Path) -> None:
    folder = tiny.write_mimo_v2_flash(tmp_path, 1, moe_layer_freq=[1, 0, 1, 1, 0])
    kinds = open_checkpoint(folder).config.ffn_kinds
    assert [kind is FfnKind.MOE for kind in kinds] == [True, False, True, True, False]


def test_gemma_states_its_pattern_as_a_period_or_as_a_list(tmp_path: Path) -> None:
    one = open_checkpoint(tiny.write_gemma3_text(tmp_path / "a", 1)).config
    two = open_checkpoint(tiny.write_gemma3_text(tmp_path / "b", 1, list_layers=True)).config
    assert one == two
    assert one.pattern == "WWFWW"
    kinds = ["full_attention", *["sliding_attention"] * 3, "full_attention"]
    other = open_checkpoint(tiny.write_gemma3_text(tmp_path / "c", 1, layer_types=kinds)).config
    assert other.pattern == "FWWWF"


def test_full_and_window_layers_have_their_own_numbers(tmp_path: Path) -> None:
    config = open_checkpoint(tiny.write_mimo_v2_flash(tmp_path, 1, swa_head_dim=18, swa_v_head_dim=10)).config
    assert config.full is not None
    assert config.window is not None
    assert (config.full.kv_heads, config.full.head_dim, config.full.v_dim) == (2, 20, 14)
    assert (config.window.kv_heads, config.window.head_dim, config.window.v_dim) == (4, 18, 10)
    assert (config.full.window_tokens, config.window.window_tokens) == (None, 11)
    assert (config.full.has_sink, config.window.has_sink) == (False, True)
    assert (config.full.rope_theta, config.window.rope_theta) == (5e6, 1e4)
    assert (config.full.rotary_dims, config.window.rotary_dims) == (6, 6)  # int(20 * 0.334), int(18 * 0.334)


def test_the_newer_spelling_of_rotary_parameters_means_the_same(tmp_path: Path) -> None:
    old = open_checkpoint(tiny.write_gemma3_text(tmp_path / "a", 1)).config
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    folder = tiny.write_gemma3_text(tmp_path / "b", 1, rope_parameters=parameters)
    assert open_checkpoint(folder).config == old

"""Every published layout is the model it was made from: weights exactly, logits to rounding, mistakes visibly."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from mimo_jax import Params
from mimo_jax.checkpoint.checkpoint import open_checkpoint
from mimo_jax.checkpoint.load import load_params
from mimo_jax.checkpoint.numbers import dequantise
from mimo_jax.config import MtpDims
from mimo_jax.params import MtpHead
from pallas_kernels.formats import Fp8Block, Int8, MxFp4, is_format, widen
from sharding import Rules, make_mesh
from tests import tiny
from tests.checkpoint.forward import logits
from tests.checkpoint.published import LAYOUTS, Published, publish, write_truth
from tests.tiny_write import write

# float32 sums in another order: the same weights in another format may be multiplied in another loop.
BOUND = 1e-4
MISTAKE = 0.05


def load(folder: Path, quantization: str | None = None, dtype: Any = np.float32) -> Params:
    return load_params(open_checkpoint(folder), dtype, make_mesh(jax.devices()[0]), Rules(), quantization=quantization)


def assert_same(got: Params, wanted: Params) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, two in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, two)


def widened(params: Params, how: Callable[[Any], Any]) -> Params:
    return jax.tree.map(how, params, is_leaf=is_format)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Published]:
    cache: dict[str, Published] = {}

    def make(name: str) -> Published:
        if name not in cache:
            cache[name] = publish(tmp_path_factory.mktemp("published") / "model", name)
        return cache[name]

    return make


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_mean_exactly_what_the_layout_says(name: str, made: Callable[[str], Published], tmp_path: Path) -> None:
    """Widened by the loader, by its NumPy twin, or where they are multiplied: the same floats, bit for bit."""
    model = made(name)
    wanted = load(write_truth(tmp_path, model))
    kept = load(model.folder)
    assert_same(load(model.folder, "dequantize"), wanted)
    assert_same(widened(kept, lambda weight: dequantise(jax.tree.map(np.asarray, weight))), wanted)
    assert_same(widened(kept, lambda weight: widen(weight, jnp.float32)), wanted)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_model_computes_in_the_stored_format(name: str, made: Callable[[str], Published], tmp_path: Path) -> None:
    model = made(name)
    config = open_checkpoint(model.folder).config
    ids = tiny.prompt(30)
    got = logits(load(model.folder), config, ids)
    wanted = logits(load(write_truth(tmp_path, model)), config, ids)
    assert np.abs(got - wanted).max() < BOUND


def test_two_published_layouts_of_one_model_load_to_one_model(made: Callable[[str], Published]) -> None:
    """V2-Flash's three tensors and V2.5's chunks hold the same numbers; V2.6 says its factors in two ways."""
    assert_same(load(made("flash").folder, "dequantize"), load(made("v2.5").folder, "dequantize"))
    assert_same(load(made("v2.6").folder), load(made("v2.6 float").folder))


@pytest.mark.parametrize(("name", "bound"), [("v2.5", 2**-4), ("flat", 2**-4), ("v2.6", 0.25), ("bf16", 2**-8)])
def test_weights_are_as_close_to_the_floats_as_the_format_allows(
    name: str, bound: float, made: Callable[[str], Published]
) -> None:
    """Half a step: e4m3 has 3 bits of fraction, bfloat16 7; between 4 and 6, e2m1's steps are 2, that is half of 4.

    A factor is the largest number of a block over 448, or for mxfp4 a power of two that may leave the largest at
    almost 8 of 6. Numbers far below the largest of their block have fixed steps, 2^-9 and 1/2 of the factor.
    """
    model = made(name)
    for weight, floats in load_file(model.folder / "floats" / "model.safetensors").items():
        largest = np.abs(floats).max()
        error = np.abs(model.truth[weight] - floats)
        assert (error <= bound * np.abs(floats) + largest * (0.07 if name == "v2.6" else 2**-9)).all(), weight


# ---- formats ----


def kinds(params: Params) -> set[type]:
    return {type(weight) for weight in jax.tree.leaves(params, is_leaf=is_format) if is_format(weight)}


def test_what_a_tensor_is_decides_how_it_is_kept(made: Callable[[str], Published]) -> None:
    fp8, mxfp4, plain = (load(made(name).folder) for name in ("v2.5", "v2.6", "bf16"))
    assert (kinds(fp8), kinds(mxfp4), kinds(plain)) == ({Fp8Block}, {Fp8Block, MxFp4}, set())
    for params in (fp8, mxfp4):
        for layer in (*params.layers, *(head.layer for head in params.mtp)):
            assert isinstance(layer.attention.query, Fp8Block)
            assert isinstance(layer.attention.output, jax.Array)  # bf16 in trunk and draft heads
        assert all(isinstance(head.projection, jax.Array) for head in params.mtp)
        assert isinstance(params.layers[0].ffn.gate, Fp8Block)
        assert params.layers[1].ffn.router.dtype == np.float32
    assert isinstance(fp8.layers[1].ffn.down, Fp8Block)
    assert isinstance(mxfp4.layers[1].ffn.down, MxFp4)
    # Blocks half as high: 8 rows divide every border of Q, K and V in a chunk, and their heads.
    assert [fp8.layers[0].attention.query.block, fp8.layers[0].attention.key.block] == [(8, 24), (8, 24)]
    assert fp8.layers[0].ffn.up.block == (16, 24)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("quantization", [None, "int8", "int8-g128", "dequantize"])
def test_what_is_loaded_is_what_was_announced(
    name: str, quantization: str | None, made: Callable[[str], Published]
) -> None:
    specs = open_checkpoint(made(name).folder).specs(jnp.bfloat16, quantization)
    params = load(made(name).folder, quantization, jnp.bfloat16)
    assert jax.tree.structure(specs) == jax.tree.structure(params)
    for spec, array in zip(jax.tree.leaves(specs), jax.tree.leaves(params), strict=True):
        assert (spec.shape, spec.dtype) == (array.shape, array.dtype)


def test_int8_is_symmetric_and_rounded_to_nearest(made: Callable[[str], Published]) -> None:
    """Of every kind of source: floats, fp8 and mxfp4, experts and projections that several pieces make."""
    for name in ("bf16", "v2.5", "v2.6"):
        exact = load(made(name).folder, "dequantize")
        for quantization, group in (("int8", None), ("int8-g128", 128)):
            small = load(made(name).folder, quantization)
            assert kinds(small) == {Int8}
            for weight, wanted in zip(jax.tree.leaves(small, is_leaf=is_format), jax.tree.leaves(exact), strict=True):
                if not is_format(weight):
                    np.testing.assert_array_equal(weight, wanted)  # norms, sinks, router, embedding, head
                    continue
                columns = wanted.shape[-1]
                assert weight.group == min(group or columns, columns)
                error = np.abs(widen(weight, jnp.float32) - wanted)
                steps = np.repeat(weight.scale, weight.group, axis=-1)[..., :columns]
                assert (error <= 0.5001 * steps).all()
                assert (np.abs(np.asarray(weight.values)).max(axis=-1) == 127).all()


# ---- draft heads ----


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_draft_head_has_weights_of_its_own(name: str, made: Callable[[str], Published]) -> None:
    params = load(made(name).folder, "dequantize")
    assert len(params.mtp) == 3
    for one in range(3):
        for two in range(one):
            pairs = zip(jax.tree.leaves(params.mtp[one]), jax.tree.leaves(params.mtp[two]), strict=True)
            assert all((np.asarray(a) != np.asarray(b)).mean() > 0.5 for a, b in pairs)


def test_a_draft_head_s_tensors_are_where_they_belong(made: Callable[[str], Published]) -> None:
    model = made("pro")
    heads = load(model.folder, "dequantize").mtp
    for index, head in enumerate(heads):
        assert isinstance(head, MtpHead)
        wanted = {
            "enorm": head.embed_norm,
            "hnorm": head.hidden_norm,
            "eh_proj": head.projection,
            "input_layernorm": head.layer.attention_norm,
            "self_attn.k_proj": head.layer.attention.key,
            "pre_mlp_layernorm": head.layer.ffn_norm,
            "mlp.up_proj": head.layer.ffn.up,
            "final_layernorm": head.final_norm,
        }
        for part, array in wanted.items():
            np.testing.assert_array_equal(array, model.truth[f"model.mtp.layers.{index}.{part}.weight"])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_fewer_draft_heads_can_be_asked_for(count: int, made: Callable[[str], Published]) -> None:
    whole = open_checkpoint(made("v2.5").folder)
    part = whole.with_draft_heads(count)
    assert part.config.draft_heads == count == len(part.sources.mtp)
    assert (part.config.mtp is None) == (count == 0)
    assert part.config.layer_kinds == whole.config.layer_kinds
    params = load_params(part, np.float32, make_mesh(jax.devices()[0]), Rules())
    assert jax.tree.structure(params) == jax.tree.structure(part.specs(np.float32))
    assert sum(part.skipped.values()) == (3 - count) * 16
    with pytest.raises(ValueError, match="4 were asked for"):
        whole.with_draft_heads(4)


def test_a_checkpoint_without_draft_heads_has_none(tmp_path: Path) -> None:
    config = open_checkpoint(publish(tmp_path / "m", "v2.5", heads=0).folder).config
    assert config.mtp is None


# ---- mistakes ----


def test_how_heads_are_fed_can_be_said(made: Callable[[str], Published]) -> None:
    folder = made("v2.5").folder
    as_published, chained = open_checkpoint(folder), open_checkpoint(folder, hf_overrides={"mtp_chained": True})
    assert as_published.config.mtp == MtpDims(heads=3)
    assert chained.config.mtp == MtpDims(heads=3, chained=True)


def swap_heads(stored: dict[str, np.ndarray]) -> None:
    name = "model.layers.0.self_attn.qkv_proj.weight"
    rows = stored[name].copy()
    rows[:24], rows[24:48] = stored[name][24:48], stored[name][:24]
    stored[name] = rows


def swap_chunks(stored: dict[str, np.ndarray]) -> None:
    for name in ("model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.self_attn.qkv_proj.weight_scale_inv"):
        if name in stored:
            stored[name] = np.concatenate(np.split(stored[name], 2)[::-1])


def high_half_first(stored: dict[str, np.ndarray]) -> None:
    for name, packed in stored.items():
        if packed.dtype == np.uint8 and name.endswith(".weight"):
            stored[name] = packed << 4 | packed >> 4


def shared_block_dropped(stored: dict[str, np.ndarray]) -> None:
    """As if V had factors of its own: what others read where the block belongs to K and V."""
    name = "model.layers.0.self_attn.{}_proj.weight_scale_inv"
    if name.format("k") in stored:
        stored[name.format("k")] = stored[name.format("k")].copy()
        stored[name.format("k")][1::2] = np.repeat(stored[name.format("v")], 1, axis=0)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("v2.5", swap_heads),
        ("v2.5", swap_chunks),
        ("v2.6", high_half_first),
        ("flash", shared_block_dropped),
    ],
)
def test_a_mistake_in_the_layout_would_show(
    name: str, mistake: Callable[[dict[str, np.ndarray]], None], made: Callable[[str], Published], tmp_path: Path
) -> None:
    """In the weights and in the logits."""
    model = made(name)
    stored = dict(model.stored)
    mistake(stored)
    wrong = write(tmp_path, model.config, stored, 2, "float32")
    config = open_checkpoint(model.folder).config
    ids = tiny.prompt(30)
    right, got = (logits(load(folder), config, ids) for folder in (model.folder, wrong))
    assert np.abs(right - got).max() > MISTAKE
    with pytest.raises(AssertionError):
        assert_same(load(wrong, "dequantize"), load(model.folder, "dequantize"))

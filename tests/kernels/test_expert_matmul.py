"""The grouped matmul, each implementation and weight format, against a loop over rows, whatever the router does."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.expert_matmul import expert_matmul, expert_matmul_choice
from pallas_kernels.expert_matmul.gpu import Blocks, choose_blocks, expert_matmul_gpu, make_tiles
from pallas_kernels.formats import FP4_VALUES, Fp8Block, Int8, MxFp4

# Pairwise different; no block divides them.
EXPERTS, IN, OUT = 5, 224, 77
BOUND = 1e-5  # worst row, float32: some hundred sums
FORMATS = ("plain", "int8", "int8, groups", "fp8", "fp8, one block", "mxfp4")
SPLIT = Blocks(rows=16, outputs=32, columns=32, splits=3, num_warps=4, num_stages=2)
IMPLEMENTATIONS: dict[str, Any] = {
    "reference": partial(expert_matmul, impl="reference"),
    "kernel": partial(expert_matmul, impl="interpret"),
    "kernel, split columns": lambda x, weight, experts, most_rows=None: expert_matmul_gpu(
        x, weight, experts, most_rows=most_rows or len(x), out_dtype=x.dtype, blocks=SPLIT, interpret=True
    ),
}


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def matmul(request: pytest.FixtureRequest) -> Any:
    return jax.jit(IMPLEMENTATIONS[request.param], static_argnames="most_rows")


def routings(rows: int) -> dict[str, np.ndarray]:
    """Ascending expert ids: even, random, all on one expert, experts without rows, one row on an edge expert."""
    draw = np.random.default_rng(rows)
    skewed = np.minimum(draw.geometric(0.6, rows) - 1, EXPERTS - 1)
    found = {
        "even": np.arange(rows) * EXPERTS // rows,
        "random": np.sort(draw.integers(0, EXPERTS, rows)),
        "skewed": np.sort(skewed),
        "only the first": np.zeros(rows, int),
        "only the last": np.full(rows, EXPERTS - 1),
        "the middle is empty": np.sort(draw.choice([0, EXPERTS - 1], rows)),
        "all but one on the second": np.sort(np.where(np.arange(rows) == 0, EXPERTS - 1, 1)),
    }
    return {name: experts.astype(np.int32) for name, experts in found.items()}


def make_weight(name: str, columns: int = IN) -> tuple[Any, np.ndarray]:
    """A weight and, number by number, what it stands for in float64."""
    draw = np.random.default_rng(FORMATS.index(name))
    shape = (EXPERTS, OUT, columns)
    if name == "plain":
        values = draw.standard_normal(shape).astype(np.float32)
        return values, values.astype(np.float64)
    if name == "mxfp4":
        packed = draw.integers(0, 256, (EXPERTS, OUT, columns // 2), np.uint8)
        powers = draw.integers(119, 131, (EXPERTS, OUT, columns // 32), np.uint8)
        halves = np.stack([packed % 16, packed // 16], axis=-1).reshape(shape)
        wide = np.array(FP4_VALUES)[halves] * np.repeat(2.0 ** (powers.astype(np.float64) - 127), 32, axis=-1)
        return MxFp4(packed, powers), wide
    if name.startswith("int8"):
        group = 96 if "groups" in name else columns
        values = draw.integers(-127, 128, shape).astype(np.int8)
        scale = draw.uniform(0.01, 1, (EXPERTS, OUT, -(-columns // group))).astype(np.float32)
        return Int8(values, scale, group), values * np.repeat(scale, group, axis=-1)[..., :columns].astype(np.float64)
    rows, group = (32, 96) if name == "fp8" else (128, columns)
    # Every value there is, subnormals included, NaN alone not.
    codes = draw.permutation(np.arange(np.prod(shape)) % 254).astype(np.uint8)
    values = np.where(codes >= 127, codes + 1, codes).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(shape)
    scale = draw.uniform(0.01, 1, (EXPERTS, -(-OUT // rows), -(-columns // group))).astype(np.float32)
    spread = np.repeat(np.repeat(scale, rows, axis=1)[:, :OUT], group, axis=2)[..., :columns]
    return Fp8Block(values, scale, (rows, group)), values.astype(np.float64) * spread


def make_rows(rows: int, columns: int = IN) -> np.ndarray:
    return np.random.default_rng([rows, 1]).standard_normal((rows, columns)).astype(np.float32)


def looped(x: np.ndarray, wide: np.ndarray, experts: np.ndarray) -> np.ndarray:
    return np.stack([wide[expert] @ row for expert, row in zip(experts, x.astype(np.float64), strict=True)])


def worst_row(got: Any, expected: np.ndarray) -> float:
    distance = np.linalg.norm(np.asarray(got, np.float64) - expected, axis=-1)
    return float(np.max(distance / np.linalg.norm(expected, axis=-1)))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 16, 17, 130])
def test_every_row_is_multiplied_by_its_own_expert(matmul: Any, rows: int, name: str) -> None:
    """Around the tile of 16 rows, which is also where plain XLA changes its form."""
    x, (weight, wide) = make_rows(rows), make_weight(name)
    for routing, experts in routings(rows).items():
        got = matmul(x, weight, experts)
        assert (got.dtype, got.shape) == (jnp.float32, (rows, OUT))
        assert worst_row(got, looped(x, wide, experts)) < BOUND, routing


@pytest.mark.parametrize("name", FORMATS)
def test_columns_that_blocks_divide(matmul: Any, name: str) -> None:
    x, (weight, wide) = make_rows(9, 384), make_weight(name, 384)
    for experts in routings(9).values():
        assert worst_row(matmul(x, weight, experts), looped(x, wide, experts)) < BOUND


@pytest.mark.parametrize("name", FORMATS)
def test_bfloat16_rows_lose_nothing_in_the_product_and_are_rounded_once(matmul: Any, name: str) -> None:
    """Each format's values are exact in bfloat16 but for their scale, which the kernel multiplies behind the product;
    plain XLA rounds widened weights to bfloat16, at most half a unit of 2^-8."""
    x, (weight, wide) = jnp.asarray(make_rows(33), jnp.bfloat16), make_weight(name)
    if name == "plain":
        weight = jnp.asarray(weight, jnp.bfloat16)
        wide = np.asarray(weight, np.float64)
    experts = routings(33)["skewed"]
    got = matmul(x, weight, experts)
    assert got.dtype == jnp.bfloat16
    assert worst_row(got, looped(np.asarray(x), wide, experts)) < 2**-8


@pytest.mark.parametrize("name", FORMATS)
def test_the_kernel_s_float32_sums_of_bfloat16_rows_are_exact_to_float32(name: str) -> None:
    x, (weight, wide) = jnp.asarray(make_rows(33), jnp.bfloat16), make_weight(name)
    if name == "plain":
        weight = jnp.asarray(weight, jnp.bfloat16)
        wide = np.asarray(weight, np.float64)
    experts = routings(33)["random"]
    got = expert_matmul(x, weight, experts, out_dtype=jnp.float32, impl="interpret")
    assert worst_row(got, looped(np.asarray(x), wide, experts)) < BOUND


def test_a_row_is_the_same_whoever_is_in_the_batch(matmul: Any) -> None:
    x, (weight, _) = make_rows(130), make_weight("fp8")
    experts = routings(130)["random"]
    whole = np.asarray(matmul(x, weight, experts))
    for row in (0, 15, 16, 64, 129):
        alone = matmul(x[row : row + 1], weight, experts[row : row + 1])
        np.testing.assert_allclose(np.asarray(alone)[0], whole[row], rtol=0, atol=1e-5 * np.abs(whole[row]).max())


def test_what_rows_of_no_tile_hold_changes_nothing(matmul: Any) -> None:
    """Tiles reach beyond an expert's rows."""
    x, (weight, wide) = make_rows(20), make_weight("plain")
    experts = routings(20)["even"]
    poisoned = np.where((experts == 2)[:, None], np.nan, x).astype(np.float32)
    got = np.asarray(matmul(poisoned, weight, experts))
    assert worst_row(got[experts != 2], looped(x, wide, experts)[experts != 2]) < BOUND


def test_the_bound_catches_every_wrong_product(matmul: Any) -> None:
    rows = 33
    x, experts = make_rows(rows), routings(rows)["even"]
    fp8, wide = make_weight("fp8")
    fp4, wide4 = make_weight("mxfp4")
    int8, wide8 = make_weight("int8, groups")
    right, right4, right8 = (looped(x, w, experts) for w in (wide, wide4, wide8))
    wrong = {
        "zeros": worst_row(np.zeros_like(right), right),
        "another expert": worst_row(matmul(x, fp8, np.sort((experts + 1) % EXPERTS).astype(np.int32)), right),
        "blocks of other rows": worst_row(
            matmul(x, Fp8Block(fp8.values, np.roll(fp8.scale, 1, axis=1), fp8.block), experts), right
        ),
        "blocks of other columns": worst_row(
            matmul(x, Fp8Block(fp8.values, np.roll(fp8.scale, 1, axis=2), fp8.block), experts), right
        ),
        "other groups": worst_row(matmul(x, Int8(int8.values, np.roll(int8.scale, 1, 2), 96), experts), right8),
        "high half first": worst_row(matmul(x, MxFp4(fp4.packed // 16 | fp4.packed << 4, fp4.scale), experts), right4),
        "powers of other groups": worst_row(matmul(x, MxFp4(fp4.packed, np.roll(fp4.scale, 1, 2)), experts), right4),
        "no subnormals": worst_row(
            matmul(x, Fp8Block(_without_subnormals(fp8.values), fp8.scale, fp8.block), experts), right
        ),
    }
    assert wrong.pop("no subnormals") > 2 * BOUND  # they are small beside the largest
    assert all(found > 1e3 * BOUND for found in wrong.values()), wrong


def _without_subnormals(values: np.ndarray) -> np.ndarray:
    return np.where(np.abs(values.astype(np.float32)) < 2**-6, 0, values).astype(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize("tile_rows", [16, 64])
def test_each_row_is_in_one_tile_of_its_expert_and_a_decode_step_needs_a_tile_an_expert(tile_rows: int) -> None:
    for rows in (1, 15, 16, 17, 130):
        for experts in routings(rows).values():
            tiles = jax.tree.map(np.asarray, make_tiles(jnp.asarray(experts), EXPERTS, tile_rows))
            covered = [
                (row, expert)
                for expert, first, count in zip(tiles.expert, tiles.first, tiles.count, strict=True)
                for row in range(first, first + count)
            ]
            assert covered == list(enumerate(experts))
            if np.bincount(experts).max() <= tile_rows:
                used = tiles.expert[tiles.count > 0]
                assert len(set(used)) == len(used)


def test_a_decode_step_s_tiles_hold_all_rows_an_expert_can_have() -> None:
    def spec(experts: int, outputs: int, columns: int) -> Any:
        return jax.ShapeDtypeStruct((experts, outputs, columns), jnp.bfloat16)

    for tokens in (1, 8, 16, 33, 64):
        blocks = choose_blocks(spec(256, 2048, 4096), tokens * 8, tokens, 2)
        assert tokens <= blocks.rows <= 64
    assert choose_blocks(spec(256, 2048, 4096), 2048 * 8, 2048, 2).rows == 128
    assert choose_blocks(spec(256, 2048, 4096), 256 * 8, 256, 2).rows == 16  # eight rows an expert
    assert choose_blocks(spec(1, 16384, 4096), 2048, 2048, 2).rows == 128
    assert choose_blocks(spec(256, 2048, 4096), 8, 1, 2).splits > 1
    assert choose_blocks(spec(256, 2048, 4096), 8 * 64, 64, 2).splits == 1


def test_what_does_not_fit_is_refused_by_name() -> None:
    x, experts = jnp.asarray(make_rows(7)), jnp.zeros(7, jnp.int32)
    plain, int8, fp8, fp4 = (make_weight(name)[0] for name in ("plain", "int8, groups", "fp8", "mxfp4"))
    bad: list[tuple[str, dict[str, Any]]] = [
        (r"x is \(7, 223\) and weight \(5, 77, 224\)", {"x": x[:, :-1]}),
        ("x is int32", {"x": x.astype(jnp.int32)}),
        (r"weight \(77, 224\)", {"weight": plain[0]}),
        (r"weight \(5, 77, 448\)", {"weight": MxFp4(np.tile(fp4.packed, 2), np.tile(fp4.scale, 2))}),
        (r"expert_of_row is int32 \(6,\)", {"expert_of_row": experts[:-1]}),
        ("expert_of_row is float32", {"expert_of_row": experts.astype(jnp.float32)}),
        ("most_rows=0", {"most_rows": 0}),
        ("impl='triton'", {"impl": "triton"}),
        ("weight is uint8", {"weight": Int8(int8.values.view(np.uint8), int8.scale, int8.group)}),
        (
            r"scale is float32 \(5, 77, 2\); float32 \(5, 77, 3\)",
            {"weight": Int8(int8.values, int8.scale[..., 1:], 96)},
        ),
        (r"scale is float32 \(5, 3, 2\)", {"weight": Fp8Block(fp8.values, fp8.scale[..., 1:], fp8.block)}),
        ("scale is int8", {"weight": MxFp4(fp4.packed, fp4.scale.view(np.int8))}),
        ("a scale for 0 x 96", {"weight": Fp8Block(fp8.values, fp8.scale, (0, 96))}),
        ("cannot take a scale for 40 columns", {"weight": Int8(int8.values, np.ones((5, 77, 6), np.float32), 40)}),
        ("cannot take a weight of type float32 with x of bfloat16", {"x": x.astype(jnp.bfloat16)}),
    ]
    for message, changed in bad:
        arguments = {"x": x, "weight": plain, "expert_of_row": experts, "impl": "interpret"} | changed
        with pytest.raises(ValueError, match=message):
            expert_matmul(**arguments)


@pytest.mark.parametrize(("elements", "taken"), [(1 << 31, True), ((1 << 31) + 4096, False), ((1 << 32) + 4096, True)])
def test_a_weight_whose_elements_32_bits_cannot_count_is_refused(elements: int, taken: bool) -> None:
    spec = jax.ShapeDtypeStruct((1, elements // 4096, 4096), jnp.int8)
    weight = Int8(spec, jax.ShapeDtypeStruct((1, elements // 4096, 1), jnp.float32), 4096)
    if taken:
        assert expert_matmul_choice("pallas", jnp.bfloat16, weight).implementation == "pallas"
    else:
        with pytest.raises(ValueError, match=f"a weight of {elements} bytes"):
            expert_matmul_choice("pallas", jnp.bfloat16, weight)

"""The int8 matmul, each implementation, against NumPy that goes group by group, and mistakes the bound has to catch."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.int8_matmul import int8_matmul, int8_matmul_choice
from pallas_kernels.int8_matmul.gpu import Blocks, choose_blocks, int8_matmul_gpu
from pallas_kernels.int8_matmul.reference import quantize_rows

BOUND = 3e-6  # worst row, float32: some hundred sums
SPLIT = Blocks(rows=16, outputs=32, columns=32, splits=3, num_warps=4, num_stages=2)
IMPLEMENTATIONS: dict[str, Any] = {
    "reference": partial(int8_matmul, impl="reference"),
    "kernel": partial(int8_matmul, impl="interpret"),
    "kernel, split columns": partial(int8_matmul_gpu, interpret=True, blocks=SPLIT),
}
# (rows, out, in, group): decode and prefill, odd sizes, one scale a row, and a short last group (576 = 4.5 x 128)
SHAPES = [
    (1, 7, 33, 33),
    (3, 64, 576, 128),
    (5, 130, 257, 64),
    (16, 65, 200, 96),
    (17, 31, 576, 128),
    (130, 129, 100, 1000),
]


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def matmul(request: pytest.FixtureRequest) -> Any:
    return jax.jit(IMPLEMENTATIONS[request.param], static_argnames=("group", "int8_activations"))


def arrays(rows: int, outputs: int, columns: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scales differ by row and by group, so that another one's cannot pass."""
    draw = np.random.default_rng([rows, outputs, columns])
    return (
        draw.standard_normal((rows, columns)).astype(np.float32) * draw.uniform(0.1, 10, (rows, 1)).astype(np.float32),
        draw.integers(-127, 128, (outputs, columns)).astype(np.int8),
        draw.uniform(0.001, 0.1, (outputs, -(-columns // group))).astype(np.float32),
    )


def by_groups(x: np.ndarray, values: np.ndarray, scale: np.ndarray, group: int) -> np.ndarray:
    """In float64, group by group."""
    total = np.zeros((x.shape[0], values.shape[0]))
    for index in range(scale.shape[1]):
        columns = slice(index * group, (index + 1) * group)
        total += x[:, columns].astype(np.float64) @ values[:, columns].T.astype(np.float64) * scale[:, index]
    return total


def rounded(x: np.ndarray) -> np.ndarray:
    """Rows as int8 activations stand for them; a half goes to the even neighbour."""
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    return np.rint(x / scale).astype(np.float64) * scale


def worst_row(got: Any, expected: np.ndarray) -> float:
    distance = np.linalg.norm(np.asarray(got, np.float64) - expected, axis=1)
    return float(np.max(distance / np.linalg.norm(expected, axis=1)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float_rows_are_multiplied_as_they_are(matmul: Any, shape: tuple[int, ...]) -> None:
    x, values, scale = arrays(*shape)
    got = matmul(x, values, scale, group=shape[3], int8_activations=False)
    assert (got.dtype, got.shape) == (jnp.float32, shape[:2])
    assert worst_row(got, by_groups(x, values, scale, shape[3])) < BOUND


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_rows_are_rounded_and_their_products_are_exact(matmul: Any, shape: tuple[int, ...]) -> None:
    x, values, scale = arrays(*shape)
    got = matmul(x, values, scale, group=shape[3], int8_activations=True)
    assert worst_row(got, by_groups(rounded(x), values, scale, shape[3])) < BOUND
    assert 1e-4 < worst_row(got, by_groups(x, values, scale, shape[3])) < 0.03  # rounding shows, and is all that does


def test_bfloat16_rows_lose_nothing_in_the_product(matmul: Any) -> None:
    """int8 is exact in bfloat16 and sums are in float32."""
    x, values, scale = arrays(17, 31, 576, 128)
    x = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)
    got = matmul(jnp.asarray(x, jnp.bfloat16), values, scale, group=128, int8_activations=False)
    assert worst_row(got, by_groups(x, values, scale, 128)) < BOUND


def test_the_largest_sums_of_a_row_are_exact(matmul: Any) -> None:
    columns = 4096
    x, values = np.full((2, columns), 127, np.float32), np.full((3, columns), 127, np.int8)
    got = matmul(x, values, np.ones((3, 1), np.float32), group=columns, int8_activations=True)
    assert np.array_equal(got, np.full((2, 3), 127.0 * 127 * columns))


def test_rows_are_rounded_to_the_nearest_and_ties_to_even() -> None:
    x = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, 0.49, 0.51], [0] * 8, [-1, 0, 0, 0, 0, 0, 0, 0.5]], np.float32)
    values, scale = quantize_rows(jnp.asarray(x))
    assert values.tolist() == [[127, 0, 2, 2, 0, -2, 0, 1], [0] * 8, [-127, 0, 0, 0, 0, 0, 0, 64]]
    np.testing.assert_allclose(scale, [1, 0, 1 / 127])


def test_the_bound_catches_every_wrong_product(matmul: Any) -> None:
    x, values, scale = arrays(17, 31, 576, 128)
    right = by_groups(rounded(x), values, scale, 128)
    run = partial(matmul, group=128, int8_activations=True)
    wrong = {
        "zeros": np.zeros_like(right),
        "scales of other groups": run(x, values, np.roll(scale, 1, axis=1)),
        "scales of other rows": run(x, values, np.roll(scale, 1, axis=0)),
        "the short group is left out": run(x, np.where(np.arange(576) < 512, values, 0).astype(np.int8), scale),
        "truncated instead of rounded": by_groups(np.trunc(x / 0.05) * 0.05, values, scale, 128),
        "one column further": run(x, np.roll(values, 1, axis=1), scale),
        "unsigned": by_groups(rounded(x), values.view(np.uint8), scale, 128),
    }
    errors = {name: worst_row(got, right) for name, got in wrong.items()}
    assert all(found > 1e3 * BOUND for found in errors.values()), errors


def test_blocks_share_columns_only_where_a_gpu_would_idle_and_never_cross_a_group() -> None:
    assert choose_blocks(8, 4096, 4096, 4096, 2).splits == 8
    assert choose_blocks(8, 152576, 4096, 4096, 2).splits == 1
    assert choose_blocks(2048, 4096, 4096, 4096, 2).splits == 1
    for rows in (1, 16, 17, 4096):
        for group in (32, 64, 96, 128, 192, 640):
            for row_bytes in (1, 2, 4):
                assert group % choose_blocks(rows, 100, 6400, group, row_bytes).columns == 0


def test_what_does_not_fit_is_refused_by_name() -> None:
    x, values, scale = map(jnp.asarray, arrays(3, 64, 576, 128))
    bad: list[tuple[str, dict[str, Any]]] = [
        (r"x is \(3, 575\)", {"x": x[:, 1:]}),
        ("x is int8", {"x": x.astype(jnp.int8)}),
        ("values is uint8", {"values": values.astype(jnp.uint8)}),
        (r"scale is float32 \(64, 4\)", {"scale": scale[:, 1:]}),
        ("scale is bfloat16", {"scale": scale.astype(jnp.bfloat16)}),
        ("group=0", {"group": 0}),
        (r"impl='interpret' cannot take a group of 48 columns", {"group": 48, "scale": jnp.ones((64, 12))}),
    ]
    for message, changed in bad:
        with pytest.raises(ValueError, match=message):
            int8_matmul(**({"x": x, "values": values, "scale": scale, "group": 128, "impl": "interpret"} | changed))
    with pytest.raises(ValueError, match="group=200000; products of at most 133144 columns"):
        int8_matmul(jnp.ones((1, 200000)), jnp.ones((1, 200000), jnp.int8), jnp.ones((1, 1)), group=200000)
    with pytest.raises(ValueError, match="a weight of 4294967296 elements"):
        int8_matmul_choice("pallas", jnp.bfloat16, (1 << 16, 1 << 16), 128)

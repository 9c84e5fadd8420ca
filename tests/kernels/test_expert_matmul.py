"""The grouped matmul: both forms against a loop over rows, whatever the router does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_matmul import expert_matmul
from pallas_kernels.expert_matmul.reference import expert_matmul_reference
from pallas_kernels.expert_matmul.xla import expert_matmul_tiled

EXPERTS, IN, OUT = 5, 26, 12
FORMS = {
    "reference": jax.jit(expert_matmul_reference),
    "tiled": jax.jit(expert_matmul_tiled),
    "chosen": jax.jit(expert_matmul),
}
# Around the tile of 16 rows, which is also where the chosen form changes.
ROWS = [("tiled", rows) for rows in (1, 16, 17, 33, 130)] + [
    ("reference", 33),
    ("chosen", 16),
    ("chosen", 17),
]


def routings(rows: int) -> dict[str, np.ndarray]:
    """Ascending expert ids: even, random, all on one expert, experts without rows, one row on an edge expert."""
    draw = np.random.default_rng(rows)
    skewed = np.minimum(draw.geometric(0.6, rows) - 1, EXPERTS - 1)
    return {
        "even": np.arange(rows) * EXPERTS // rows,
        "random": np.sort(draw.integers(0, EXPERTS, rows)),
        "skewed": np.sort(skewed),
        "only the first": np.zeros(rows, int),
        "only the last": np.full(rows, EXPERTS - 1),
        "the middle is empty": np.sort(draw.choice([0, EXPERTS - 1], rows)),
        "all but one on the second": np.sort(np.where(np.arange(rows) == 0, EXPERTS - 1, 1)),
    }


def arrays(rows: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng([rows, 1])
    return (
        draw.standard_normal((rows, IN)).astype(np.float32),
        draw.standard_normal((EXPERTS, OUT, IN)).astype(np.float32),
    )


def worst_row(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.max(np.linalg.norm(got - expected, axis=-1) / np.linalg.norm(expected, axis=-1)))


@pytest.mark.parametrize(("form", "rows"), ROWS)
def test_every_row_is_multiplied_by_its_own_expert(form: str, rows: int) -> None:
    x, weights = arrays(rows)
    for name, experts in routings(rows).items():
        got = np.asarray(FORMS[form](x, weights, experts.astype(np.int32)))
        expected = np.stack([weights[expert].astype(np.float64) @ row for expert, row in zip(experts, x, strict=True)])
        assert got.shape == (rows, OUT)
        assert worst_row(got, expected) < 1e-5, name


def test_bfloat16_rows_are_summed_in_float32_and_rounded_once() -> None:
    rows = 33
    x, weights = (jnp.asarray(array, jnp.bfloat16) for array in arrays(rows))
    experts = routings(rows)["skewed"]
    exact = np.einsum("ri,roi->ro", np.asarray(x, np.float64), np.asarray(weights, np.float64)[experts])
    once = np.asarray(jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16), np.float64)
    for form in ("reference", "tiled"):
        got = FORMS[form](x, weights, jnp.asarray(experts, jnp.int32))
        assert got.dtype == jnp.bfloat16
        # Half a unit in the last of 8 bits, and hardly ever another neighbour than the exact sum's own.
        np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2**-8, atol=1e-6)
        assert (np.asarray(got, np.float64) != once).mean() < 0.01


def test_a_row_is_the_same_whoever_is_in_the_batch() -> None:
    x, weights = arrays(130)
    experts = routings(130)["random"]
    whole = np.asarray(FORMS["chosen"](x, weights, experts.astype(np.int32)))
    for row in (0, 15, 16, 64, 129):
        alone = FORMS["chosen"](x[row : row + 1], weights, experts[row : row + 1].astype(np.int32))
        np.testing.assert_allclose(np.asarray(alone)[0], whole[row], rtol=0, atol=1e-5)


def test_a_wrong_expert_is_far_outside_the_bound() -> None:
    x, weights = arrays(33)
    experts = routings(33)["even"]
    right, wrong = (
        np.asarray(FORMS["chosen"](x, weights, ids.astype(np.int32)))
        for ids in (experts, np.sort((experts + 1) % EXPERTS))
    )
    assert worst_row(wrong, right) > 0.1


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, weights = (jnp.asarray(array) for array in arrays(7))
    ids = jnp.zeros(7, jnp.int32)
    for arguments, message in [
        ((x[:, :-1], weights, ids), "x is"),
        ((x, weights[0], ids), "weights"),
        ((x, weights, ids[:-1]), "expert_of_row"),
    ]:
        with pytest.raises(ValueError, match=message):
            expert_matmul(*arguments)

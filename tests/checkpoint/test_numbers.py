"""The weight formats number by number: literal examples, and the NumPy and JAX forms against each other."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mimo_jax.checkpoint.numbers import dequantise, quantise
from mimo_jax.families.source import exponent_bytes
from mimo_jax.weights import expert_linear, linear, linear_float32
from pallas_kernels.formats import Fp8Block, Int8, MxFp4, widen


def test_mxfp4_low_half_first() -> None:
    packed = np.zeros((1, 16), np.uint8)
    packed[0, :3] = [0x21, 0xF7, 0x8A]  # 0.5 1.0 | 6.0 -6.0 | -1.0 -0.0
    weight = MxFp4(packed, np.array([[128]], np.uint8))
    assert dequantise(weight)[0, :6].tolist() == [1.0, 2.0, 12.0, -12.0, -2.0, 0.0]
    np.testing.assert_array_equal(widen(weight, np.float32), dequantise(weight))


def test_every_4_bit_value_is_that_of_the_reference_type() -> None:
    codes = np.arange(16, dtype=np.uint8)
    packed = np.concatenate([codes[0::2] | codes[1::2] << 4, np.zeros(8, np.uint8)])[None]
    got = dequantise(MxFp4(packed, np.array([[127]], np.uint8)))[0, :16]
    np.testing.assert_array_equal(got, codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32))


def test_powers_of_two_from_the_smallest_to_the_largest() -> None:
    """Subnormal results may be flushed to zero by the processor, as those of any product may."""
    scale = np.arange(255, dtype=np.uint8)
    weight = MxFp4(np.full((255, 16), 0x22, np.uint8), scale[:, None])
    exact = scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    np.testing.assert_array_equal(dequantise(weight)[:, 0], exact.astype(np.float32))
    np.testing.assert_array_equal(np.asarray(widen(weight, np.float32))[1:, 0], exact[1:].astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float64, ml_dtypes.float8_e8m0fnu])
def test_factors_that_are_numbers_become_exponents(dtype: type) -> None:
    powers = np.array([-127, -3, 0, 5, 127])
    stored = np.ldexp(1.0, powers).astype(dtype)
    assert exponent_bytes(stored).tolist() == (powers + 127).tolist()


@pytest.mark.parametrize("value", [0.0, -1.0, 3.0, np.inf, np.nan, 2.0**200])
def test_other_numbers_are_no_factors(value: float) -> None:
    with pytest.raises(ValueError, match="power of two"):
        exponent_bytes(np.array([1.0, value]))


def test_fp8_blocks_that_do_not_fit() -> None:
    """3 x 5 in blocks of 2 x 3: the last ones are short."""
    values = np.ones((3, 5), ml_dtypes.float8_e4m3fn)
    scale = np.array([[1, 2], [3, 4]], np.float32)
    wanted = [[1, 1, 1, 2, 2], [1, 1, 1, 2, 2], [3, 3, 3, 4, 4]]
    weight = Fp8Block(values, scale, (2, 3))
    assert dequantise(weight).tolist() == wanted
    assert np.asarray(widen(weight, np.float32)).tolist() == wanted


def test_int8_rounds_to_nearest_and_survives_zeros_and_extremes() -> None:
    weight = np.array([[127, 63.5, -63.4, 0.4], [0, 0, 0, 0], [-1e-30, 0, 1e-30, 0], [3e38, -3e38, 1, 0]], np.float32)
    got = quantise(weight, 4)
    assert got.values[0].tolist() == [127, 64, -63, 0]  # ties to even
    assert got.values[1].tolist() == [0, 0, 0, 0]
    assert got.values[3].tolist() == [127, -127, 0, 0]
    assert np.isfinite(got.scale).all()
    assert np.isfinite(dequantise(got)).all()
    assert (np.abs(dequantise(got) - weight) <= 0.5001 * got.scale).all()
    tiny = quantise(np.full((1, 4), 1e-42, np.float32), 4)  # a factor would underflow
    assert np.isfinite(dequantise(tiny)).all()


@pytest.mark.parametrize("columns", [7, 128, 129, 300])
def test_a_short_last_group_has_a_factor_of_its_own(columns: int) -> None:
    weight = np.random.default_rng(1).standard_normal((5, columns)).astype(np.float32)
    got = quantise(weight, 128)
    assert got.scale.shape == (5, -(-columns // 128))
    for group in range(got.scale.shape[1]):
        part = weight[:, group * 128 : (group + 1) * 128]
        np.testing.assert_allclose(got.scale[:, group], np.abs(part).max(axis=-1) / 127, rtol=1e-6)
    np.testing.assert_array_equal(widen(got, np.float32), dequantise(got))


def formats(experts: int, rows: int, columns: int) -> list[Fp8Block | MxFp4 | Int8]:
    draw = np.random.default_rng(2)
    shape = (experts, rows, columns)
    fp8 = Fp8Block(
        draw.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn),
        draw.random((experts, -(-rows // 16), -(-columns // 24))).astype(np.float32),
        (16, 24),
    )
    packed = draw.integers(0, 256, (experts, rows, columns // 2), np.uint8)
    powers = draw.integers(124, 130, (experts, rows, columns // 32), np.uint8)
    floats = draw.standard_normal(shape).astype(np.float32)
    return [fp8, MxFp4(packed, powers), quantise(floats, columns), quantise(floats, 40)]


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("tokens", [3, 40])
def test_products_are_those_of_the_widened_weights(place: int, tokens: int) -> None:
    weight = formats(5, 36, 64)[place]
    wide = dequantise(weight).astype(np.float64)
    x = np.random.default_rng(3).standard_normal((tokens, 64)).astype(np.float32)
    experts = np.sort(np.random.default_rng(4).integers(0, 5, tokens)).astype(np.int32)
    wanted = np.einsum("ri,roi->ro", x.astype(np.float64), wide[experts])
    weight = jax.tree.map(jnp.asarray, weight)
    np.testing.assert_allclose(expert_linear(x, weight, experts, tokens), wanted, atol=1e-4 * np.abs(wanted).max())
    first = jax.tree.map(lambda array: array[0], weight)
    for multiply in (linear, linear_float32):
        got = multiply(x, first)
        np.testing.assert_allclose(got, x.astype(np.float64) @ wide[0].T, atol=1e-4 * np.abs(wanted).max())
    narrow = linear(x.astype(ml_dtypes.bfloat16), first)
    assert narrow.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(narrow.astype(np.float32), x @ wide[0].T, atol=0.02 * np.abs(wanted).max())


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("tokens", [3, 40])
def test_experts_are_not_widened_all_at_once(place: int, tokens: int) -> None:
    """Not even as float16. Tiles of rows and their results take their part; fp8 is copied, as bytes, on a CPU."""
    experts, rows, columns = 64, 512, 64
    weight = formats(experts, rows, columns)[place]
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), weight)
    x, ids = jax.ShapeDtypeStruct((tokens, columns), jnp.float32), jax.ShapeDtypeStruct((tokens,), jnp.int32)
    taken = (
        jax.jit(expert_linear, static_argnames="most_rows")
        .lower(x, shapes, ids, tokens)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
    )
    tiles = (tokens // 16 + experts) * 16 * (rows + columns) * 4 if tokens > 16 else 0
    copied = experts * rows * columns if place == 0 and tokens > 16 else 0
    assert taken < tiles + copied + 16 * rows * columns

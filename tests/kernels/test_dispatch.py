"""Which implementation runs: by platform, by name, and never a kernel on what it cannot take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels.attention import attention_choice, paged_attention
from pallas_kernels.dispatch import choose, platform


def on(kind: str) -> AbstractMesh:
    device = AbstractDevice(device_kind="somebody's", num_cores=None, platform=kind)
    return AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)


def test_the_mesh_in_context_decides_for_auto() -> None:
    assert platform() == jax.default_backend() == "cpu"
    assert choose("op", "auto", None).implementation == "reference"
    with jax.sharding.use_abstract_mesh(on("gpu")):
        assert choose("op", "auto", None).implementation == "pallas"
        refused = choose("op", "auto", "a head_dim of 1000")
        assert (refused.implementation, refused.why) == ("reference", "the kernel cannot take a head_dim of 1000")
        assert choose("op", "reference", None).implementation == "reference"
    with jax.sharding.use_abstract_mesh(on("tpu")):
        assert choose("op", "auto", None).why == "no kernel for platform 'tpu'"


def test_a_kernel_asked_for_by_name_says_what_it_cannot_take() -> None:
    with pytest.raises(ValueError, match="impl='triton'; 'auto', 'reference'"):
        choose("op", "triton", None)
    for impl in ("pallas", "interpret"):
        with pytest.raises(ValueError, match=r"attention: impl='\w+' cannot take a head_dim of 1024"):
            attention_choice(impl, 192, 1024, jnp.bfloat16, jnp.bfloat16)
        with pytest.raises(ValueError, match="key_pages of type int8"):
            attention_choice(impl, 192, 128, jnp.bfloat16, jnp.int8)
        with pytest.raises(ValueError, match="query of type float32 with pages of bfloat16"):
            attention_choice(impl, 192, 128, jnp.float32, jnp.bfloat16)


def test_the_op_runs_what_was_chosen() -> None:
    query = jax.random.normal(jax.random.key(0), (1, 2, 4, 16))
    keys, values = (jax.random.normal(jax.random.key(seed), (3, 4, 2, 16)) for seed in (1, 2))
    table, first, positions, lengths = ([[1, 2]], [0], [[3, 4]], [5])
    integers = [jnp.array(values, jnp.int32) for values in (table, first, positions, lengths)]
    options = {"scale": 0.25, "window_tokens": None, "first_position": 0, "sink": None}

    def lowered(impl: str) -> str:
        return str(jax.make_jaxpr(lambda *a: paged_attention(*a, impl=impl, **options))(query, keys, values, *integers))

    assert "pallas_call" not in lowered("auto")
    assert "pallas_call" in lowered("interpret")
    with jax.sharding.use_abstract_mesh(on("gpu")):
        assert "pallas_call" in lowered("auto")
    one, other = (
        paged_attention(query, keys, values, *integers, impl=impl, **options) for impl in ("auto", "interpret")
    )
    np.testing.assert_allclose(one, other, atol=1e-6)

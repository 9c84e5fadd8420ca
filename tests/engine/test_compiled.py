"""The compiled step: what it keeps, what it costs, and that nothing is compiled once an engine is warm."""

import threading
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo_jax.cache import PoolSizes, cache_specs
from mimo_jax.config import FfnKind, LayerKind, ModelConfig, tiny_config
from mimo_jax.engine.engine import Engine
from mimo_jax.model import forward
from mimo_jax.params import param_specs
from mimo_jax.sampling_params import SamplingParams
from mimo_jax.steps import Bucket, Steps, step
from sharding import Rules, make_mesh
from tests.engine.helpers import ids, run_to_end, start


def test_the_cache_is_a_fixed_point_of_the_step(engine: Engine) -> None:
    steps = engine.steps
    cache = jax.eval_shape(lambda: jax.tree.map(jnp.zeros_like, engine._cache))
    for bucket in (key for key in steps._jobs if isinstance(key, Bucket)):
        function = partial(step, config=steps.config, vocab=steps.vocab)
        _, after = jax.eval_shape(function, engine.params, engine._cache, *steps.input_shapes(bucket))
        assert jax.tree.structure(after) == jax.tree.structure(cache)
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(after)] == [
            (x.shape, x.dtype) for x in jax.tree.leaves(cache)
        ]


def test_every_byte_of_the_cache_is_updated_in_place(engine: Engine) -> None:
    size = sum(pages.nbytes for pages in jax.tree.leaves(engine._cache))
    compiled = [job.result() for key, job in engine.steps._jobs.items() if isinstance(key, Bucket)]
    assert len(compiled) == 4
    for made in compiled:
        assert made.memory_analysis().alias_size_in_bytes == size


def test_a_warm_engine_compiles_nothing_whatever_is_asked(engine: Engine) -> None:
    events: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if "compile" in event and "cache" not in event:
            events.append(event)

    options = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
        {"logprobs": 0},
        {"logprobs": 20, "temperature": 0},
        {"prompt_logprobs": 0},
        {"prompt_logprobs": 20, "stop": ["zz"]},
        {"min_tokens": 4, "stop_token_ids": [5, 6]},
    ]
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for batch in (1, 2, 3, 8):
            for place in range(batch):
                params = SamplingParams(max_tokens=6, **options[(place + batch) % len(options)])
                start(engine, f"{batch}-{place}", ids((1, 16, 17, 33, 70, 5, 100, 32)[place]), params)
            for _ in range(2):
                engine.step()
            engine.abort(f"{batch}-1")
            run_to_end(engine)
        compiled = list(events)
        jax.jit(lambda x: x + 41)(np.zeros(3))
        assert events, "the listener hears nothing"
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert engine.steps.late_compiles == 0
    assert compiled == []


def test_a_shape_compiled_late_is_counted_and_logged(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Negative control of the count that the other tests rely on."""
    cold = replace(engine.steps, _jobs={}, _warm=True)
    cold._compile = lambda key: key  # type: ignore[method-assign]
    cold._get(Bucket(1, 1, 32))
    cold._get(Bucket(1, 1, 32))
    assert cold.late_compiles == 1
    assert "after warm-up" in caplog.text


def test_a_shape_that_failed_to_compile_can_be_tried_again(engine: Engine) -> None:
    """A program made in the background, too: its error reaches whoever runs it, and does not stay."""
    cold = replace(engine.steps, _jobs={})
    failures, asked = iter([ValueError("no room"), None]), threading.Event()

    def compile_once(key: object) -> object:
        asked.wait(20)
        if error := next(failures):
            raise error
        return key

    cold._compile = compile_once  # type: ignore[method-assign]
    cold.warm_up([Bucket(1, 1, 32)], wait=False)
    job = cold._jobs[Bucket(1, 1, 32)]
    asked.set()
    with pytest.raises(ValueError, match="no room"):
        job.result()
    assert cold._get(Bucket(1, 1, 32)) == Bucket(1, 1, 32)


def test_a_run_waits_for_its_own_program_alone(engine: Engine) -> None:
    cold, release = replace(engine.steps, _jobs={}), threading.Event()

    def compile_when_released(key: object) -> object:
        assert key != Bucket(1, 1, 32) or release.wait(20)
        return key

    cold._compile = compile_when_released  # type: ignore[method-assign]
    cold.warm_up([Bucket(1, 1, 32), Bucket(1, 16, 32)], wait=False)
    assert cold._get(Bucket(1, 16, 32)) == Bucket(1, 16, 32)
    assert not cold._jobs[Bucket(1, 1, 32)].done()
    release.set()
    assert cold._get(Bucket(1, 1, 32)) == Bucket(1, 1, 32)
    assert cold.late_compiles == 0


def only(kinds: str) -> ModelConfig:
    return replace(
        tiny_config(),
        layer_kinds=tuple(LayerKind(kind) for kind in kinds),
        ffn_kinds=(FfnKind.DENSE,) * len(kinds),
        max_position_tokens=32_768,
    )


def decode_cost(kinds: str, tokens: int) -> dict[str, int]:
    """What one decode step of 2 sequences of up to so many tokens costs, by XLA's own count."""
    config = only(kinds)
    pages = -(-tokens // 16)
    sizes = PoolSizes(2 * 1250 + 1, 9)
    mesh, specs = make_mesh(jax.devices()[0]), param_specs(config, jnp.float32)
    steps = Steps(config, specs, sizes, mesh, Rules(), config.vocab, jnp.float32, jnp.float32)
    inputs, _ = steps.input_shapes(Bucket(2, 1, pages))
    specs = (param_specs(config, jnp.float32), cache_specs(config, sizes, jnp.float32))
    params, cache = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs)
    made = jax.jit(partial(forward, config=config), donate_argnums=1).lower(params, cache, inputs).compile()
    cost = made.cost_analysis()
    return {
        "flops": int(cost["flops"]),
        "bytes": int(cost["bytes accessed"]),
        "temporary": made.memory_analysis().temp_size_in_bytes,
    }


def test_a_window_layer_costs_the_same_at_position_200_and_at_20000() -> None:
    near, far = decode_cost("W", 200), decode_cost("W", 20_000)
    assert far == near
    # In a hybrid model only the full layer's part grows, by what it grows without window layers.
    growth = {
        kinds: {name: far[name] - near[name] for name in ("flops", "bytes")}
        for kinds in ("F", "FW")
        for near, far in [(decode_cost(kinds, 200), decode_cost(kinds, 20_000))]
    }
    assert growth["F"]["flops"] > 10 * near["flops"]
    assert growth["F"]["bytes"] > 10 * near["bytes"]
    for name in ("flops", "bytes"):
        assert growth["FW"][name] == pytest.approx(growth["F"][name], rel=1e-3)

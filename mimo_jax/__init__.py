"""mimo_jax: an inference engine in JAX for hybrid sliding-window transformers, first of all Xiaomi's MiMo-V2 family.

Public names are imported when they are first used: the host-side modules (`mimo_jax.engine.scheduler` and its like)
can be imported without JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mimo_jax.cache import Cache, PoolSizes, init_cache
    from mimo_jax.config import FfnKind, LayerKind, ModelConfig, tiny_config
    from mimo_jax.errors import CheckpointError, RequestError
    from mimo_jax.generation import generate
    from mimo_jax.inputs import StepInputs
    from mimo_jax.llm import LLM
    from mimo_jax.model import forward
    from mimo_jax.outputs import CompletionOutput, Logprob, RequestOutput
    from mimo_jax.params import Params, init_params, param_specs
    from mimo_jax.sampling_params import SamplingParams

_HOMES = {
    "LLM": "llm",
    "Cache": "cache",
    "CheckpointError": "errors",
    "CompletionOutput": "outputs",
    "FfnKind": "config",
    "LayerKind": "config",
    "Logprob": "outputs",
    "ModelConfig": "config",
    "Params": "params",
    "PoolSizes": "cache",
    "RequestError": "errors",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "StepInputs": "inputs",
    "forward": "model",
    "generate": "generation",
    "init_cache": "cache",
    "init_params": "params",
    "param_specs": "params",
    "tiny_config": "config",
}

__all__ = [
    "LLM",
    "Cache",
    "CheckpointError",
    "CompletionOutput",
    "FfnKind",
    "LayerKind",
    "Logprob",
    "ModelConfig",
    "Params",
    "PoolSizes",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StepInputs",
    "forward",
    "generate",
    "init_cache",
    "init_params",
    "param_specs",
    "tiny_config",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mimo_jax' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"mimo_jax.{_HOMES[name]}"), name)
    globals()[name] = value
    return value

"""mimo_jax: an inference engine in JAX for hybrid sliding-window transformers, first of all Xiaomi's MiMo-V2 family."""

from mimo_jax.cache import Cache, PoolSizes, init_cache
from mimo_jax.config import FfnKind, LayerKind, ModelConfig, tiny_config
from mimo_jax.errors import CheckpointError, RequestError
from mimo_jax.generate import generate
from mimo_jax.inputs import StepInputs
from mimo_jax.llm import LLM
from mimo_jax.model import forward
from mimo_jax.outputs import CompletionOutput, Logprob, RequestOutput
from mimo_jax.params import Params, init_params, param_specs
from mimo_jax.sampling_params import SamplingParams

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

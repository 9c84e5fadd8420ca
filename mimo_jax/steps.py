"""Everything that is compiled: the only product file that calls jax.jit.

A step is one executable per `Bucket`: [seqs, step] tokens and a full page table of some width. All buckets a run can
reach are compiled before it starts; a bucket compiled later is counted and logged, because it stalls every request.
"""

import logging
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.sharding import Mesh
from tqdm import tqdm

from mimo_jax.cache import Cache, PoolSizes, cache_specs
from mimo_jax.config import LayerKind, ModelConfig
from mimo_jax.inputs import SamplingInputs, StepInputs
from mimo_jax.layers import rms_norm, unembed
from mimo_jax.model import decoder_layer, trunk
from mimo_jax.mtp import draft, store_hidden
from mimo_jax.params import ArraySpec, Params
from mimo_jax.sampling import BANNED, Sampled, accept, describe, mask_padding, sample
from mimo_jax.window_pages import window_table_pages
from sharding import Rules, array_sharding

log = logging.getLogger(__name__)


@dataclass(frozen=True, order=True)
class Bucket:
    """The shape of one executable."""

    seqs: int
    step: int
    full_width: int  # pages in the full pool's table


@struct.dataclass
class StepOutputs:
    """What a step chose. A row brings 1 + accepted tokens, the first of its places; padding rows mean nothing."""

    sampled: Sampled  # [seqs, places]
    accepted: Array  # [seqs] int32, drafts that stand
    drafts: Array  # [seqs, draft heads] int32, guesses at what follows
    hidden: Array  # [seqs, step, embed], for `score_rows`


# Traced once per kind of layer instead of once per layer. Inlined, because XLA's CPU compiler copies a cache that is
# updated inside a call.
_traced_layer = jax.jit(decoder_layer, static_argnames=("dims", "ffn_kind", "config", "first_position"), inline=True)


def step(
    params: Params, cache: Cache, inputs: StepInputs, sampling: SamplingInputs, *, config: ModelConfig, vocab: int
) -> tuple[StepOutputs, Cache]:
    """Runs the step's tokens, accepts those drafts among them that stand, samples behind each, and drafts anew.

    The cache is donated. A step of 1 + draft heads tokens verifies; in any other one all of a row's tokens are given.
    """
    x, cache = trunk(params, cache, inputs, config=config, run_layer=_traced_layer)
    hidden = rms_norm(x, params.final_norm, config.norm_epsilon)
    step_tokens = inputs.tokens.shape[1]
    places = 1 + config.draft_heads if step_tokens == 1 + config.draft_heads else 1
    behind = jnp.maximum(sampling.given - 1, 0)[:, None] + jnp.arange(places)  # [seqs, places]
    rows = jnp.arange(inputs.counts.shape[0])
    with jax.named_scope("logits"):
        logits = unembed(hidden[rows[:, None], jnp.minimum(behind, step_tokens - 1)], params)
    with jax.named_scope("sample"):
        sampled = sample(logits, sampling, inputs.starts[:, None] + behind + 1, vocab=vocab)
    if config.mtp is None:
        nothing = jnp.zeros((rows.size, 0), jnp.int32)
        return StepOutputs(sampled, jnp.zeros_like(inputs.counts), nothing, hidden), cache
    accepted, following = accept(inputs.tokens, sampled.token, inputs.counts, sampling)
    cache = store_hidden(cache, inputs, hidden if config.mtp.normed_hidden else x, config=config)
    drafts, cache = draft(
        params,
        cache,
        inputs,
        sampling.given + accepted,
        following,
        config=config,
        vocab=vocab,
        run_layer=_traced_layer,
    )
    return StepOutputs(sampled, accepted, drafts, hidden), cache


def score_rows(params: Params, hidden: Array, targets: Array, *, vocab: int) -> Sampled:
    """What the model thought of given tokens: hidden [rows, embed], targets [rows] -> Sampled of `targets`."""
    return describe(mask_padding(unembed(hidden, params), vocab), targets, jnp.asarray(True))


def log_prob_rows(params: Params, hidden: Array, *, vocab: int) -> Array:
    """hidden [rows, embed] -> float32 log-probabilities [rows, vocab padded]."""
    return jax.nn.log_softmax(mask_padding(unembed(hidden, params), vocab), axis=-1)


# XLA's CPU compiler gives matrix products to YNNPACK, which builds an operator for each at a program's first run: 1.4 s
# for a prompt chunk of SmolLM2, to run it 20 % faster from then on. Without it a single short request is done sooner.
QUICK_START = {"cpu": {"xla_cpu_experimental_ynn_fusion_type": ""}}

SCORE_ROWS = 16  # positions whose logits are held at once


@dataclass
class Steps:
    """Compiled steps of one model on one mesh. Thread-safe; holds no weights and no cache."""

    config: ModelConfig
    specs: Params  # of the weights, in whatever format they are kept
    sizes: PoolSizes
    mesh: Mesh
    rules: Rules
    vocab: int  # ids from here on pad the head
    dtype: Any  # of activations
    cache_dtype: Any
    compiler_options: Mapping[str, Any] = field(default_factory=dict)
    late_compiles: int = 0
    _warm: bool = False
    _jobs: dict[Any, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def warm_up(
        self,
        buckets: Iterable[Bucket],
        *,
        scoring: bool = False,
        wait: bool = True,
        progress: bool = False,
    ) -> None:
        """Compiles what is not compiled yet, two at a time; `scoring` adds the prompt log-probability functions.

        Without `wait` it returns at once, and whoever runs a bucket that is still being compiled waits for that one.
        """
        missing = {bucket for bucket in buckets if bucket not in self._jobs}
        wanted: list[Any] = sorted(missing, key=lambda bucket: (-bucket.step, bucket))  # the longest job first
        wanted += [name for name in ("score", "log_probs") if scoring and name not in self._jobs]
        if not wanted:
            return
        workers = ThreadPoolExecutor(2)
        with self._lock:
            jobs = [self._submit(workers, key) for key in wanted]
        try:
            for job in tqdm(jobs if wait else [], desc="compiling", disable=not progress):
                job.result()
        except BaseException:
            workers.shutdown(cancel_futures=True)
            raise
        workers.shutdown(wait=False)
        self._warm = True

    def run(
        self, bucket: Bucket, params: Params, cache: Cache, inputs: StepInputs, sampling: SamplingInputs
    ) -> tuple[StepOutputs, Cache]:
        """One step. `cache` is donated: use the returned one."""
        return self._get(bucket)(params, cache, inputs, sampling)

    def score(self, params: Params, hidden: Array, targets: np.ndarray) -> Sampled:
        """`score_rows` over [rows, embed] of any length, in blocks; NumPy arrays."""
        function = self._get("score")
        blocks = [
            function(params, _padded(hidden[first : first + SCORE_ROWS]), _padded(targets[first : first + SCORE_ROWS]))
            for first in range(0, hidden.shape[0], SCORE_ROWS)
        ]
        return jax.tree.map(lambda *parts: np.concatenate(parts)[: hidden.shape[0]], *jax.device_get(blocks))

    def log_probs(self, params: Params, hidden: Array) -> np.ndarray:
        """float32 [rows, vocab] from hidden [rows, embed] of any length."""
        function = self._get("log_probs")
        starts = range(0, hidden.shape[0], SCORE_ROWS)
        blocks = [function(params, _padded(hidden[first : first + SCORE_ROWS])) for first in starts]
        return np.concatenate(jax.device_get(blocks))[: hidden.shape[0], : self.vocab]

    def init_cache(self) -> Cache:
        """An empty cache on its devices."""
        specs = cache_specs(self.config, self.sizes, self.cache_dtype)
        shardings = jax.tree.map(self._sharding, specs)
        make = jax.jit(
            lambda: jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs), out_shardings=shardings
        )
        return make()

    def ready(self, bucket: Bucket) -> bool:
        """Whether running this bucket starts at once."""
        job = self._jobs.get(bucket)
        return job is not None and job.done()

    def _get(self, key: Any) -> Any:
        with self._lock:
            job = self._jobs.get(key)
            if job is None:
                if self._warm:
                    self.late_compiles += 1
                    log.warning("compiling %s after warm-up: every request waits", key)
                job = self._submit(ThreadPoolExecutor(1), key)
        return job.result()

    def _submit(self, workers: ThreadPoolExecutor, key: Any) -> "Future[Any]":
        """Makes the program of `key` in another thread. One that fails is forgotten, so that it can be tried again."""

        def forget(job: "Future[Any]") -> None:
            if job.cancelled() or job.exception() is not None:
                self._jobs.pop(key, None)

        job = self._jobs[key] = workers.submit(self._compile, key)
        job.add_done_callback(forget)
        return job

    def _compile(self, key: Any) -> Any:
        with jax.set_mesh(self.mesh):  # whose devices decide which kernels are compiled
            return self._program(key)

    def _program(self, key: Any) -> Any:
        params = self._shapes(self.specs)
        hidden = jax.ShapeDtypeStruct((SCORE_ROWS, self.config.embed), self.dtype)
        if key == "score":
            targets = jax.ShapeDtypeStruct((SCORE_ROWS,), jnp.int32)
            return jax.jit(partial(score_rows, vocab=self.vocab)).lower(params, hidden, targets).compile()
        if key == "log_probs":
            return jax.jit(partial(log_prob_rows, vocab=self.vocab)).lower(params, hidden).compile()
        cache = self._shapes(cache_specs(self.config, self.sizes, self.cache_dtype))
        function = jax.jit(partial(step, config=self.config, vocab=self.vocab), donate_argnames=("cache",))
        return function.lower(params, cache, *self.input_shapes(key)).compile(
            compiler_options=dict(self.compiler_options)
        )

    def input_shapes(self, bucket: Bucket) -> tuple[StepInputs, SamplingInputs]:
        """Shapes and dtypes of a bucket's inputs."""
        seqs = bucket.seqs

        def array(dtype: Any, *shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype)

        inputs = StepInputs(
            tokens=array(jnp.int32, seqs, bucket.step),
            starts=array(jnp.int32, seqs),
            counts=array(jnp.int32, seqs),
            full_table=array(jnp.int32, seqs, bucket.full_width),
            window_table=array(jnp.int32, seqs, self.window_width(bucket.step)),
            window_first=array(jnp.int32, seqs),
        )
        sampling = SamplingInputs(
            given=array(jnp.int32, seqs),
            following=array(jnp.int32, seqs),
            temperature=array(jnp.float32, seqs),
            top_k=array(jnp.int32, seqs),
            top_p=array(jnp.float32, seqs),
            min_p=array(jnp.float32, seqs),
            seed=array(jnp.uint32, seqs),
            choice=array(jnp.int32, seqs),
            banned=array(jnp.int32, seqs, BANNED),
            banned_places=array(jnp.int32, seqs),
            top_logprobs=array(jnp.bool_),
        )
        return inputs, sampling

    def window_width(self, step_tokens: int) -> int:
        """Pages in the window pool's table; the same at every position. 1 where the model has no window layers."""
        if self.config.window is None or self.config.window.window_tokens is None:
            return 1
        window = self.config.window.window_tokens
        return window_table_pages(
            window, step_tokens + self.config.lookahead(LayerKind.WINDOW), self.sizes.window_page_tokens
        )

    def _shapes(self, specs: Any) -> Any:
        return jax.tree.map(
            lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=self._sharding(spec)), specs
        )

    def _sharding(self, spec: ArraySpec) -> Any:
        return array_sharding(spec.shape, spec.axes, self.rules, self.mesh)


def _padded(rows: Any) -> Any:
    """The first axis filled up to SCORE_ROWS with zeros."""
    missing = SCORE_ROWS - rows.shape[0]
    if not missing:
        return rows
    library = np if isinstance(rows, np.ndarray) else jnp
    return library.pad(rows, [(0, missing)] + [(0, 0)] * (rows.ndim - 1))


def enable_compile_cache(folder: str) -> None:
    """Keeps compiled programs in `folder` for later processes. A folder that cannot be used costs only time."""
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

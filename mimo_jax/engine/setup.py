"""From options to a running engine: the way in that the Python API, the command line and the server share."""

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mimo_jax.cache import PoolSizes, page_bytes
from mimo_jax.checkpoint.checkpoint import Checkpoint, open_checkpoint
from mimo_jax.checkpoint.load import load_params
from mimo_jax.checkpoint.specs import QUANTIZATIONS
from mimo_jax.config import LayerKind, ModelConfig
from mimo_jax.engine.buckets import Ladder, make_ladder
from mimo_jax.engine.engine import Engine
from mimo_jax.engine.scheduler import Limits
from mimo_jax.errors import short
from mimo_jax.models import resolve_model
from mimo_jax.steps import QUICK_START, Bucket, Steps, enable_compile_cache
from mimo_jax.text import Tokenizer, load_tokenizer
from pallas_kernels.attention import attention_choice
from pallas_kernels.dispatch import Choice
from sharding import Rules, make_mesh

log = logging.getLogger(__name__)

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
# What weights and cache may take of a GPU's memory, and the cache of a computer's: of all that there is and not of what
# is free just now, because with another size of the pools every program is another one and has to be compiled again.
_DEVICE_SHARE = 0.9
_HOST_SHARE = 0.125


@dataclass(frozen=True)
class EngineOptions:
    """Runtime choices. None means: chosen from the model and the device.

    dtype                    "auto" (float32 on a CPU, where XLA's bfloat16 is slower; else bfloat16), "float32",
                             "bfloat16"
    quantization             None: weights stay in the format they are stored in. "int8" (a factor for each output
                             channel) and "int8-g128" (for each 128 inputs) re-quantise them while loading;
                             "dequantize" widens them
    max_model_len            tokens of a sequence at most, prompt and output; the model's own context by default
    max_num_seqs             sequences that run at once; 8 on a CPU, else 64
    max_num_batched_tokens   prompt tokens computed in one step
    block_size               tokens in a page of the cache, both pools
    kv_cache_memory_bytes    bytes for both pools of the cache together
    num_speculative_tokens   draft heads to use, each one more token to guess and verify a step; all that the model has
                             by default, 0 for none
    seed                     of the random numbers of requests that bring no seed
    """

    model: str | Path
    dtype: str = "auto"
    quantization: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int = 256
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    num_speculative_tokens: int | None = None
    seed: int = 0
    hf_overrides: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", *_DTYPES):
            raise ValueError(f"dtype={self.dtype!r}; 'auto', 'float32' and 'bfloat16' are possible")
        if self.quantization not in QUANTIZATIONS:
            names = ", ".join(repr(name) for name in QUANTIZATIONS)
            raise ValueError(f"quantization={short(self.quantization)}; {names} are possible")
        if self.hf_overrides is not None and not isinstance(self.hf_overrides, dict):
            raise ValueError(f"hf_overrides={short(self.hf_overrides)}; an object of config.json keys is needed")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed={short(self.seed)}; a whole number is needed")
        if not isinstance(self.model, str | Path):
            raise ValueError(f"model={short(self.model)}; a path or a name is needed")
        drafts = self.num_speculative_tokens
        if drafts is not None and (isinstance(drafts, bool) or not isinstance(drafts, int) or drafts < 0):
            raise ValueError(f"num_speculative_tokens={short(drafts)}; a whole number from 0 is needed")
        for name in ("max_model_len", "max_num_seqs", "kv_cache_memory_bytes", "max_num_batched_tokens", "block_size"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r}; a whole number from 1 is needed")


@dataclass(frozen=True)
class Load:
    """What an engine should be ready for: so many requests at once, of such sizes at most.

    `alone`: one request, of exactly this prompt length. It starts as soon as its prompt's shape is compiled, from
    programs that start quickly (see `QUICK_START`).
    """

    seqs: int
    prompt_tokens: int
    total_tokens: int
    scoring: bool = False
    alone: bool = False


def load_engine(
    options: EngineOptions,
    *,
    expect: Callable[[Tokenizer | None, Limits], Load] | None = None,
    progress: bool = False,
) -> Engine:
    """Opens the model, reads its weights and, if `expect` says for what, compiles meanwhile.

    Raises CheckpointError for a model that cannot be loaded, ValueError for options that do not fit it.
    """
    path = resolve_model(options.model)
    checkpoint = _open(path, options)
    tokenizer = load_tokenizer(path)
    config = checkpoint.config
    device = jax.devices()[0]
    dtype = _DTYPES[auto_dtype(device) if options.dtype == "auto" else options.dtype]
    limits = make_limits(options, config, device)
    specs = checkpoint.specs(dtype, options.quantization)
    weight_bytes = sum(spec.size_bytes for spec in jax.tree.leaves(specs))
    budget = options.kv_cache_memory_bytes or cache_budget(device, weight_bytes)
    sizes = pool_sizes(config, limits, budget, dtype)
    vocab = config.vocab if tokenizer is None else min(config.vocab, tokenizer.vocab_size)
    mesh, rules = make_mesh(device), Rules()
    load = None if expect is None else expect(tokenizer, limits)
    steps = Steps(
        config,
        specs,
        sizes,
        mesh,
        rules,
        vocab,
        dtype=dtype,
        cache_dtype=dtype,
        compiler_options=QUICK_START.get(device.platform, {}) if load is not None and load.alone else {},
    )
    for choice in kernels(steps):
        log.info("%s: %s (%s)", choice.op, choice.implementation, choice.why)
    enable_compile_cache(str(compile_cache_folder()))
    ladder = make_ladder(limits)
    first, rest = _compile_order(ladder, limits, load)
    warm_up = partial(steps.warm_up, scoring=load is not None and load.scoring, progress=progress)
    with ThreadPoolExecutor(1) as pool:
        compiling = pool.submit(warm_up, first)
        params = load_params(checkpoint, dtype, mesh, rules, quantization=options.quantization, progress=progress)
        compiling.result()
    steps.warm_up(rest, wait=False)
    return Engine(params, steps, limits, ladder, tokenizer=tokenizer, seed=options.seed)


def _open(path: Path, options: EngineOptions) -> Checkpoint:
    """The model with as many draft heads as are asked for."""
    checkpoint = open_checkpoint(path, hf_overrides=options.hf_overrides)
    wanted, there = options.num_speculative_tokens, checkpoint.config.draft_heads
    if wanted is None:
        return checkpoint
    if wanted > there:
        raise ValueError(f"num_speculative_tokens={wanted}; the model has {there} draft heads")
    return checkpoint.with_draft_heads(wanted)


def kernels(steps: Steps) -> tuple[Choice, ...]:
    """What each op of the steps runs on, and why."""
    with jax.set_mesh(steps.mesh):
        return tuple(
            replace(made, op=f"{made.op}, {kind.name.lower()} layers")
            for kind in steps.config.kinds
            for dims in [steps.config.dims(kind)]
            for made in [attention_choice("auto", dims.head_dim, dims.v_dim, steps.dtype, steps.cache_dtype)]
        )


def _compile_order(ladder: Ladder, limits: Limits, load: Load | None) -> tuple[list[Bucket], list[Bucket]]:
    """What to compile before the first step, and what while it runs: of one request, its tokens behind the prompt."""
    if load is None:
        return [], []
    shapes = ladder.reachable(limits, load.seqs, load.prompt_tokens, load.total_tokens, alone=load.alone)
    buckets = [Bucket(*shape) for shape in shapes]
    if not load.alone:
        return buckets, []
    most = max(bucket.step for bucket in buckets)
    return [b for b in buckets if b.step == most], [b for b in buckets if b.step < most]


def make_limits(options: EngineOptions, config: ModelConfig, device: jax.Device) -> Limits:
    """Options completed from model and device. Raises ValueError when max_model_len is over the model's context."""
    most = options.max_model_len or config.max_position_tokens
    if most > config.max_position_tokens:
        raise ValueError(f"max_model_len={most}; the model's context is {config.max_position_tokens} tokens")
    seqs = options.max_num_seqs or (8 if device.platform == "cpu" else 64)
    window = config.window.window_tokens if config.window is not None and LayerKind.WINDOW in config.kinds else None
    return Limits(
        max_seqs=seqs,
        max_model_tokens=most,
        prefill_tokens=options.max_num_batched_tokens,
        prefill_rows=max(1, min(4, seqs, options.max_num_batched_tokens // 16)),
        full_page_tokens=options.block_size,
        window_page_tokens=options.block_size,
        window_tokens=window or 0,
        has_full=LayerKind.FULL in config.kinds,
        drafts=config.draft_heads,
        full_lookahead=config.lookahead(LayerKind.FULL),
        window_lookahead=config.lookahead(LayerKind.WINDOW),
    )


def pool_sizes(config: ModelConfig, limits: Limits, budget_bytes: int, dtype: Any) -> PoolSizes:
    """Pages of both pools from the memory there is for them.

    The window pool gets what all running sequences can hold at once, the full pool the rest, up to what all of them
    could fill. Raises ValueError when not even one page is left.
    """
    window_pages = 0
    if limits.window_tokens:
        decode, chunk = limits.window_pages(1 + limits.drafts), limits.window_pages(limits.prefill_tokens)
        most = limits.window_ceiling(limits.max_model_tokens)
        window_pages = limits.max_seqs * min(decode, most) + limits.prefill_rows * min(chunk, most)
    full_page = page_bytes(config, LayerKind.FULL, limits.full_page_tokens, dtype)
    window_page = page_bytes(config, LayerKind.WINDOW, limits.window_page_tokens, dtype)
    wanted = limits.max_seqs * limits.full_pages(limits.max_model_tokens)
    room = (budget_bytes - (window_pages + 1) * window_page) // full_page - 1 if full_page else 0
    full_pages = min(wanted, room)
    if full_pages < min(wanted, 1) or budget_bytes < (window_pages + 1) * window_page:
        raise ValueError(
            f"{budget_bytes} bytes are too few for the cache: {window_pages} window pages of {window_page} bytes "
            f"come first, then full pages of {full_page} bytes (kv_cache_memory_bytes)"
        )
    log.info("cache: %d full, %d window pages of %d tokens", full_pages, window_pages, limits.full_page_tokens)
    return PoolSizes(full_pages + 1, window_pages + 1, limits.full_page_tokens, limits.window_page_tokens)


def cache_budget(device: jax.Device, weight_bytes: int) -> int:
    """Bytes for the cache on a device that holds nothing of this engine yet; ValueError if the weights leave none.

    Rounded down by a sixteenth at most: a little more or less memory in use gives the same pools.
    """
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _HOST_SHARE)
    free_bytes = int(stats["bytes_limit"] * _DEVICE_SHARE) - int(stats.get("bytes_in_use", 0))
    if free_bytes <= weight_bytes:
        raise ValueError(f"the weights take {weight_bytes:,} bytes; {free_bytes:,} are there for them and the cache")
    budget = free_bytes - weight_bytes
    shift = max(0, budget.bit_length() - 5)
    return budget >> shift << shift


def compile_cache_folder() -> Path:
    """Where compiled programs are kept: $MIMO_JAX_CACHE, or mimo_jax/ in the user's cache folder."""
    own = os.environ.get("MIMO_JAX_CACHE")  # empty means unset, as for XDG_CACHE_HOME
    return Path(own or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "mimo_jax")).expanduser()


def auto_dtype(device: jax.Device) -> str:
    """The dtype of plain weights and activations that suits a device."""
    return "float32" if device.platform == "cpu" else "bfloat16"

"""From a plan to the arrays of one device call: NumPy, padded to the bucket, transferred once."""

from typing import Any

import jax
import numpy as np

from mimo_jax.engine.scheduler import Row
from mimo_jax.inputs import SamplingInputs, StepInputs


def build(
    rows: tuple[Row, ...], shapes: tuple[StepInputs, SamplingInputs], vocab: int
) -> tuple[StepInputs, SamplingInputs]:
    """Fills a bucket's inputs from its rows. Rows beyond them are padding: count 0, null pages, neutral sampling."""
    inputs, sampling = jax.tree.map(lambda shape: np.zeros(shape.shape, shape.dtype), shapes)
    sampling.top_p[:] = 1.0
    sampling.banned[:] = vocab  # "none": outside every row of logits
    for index, row in enumerate(rows):
        _fill_row(inputs, index, row)
        _fill_sampling(sampling, index, row)
    wants_top = any(row.samples and row.request.params.logprobs for row in rows)
    return inputs, sampling.replace(top_logprobs=np.bool_(wants_top))


def _fill_row(inputs: Any, index: int, row: Row) -> None:
    request = row.request
    given = row.count - row.drafts
    inputs.tokens[index, :given] = request.tokens(row.start, given)
    inputs.tokens[index, given : row.count] = request.drafts[: row.drafts]
    inputs.starts[index] = row.start
    inputs.counts[index] = row.count
    inputs.full_table[index, : len(request.full_pages)] = request.full_pages
    # Rejected drafts may have left it pages behind those that this step can touch.
    window_pages = request.window_pages[: inputs.window_table.shape[1]]
    inputs.window_table[index, : len(window_pages)] = window_pages
    inputs.window_first[index] = request.window_first


def _fill_sampling(sampling: Any, index: int, row: Row) -> None:
    request, params = row.request, row.request.params
    sampling.given[index] = row.count - row.drafts
    sampling.following[index] = -1 if row.samples else request.tokens(row.start + row.count, 1)[0]
    sampling.temperature[index] = params.temperature
    sampling.top_k[index] = max(0, params.top_k)
    sampling.top_p[index] = params.top_p
    sampling.min_p[index] = params.min_p
    sampling.seed[index] = fold_seed(request.seed)
    sampling.choice[index] = request.choice
    sampling.banned[index, : len(request.stop_ids)] = sorted(request.stop_ids)
    sampling.banned_places[index] = max(0, params.min_tokens - len(request.output))


def fold_seed(seed: int) -> int:
    """Any whole number to 32 bits; small seeds stay as they are, and -1 does not become 0."""
    seed &= (1 << 64) - 1
    return (seed ^ ((seed >> 32) * 0x9E3779B9)) & 0xFFFFFFFF

"""The signature and the checks of paged attention."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.attention.gpu import paged_attention_gpu
from pallas_kernels.attention.reference import paged_attention_reference
from pallas_kernels.dispatch import Choice, choose

_IMPLEMENTATIONS: dict[str, Any] = {
    "reference": paged_attention_reference,
    "pallas": paged_attention_gpu,
    "interpret": partial(paged_attention_gpu, interpret=True),
}
_KERNEL_DTYPES = ("float32", "bfloat16", "float16")
_KERNEL_HEAD_DIM = 512  # a tile of keys and the sums stand in registers and shared memory


def paged_attention(
    query: Array,
    key_pages: Array,
    value_pages: Array,
    page_table: Array,
    first_page: Array,
    positions: Array,
    lengths: Array,
    *,
    scale: float,
    window_tokens: int | None,
    first_position: int,
    sink: Array | None,
    impl: str = "auto",
) -> Array:
    """Attention of a step's queries over the pages that their sequences own.

    query        [seqs, step, heads, head_dim]
    key_pages    [pages, page, kv_heads, head_dim]; value_pages [pages, page, kv_heads, v_dim]
    page_table   [seqs, width] int32, page ids; entry j holds positions (first_page + j) * page ...
    first_page   [seqs] int32, the logical page of the table's first entry
    positions    [seqs, step] int32, of the queries
    lengths      [seqs] int32, tokens of the sequence that are in the pages; a row with 0 yields zeros
    first_position  the first position that has keys at all; 0 but for the draft heads, which lag behind
    sink         [heads] or None: one logit a query head without a value, not scaled
    impl         "auto", "reference", "pallas" or "interpret", see `pallas_kernels/dispatch.py`

    Returns [seqs, step, heads, v_dim] in the query's dtype. Softmax is in float32. What a page holds outside a
    sequence's own tokens, NaN included, changes nothing; neither do entries of the table that no token needs. Raises
    ValueError naming the argument when shapes or types do not fit together.
    """
    arrays = (query, key_pages, value_pages, page_table, first_page, positions, lengths)
    _check(*arrays, window_tokens, sink)
    made = attention_choice(impl, query.shape[3], value_pages.shape[3], query.dtype, key_pages.dtype)
    attend = _IMPLEMENTATIONS[made.implementation]
    out: Array = attend(*arrays, scale=scale, window_tokens=window_tokens, first_position=first_position, sink=sink)
    return out


def attention_choice(impl: str, head_dim: int, v_dim: int, query_dtype: Any, cache_dtype: Any) -> Choice:
    """Which implementation runs for such arrays, and why. Raises ValueError when `impl` names one that cannot."""
    refusal = None
    if max(head_dim, v_dim) > _KERNEL_HEAD_DIM:
        refusal = f"a head_dim of {max(head_dim, v_dim)} (at most {_KERNEL_HEAD_DIM})"
    for name, dtype in (("query", query_dtype), ("key_pages", cache_dtype)):
        if jnp.dtype(dtype).name not in _KERNEL_DTYPES:
            refusal = f"{name} of type {jnp.dtype(dtype).name} ({', '.join(_KERNEL_DTYPES)})"
    if query_dtype != cache_dtype:
        refusal = refusal or f"query of type {jnp.dtype(query_dtype).name} with pages of {jnp.dtype(cache_dtype).name}"
    return choose("attention", impl, refusal)


def _check(
    query: Array,
    key_pages: Array,
    value_pages: Array,
    page_table: Array,
    first_page: Array,
    positions: Array,
    lengths: Array,
    window_tokens: int | None,
    sink: Array | None,
) -> None:
    seqs, step, heads, head_dim = query.shape
    kv_heads = key_pages.shape[2]
    if heads % kv_heads:
        raise ValueError(f"query has {heads} heads, not a multiple of the {kv_heads} of key_pages")
    if key_pages.shape[3] != head_dim:
        raise ValueError(f"key_pages has head_dim {key_pages.shape[3]}, query has {head_dim}")
    if value_pages.shape[:3] != key_pages.shape[:3]:
        raise ValueError(
            f"value_pages is {value_pages.shape}, key_pages is {key_pages.shape}: the first three must agree"
        )
    if window_tokens is not None and window_tokens < 1:
        raise ValueError(f"window_tokens={window_tokens}; at least 1 is needed")
    if sink is not None and sink.shape != (heads,):
        raise ValueError(f"sink is {sink.shape}; ({heads},) is needed, one a query head")
    integers = {
        "page_table": (page_table, (seqs, *page_table.shape[1:])),
        "first_page": (first_page, (seqs,)),
        "positions": (positions, (seqs, step)),
        "lengths": (lengths, (seqs,)),
    }
    for name, (array, shape) in integers.items():
        if array.shape != shape or array.dtype != jnp.int32:
            raise ValueError(f"{name} is {array.dtype} {array.shape}; int32 {shape} is needed")

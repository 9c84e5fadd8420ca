"""The signature and the checks of paged attention."""

from jax import Array

from pallas_kernels.attention.reference import paged_attention_reference


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

    Returns [seqs, step, heads, v_dim] in the query's dtype. Softmax is in float32. What a page holds outside a
    sequence's own tokens, NaN included, changes nothing. Raises ValueError naming the argument when shapes do not fit
    together.
    """
    _check(query, key_pages, value_pages, page_table, window_tokens, sink)
    return paged_attention_reference(
        query,
        key_pages,
        value_pages,
        page_table,
        first_page,
        positions,
        lengths,
        scale=scale,
        window_tokens=window_tokens,
        first_position=first_position,
        sink=sink,
    )


def _check(
    query: Array, key_pages: Array, value_pages: Array, page_table: Array, window_tokens: int | None, sink: Array | None
) -> None:
    seqs, _, heads, head_dim = query.shape
    kv_heads = key_pages.shape[2]
    if heads % kv_heads:
        raise ValueError(f"query has {heads} heads, not a multiple of the {kv_heads} of key_pages")
    if key_pages.shape[3] != head_dim:
        raise ValueError(f"key_pages has head_dim {key_pages.shape[3]}, query has {head_dim}")
    if value_pages.shape[:3] != key_pages.shape[:3]:
        raise ValueError(
            f"value_pages is {value_pages.shape}, key_pages is {key_pages.shape}: the first three must agree"
        )
    if page_table.shape[0] != seqs:
        raise ValueError(f"page_table has {page_table.shape[0]} rows, query has {seqs} sequences")
    if window_tokens is not None and window_tokens < 1:
        raise ValueError(f"window_tokens={window_tokens}; at least 1 is needed")
    if sink is not None and sink.shape != (heads,):
        raise ValueError(f"sink is {sink.shape}; ({heads},) is needed, one a query head")

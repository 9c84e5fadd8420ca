"""The one definition of causal and sliding-window visibility."""

from jax import Array


def visible(query_positions: Array, key_positions: Array, window_tokens: int | None, first_position: int) -> Array:
    """Whether a query may see a key; shapes broadcast against each other.

    The window counts the query's own position. With window_tokens=3, rows are queries and columns keys 0..4:

        1 . . . .
        1 1 . . .
        1 1 1 . .
        . 1 1 1 .
        . . 1 1 1

    With first_position=1 the first column is empty: the sequence has no key there.
    """
    causal = (key_positions <= query_positions) & (key_positions >= first_position)
    if window_tokens is None:
        return causal
    return causal & (key_positions > query_positions - window_tokens)

"""How many window pages a step can touch: one formula for the device's page table and the host's admission. No JAX."""


def window_table_pages(window_tokens: int, step: int, page_tokens: int) -> int:
    """Pages that the window and `step` new tokens can touch at most, whatever the position.

    They span window - 1 + step positions; a span of n tokens touches most pages when it starts on a page's last token.
    """
    span = window_tokens - 1 + step
    return (span + page_tokens - 2) // page_tokens + 1

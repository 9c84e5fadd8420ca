"""What a step is told besides parameters and cache: frozen trees of arrays, the same structure whatever is asked."""

from flax import struct
from jax import Array


@struct.dataclass
class StepInputs:
    """One step over `seqs` sequences of up to `step` new tokens. Page 0 of either pool is the null page.

    full_table    [seqs, width]: entry j is the page of positions j * page ...
    window_table  [seqs, width]: entry j is the page of positions (window_first + j) * page ...
    """

    tokens: Array  # [seqs, step] int32
    starts: Array  # [seqs] int32, position of the first token
    counts: Array  # [seqs] int32, valid tokens of the row; 0 is a padding row
    full_table: Array  # [seqs, full_width] int32
    window_table: Array  # [seqs, window_width] int32
    window_first: Array  # [seqs] int32


@struct.dataclass
class SamplingInputs:
    """How each row's next token is chosen. Neutral values switch an option off; the structure never changes.

    The row's first `given` tokens stand; those behind them are drafts, to be accepted or not. A row that ends inside
    its prompt has nothing to choose: `following` is the token that comes next.
    """

    given: Array  # [seqs] int32
    following: Array  # [seqs] int32; -1: to be chosen
    temperature: Array  # [seqs] float32; 0 is greedy
    top_k: Array  # [seqs] int32; 0 is off
    top_p: Array  # [seqs] float32; 1 is off
    min_p: Array  # [seqs] float32; 0 is off
    seed: Array  # [seqs] uint32
    choice: Array  # [seqs] int32, which of the n choices of a request
    banned: Array  # [seqs, BANNED] int32, ids that may not come yet (min_tokens); vocab is "none"
    banned_places: Array  # [seqs] int32, at how many of the tokens to come they may not
    top_logprobs: Array  # [] bool: whether any row wants the most likely alternatives

"""One sequence on its way through the engine: what was asked and how far it is."""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mimo_jax.sampling_params import SamplingParams


class FinishReason(enum.Enum):
    """Why a sequence ended, in OpenAI's words; ABORT and ERROR never come from the model."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class TokenLogprob:
    """One token's log-probability and its alternatives, most likely first. `rank` 1 is the most likely token."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass
class Request:
    """One choice of one prompt.

    Of its tokens (prompt, then output) the first `computed` have their keys and values in pages. A step computes some
    of the rest, and one that reaches the last known token samples the next: prefill, decode and resuming are the
    same.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    stop_ids: frozenset[int]
    choice: int = 0
    on_hidden: Callable[[Any], None] | None = None  # is handed the hidden states [count, embed] of every step's tokens

    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # of prompt[1:]
    computed: int = 0
    drafts: tuple[int, ...] = ()  # guesses at what follows the last known token
    full_pages: list[int] = field(default_factory=list)
    window_pages: list[int] = field(default_factory=list)
    window_first: int = 0  # logical page of window_pages[0]
    reserved_full: int = 0
    reserved_window: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id or stop string that ended it

    @property
    def known(self) -> int:
        """Tokens that are known, computed or not."""
        return len(self.prompt) + len(self.output)

    @property
    def decoding(self) -> bool:
        """Whether only the newest token is still to be computed, and it is an output token."""
        return bool(self.output) and self.computed == self.known - 1

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def tokens(self, start: int, count: int) -> list[int]:
        """Known tokens at positions start ... start + count."""
        prompt = len(self.prompt)
        if start >= prompt:
            return self.output[start - prompt : start - prompt + count]
        return list(self.prompt[start : start + count] + tuple(self.output[: max(0, start + count - prompt)]))

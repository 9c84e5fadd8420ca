"""Who runs in the next step. Decisions over ints: neither JAX nor arrays.

Continuous batching with chunked prefill. Each iteration decodes one token for every running sequence that is past its
prompt and computes at most one batch of prompt chunks, so:

- a running sequence waits at most one prefill batch (`prefill_tokens` tokens) between two of its tokens;
- prompts are admitted in order of arrival; the `prefill_rows` oldest ones share the prefill batch evenly, so a short
  prompt behind a long one does not wait for all of it, and the oldest always advances;
- a request is admitted when both pools have room for all it can ever hold. Nobody overtakes the head of the queue, so
  it runs as soon as enough of the running ones have ended.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mimo_jax.engine.pages import PagePool
from mimo_jax.engine.request import FinishReason, Request
from mimo_jax.errors import RequestError
from mimo_jax.window_pages import window_table_pages


@dataclass(frozen=True)
class Limits:
    """Numbers that bound a step and a sequence. `window_tokens` is 0 for a model without window layers."""

    max_seqs: int
    max_model_tokens: int
    prefill_tokens: int
    prefill_rows: int
    full_page_tokens: int
    window_page_tokens: int
    window_tokens: int
    has_full: bool
    drafts: int = 0  # draft heads
    full_lookahead: int = 0  # tokens behind a step's own that draft heads keep in the pool
    window_lookahead: int = 0

    def room(self, prompt: int, max_tokens: int | None) -> int:
        """Tokens that fit behind a prompt of so many. Raises RequestError when it, or max_tokens, does not fit."""
        most = self.max_model_tokens - prompt
        if prompt < 1:
            raise RequestError("the prompt is empty; at least one token is needed", param="prompt")
        if most < 1:
            message = f"the prompt has {prompt} tokens; with at least one more, {self.max_model_tokens} fit"
            raise RequestError(message, param="prompt")
        if max_tokens is not None and max_tokens > most:
            message = f"max_tokens={max_tokens}; behind a prompt of {prompt} tokens at most {most} fit"
            raise RequestError(message, param="max_tokens")
        return most

    def chunk_tokens(self, rows: int) -> int:
        """Prompt tokens of one row when so many share a prefill batch: all of them, or an even share."""
        return self.prefill_tokens if rows == 1 else self.prefill_tokens // self.prefill_rows

    def full_pages(self, tokens: int) -> int:
        """Full pages of a sequence of which so many tokens are stored."""
        return -(-(tokens + self.full_lookahead) // self.full_page_tokens) if self.has_full else 0

    def window_pages(self, step: int) -> int:
        """Window pages that a step of so many tokens can touch."""
        if not self.window_tokens:
            return 0
        return window_table_pages(self.window_tokens, step + self.window_lookahead, self.window_page_tokens)

    def stored_tokens(self, prompt: int, max_tokens: int) -> int:
        """Tokens whose keys and values a request stores at most: the last one sampled is never fed back."""
        return prompt + max_tokens - 1

    def needed(self, request: Request) -> tuple[int, int]:
        """Pages of (full, window) that the request can hold at once: the one formula for validation and admission."""
        stored = self.stored_tokens(len(request.prompt), request.max_tokens)
        largest = max(min(self.prefill_tokens, stored), min(1 + self.drafts, stored))
        window = min(self.window_pages(largest), self.window_ceiling(stored))
        return self.full_pages(stored), window

    def window_ceiling(self, tokens: int) -> int:
        """Window pages that a sequence of so many stored tokens can hold at most, however long the window."""
        return -(-(tokens + self.window_lookahead) // self.window_page_tokens) if self.window_tokens else 0


@dataclass(frozen=True)
class Row:
    """One sequence's part of a step: `count` tokens from position `start`, the last `drafts` of them guessed.

    It samples if the others reach the last known token.
    """

    request: Request
    start: int
    count: int
    samples: bool
    drafts: int = 0


@dataclass(frozen=True)
class StepPlan:
    """One device call: all rows decode (one known token, and drafts) or all are prompt chunks."""

    rows: tuple[Row, ...]
    decode: bool


class Scheduler:
    """Owns the queue, the running set and both pools. Plan, then advance every row; finish in between or after."""

    def __init__(self, limits: Limits, full: PagePool, window: PagePool) -> None:
        self.limits = limits
        self.full = full
        self.window = window
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    def check_fits(self, request: Request) -> None:
        """Raises RequestError when the request could not run even alone in empty pools."""
        full, window = self.limits.needed(request)
        page = self.limits.full_page_tokens
        if full > self.full.total:
            stored = self.limits.stored_tokens(len(request.prompt), request.max_tokens)
            raise RequestError(
                f"a prompt of {len(request.prompt)} tokens with max_tokens={request.max_tokens} needs room for "
                f"{stored} tokens; the full-attention cache has room for {self.full.total * page}",
                param="max_tokens",
            )
        if window > self.window.total:
            raise RequestError(f"the request needs {window} window pages; the window cache has {self.window.total}")

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestError, queueing nothing, when it can never run."""
        self.check_fits(request)
        self.waiting.append(request)

    def plan(self, drafts_for: Callable[[int], int] = lambda rows: 0) -> list[StepPlan]:
        """This iteration's device calls: at most one decode and one prefill batch. Takes the pages they write to.

        `drafts_for` says how many drafts each of so many decoding rows may verify.
        """
        self._admit()
        decode = [request for request in self.running if request.decoding]
        prefill = [request for request in self.running if not request.decoding][: self.limits.prefill_rows]
        plans = []
        if decode:
            most = drafts_for(len(decode))
            plans.append(StepPlan(tuple(self._decode_row(request, most) for request in decode), decode=True))
        if prefill:
            share = self.limits.chunk_tokens(len(prefill))
            plans.append(StepPlan(tuple(self._row(request, share) for request in prefill), decode=False))
        return plans

    def advance(self, row: Row, accepted: int = 0) -> None:
        """Marks a row's tokens as computed, as far as its drafts were accepted, and lets go of the window pages that no
        later query sees."""
        request = row.request
        if request.finished:  # aborted while the step ran: its pages are gone already
            return
        request.computed = row.start + row.count - row.drafts + accepted
        self._release_window(request)
        if row.samples:
            # From here on it decodes, which needs fewer window pages than a prompt chunk.
            needed = min(self.limits.window_pages(1 + self.limits.drafts), request.reserved_window)
            self.window.unreserve(request.reserved_window - needed)
            request.reserved_window = needed

    def finish(self, request: Request, reason: FinishReason) -> None:
        """The one path that ends a request, running or waiting: sets the reason and frees all it holds. Idempotent."""
        if request.finished:
            return
        request.finish_reason = reason
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.full.give_back(request.full_pages)
        self.window.give_back(request.window_pages)
        self.full.unreserve(request.reserved_full)
        self.window.unreserve(request.reserved_window)
        request.full_pages, request.window_pages = [], []
        request.reserved_full = request.reserved_window = 0

    def check(self) -> None:
        """Raises AssertionError unless every page is accounted for in both pools."""
        self.full.check()
        self.window.check()
        assert self.full.in_use == sum(len(request.full_pages) for request in self.running)
        assert self.window.in_use == sum(len(request.window_pages) for request in self.running)
        assert self.full.reserved == sum(request.reserved_full for request in self.running)
        assert self.window.reserved == sum(request.reserved_window for request in self.running)
        assert not any(request.full_pages or request.window_pages for request in self.waiting)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.limits.max_seqs:
            request = self.waiting[0]
            full, window = self.limits.needed(request)
            if not (self.full.can_reserve(full) and self.window.can_reserve(window)):
                return
            self.full.reserve(full)
            self.window.reserve(window)
            request.reserved_full, request.reserved_window = full, window
            self.running.append(self.waiting.popleft())

    def _decode_row(self, request: Request, most_drafts: int) -> Row:
        # A draft behind the last token that may come would be stored where the request has no pages.
        drafts = min(most_drafts, len(request.drafts), request.max_tokens - len(request.output) - 1)
        count = 1 + drafts
        self._take_pages(request, request.computed + count)
        return Row(request, request.computed, count, samples=True, drafts=drafts)

    def _row(self, request: Request, most: int) -> Row:
        start = request.computed
        count = min(most, request.known - start)
        self._take_pages(request, start + count)
        return Row(request, start, count, samples=start + count == request.known)

    def _take_pages(self, request: Request, end: int) -> None:
        """Pages for positions up to `end` in both pools."""
        missing = self.limits.full_pages(end) - len(request.full_pages)
        request.full_pages += self.full.take(missing)
        if self.limits.window_tokens:
            missing = self.limits.window_ceiling(end) - request.window_first - len(request.window_pages)
            request.window_pages += self.window.take(missing)

    def _release_window(self, request: Request) -> None:
        """The next query stands at `computed` and sees window_tokens keys, itself included; earlier pages go back."""
        if not self.limits.window_tokens:
            return
        first_key = max(0, request.computed - (self.limits.window_tokens - 1))
        gone = first_key // self.limits.window_page_tokens - request.window_first
        if gone > 0:
            self.window.give_back(request.window_pages[:gone])
            del request.window_pages[:gone]
            request.window_first += gone

"""The shapes that are compiled, and which one a plan runs in. A short ladder: each rung costs seconds of compiling."""

from collections.abc import Iterator
from dataclasses import dataclass

from mimo_jax.engine.scheduler import Limits

# Between two rungs a step is padded. On a CPU a matrix product of 2 rows takes as long as one of 8 (it packs the
# weights first), on a GPU both are bound by reading the weights; so sequences need few rungs. A table up to four
# times too wide costs attention masked reads, a chunk up to four times too long costs compute.
_SEQS_FACTOR = 8
_STEP_FACTOR = 4
_WIDTH_FACTOR = 4
_SMALLEST_STEP = 64
_SMALLEST_WIDTH_TOKENS = 512


@dataclass(frozen=True)
class Ladder:
    """Sizes in ascending order. `prefill` has (rows, step) pairs; widths are pages of the full pool's table.

    A decode step has one token a sequence, or all `drafts` behind it too.
    """

    decode_seqs: tuple[int, ...]
    prefill: tuple[tuple[int, int], ...]
    widths: tuple[int, ...]
    drafts: int = 0

    def decode(self, rows: int, pages: int, *, drafts: bool = False) -> tuple[int, int, int]:
        """(seqs, step, full_width) of the smallest shape that holds so many rows and pages."""
        return _at_least(self.decode_seqs, rows), 1 + self.drafts * drafts, _at_least(self.widths, pages)

    def chunk(self, rows: int, step: int, pages: int) -> tuple[int, int, int]:
        fitting = [shape for shape in self.prefill if shape[0] >= rows and shape[1] >= step]
        return (*min(fitting, key=lambda shape: (shape[0] * shape[1], shape)), _at_least(self.widths, pages))

    def reachable(
        self, limits: Limits, seqs: int, prompt: int, total: int, *, alone: bool
    ) -> Iterator[tuple[int, int, int]]:
        """Every shape that `seqs` requests at once can meet, of prompts and totals up to so many tokens.

        `alone`: there is one request and its prompt has exactly that length, so its chunks are known.
        """
        seqs = min(seqs, limits.max_seqs)
        yield from self._reachable_decode(limits, seqs, total)
        for rows in range(1, min(seqs, limits.prefill_rows) + 1):
            most = limits.chunk_tokens(rows)
            # A known prompt alone is cut into whole chunks and a rest; otherwise chunks can have any length.
            counts = {min(prompt, most), prompt % most or most} if alone else set(range(1, min(prompt, most) + 1))
            for step in {self.chunk(rows, count, 0)[1] for count in counts}:
                yield from (self.chunk(rows, step, pages) for pages in self._widths(limits, prompt))

    def _reachable_decode(self, limits: Limits, seqs: int, total: int) -> Iterator[tuple[int, int, int]]:
        for rung in self.decode_seqs:
            if rung <= _at_least(self.decode_seqs, seqs):
                steps = {1, 1 + self.drafts}
                yield from ((rung, step, pages) for step in steps for pages in self._widths(limits, total))

    def _widths(self, limits: Limits, tokens: int) -> list[int]:
        widest = _at_least(self.widths, limits.full_pages(tokens))
        return [rung for rung in self.widths if rung <= widest]


def make_ladder(limits: Limits) -> Ladder:
    """The rungs for these limits; every plan that keeps them fits one."""
    prefill = {
        (rows, step)
        for rows in {1, limits.prefill_rows}
        for step in _descending(limits.chunk_tokens(rows), _STEP_FACTOR, _SMALLEST_STEP)
    }
    widest = max(1, limits.full_pages(limits.max_model_tokens))
    smallest = max(1, _SMALLEST_WIDTH_TOKENS // limits.full_page_tokens)
    return Ladder(
        decode_seqs=_ascending(limits.max_seqs, _SEQS_FACTOR),
        prefill=tuple(sorted(prefill)),
        widths=tuple(sorted(_descending(widest, _WIDTH_FACTOR, smallest))),
        drafts=limits.drafts,
    )


def _ascending(top: int, factor: int) -> tuple[int, ...]:
    """1, factor, factor^2 ... and `top` itself."""
    rungs, rung = [], 1
    while rung < top:
        rungs.append(rung)
        rung *= factor
    return (*rungs, top)


def _descending(top: int, factor: int, smallest: int) -> set[int]:
    """top, top / factor ... as long as they are not below `smallest`."""
    rungs = {top}
    while top // factor >= smallest:
        top //= factor
        rungs.add(top)
    return rungs


def _at_least(rungs: tuple[int, ...], value: int) -> int:
    return next(rung for rung in rungs if rung >= value)

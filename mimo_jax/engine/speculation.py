"""Whether to verify drafts in the next decode step: counted and timed, no JAX.

The rule. A decode step of R rows either verifies the drafts of its draft heads or takes one token a row. For each rung
of R both ways are timed (exponential averages), and the drafts that were accepted are counted. Drafts are used while

    (1 + accepted drafts a row) / seconds of a verifying step  >=  1 / seconds of a plain step

The losing way is tried again for a few steps now and then, because text changes. The first steps of a rung verify.
What comes out is the same either way; only the time differs.
"""

from dataclasses import dataclass, field

_TRIAL_STEPS = 4  # of either way before the first decision, and of the losing way when it is tried again
_TRIAL_EVERY = 128  # steps
_SMOOTHING = 0.9


@dataclass
class DraftMetrics:
    """Counts since the start. `accepted_at[i]` is how often the draft at place i was accepted."""

    steps: int = 0  # rows of verifying steps
    drafts: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens that a row of a verifying step brought, its own included; 1 is no gain."""
        return 1 + self.accepted / self.steps if self.steps else 1.0


@dataclass
class _Average:
    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        # The first one pays for a program's first run, so it is replaced instead of averaged.
        self.value = value if self.count <= 1 else _SMOOTHING * self.value + (1 - _SMOOTHING) * value
        self.count += 1


@dataclass
class _Rung:
    verify_seconds: _Average = field(default_factory=_Average)
    plain_seconds: _Average = field(default_factory=_Average)
    brought: _Average = field(default_factory=_Average)  # tokens a row of a verifying step
    step: int = 0


class Speculation:
    """Counts, times and decides. `drafts` is the number of draft heads; 0 never verifies."""

    def __init__(self, drafts: int) -> None:
        self.metrics = DraftMetrics(accepted_at=[0] * drafts)
        self._drafts = drafts
        self._rungs: dict[int, _Rung] = {}

    def drafts_for(self, rung: int) -> int:
        """How many drafts each row of a decode step of this rung should verify."""
        if not self._drafts:
            return 0
        state = self._rungs.setdefault(rung, _Rung())
        if state.verify_seconds.count < _TRIAL_STEPS:
            return self._drafts
        if state.plain_seconds.count < _TRIAL_STEPS:
            return 0
        pays = state.brought.value / state.verify_seconds.value >= 1 / state.plain_seconds.value
        trial = state.step % _TRIAL_EVERY < _TRIAL_STEPS
        return self._drafts if pays != trial else 0

    def record(self, rung: int, seconds: float, rows: list[tuple[int, int]]) -> None:
        """One decode step: for each row (drafts verified, drafts accepted). A step without drafts was a plain one."""
        if not self._drafts:
            return
        state = self._rungs.setdefault(rung, _Rung())
        state.step += 1
        verified = [(drafts, accepted) for drafts, accepted in rows if drafts]
        if not verified:
            state.plain_seconds.add(seconds)
            return
        state.verify_seconds.add(seconds)
        state.brought.add(1 + sum(accepted for _, accepted in verified) / len(verified))
        self.metrics.steps += len(verified)
        for drafts, accepted in verified:
            self.metrics.drafts += drafts
            self.metrics.accepted += accepted
            for place in range(accepted):
                self.metrics.accepted_at[place] += 1

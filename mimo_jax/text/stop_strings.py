"""Stop strings in streamed text.

Which match counts: the one that is complete first, reading the text character by character, since that is the
moment generation ends; of several complete at the same character the longest. The rule does not depend on how
tokens cut the text, nor on how a step groups tokens.
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from mimo_jax.errors import RequestError


class TextSource(Protocol):
    """A stream of text made from token ids (`Detokenizer` is one)."""

    def add(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class StopStrings:
    """Finds any of several strings in one pass (Aho-Corasick). Immutable, so one may serve many sequences.

    A state stands for the longest tail of the text that begins some stop string; state 0 is the empty tail.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        """Raises RequestError for an empty stop string, which would match everywhere."""
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise RequestError(f"stop is {stop!r}; a list of non-empty strings is needed", param="stop")
        self._children: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self._matched: list[str | None] = [None]
        self._held_characters = [0]
        for text in stop:
            self._insert(text)
        self._link()

    def __bool__(self) -> bool:
        return len(self._children) > 1

    def advance(self, state: int, character: str) -> int:
        """The state after one more character. Amortised O(1)."""
        while True:
            following = self._children[state].get(character)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fallback[state]

    def matched(self, state: int) -> str | None:
        """The longest stop string that ends here."""
        return self._matched[state]

    def held_characters(self, state: int) -> int:
        """How many characters at the end of the text are a proper prefix of a stop string."""
        return self._held_characters[state]

    def _insert(self, text: str) -> None:
        state = 0
        for character in text:
            if character not in self._children[state]:
                self._children[state][character] = len(self._children)
                self._children.append({})
                self._fallback.append(0)
                self._matched.append(None)
                self._held_characters.append(0)
            state = self._children[state][character]
        self._matched[state] = text

    def _link(self) -> None:
        """Breadth first, so that the shorter tail a state falls back to is complete before the state is."""
        depths = {0: 0}
        queue = deque([0])
        while queue:
            parent = queue.popleft()
            for character, state in self._children[parent].items():
                depths[state] = depths[parent] + 1
                if parent:
                    self._fallback[state] = self.advance(self._fallback[parent], character)
                shorter = self._fallback[state]
                self._matched[state] = self._matched[state] or self._matched[shorter]
                # A state without children is a whole stop string, not a proper prefix of one.
                self._held_characters[state] = (
                    depths[state] if self._children[state] else self._held_characters[shorter]
                )
                queue.append(state)


class TextStream:
    """The text of one sequence, cut at the first stop string.

    Law: the joined deltas are the whole text up to the stop (its end with `include_stop`), or the whole text
    if there is none. Only a tail that is a proper prefix of some stop string is held back.
    """

    def __init__(self, source: TextSource, stop: Sequence[str] | StopStrings, include_stop: bool = False) -> None:
        self._source = source
        self._stops = stop if isinstance(stop, StopStrings) else StopStrings(stop)
        self._include_stop = include_stop
        self._state = 0
        self._held = ""
        self._matched: str | None = None

    def add(self, ids: Sequence[int], check_stop: bool = True) -> tuple[str, str | None]:
        """Appends tokens. Returns the text that may now be sent and the stop string that ended it, if one
        did.

        With `check_stop=False` (a minimum length not reached yet) a stop string that completes within these
        tokens is ordinary text; one that begins here and completes in a later checked call counts. After a
        match nothing more is returned and the match is repeated.
        """
        if self._matched is not None:
            return "", self._matched
        return self._take(self._source.add(ids), check_stop), self._matched

    def finish(self) -> str:
        """Ends the sequence (end of turn, length): returns what was held back. Empty after a match."""
        if self._matched is not None:
            return ""
        tail = self._take(self._source.finish(), check_stop=False) + self._held
        self._held = ""
        return tail

    def _take(self, text: str, check_stop: bool) -> str:
        if not self._stops:
            return text
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            self._state = self._stops.advance(self._state, character)
            stop = self._stops.matched(self._state) if check_stop else None
            if stop is not None:
                self._matched, self._held = stop, ""
                return pending[: end if self._include_stop else end - len(stop)]
        certain = len(pending) - self._stops.held_characters(self._state)
        self._held = pending[certain:]
        return pending[:certain]

"""Token ids to text, piece by piece.

`Tokenizer.decode` runs the same code over a whole sequence at once, so streamed and one-shot text agree by
construction: token bytes are concatenated and go through one incremental UTF-8 decoder.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol


class TokenSource(Protocol):
    """What a detokenizer needs to know about a vocabulary (`Tokenizer` is one)."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def strips_leading_space(self) -> bool: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class Detokenizer:
    """The text of one running sequence. Costs O(1) a token, whatever the length of the sequence.

    Law: for every way of cutting `ids` into groups, the joined results of `add` and the final `finish` equal
    `tokenizer.decode(ids)`. Only the bytes of an incomplete character are held back, so at most three bytes.
    """

    def __init__(self, tokenizer: TokenSource, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = tokenizer.strips_leading_space

    def add(self, ids: Sequence[int]) -> str:
        """Appends tokens and returns the text that has become certain.

        Raises ValueError for an id outside the vocabulary; the sequence is then unchanged.
        """
        read = self._tokenizer.token_bytes
        data = b"".join([read(token_id) for token_id in ids if token_id not in self._skipped])
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def finish(self) -> str:
        """Ends the sequence: a character that never completed becomes U+FFFD, once."""
        return self._utf8.decode(b"", final=True)

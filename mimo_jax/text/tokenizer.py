"""One tokenizer for every checkpoint: text to ids and back, stop ids, and the chat template.

Special-token text is recognised wherever it stands in the input, in raw prompts and in chats alike (as
Hugging Face and llama.cpp's server do): "<|im_end|>" typed by a user is the control token. Callers that must
not allow it have to refuse or alter such text before it comes here.
"""

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import tokenizers

from mimo_jax.errors import RequestError
from mimo_jax.text.chat import ChatTemplate
from mimo_jax.text.detokenizer import Detokenizer

SPACE_MARK = "\u2581"  # what SentencePiece writes for a space
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# End-of-turn markers by name. Declared ids are often incomplete: MiMo-V2.5's config.json names 151645 but not
# 151643.
_TURN_ENDS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "</s>",
)


class PieceCoding(enum.Enum):
    """How a vocabulary writes bytes as text."""

    BYTE_LEVEL = "byte-level"  # GPT-2: each byte is one printable character
    SENTENCEPIECE = "sentencepiece"  # U+2581 for a space, <0xE5> for a byte that no piece covers


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A vocabulary with its rules. Immutable and safe to share between threads."""

    backend: tokenizers.Tokenizer
    coding: PieceCoding
    vocab_size: int  # highest id + 1; a model may have more (padding) rows, which have no text
    bos_token_id: int | None
    stop_token_ids: tuple[int, ...]  # every id that ends a turn, see `stop_token_ids`
    special_ids: frozenset[int]  # control tokens, left out of text by skip_special_tokens
    literal_ids: frozenset[int]  # tokens whose text is taken as it stands, not in the vocabulary's coding
    prefix_ids: tuple[int, ...] = ()  # what the file says comes before a text (BOS or nothing)
    suffix_ids: tuple[int, ...] = ()  # and after it (EOS or nothing)
    strips_leading_space: bool = False  # the file's decoder drops the space its encoder puts in front
    chat_template: ChatTemplate | None = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`, with BOS and EOS where the file asks for them.

        A text that already begins (ends) with the text of those tokens does not get them a second time: a
        prompt rendered elsewhere keeps the BOS count of its template. Raises RequestError for text with lone
        surrogates.
        """
        ids = self._encode(text)
        if not add_special_tokens:
            return ids
        prefix, suffix = list(self.prefix_ids), list(self.suffix_ids)
        if ids[: len(prefix)] == prefix:
            prefix = []
        if suffix and ids[-len(suffix) :] == suffix:
            suffix = []
        return prefix + ids + suffix

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Renders `messages` with the chat template and encodes the result: the one way from a chat to ids.

        BOS is there as often as the template writes it; none is added. Raises RequestError if the model has
        no chat template, for messages that `normalise_messages` refuses, and where the template itself
        raises.
        """
        if self.chat_template is None:
            raise RequestError("this model has no chat template; send a plain prompt instead", param="messages")
        text = self.chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, **template_kwargs
        )
        return self._encode(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Bytes that are no UTF-8 become U+FFFD. Raises ValueError for an id out of range.

        Nothing is cleaned up: spaces before punctuation stay, whatever `clean_up_tokenization_spaces` says,
        because a stream could not take them back. One leading space goes where the file's own decoder drops
        it.
        """
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.add(ids) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; a special token's own text; b"" for an id without a token."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token id {token_id} is outside the vocabulary (0 to {self.vocab_size - 1})")
        piece = self.backend.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self.literal_ids:
            return piece.encode()
        if self.coding is PieceCoding.BYTE_LEVEL:
            return _byte_level_bytes(piece)
        byte = _BYTE_PIECE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE_MARK, " ").encode()

    def token_text(self, token_id: int) -> str:
        """The token as printable text: its bytes, with U+FFFD for parts of characters."""
        return self.token_bytes(token_id).decode(errors="replace")

    def _encode(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has a lone surrogate at position {error.start}; UTF-8 cannot hold it"
            ) from error
        return self.backend.encode(text, add_special_tokens=False).ids


def stop_token_ids(declared: Iterable[int | None], special: Mapping[str, int], vocab_size: int) -> tuple[int, ...]:
    """Every id that ends a turn: what the files declare, then end-of-turn markers known by name.

    `special` holds the tokens that the file marks as special: a name counts only there. Gemma's "</s>", for
    example, is an ordinary token (the HTML tag), and stopping on it would cut HTML short.
    """
    named = (special[name] for name in _TURN_ENDS if name in special)
    ids = [*declared, *named]
    return tuple(dict.fromkeys(i for i in ids if i is not None and 0 <= i < vocab_size))


def _byte_level_bytes(piece: str) -> bytes:
    values = [_BYTE_OF_CHARACTER.get(character) for character in piece]
    # A piece with a foreign character was never byte-level coded (a padding entry, say): take it literally.
    return piece.encode() if None in values else bytes(value for value in values if value is not None)


def _byte_of_character() -> Mapping[str, int]:
    """GPT-2's table: printable Latin-1 bytes stand for themselves, the other 68 are U+0100 and onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    own = {chr(byte): byte for byte in printable}
    return MappingProxyType(own | {chr(0x100 + n): byte for n, byte in enumerate(others)})


_BYTE_OF_CHARACTER = _byte_of_character()

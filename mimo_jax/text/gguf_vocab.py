"""A tokenizer from the metadata of a GGUF file.

Two vocabularies are read: "gpt2" (byte-level BPE with ranked merges, split by a regex that
`tokenizer.ggml.pre` names) and "llama" (SentencePiece BPE, whose merges follow from the scores of the
pieces). The ids agree with llama.cpp's `tokenize(..., parse_special=true)`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from mimo_jax.checkpoint.gguf import read_gguf
from mimo_jax.errors import CheckpointError
from mimo_jax.text.chat import ChatTemplate
from mimo_jax.text.split_rules import SplitRule, split_rule
from mimo_jax.text.tokenizer import SPACE_MARK, PieceCoding, Tokenizer, stop_token_ids

# Token types of the GGUF specification.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_FOUND_IN_TEXT = (_CONTROL, _USER_DEFINED, _UNKNOWN)  # matched before anything else


@dataclass(frozen=True)
class GgufVocabulary:
    """The `tokenizer.*` keys, checked."""

    source: Path
    pieces: list[str]
    kinds: list[int]
    metadata: Mapping[str, Any]

    def special_id(self, role: str) -> int | None:
        """The id under `tokenizer.ggml.<role>_token_id`."""
        key = f"tokenizer.ggml.{role}_token_id"
        value = self.metadata.get(key)
        if value is not None and not (isinstance(value, int) and 0 <= value < len(self.pieces)):
            raise CheckpointError(f"{self.source}: {key} is {value!r}; there are {len(self.pieces)} tokens")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """The switch under `tokenizer.ggml.<name>`; `default` is what llama.cpp assumes without it."""
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.source}: tokenizer.ggml.{name} is {value!r}; true or false is needed")
        return value

    def array(self, name: str, length: int | None = None) -> list[Any]:
        value = self.metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, list) or (length is not None and len(value) != length):
            found = f"has {len(value)} entries" if isinstance(value, list) else "is missing"
            wanted = "" if length is None else f"; {length} are needed, one a token"
            raise CheckpointError(f"{self.source}: tokenizer.ggml.{name} {found}{wanted}")
        return value


def load_gguf_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer inside a .gguf file, or None if the file has none."""
    return tokenizer_from_metadata(read_gguf(path).metadata, path)


def tokenizer_from_metadata(metadata: Mapping[str, Any], source: Path) -> Tokenizer | None:
    """As `load_gguf_tokenizer`, from metadata already read. `source` is named in errors.

    Raises CheckpointError for a vocabulary kind or pre-tokenizer that is not known, and for keys that
    contradict each other.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model is None or model == "none":  # llama.cpp's word for a file without a vocabulary
        return None
    if model not in ("gpt2", "llama"):
        raise CheckpointError(f"{source}: tokenizer.ggml.model is {model!r}; gpt2 and llama are read")
    vocabulary = _read_vocabulary(metadata, source)
    if model == "gpt2":
        rule = split_rule(metadata.get("tokenizer.ggml.pre"), source)
        backend = _byte_level_backend(vocabulary, rule)
        return _assemble(vocabulary, backend, PieceCoding.BYTE_LEVEL, add_bos=rule.add_bos, space_prefix=False)
    space_prefix = vocabulary.flag("add_space_prefix", True)
    backend = _sentencepiece_backend(vocabulary, space_prefix)
    return _assemble(vocabulary, backend, PieceCoding.SENTENCEPIECE, add_bos=True, space_prefix=space_prefix)


def _read_vocabulary(metadata: Mapping[str, Any], source: Path) -> GgufVocabulary:
    vocabulary = GgufVocabulary(source, [], [], metadata)
    # A nameless token gets a name of its own: ids must stay distinct.
    pieces = [piece or f"[EMPTY_{index}]" for index, piece in enumerate(vocabulary.array("tokens"))]
    kinds = [_NORMAL] * len(pieces)
    if "tokenizer.ggml.token_type" in metadata:
        kinds = vocabulary.array("token_type", len(pieces))
    for index, piece in enumerate(pieces):
        if not _is_text(piece):
            raise CheckpointError(f"{source}: token {index} is {piece!r}; text in UTF-8 is needed")
    if len(set(pieces)) != len(pieces):
        first = {piece: index for index, piece in reversed(list(enumerate(pieces)))}
        index, piece = next((i, p) for i, p in enumerate(pieces) if first[p] != i)
        raise CheckpointError(f"{source}: tokens {first[piece]} and {index} are both {piece!r}")
    return GgufVocabulary(source, pieces, kinds, metadata)


def _is_text(piece: object) -> bool:
    try:
        return isinstance(piece, str) and piece.encode() is not None
    except UnicodeEncodeError:  # read with surrogates in place of bytes that are no UTF-8
        return False


def _byte_level_backend(vocabulary: GgufVocabulary, rule: SplitRule) -> tokenizers.Tokenizer:
    merges = []
    for line in vocabulary.array("merges"):
        left, _, right = line.partition(" ")
        if not left or not right:
            raise CheckpointError(f"{vocabulary.source}: the merge {line!r} is not two pieces with a space between")
        merges.append((left, right))
    ids = {piece: index for index, piece in enumerate(vocabulary.pieces)}
    backend = _bpe(vocabulary, ids, merges, ignore_merges=rule.whole_words_first)
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in rule.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_backend(vocabulary: GgufVocabulary, space_prefix: bool) -> tokenizers.Tokenizer:
    ids = {piece: index for index, piece in enumerate(vocabulary.pieces)}
    unknown = vocabulary.special_id("unknown")
    unknown_piece = None if unknown is None else vocabulary.pieces[unknown]
    merges = _merges_by_score(vocabulary, ids)
    backend = _bpe(vocabulary, ids, merges, unk_token=unknown_piece, byte_fallback=True)
    # Text between two special tokens is one fragment here, and each fragment gets the leading space.
    steps: list[Any] = [normalizers.Prepend(SPACE_MARK)] if space_prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE_MARK)])
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_by_score(vocabulary: GgufVocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Ranked merges that do as SentencePiece: of all neighbours that make up a piece, merge the best scored.

    Every way of making a piece of two others becomes a merge, ranked by the score of the result. Merges with
    the same score come in the order of ids; SentencePiece takes the leftmost of them in the text, which only
    matters where two such merges overlap.
    """
    pieces, kinds = vocabulary.pieces, vocabulary.kinds
    scores = vocabulary.array("scores", len(pieces))
    # Tokens found in the text beforehand are never put together from pieces.
    composed = [i for i, piece in enumerate(pieces) if kinds[i] not in _FOUND_IN_TEXT and len(piece) > 1]
    composed.sort(key=lambda i: -scores[i])  # stable
    return [
        (left, right)
        for piece in map(pieces.__getitem__, composed)
        for cut in range(len(piece) - 1, 0, -1)
        if (left := piece[:cut]) in ids and (right := piece[cut:]) in ids
    ]


def _bpe(
    vocabulary: GgufVocabulary, ids: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges, **options))
    except Exception as error:  # the library raises bare Exception, e.g. for a merge whose result is no token
        raise CheckpointError(f"{vocabulary.source}: the merges do not fit the tokens ({error})") from error
    added = [
        AddedToken(piece, normalized=False, special=kind != _USER_DEFINED)
        for piece, kind in zip(vocabulary.pieces, vocabulary.kinds, strict=True)
        if kind in _FOUND_IN_TEXT
    ]
    backend.add_tokens(added)
    return backend


def _assemble(
    vocabulary: GgufVocabulary,
    backend: tokenizers.Tokenizer,
    coding: PieceCoding,
    *,
    add_bos: bool,
    space_prefix: bool,
) -> Tokenizer:
    """`add_bos` is the default of the vocabulary kind; a key of the file comes first."""
    pieces, kinds = vocabulary.pieces, vocabulary.kinds
    bos, eos = vocabulary.special_id("bos"), vocabulary.special_id("eos")
    prefix = _required_id(vocabulary, "bos", bos) if vocabulary.flag("add_bos_token", add_bos) else ()
    suffix = _required_id(vocabulary, "eos", eos) if vocabulary.flag("add_eos_token", False) else ()
    special = frozenset(i for i, kind in enumerate(kinds) if kind in (_CONTROL, _UNKNOWN, _UNUSED))
    control = {pieces[i]: i for i, kind in enumerate(kinds) if kind == _CONTROL}
    declared = (eos, vocabulary.special_id("eot"), vocabulary.special_id("eom"))
    return Tokenizer(
        backend=backend,
        coding=coding,
        vocab_size=len(pieces),
        bos_token_id=bos,
        stop_token_ids=stop_token_ids(declared, control, len(pieces)),
        special_ids=special,
        literal_ids=frozenset(i for i, kind in enumerate(kinds) if kind in _FOUND_IN_TEXT),
        prefix_ids=prefix,
        suffix_ids=suffix,
        strips_leading_space=space_prefix,
        chat_template=_chat_template(vocabulary),
    )


def _required_id(vocabulary: GgufVocabulary, role: str, token_id: int | None) -> tuple[int]:
    if token_id is None:
        raise CheckpointError(
            f"{vocabulary.source}: a text gets {role.upper()}, but tokenizer.ggml.{role}_token_id is missing"
        )
    return (token_id,)


def _chat_template(vocabulary: GgufVocabulary) -> ChatTemplate | None:
    source = vocabulary.metadata.get("tokenizer.chat_template")
    if source is None:
        return None
    if not isinstance(source, str):
        raise CheckpointError(f"{vocabulary.source}: tokenizer.chat_template is no text")
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: vocabulary.special_id(role) for name, role in roles.items()}
    texts = {name: vocabulary.pieces[token_id] for name, token_id in ids.items() if token_id is not None}
    return ChatTemplate(source, texts, origin=str(vocabulary.source))

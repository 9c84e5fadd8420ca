"""From documents to arrays: ids, what each id is worth as a target, rows of a few fixed lengths."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.mimo_tiny.corpus import Document, Part, documents
from mimo_jax.text import Tokenizer

ROW_TOKENS = 384  # places of a row; a longer text is left out
OTHER_WEIGHT = 0.1  # of a target that the assistant does not write


Text = tuple[list[int], list[float]]  # ids and their weights, see `encode`


@dataclass(frozen=True)
class Batch:
    """Texts of one length. `tokens[s, p]` is a target of weight `weights[s, p]`; the first of a text has none."""

    tokens: np.ndarray  # [seqs, step] int32
    counts: np.ndarray  # [seqs] int32
    weights: np.ndarray  # [seqs, step] float32; 1 where the assistant writes


def encode(document: Document, tokenizer: Tokenizer) -> Text:
    """(ids, weights). The assistant writes from behind <think></think> up to <|im_end|>, which it writes too."""
    ids = tokenizer.encode(document.text())
    opened, closed = (tokenizer.backend.token_to_id(text) for text in ("</think>", "<|im_end|>"))
    weights, writing = [0.0], False
    for before in ids[:-1]:
        writing = before == opened or (writing and before != closed)
        weights.append(1.0 if writing else OTHER_WEIGHT)
    return ids, weights


def batches(part: Part, tokenizer: Tokenizer, rows: int) -> Iterator[Batch]:
    """An endless stream of batches of `rows` rows."""
    texts = (encode(document, tokenizer) for document in documents(part))
    packed = packed_rows(text for text in texts if len(text[0]) <= ROW_TOKENS)
    while True:
        yield pack([next(packed) for _ in range(rows)])


def packed_rows(texts: Iterable[Text], waiting: int = 16) -> Iterator[Text]:
    """Rows of one text after the other, as long as they fit. The first comes in turn, then the longest that fits.

    `waiting` texts are looked at for each place. Nothing separates the texts of a row but their own first token.
    """
    stream = iter(texts)
    pool = list(itertools.islice(stream, waiting))
    while True:
        ids, weights = pool.pop(0)
        while True:
            pool += itertools.islice(stream, waiting - len(pool))
            fitting = [text for text in pool if len(text[0]) <= ROW_TOKENS - len(ids)]
            if not fitting:
                break
            best = max(fitting, key=lambda text: len(text[0]))
            pool.remove(best)
            ids, weights = ids + best[0], weights + best[1]
        yield ids, weights


def pack(rows: list[Text]) -> Batch:
    tokens = np.zeros((len(rows), ROW_TOKENS), np.int32)
    weights = np.zeros((len(rows), ROW_TOKENS), np.float32)
    for row, (ids, values) in enumerate(rows):
        tokens[row, : len(ids)] = ids
        weights[row, : len(ids)] = values
    return Batch(tokens, np.array([len(ids) for ids, _ in rows], np.int32), weights)

"""Streamed text is the one-shot text, whatever the vocabulary and however tokens are grouped (case B20)."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_jax.text import Detokenizer, Tokenizer, load_tokenizer
from tests.text.toys import byte_level_backend, sentencepiece_backend, write_folder

BROKEN = "\ufffd"
ALPHABETS = (
    "abc xyz. ",
    "你好世界한국어",
    "\U0001f468\u200d\U0001f469\U0001f3fd❤\ufe0f",
    "e\u0301n\u0303\u0361o",
    "\n\t ",
)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return loaded(write_folder(tmp_path_factory.mktemp("byte_level"), byte_level_backend()))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return loaded(write_folder(tmp_path_factory.mktemp("sentencepiece"), sentencepiece_backend()))


def loaded(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def byte_token(tokenizer: Tokenizer, byte: int) -> int:
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([byte]))


def stream(tokenizer: Tokenizer, groups: Sequence[Sequence[int]], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.add(group) for group in groups), detokenizer.finish()]


def grouped(ids: Sequence[int], draw: random.Random) -> list[Sequence[int]]:
    groups, start = [], 0
    while start < len(ids):
        size = draw.randint(1, 5)
        groups.append(ids[start : start + size])
        start += size
    return groups


def test_joined_deltas_are_the_one_shot_text_on_2000_random_strings(smollm2: Tokenizer) -> None:
    draw = random.Random(20)
    single_bytes = [i for i in range(smollm2.vocab_size) if len(smollm2.token_bytes(i)) == 1]
    for _ in range(2000):
        text = "".join(draw.choice(draw.choice(ALPHABETS)) for _ in range(draw.randint(0, 20)))
        ids = smollm2.encode(text)
        for _ in range(draw.choice((0, 0, 1, 3))):  # raw bytes: half characters, and bytes that are no UTF-8
            ids.insert(draw.randint(0, len(ids)), draw.choice(single_bytes))
        whole = b"".join(map(smollm2.token_bytes, ids)).decode(errors="replace")
        assert smollm2.decode(ids) == whole
        assert "".join(stream(smollm2, grouped(ids, draw))) == whole


@given(ids=st.lists(st.integers(0, 261), max_size=30), seed=st.integers(0, 1 << 30), skip=st.booleans())
@settings(deadline=None, max_examples=150)
def test_any_ids_in_any_groups_give_the_same_text(
    byte_level: Tokenizer, sentencepiece: Tokenizer, ids: list[int], seed: int, skip: bool
) -> None:
    for tokenizer in (byte_level, sentencepiece):
        inside = [token_id for token_id in ids if token_id < tokenizer.vocab_size]
        deltas = stream(tokenizer, grouped(inside, random.Random(seed)), skip)
        assert "".join(deltas) == tokenizer.decode(inside, skip_special_tokens=skip)


def test_a_half_character_waits_for_its_other_half(gemma: Tokenizer) -> None:
    ids = [238 + byte for byte in "é𐍈".encode()]  # Gemma's byte tokens begin at 238
    assert [gemma.token_bytes(i) for i in ids[:2]] == [b"\xc3", b"\xa9"]
    assert stream(gemma, [[i] for i in ids]) == ["", "é", "", "", "", "𐍈", ""]


def test_a_broken_tail_is_flushed_once(byte_level: Tokenizer) -> None:
    ids = [byte_token(byte_level, byte) for byte in "a한".encode()[:-1]]
    detokenizer = Detokenizer(byte_level)
    assert [detokenizer.add([i]) for i in ids] == ["a", "", ""]
    assert [detokenizer.finish(), detokenizer.finish()] == [BROKEN, ""]
    assert byte_level.decode(ids) == "a" + BROKEN


def test_a_broken_character_does_not_swallow_what_follows(byte_level: Tokenizer) -> None:
    first_byte = byte_token(byte_level, 0xED)
    assert stream(byte_level, [[first_byte], byte_level.encode("hi")]) == ["", BROKEN + "hi", ""]


def test_a_skipped_special_token_does_not_cut_a_character(byte_level: Tokenizer) -> None:
    low, high = (byte_token(byte_level, byte) for byte in "é".encode())
    end = byte_level.encode("<|im_end|>")
    assert byte_level.decode([low, *end, high]) == "é"
    assert byte_level.decode([low, *end, high], skip_special_tokens=False) == f"{BROKEN}<|im_end|>{BROKEN}"


def test_only_the_first_space_of_a_text_is_stripped_and_only_once(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("hi hi")
    assert sentencepiece.token_bytes(ids[0]) == b" hi"
    assert stream(sentencepiece, [[i] for i in ids]) == ["hi", " hi", ""]
    assert sentencepiece.decode(sentencepiece.encode("  hi")) == "  hi"
    assert sentencepiece.decode([1, *ids], skip_special_tokens=False) == "<s> hi hi"
    assert sentencepiece.decode([1, *ids]) == sentencepiece.backend.decode([1, *ids]) == "hi hi"


def test_an_id_outside_the_vocabulary_is_refused_and_changes_nothing(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level)
    for wrong in (-1, byte_level.vocab_size):
        with pytest.raises(ValueError, match=f"token id {wrong} is outside the vocabulary"):
            detokenizer.add([0, wrong])
        with pytest.raises(ValueError, match="outside the vocabulary"):
            byte_level.decode([wrong])
    assert detokenizer.add(byte_level.encode("hi")) == "hi"

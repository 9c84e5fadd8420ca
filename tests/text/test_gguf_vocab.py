"""What a GGUF file's tokenizer keys may look like."""

from pathlib import Path
from typing import Any

import pytest

from mimo_jax.errors import CheckpointError
from mimo_jax.text import Tokenizer, load_tokenizer
from mimo_jax.text.gguf_vocab import tokenizer_from_metadata

SOURCE = Path("toy.gguf")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def byte_level(**changes: Any) -> dict[str, Any]:
    """h i Ġ hi Ġhi, one control and one user-defined token, one unused."""
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["h", "i", "Ġ", "hi", "Ġhi", "<|im_end|>", "é é", "[PAD7]"],
        "token_type": [NORMAL] * 5 + [CONTROL, USER_DEFINED, UNUSED],
        "merges": ["h i", "Ġ hi"],
        "eos_token_id": 5,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in {**keys, **changes}.items() if value is not None}


def sentencepiece(**changes: Any) -> dict[str, Any]:
    keys = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", "\u2581", "h", "i", "hi", "\u2581hi", "ih"],
        "token_type": [UNKNOWN, CONTROL, CONTROL, BYTE, BYTE] + [NORMAL] * 6,
        "scores": [0.0, 0.0, 0.0, 0.0, 0.0, -7.0, -8.0, -9.0, -2.0, -3.0, -1.0],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in {**keys, **changes}.items() if value is not None}


def build(keys: dict[str, Any]) -> Tokenizer:
    tokenizer = tokenizer_from_metadata(keys, SOURCE)
    assert tokenizer is not None
    return tokenizer


def test_byte_level_tokens_in_literal_numbers() -> None:
    tokenizer = build(byte_level())
    assert tokenizer.encode("hi hi<|im_end|>é é") == [3, 4, 5, 6]
    assert tokenizer.decode([3, 4, 5, 6]) == "hi hié é"
    assert tokenizer.decode([3, 5, 7], skip_special_tokens=False) == "hi<|im_end|>[PAD7]"
    assert tokenizer.stop_token_ids == (5,)
    assert tokenizer.bos_token_id is None


def test_sentencepiece_merges_the_best_scored_neighbours_first() -> None:
    tokenizer = build(sentencepiece(add_space_prefix=False))
    # "hihi": of hi (-2), ih (-1) and hi (-2) the middle one wins, which leaves h and i alone.
    assert tokenizer.encode("hihi", add_special_tokens=False) == [6, 10, 7]
    assert tokenizer.encode("é") == [1, 3, 4]
    assert tokenizer.decode([1, 3, 4, 9]) == "é hi"


def test_a_space_goes_in_front_unless_the_file_says_no() -> None:
    assert build(sentencepiece()).encode("hi") == [1, 9]
    assert build(sentencepiece()).decode([1, 9, 9]) == "hi hi"
    assert build(sentencepiece(add_space_prefix=False)).encode("hi") == [1, 8]


def test_bos_and_eos_follow_the_switches_of_the_file() -> None:
    assert build(sentencepiece(add_bos_token=False)).encode("hi") == [9]
    assert build(sentencepiece(add_eos_token=True)).encode("hi") == [1, 9, 2]
    assert build(sentencepiece(add_eos_token=True)).encode("hi", add_special_tokens=False) == [9]
    llama3 = byte_level(pre="llama-bpe", bos_token_id=5)
    assert build(llama3).encode("hi") == [5, 3]


def test_named_ends_count_only_where_the_file_marks_them_as_control() -> None:
    ordinary = byte_level(token_type=[NORMAL] * 5 + [USER_DEFINED, CONTROL, UNUSED], eos_token_id=None)
    assert build(ordinary).stop_token_ids == ()
    assert build(byte_level(eos_token_id=None)).stop_token_ids == (5,)
    assert build(byte_level(eot_token_id=6)).stop_token_ids == (5, 6)


def test_a_file_without_tokenizer_has_none() -> None:
    assert tokenizer_from_metadata({"general.architecture": "llama"}, SOURCE) is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (byte_level(model="bert"), "tokenizer.ggml.model is 'bert'"),
        (byte_level(pre="viking"), "tokenizer.ggml.pre is 'viking'"),
        (byte_level(pre=None), "tokenizer.ggml.pre is None"),
        (byte_level(merges=None), "tokenizer.ggml.merges is missing"),
        (byte_level(merges=["hi"]), "the merge 'hi'"),
        (byte_level(merges=["h x"]), "the merges do not fit the tokens"),
        (byte_level(tokens=None), "tokenizer.ggml.tokens is missing"),
        (byte_level(token_type=[NORMAL]), "tokenizer.ggml.token_type has 1 entries; 8 are needed"),
        (byte_level(tokens=["h", "i", "Ġ", "hi", "Ġhi", "x", "y", "h"]), "tokens 0 and 7 are both 'h'"),
        (byte_level(eos_token_id=8), "tokenizer.ggml.eos_token_id is 8; there are 8 tokens"),
        (
            byte_level(tokens=["h", "i", "Ġ", "hi", "Ġhi", "x", "y", "\udce9"]),
            "token 7 is '.udce9'; text in UTF-8",
        ),
        (byte_level(add_bos_token=True), "tokenizer.ggml.bos_token_id is missing"),
        (byte_level(add_bos_token="yes"), "tokenizer.ggml.add_bos_token is 'yes'"),
        (sentencepiece(scores=None), "tokenizer.ggml.scores is missing"),
        ({**byte_level(), "tokenizer.chat_template": "{% for %}"}, "chat template is not valid"),
        ({**byte_level(), "tokenizer.chat_template": 3}, "tokenizer.chat_template is no text"),
    ],
)
def test_a_wrong_key_is_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match="toy.gguf: .*" + message):
        tokenizer_from_metadata(keys, SOURCE)


def test_a_path_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent: is not there"):
        load_tokenizer(tmp_path / "absent")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"notes.txt: is a file of another kind"):
        load_tokenizer(tmp_path / "notes.txt")
    assert load_tokenizer(tmp_path) is None

"""GGUF vocabularies against llama.cpp, on the texts and ids of tests/references/tokenizer_ids.json."""

import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mimo_jax.checkpoint.gguf import read_gguf
from mimo_jax.text import Tokenizer
from mimo_jax.text.gguf_vocab import tokenizer_from_metadata

REFERENCE = json.loads((Path(__file__).parents[1] / "references" / "tokenizer_ids.json").read_text(encoding="ascii"))
TEXTS: list[str] = REFERENCE["texts"]
VOCABULARIES: dict[str, dict[str, Any]] = REFERENCE["vocabularies"]

# llama.cpp makes every token called "</s>" a control token that ends a turn, whatever the file says. In
# Gemma's file it is a user-defined token, the HTML tag that closes <s>; llama.cpp logs that it overrides the
# type.
WRONG_END = "</s>"
# In llama.cpp a text that begins with BOS gets a second one, with a warning that this is likely unwanted.
# Here a prompt that was rendered elsewhere keeps its one BOS.
BEGINS_WITH_BOS = "<bos>begins with BOS"

Load = Callable[[str], Tokenizer]


@pytest.fixture(scope="module")
def load(smollm2_path: Path, gemma_path: Path, smollm2: Tokenizer, gemma: Tokenizer) -> Load:
    metadata = {"smollm2": read_gguf(smollm2_path).metadata, "gemma3": read_gguf(gemma_path).metadata}

    @cache
    def load_named(name: str) -> Tokenizer:
        if not VOCABULARIES[name]["overrides"]:
            return {"smollm2": smollm2, "gemma3": gemma}[name]
        keys = {**metadata[name.split()[0]], **VOCABULARIES[name]["overrides"]}
        tokenizer = tokenizer_from_metadata(keys, Path(name))
        assert tokenizer is not None
        return tokenizer

    return load_named


def test_the_reference_holds_the_texts_it_promises() -> None:
    assert len(TEXTS) >= 60
    assert {"smollm2", "gemma3", "gemma3 with a space in front"} < VOCABULARIES.keys()


@pytest.mark.parametrize("name", VOCABULARIES)
def test_ids_are_those_of_llama_cpp(name: str, load: Load) -> None:
    tokenizer, expected = load(name), VOCABULARIES[name]
    for text, ids, with_special in zip(TEXTS, expected["ids"], expected["ids_with_special"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, repr(text)
        if "gemma3" in name and text == BEGINS_WITH_BOS:
            assert with_special[:2] == [tokenizer.bos_token_id] * 2
            with_special = with_special[1:]
        assert tokenizer.encode(text) == with_special, repr(text)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_text_is_that_of_llama_cpp(name: str, load: Load) -> None:
    tokenizer, expected = load(name), VOCABULARIES[name]
    for index, (text, ids) in enumerate(zip(TEXTS, expected["ids"], strict=True)):
        for key, skip in (("text", False), ("text_without_special", True)):
            want = text if expected[key][index] is None else expected[key][index]
            if skip and "gemma3" in name and WRONG_END in text:
                continue
            # llama.cpp's pieces keep the space its encoder put in front; a whole text does not show it.
            want = want.removeprefix(" ") if tokenizer.strips_leading_space else want
            assert tokenizer.decode(ids, skip_special_tokens=skip) == want, repr(text)


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_the_bytes_of_every_token_are_those_of_llama_cpp(name: str, load: Load) -> None:
    tokenizer = load(name)
    assert tokenizer.vocab_size == VOCABULARIES[name]["vocab_size"]
    digest = hashlib.sha256()
    for token_id in range(tokenizer.vocab_size):
        data = tokenizer.token_bytes(token_id)
        digest.update(b"%d:" % len(data) + data)
    assert digest.hexdigest() == VOCABULARIES[name]["pieces_sha256"]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_text_is_that_of_the_tokenizers_library(name: str, load: Load) -> None:
    tokenizer = load(name)
    for text, ids in zip(TEXTS, VOCABULARIES[name]["ids"], strict=True):
        for skip in (False, True):
            want = tokenizer.backend.decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == want, repr(text)


def test_stop_ids_of_smollm2_are_its_two_ends(load: Load) -> None:
    tokenizer = load("smollm2")
    assert [tokenizer.token_text(i) for i in tokenizer.stop_token_ids] == ["<|im_end|>", "<|endoftext|>"]
    # llama.cpp also ends at <reponame>, which it takes for a marker of fill-in-the-middle prompts.
    extra = set(VOCABULARIES["smollm2"]["end_ids"]) - set(tokenizer.stop_token_ids)
    assert [tokenizer.token_text(i) for i in extra] == ["<reponame>"]


def test_stop_ids_of_gemma_leave_out_the_html_tag(load: Load) -> None:
    tokenizer = load("gemma3")
    assert [tokenizer.token_text(i) for i in tokenizer.stop_token_ids] == ["<eos>", "<end_of_turn>"]
    extra = set(VOCABULARIES["gemma3"]["end_ids"]) - set(tokenizer.stop_token_ids)
    assert [tokenizer.token_text(i) for i in extra] == [WRONG_END]

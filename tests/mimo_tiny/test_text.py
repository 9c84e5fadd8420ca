"""mimo-tiny's tokenizer and chat template: literal prompts, and one way from text to ids and back."""

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mimo_tiny.batches import OTHER_WEIGHT, ROW_TOKENS, encode, packed_rows
from benchmarks.mimo_tiny.corpus import Part, chat_template, documents
from benchmarks.mimo_tiny.tokenizer import MARKS, SPECIAL, VOCAB, train_tokenizer, write_tokenizer
from mimo_jax.text import Tokenizer, load_tokenizer

USER: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
OPENING = "<|im_start|>system\nYou are mimo-tiny, a small test model.<|im_end|><|im_start|>user\nHi<|im_end|>"
TOOL = {
    "type": "function",
    "function": {
        "name": "roll",
        "description": "Rolls dice.",
        "parameters": {
            "type": "object",
            "properties": {"sides": {"type": "integer", "description": "How many", "enum": [6, 20]}},
            "required": ["sides"],
        },
    },
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, small())
    loaded = load_tokenizer(folder)
    assert loaded is not None
    return loaded


@cache
def small() -> Any:
    return train_tokenizer(sample=400)


def render(messages: list[dict[str, Any]], **arguments: Any) -> str:
    return chat_template().render(messages, **{"add_generation_prompt": False, **arguments})


def test_no_line_end_stands_between_the_turns() -> None:
    answer = [*USER, {"role": "assistant", "content": "Hello"}]
    assert render(answer) == f"{OPENING}<|im_start|>assistant\n<think></think>Hello<|im_end|>"
    system = [{"role": "system", "content": "Be brief."}, *USER]
    assert render(system) == "<|im_start|>system\nBe brief.<|im_end|><|im_start|>user\nHi<|im_end|>"


def test_the_answer_begins_without_thinking_unless_asked_for() -> None:
    assert render(USER, add_generation_prompt=True) == f"{OPENING}<|im_start|>assistant\n<think></think>"
    assert render(USER, add_generation_prompt=True, enable_thinking=True) == f"{OPENING}<|im_start|>assistant\n"


def test_reasoning_is_kept_or_only_that_behind_the_last_question() -> None:
    messages = [
        *USER,
        {"role": "assistant", "content": "<think>one</think>A"},
        *USER,
        {"role": "assistant", "content": "B", "reasoning_content": "two"},
    ]
    assert "<think>one</think>A<|im_end|>" in render(messages)
    last_only = render(messages, keep_all_reasoning=False)
    assert "<think></think>A<|im_end|>" in last_only
    assert "<think>two</think>B<|im_end|>" in last_only


def test_tools_are_listed_in_the_system_turn() -> None:
    assert render(USER, tools=[TOOL]).startswith(
        "<|im_start|>system\nYou are mimo-tiny, a small test model.\n\n# Tools\n\nYou may call functions.\n\n"
        "You have access to the following functions:\n\n<tools>\n<function>\n<name>roll</name>\n"
        "<description>Rolls dice.</description>\n<parameters>\n<parameter>\n<name>sides</name>\n<type>integer</type>\n"
        '<description>How many</description>\n<enum>[6, 20]</enum>\n</parameter>\n<required>["sides"]</required>\n'
        "</parameters>\n</function>\n</tools>\n\nCall a function in this form:\n<tool_call>\n<function=name>\n"
        "<parameter=key>value</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\n"
    )


def test_calls_and_what_they_return() -> None:
    call = {"type": "function", "function": {"name": "roll", "arguments": {"sides": 6, "names": ["a", "b"]}}}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "tool", "content": "5"},
    ]
    assert render([*USER, *messages]) == (
        f"{OPENING}<|im_start|>assistant\n<think></think><tool_call>\n<function=roll>\n<parameter=sides>6</parameter>\n"
        '<parameter=names>["a", "b"]</parameter>\n</function>\n</tool_call><|im_end|><|im_start|>tool\n'
        "<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response>\n<|im_end|>"
    )


def test_training_the_tokenizer_again_gives_the_same() -> None:
    assert train_tokenizer(sample=400).to_str() == small().to_str()


def test_every_text_comes_back(tokenizer: Tokenizer) -> None:
    for document in itertools.islice(documents(Part.HELD_OUT), 60):
        assert tokenizer.decode(tokenizer.encode(document.text()), skip_special_tokens=False) == document.text()
    for text in ("", "  two  spaces\n\n\ttab", "Grüße, 你好 \U0001f600", "12345"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_stand_alone_and_marks_are_one_token(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("12345")) == 5
    assert all(len(tokenizer.encode(text)) == 1 for text in (*SPECIAL, *MARKS))
    assert tokenizer.vocab_size <= VOCAB
    assert tokenizer.stop_token_ids == tuple(tokenizer.encode("<|im_end|><|endoftext|>"))


def test_prompt_and_answer_are_the_text_the_model_learns(tokenizer: Tokenizer) -> None:
    for document in itertools.islice(documents(Part.TRAIN), 60):
        assert document.text().startswith(f"{document.prompt()}{document.answer()}<|im_end|>")
        ids, weights = encode(document, tokenizer)
        written = tokenizer.decode([i for i, w in zip(ids, weights, strict=True) if w == 1], skip_special_tokens=False)
        assert written.startswith(f"{document.answer()}<|im_end|>")
        assert set(weights) <= {0.0, 1.0, OTHER_WEIGHT}


def test_rows_hold_whole_texts_and_every_text_once() -> None:
    texts = [([number] * (30 + 37 * number % 300), [0.0]) for number in range(200)]
    rows = list(itertools.islice(packed_rows(iter(texts)), 50))
    numbers = [number for ids, _ in rows for number in dict.fromkeys(ids)]
    assert len(numbers) == len(set(numbers))
    assert all(len(ids) <= ROW_TOKENS for ids, _ in rows)
    assert all(ids.count(number) == len(texts[number][0]) for ids, _ in rows for number in set(ids))
    assert sum(len(ids) for ids, _ in rows) > 0.9 * 50 * ROW_TOKENS

"""The text that mimo-tiny learned from: the same for a seed, in two parts that share no question, and correct."""

import itertools
import json
from functools import cache
from typing import Any

import pytest

from benchmarks.mimo_tiny.arithmetic import worked
from benchmarks.mimo_tiny.corpus import KINDS, Document, Part, documents
from benchmarks.mimo_tiny.dialogues import SMALL_TALK
from benchmarks.mimo_tiny.draw import Draw
from benchmarks.mimo_tiny.evaluate import held_out, question, shares, valid


@cache
def some(part: Part, count: int = 300) -> list[Document]:
    return list(itertools.islice(documents(part), count))


def of_kind(kind: str) -> list[Document]:
    return [document for document in some(Part.TRAIN) if document.kind == kind]


def test_the_draws_are_those_of_every_python_version() -> None:
    draw = Draw(1)
    assert [draw.below(100) for _ in range(6)] == [13, 84, 76, 25, 49, 44]
    assert [draw.between(1, 3) for _ in range(6)] == [2, 3, 1, 1, 3, 2]
    assert draw.some("abcd", 4) == ["d", "a", "b", "c"]


def test_a_part_is_the_same_every_time() -> None:
    again = list(itertools.islice(documents(Part.TRAIN), 40))
    assert [document.text() for document in again] == [document.text() for document in some(Part.TRAIN)[:40]]


def test_no_question_of_training_is_held_out() -> None:
    asked = {question(document) for document in some(Part.HELD_OUT)}
    assert not asked & {question(document) for document in some(Part.TRAIN, 2000)}
    assert not asked & set(dict(SMALL_TALK))


def test_every_kind_is_there() -> None:
    assert {document.kind for document in some(Part.TRAIN)} == set(KINDS)
    assert [document.kind for document in held_out(2)] == [kind for kind in KINDS for _ in range(2)]


def test_every_json_answer_parses_and_says_what_was_asked() -> None:
    for document in of_kind("json"):
        value: Any = json.loads(document.answer())
        records = value if isinstance(value, list) else [value]
        for field, told in ((field, told) for record in records for field, told in record.items()):
            assert field in question(document)
            if isinstance(told, str) and ":" in question(document):
                assert told in question(document)


def test_every_function_works() -> None:
    for document in of_kind("function"):
        space: dict[str, Any] = {}
        exec(document.answer().removeprefix("```python\n").removesuffix("\n```"), space)
        (name,) = (key for key in space if key != "__builtins__")
        assert name in question(document)
        if name.startswith("sum_above_"):
            assert space[name]([1, 100, 200]) == 300
        if name.startswith("count_even"):
            assert space[name]([1, 2, 4]) == 2


@pytest.mark.parametrize(
    ("first", "sign", "second", "result"), [(47, "+", 38, 85), (83, "-", 47, 36), (47, "*", 6, 282)]
)
def test_arithmetic_is_right(first: int, sign: str, second: int, result: int) -> None:
    assert worked(first, sign, second).endswith(f"The answer is {result}.")


def test_the_steps_of_a_sum_are_written_out() -> None:
    assert worked(47, "+", 38) == "7 + 8 = 15, write 5, carry 1. 4 + 3 + 1 = 8. The answer is 85."
    assert worked(83, "-", 47) == "13 - 7 = 6, borrow 1. 8 - 1 - 4 = 3. The answer is 36."
    assert worked(47, "*", 6) == "7 * 6 = 42, write 2, carry 4. 4 * 6 + 4 = 28. The answer is 282."


def test_every_tool_call_is_closed_and_answered() -> None:
    for document in of_kind("tools"):
        text = "".join(part.partition("<|im_end|>")[0] for part in document.text().split("</think>")[1:])
        calls = text.count("<tool_call>")
        assert calls == text.count("</parameter>\n</function>\n</tool_call>")
        assert calls == document.text().count("<tool_response>")


def test_expected_answers_are_valid_and_broken_ones_are_not() -> None:
    asked = held_out(5)
    expected = [document.answer() for document in asked]
    assert all(found["valid"] == found["expected"] == 1 for found in shares(asked, expected).values())
    assert not any(valid(document, text[: len(text) // 2]) for document, text in zip(asked, expected, strict=True))

"""Stop strings: nothing of one leaks, nothing held back is lost (case B21)."""

import random
from collections.abc import Sequence

import pytest

from mimo_jax.errors import RequestError
from mimo_jax.text import StopStrings, TextStream


class Letters:
    """A detokenizer whose ids index into a list of pieces."""

    def __init__(self, pieces: Sequence[str], tail: str = "") -> None:
        self._pieces = pieces
        self._tail = tail

    def add(self, ids: Sequence[int]) -> str:
        return "".join(self._pieces[i] for i in ids)

    def finish(self) -> str:
        tail, self._tail = self._tail, ""
        return tail


def run(pieces: Sequence[str], stop: Sequence[str], include: bool = False) -> tuple[list[str], str | None]:
    """One token a step; the deltas, ending with that of `finish`, and the match."""
    stream = TextStream(Letters(pieces), stop, include_stop=include)
    deltas, matched = [], None
    for index in range(len(pieces)):
        delta, matched = stream.add([index])
        deltas.append(delta)
    return [*deltas, stream.finish()], matched


def first_stop(text: str, stop: Sequence[str]) -> tuple[int, int, str] | None:
    """By definition, without any cleverness: the first end, and of those the longest."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            longest = max(complete, key=len)
            return end - len(longest), end, longest
    return None


@pytest.mark.parametrize(
    ("pieces", "stop", "deltas", "matched"),
    [
        (["He", "llo ", "ST", "O", "P", " more"], ["STOP"], ["He", "llo ", "", "", "", "", ""], "STOP"),
        (["abST", "OPcd"], ["STOP"], ["ab", "", ""], "STOP"),
        (["ST", "ART"], ["STOP"], ["", "START", ""], None),
        (["x\n", "\ny"], ["\n\n"], ["x", "", ""], "\n\n"),
        (["xab", "c"], ["abc", "ab"], ["x", "", ""], "ab"),
        (["xa", "bd"], ["abc"], ["x", "abd", ""], None),
        (["aa", "ab"], ["aab"], ["", "a", ""], "aab"),
        (["one STOP two STOP"], ["STOP"], ["one ", ""], "STOP"),
        (["ab", "S"], ["STOP"], ["ab", "", "S"], None),
        (["x", "yz"], ["yz", "xyz"], ["", "", ""], "xyz"),
        (["bcd", "e"], ["bcd", "abcde"], ["", "", ""], "bcd"),
        (["ab", "c"], [], ["ab", "c", ""], None),
    ],
)
def test_in_pictures(pieces: list[str], stop: list[str], deltas: list[str], matched: str | None) -> None:
    assert run(pieces, stop) == (deltas, matched)


def test_the_stop_string_is_shown_on_request() -> None:
    assert run(["ab", "ST", "OPcd"], ["STOP"], include=True) == (["ab", "", "STOP", ""], "STOP")


def test_random_texts_are_cut_as_by_definition_in_any_grouping() -> None:
    draw = random.Random(21)
    for _ in range(2000):
        pieces = ["".join(draw.choice("ab\n") for _ in range(draw.randint(0, 4))) for _ in range(6)]
        stop = ["".join(draw.choice("ab\n") for _ in range(draw.randint(1, 4))) for _ in range(draw.randint(0, 4))]
        include = draw.random() < 0.5
        text = "".join(pieces)
        found = first_stop(text, stop)
        stream, sent, matched, position = TextStream(Letters(pieces), stop, include), "", None, 0
        while position < len(pieces):
            size = draw.randint(1, 3)
            delta, matched = stream.add(range(position, min(position + size, len(pieces))))
            sent += delta
            position += size
            held = len("".join(pieces[:position])) - len(sent)
            assert matched or held == longest_held("".join(pieces[:position]), stop)
        sent += stream.finish()
        if found is None:
            assert (sent, matched) == (text, None)
        else:
            start, end, string = found
            assert (sent, matched) == (text[: end if include else start], string)


def longest_held(text: str, stop: Sequence[str]) -> int:
    return max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)


def test_a_stop_below_the_minimum_length_is_text() -> None:
    stream = TextStream(Letters(["ab", "c", "ab"]), ["ab"])
    assert stream.add([0], check_stop=False) == ("ab", None)
    assert stream.add([1]) == ("c", None)
    assert stream.add([2]) == ("", "ab")


def test_a_stop_that_begins_below_the_minimum_length_counts_where_it_ends() -> None:
    stream = TextStream(Letters(["xa", "b"]), ["ab"])
    assert stream.add([0], check_stop=False) == ("x", None)
    assert stream.add([1]) == ("", "ab")


def test_an_ignored_stop_holds_back_only_what_may_still_begin_another() -> None:
    stream = TextStream(Letters(["xaba", "ba"]), ["aba"])
    assert stream.add([0], check_stop=False) == ("xab", None)
    assert stream.add([1]) == ("", "aba")


def test_finish_flushes_the_held_part_and_the_broken_tail_once() -> None:
    stream = TextStream(Letters(["ab"], tail="\ufffd"), ["bc"])
    assert stream.add([0]) == ("a", None)
    assert [stream.finish(), stream.finish()] == ["b\ufffd", ""]


def test_after_a_match_nothing_more_comes() -> None:
    stream = TextStream(Letters(["aX", "b"], tail="c"), ["X"])
    assert stream.add([0]) == ("a", "X")
    assert stream.add([1]) == ("", "X")
    assert stream.finish() == ""


def test_one_set_of_stop_strings_serves_many_streams() -> None:
    stops = StopStrings(["ab"])
    first, second = TextStream(Letters(["a", "b"]), stops), TextStream(Letters(["b", "a"]), stops)
    assert [first.add([0]), second.add([0]), first.add([1]), second.add([1])] == [
        ("", None),
        ("b", None),
        ("", "ab"),
        ("", None),
    ]


@pytest.mark.parametrize("stop", [[""], ["a", ""], "abc", [3]])
def test_a_stop_that_is_no_list_of_texts_is_refused(stop: object) -> None:
    with pytest.raises(RequestError, match="stop is") as caught:
        StopStrings(stop)  # type: ignore[arg-type]
    assert caught.value.param == "stop"

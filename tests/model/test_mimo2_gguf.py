"""A MiMo-V2 GGUF file, loaded here and in llama.cpp (committed values), gives the same tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests import tiny
from tests.model.engines import greedy, make_llm
from tests.tiny_gguf import write_mimo2_gguf

REFERENCE = json.loads((Path(__file__).parent.parent / "references" / "mimo2.json").read_text())["cases"]
CASES = [case for case in tiny.cases() if case.name in REFERENCE]
# llama.cpp and the oracle differ by 1.3e-5, both float32 here; a window of one token more moves the row by over 0.01.
BOUND = 1e-4


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_file_gives_llama_cpps_tokens(case: tiny.Case, tmp_path: Path) -> None:
    path = write_mimo2_gguf(case.into(tmp_path / "hub"), tmp_path / "tiny.gguf")
    llm = make_llm(path, 96, chunk=64)
    wanted = REFERENCE[case.name]
    assert np.abs(llm.score(tiny.prompt())[-1] - np.array(wanted["first"])).max() < BOUND
    assert min(wanted["greedy_gaps"]) > 10 * BOUND
    assert greedy(llm, tiny.prompt(), len(wanted["greedy"]))[0] == wanted["greedy"]


def test_a_longer_window_would_show(tmp_path: Path) -> None:
    """Negative control: transformers' window, which counts the query beside the tokens before it."""
    case = CASES[0]
    folder = tiny.Case(case.name, case.write, case.seed, {"sliding_window": 12}).into(tmp_path / "hub")
    llm = make_llm(write_mimo2_gguf(folder, tmp_path / "tiny.gguf"), 96, chunk=64)
    assert np.abs(llm.score(tiny.prompt())[-1] - np.array(REFERENCE[case.name]["first"])).max() > 100 * BOUND


def test_every_mimo_case_has_reference_values() -> None:
    assert {case.name for case in CASES} == {case.name for case in tiny.cases() if case.name.startswith("mimo_v2")}

"""The engine computes what transformers and the oracle compute, for every tiny checkpoint and every way to it.

Prefill in one piece, prefill in chunks around the window, and decode all go through the paged cache.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from mimo_jax import LLM
from tests import tiny
from tests.model.engines import greedy, make_llm, with_chunks
from tests.oracle import oracle_log_probs

REFERENCES = Path(__file__).parent.parent / "references" / "transformers.npz"

# Three float32 machines in three orders of summation: transformers is up to 2.1e-5 from the float64 oracle on these
# checkpoints, and the smallest deliberate mistake in test_oracle.py moves a log-probability by more than 0.1.
BOUND = 1e-4
WINDOW = 11
PROMPT = tiny.prompt()
GREEDY_TOKENS = 24
TOKENS = len(PROMPT) + GREEDY_TOKENS

CASES = {case.name: case for case in tiny.cases()}


@dataclass(frozen=True)
class Loaded:
    case: tiny.Case
    folder: Path
    llm: LLM
    expected: np.ndarray  # [tokens - 1, vocab], behind each token of prompt and continuation
    continuation: list[int]


@pytest.fixture(scope="module", params=CASES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    case = CASES[request.param]
    folder = case.into(tmp_path_factory.mktemp("tiny") / case.name)
    llm = make_llm(folder, TOKENS, chunk=TOKENS)
    if case.in_transformers:
        with np.load(REFERENCES) as committed:
            continuation = committed[f"{case.name}/greedy"].tolist()
    else:
        continuation, _ = greedy(llm, PROMPT, GREEDY_TOKENS)  # judged by the oracle's choices below
    return Loaded(case, folder, llm, oracle_log_probs(folder, PROMPT + continuation[:-1]), continuation)


def deviation(one: np.ndarray, two: np.ndarray) -> float:
    assert one.shape == two.shape
    return float(np.abs(one - two).max())


def test_prefill_in_one_piece_gives_the_log_probabilities_of_transformers(loaded: Loaded) -> None:
    got = loaded.llm.score(PROMPT)
    assert got.shape == (len(PROMPT), tiny.VOCAB_SIZE)
    assert got.dtype == np.float32
    assert deviation(got, loaded.expected[: len(PROMPT)]) < BOUND
    if loaded.case.in_transformers:
        with np.load(REFERENCES) as committed:
            assert deviation(got, committed[f"{loaded.case.name}/log_probs"]) < BOUND


@pytest.mark.parametrize("chunk", [1, WINDOW - 1, WINDOW, WINDOW + 1, 16, 17])
def test_prefill_in_chunks_gives_the_same_log_probabilities(loaded: Loaded, chunk: int) -> None:
    """Chunks around the window and around the page of 16 tokens; prompt and continuation are read as one prompt."""
    got = with_chunks(loaded.llm, chunk).score(PROMPT + loaded.continuation[:-1])
    assert deviation(got, loaded.expected) < BOUND


def test_the_greedy_continuation_and_its_log_probabilities_are_theirs(loaded: Loaded) -> None:
    ids, log_probs = greedy(loaded.llm, PROMPT, GREEDY_TOKENS)
    assert ids == loaded.continuation
    assert ids == loaded.expected[len(PROMPT) - 1 :].argmax(axis=-1).tolist()
    expected = loaded.expected[np.arange(len(PROMPT) - 1, TOKENS - 1), ids]
    assert deviation(np.array(log_probs), expected) < BOUND


def test_decode_from_the_first_token_on_gives_the_log_probabilities_of_prefill(loaded: Loaded) -> None:
    """A prompt of one token: nearly every key was written by decode, and the window fills and slides."""
    first = PROMPT[:1]
    ids, log_probs = greedy(loaded.llm, first, 3 * WINDOW)
    rows = oracle_log_probs(loaded.folder, first + ids[:-1])
    assert deviation(np.array(log_probs), rows[np.arange(len(ids)), ids]) < BOUND


def test_no_program_was_compiled_late(loaded: Loaded) -> None:
    assert loaded.llm.engine.steps.late_compiles == 0


def test_a_page_smaller_than_the_window_and_a_program_of_the_window_s_length_change_nothing(tmp_path: Path) -> None:
    """Here the compiled chunk is the window itself, so that no row of a chunk is padding."""
    folder = CASES["mimo_v2_pro"].into(tmp_path)
    llm = make_llm(folder, len(PROMPT) + 1, chunk=WINDOW, block_size=4)
    assert deviation(llm.score(PROMPT), oracle_log_probs(folder, PROMPT)) < BOUND


@pytest.mark.parametrize("name", CASES)
def test_a_bfloat16_checkpoint_in_three_shards_loads_to_the_same_numbers(name: str, tmp_path: Path) -> None:
    """Widening bfloat16 is exact, so the bound stays that of float32."""
    case = CASES[name]
    folder = case.write(tmp_path, case.seed, **(case.overrides | {"shards": 3, "dtype": "bfloat16"}))
    assert len(list(folder.glob("*.safetensors"))) == 3
    llm = make_llm(folder, TOKENS, chunk=TOKENS, dtype="float32")
    assert deviation(llm.score(PROMPT), oracle_log_probs(folder, PROMPT)) < BOUND


def test_computing_in_bfloat16_stays_near_the_float32_result(tmp_path: Path) -> None:
    """Eight bits of mantissa over four layers: 0.043 on average and 0.34 at worst, measured."""
    case = CASES["llama"]
    folder = case.write(tmp_path, case.seed, dtype="bfloat16", **case.overrides)
    got = make_llm(folder, len(PROMPT) + 1, chunk=len(PROMPT), dtype="bfloat16").score(PROMPT)
    wanted = oracle_log_probs(folder, PROMPT)
    assert np.abs(got - wanted).mean() < 0.1
    gaps = np.diff(np.sort(wanted, axis=-1)[:, -2:])[:, 0]
    clear = gaps > 0.5
    assert clear.sum() > 10
    assert (got.argmax(axis=-1) == wanted.argmax(axis=-1))[clear].all()

"""What mimo-tiny writes, and what its draft heads are worth: numbers that may not fall.

Questions are held out: no text that it was trained on asks them.
"""

import pytest

from benchmarks.mimo_tiny.corpus import Document
from benchmarks.mimo_tiny.evaluate import answers, held_out, shares
from mimo_jax import LLM, SamplingParams

EACH = 8  # questions of each kind
# Measured: 3.5 (see benchmarks/mimo_tiny/README.md); fewer means that a head is fed wrongly.
LEAST_ACCEPTED = 3.0


@pytest.fixture(scope="module")
def asked() -> list[Document]:
    return held_out(EACH)


@pytest.fixture(scope="module")
def drafting() -> LLM:
    """Verifies in every step, whatever pays on this machine."""
    llm = LLM("mimo-tiny", max_model_len=640, max_num_seqs=1, max_num_batched_tokens=64, progress=False)
    llm.engine.speculation.drafts_for = lambda rung: llm.engine.limits.drafts  # type: ignore[method-assign]
    return llm


@pytest.fixture(scope="module")
def written(drafting: LLM, asked: list[Document]) -> list[str]:
    return answers(drafting, asked)


def test_it_answers_in_form(asked: list[Document], written: list[str]) -> None:
    valid = {kind: found["valid"] for kind, found in shares(asked, written).items()}
    assert min(valid.values()) > 0.7, valid


def test_drafts_are_accepted(drafting: LLM, written: list[str]) -> None:
    metrics = drafting.draft_metrics
    assert metrics.mean_accepted_length > LEAST_ACCEPTED
    assert metrics.accepted == sum(metrics.accepted_at)
    assert metrics.accepted_at == sorted(metrics.accepted_at, reverse=True)


def test_drafts_change_no_answer(
    drafting: LLM, asked: list[Document], written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = drafting.draft_metrics.steps
    monkeypatch.setattr(drafting.engine.speculation, "drafts_for", lambda rung: 0)
    assert answers(drafting, asked[::4]) == written[::4]
    assert drafting.draft_metrics.steps == steps


def test_the_first_tokens_have_warm_heads(drafting: LLM, asked: list[Document]) -> None:
    """Heads that do not run over the prompt accept little until their window has filled."""
    before = drafting.draft_metrics.steps, drafting.draft_metrics.accepted
    drafting.generate([document.prompt() for document in asked[::2]], SamplingParams(temperature=0, max_tokens=32))
    steps, accepted = (
        now - then
        for now, then in zip((drafting.draft_metrics.steps, drafting.draft_metrics.accepted), before, strict=True)
    )
    assert 1 + accepted / steps > LEAST_ACCEPTED - 0.3

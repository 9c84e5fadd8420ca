"""The oracle agrees with Hugging Face transformers, and each fact of MiMo-V2 shows in the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests import oracle, tiny

REFERENCES = Path(__file__).parent.parent / "references" / "transformers.npz"

# Float32 (transformers) against float64 (oracle): 2.1e-5 at worst over these checkpoints, and five times that
# leaves room for no mistake: the smallest deliberate one below moves a log-probability by more than 0.1.
BOUND = 1e-4
MISTAKE = 0.1

REFERENCED = [case for case in tiny.cases() if case.in_transformers]
MIMO = [case for case in tiny.cases() if case.name.startswith("mimo_v2")]
SHORT = tiny.prompt(30)  # two windows and more, enough for a mistake to show
Change = Callable[[oracle.Config, oracle.Tensors], None]


@pytest.fixture(scope="module")
def committed() -> dict[str, np.ndarray]:
    with np.load(REFERENCES) as arrays:
        return dict(arrays)


def test_the_prompt_of_the_committed_values_is_ours_and_crosses_three_windows(
    committed: dict[str, np.ndarray],
) -> None:
    assert committed["prompt"].tolist() == tiny.prompt()
    assert len(tiny.prompt()) > 3 * 11


@pytest.mark.parametrize("case", REFERENCED, ids=lambda case: case.name)
def test_log_probabilities_agree_with_transformers(
    case: tiny.Case, tmp_path: Path, committed: dict[str, np.ndarray]
) -> None:
    got = oracle.oracle_log_probs(case.into(tmp_path), tiny.prompt())
    assert np.abs(got - committed[f"{case.name}/log_probs"]).max() < BOUND


@pytest.mark.parametrize("case", REFERENCED, ids=lambda case: case.name)
def test_the_greedy_continuation_is_that_of_transformers(
    case: tiny.Case, tmp_path: Path, committed: dict[str, np.ndarray]
) -> None:
    """One forward pass suffices: row t of a causal model does not see what follows."""
    continuation = committed[f"{case.name}/greedy"].tolist()
    rows = oracle.oracle_log_probs(case.into(tmp_path), tiny.prompt() + continuation[:-1])
    assert rows[-len(continuation) :].argmax(axis=-1).tolist() == continuation
    assert committed[f"{case.name}/greedy_gaps"].min() > 10 * BOUND


@pytest.mark.parametrize("pair", [("mimo_v2_flash", "mimo_v2"), ("gemma3_text", "gemma3_text")])
def test_two_published_forms_of_one_model_are_one_model(pair: Sequence[str], tmp_path: Path) -> None:
    if pair[0] == "mimo_v2_flash":  # split projections against fused ones
        first = tiny.write_mimo_v2_flash(tmp_path / "a", 9, rope_theta=10000000)
        second = tiny.write_mimo_v2(tmp_path / "b", 9, shards=3)
    else:  # a period against a list of layer kinds
        first = tiny.write_gemma3_text(tmp_path / "a", 9)
        second = tiny.write_gemma3_text(tmp_path / "b", 9, list_layers=True)
    one, two = (oracle.oracle_log_probs(folder, tiny.prompt(20)) for folder in (first, second))
    np.testing.assert_allclose(one, two, atol=1e-12)


# ---- negative controls: a mistake must show ----


def window_one_longer(config: oracle.Config, _: oracle.Tensors) -> None:
    config["sliding_window"] += 1


def window_one_shorter(config: oracle.Config, _: oracle.Tensors) -> None:
    config["sliding_window"] -= 1


def sink_dropped(_: oracle.Config, tensors: oracle.Tensors) -> None:
    for name in [name for name in tensors if name.endswith("attention_sink_bias")]:
        del tensors[name]


def value_scale_dropped(config: oracle.Config, _: oracle.Tensors) -> None:
    config["attention_value_scale"] = 1.0


def rotary_over_the_whole_head(config: oracle.Config, _: oracle.Tensors) -> None:
    config["partial_rotary_factor"] = 1.0


def one_rotary_base_for_all_layers(config: oracle.Config, _: oracle.Tensors) -> None:
    config["swa_rope_theta"] = config["rope_theta"]


def router_bias_dropped(_: oracle.Config, tensors: oracle.Tensors) -> None:
    for name in [name for name in tensors if name.endswith("e_score_correction_bias")]:
        tensors[name] = np.zeros_like(tensors[name])


MISTAKES: list[Change] = [
    window_one_longer,
    window_one_shorter,
    sink_dropped,
    value_scale_dropped,
    rotary_over_the_whole_head,
    one_rotary_base_for_all_layers,
    router_bias_dropped,
]


@pytest.mark.parametrize("case", MIMO, ids=lambda case: case.name)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_changes_the_result(mistake: Change, case: tiny.Case, tmp_path: Path) -> None:
    config, tensors = oracle.read_checkpoint(case.into(tmp_path))
    right = oracle.log_probs(config, tensors, SHORT)
    mistake(config, tensors)
    assert np.abs(oracle.log_probs(config, tensors, SHORT) - right).max() > MISTAKE


@pytest.mark.parametrize("case", MIMO, ids=lambda case: case.name)
def test_a_router_bias_in_the_weights_changes_the_result(
    case: tiny.Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tensors = oracle.read_checkpoint(case.into(tmp_path))
    right = oracle.log_probs(config, tensors, SHORT)
    weigh = oracle.expert_weights
    monkeypatch.setattr(oracle, "expert_weights", lambda scores, bias, count: weigh(scores + bias, 0 * bias, count))
    assert np.abs(oracle.log_probs(config, tensors, SHORT) - right).max() > MISTAKE


@pytest.mark.parametrize("mistake", [window_one_longer, window_one_shorter])
def test_a_window_off_by_one_spares_exactly_the_rows_that_see_the_same_keys(mistake: Change, tmp_path: Path) -> None:
    """With window W, rows 0 .. W - 1 see every earlier key; a shorter window already changes row W - 1."""
    config, tensors = oracle.read_checkpoint(tiny.write_mimo_v2_flash(tmp_path, 1))
    window = config["sliding_window"]
    right = oracle.log_probs(config, tensors, SHORT)
    mistake(config, tensors)
    changed = np.abs(oracle.log_probs(config, tensors, SHORT) - right).max(axis=-1) > 1e-9
    assert np.flatnonzero(changed)[0] == min(window, config["sliding_window"])


def test_the_window_counts_the_query_itself() -> None:
    seen = [[oracle.window_visible(query, key, 3) for key in range(6)] for query in range(6)]
    assert np.array(seen, int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 0, 1, 1, 1],
    ]

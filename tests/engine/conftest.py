"""One tiny hybrid model with a tokenizer, and one engine of it whose few shapes are compiled once for all tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mimo_jax.engine.engine import Engine
from mimo_jax.engine.setup import EngineOptions, Load, load_engine
from mimo_jax.llm import LLM
from tests.engine.helpers import assert_idle
from tests.text.toys import EOS, byte_level_backend, write_folder
from tests.tiny import write_mimo_v2_flash


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full layer, dense, and a window layer of 11 tokens with sinks and experts; 300 head rows for 262 tokens."""
    folder = write_mimo_v2_flash(
        tmp_path_factory.mktemp("hybrid"), 3, vocab_size=300, hybrid_layer_pattern=[0, 1], moe_layer_freq=[0, 1]
    )
    return write_folder(folder, byte_level_backend(), {"tokenizer_config.json": {"eos_token": EOS}})


@pytest.fixture(scope="session")
def shared_engine(model_folder: Path) -> Engine:
    """Pages of 4 tokens, 8 sequences, prompt chunks of 32 tokens for one row or 16 for two."""
    options = EngineOptions(
        model_folder,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        block_size=4,
    )
    return load_engine(options, expect=lambda _, limits: Load(limits.max_seqs, 127, 128, scoring=True))


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """The shared engine, which every test has to leave idle and without a new shape."""
    compiled = set(shared_engine.steps._jobs)
    yield shared_engine
    assert_idle(shared_engine)
    assert shared_engine.steps.late_compiles == 0
    assert set(shared_engine.steps._jobs) == compiled


@pytest.fixture
def llm(engine: Engine) -> LLM:
    return LLM.from_engine(engine, progress=False)

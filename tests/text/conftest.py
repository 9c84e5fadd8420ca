"""The two public vocabularies the text tests run on. A missing package is a failure, not a skip."""

from pathlib import Path

import pytest

from mimo_jax.text import Tokenizer, load_tokenizer


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

"""Config and tokenizer of a converted model."""

import dataclasses
import json
from pathlib import Path

import pytest

from mimo_jax.checkpoint import gguf
from mimo_jax.checkpoint.checkpoint import open_checkpoint
from mimo_jax.checkpoint.config_json import config_from_json, config_to_json
from mimo_jax.text import load_tokenizer
from tests import tiny


@pytest.mark.parametrize("case", tiny.cases(), ids=lambda case: case.name)
def test_configs_survive_json(case: tiny.Case, tmp_path: Path) -> None:
    config = open_checkpoint(case.into(tmp_path)).config
    back = config_from_json(json.loads(json.dumps(config_to_json(config))))
    assert back == config
    assert hash(back) == hash(config)
    with pytest.raises(ValueError, match="norm_epsilon"):
        config_from_json(config_to_json(config) | {"norm_epsilon": "small"})
    assert dataclasses.replace(back, vocab=7) != config


def test_the_tokenizer_of_a_gguf_comes_along(smollm2_path: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.gguf").write_bytes(gguf.without_tensors(smollm2_path))
    one, two = load_tokenizer(smollm2_path), load_tokenizer(tmp_path)
    assert one is not None
    assert two is not None
    text = "What is the capital of France? 12345 ünïcode"
    assert two.encode(text) == one.encode(text)
    assert two.chat_template is not None
    assert two.stop_token_ids == one.stop_token_ids

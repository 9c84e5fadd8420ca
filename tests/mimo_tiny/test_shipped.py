"""The model that is shipped: its files, its size, and that it is what the script made."""

import json
from pathlib import Path

import numpy as np

import mimo_jax
from benchmarks.mimo_tiny.architecture import DRAFT_HEADS, hub_config, model_config
from benchmarks.mimo_tiny.corpus import TEMPLATE, Part, documents
from benchmarks.mimo_tiny.train import COLUMNS, SEED
from mimo_jax.checkpoint import safetensors
from mimo_jax.checkpoint.checkpoint import open_checkpoint
from mimo_jax.text import load_tokenizer

FOLDER = Path(mimo_jax.__file__).parent / "mimo_tiny"


def test_it_opens_as_the_architecture_says() -> None:
    assert open_checkpoint(FOLDER).config == model_config()
    config = json.loads((FOLDER / "config.json").read_text())
    assert config == hub_config() | {"eos_token_id": config["eos_token_id"], "pad_token_id": config["pad_token_id"]}


def test_it_is_small() -> None:
    tensors = safetensors.read_index(FOLDER).values()
    assert 2e6 < sum(np.prod(tensor.shape) for tensor in tensors) < 6e6
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 12e6
    assert {tensor.name.split(".")[3] for tensor in tensors if ".mtp." in tensor.name} == set(
        map(str, range(DRAFT_HEADS))
    )


def test_it_learned() -> None:
    record = json.loads((FOLDER / "loss.json").read_text())
    assert (record["seed"], record["columns"]) == (SEED, list(COLUMNS))
    first, last = record["curve"][0], record["curve"][-1]
    assert all(low < 0.3 < 2 < high for low, high in zip(last[2:6], first[2:6], strict=True))
    assert record["cpu_s"] <= 40 * 60
    assert record["held_out"]["tokens_a_step"] >= 2.5


def test_tokenizer_and_template_are_the_script_s() -> None:
    tokenizer = load_tokenizer(FOLDER)
    assert tokenizer is not None
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.source == TEMPLATE.read_text(encoding="utf-8")
    document = next(document for document in documents(Part.HELD_OUT) if document.kind == "tools")
    first = next(place for place, message in enumerate(document.messages) if message["role"] == "assistant")
    ids = tokenizer.encode_chat(list(document.messages[:first]), tools=document.tools)
    assert tokenizer.decode(ids, skip_special_tokens=False) == document.prompt()

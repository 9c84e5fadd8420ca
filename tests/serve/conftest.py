"""One tiny model with a tokenizer, served once for all tests by a real server on a port of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mimo_jax.engine.engine import Engine
from mimo_jax.engine.setup import EngineOptions, Load, load_engine
from mimo_jax.llm import LLM
from serve.worker import EngineWorker
from tests.serve.client import Server, running
from tests.text.toys import TURN_END, byte_level_backend, write_folder
from tests.tiny import write_llama, write_mimo_v2_flash

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined %}"
    "{{ '[on]' if enable_thinking else '[off]' }}{% endif %}{% endif %}"
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that speaks bytes; its turn end is the token <|im_end|>."""
    backend = byte_level_backend()
    turn_end = backend.token_to_id(TURN_END)
    folder = write_llama(
        tmp_path_factory.mktemp("model"), 3, vocab_size=300, eos_token_id=turn_end, num_hidden_layers=2
    )
    config = {"eos_token": TURN_END, "chat_template": CHAT_TEMPLATE}
    return write_folder(folder, backend, {"tokenizer_config.json": config})


def load(folder: Path, seqs: int = 4) -> Engine:
    """Few shapes, because each takes seconds to compile: prompt chunks of 16 tokens, one at a time."""
    options = EngineOptions(
        folder,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=seqs,
        max_num_batched_tokens=16,
        block_size=8,
    )
    return load_engine(options, expect=lambda _, limits: Load(limits.max_seqs, 127, 128))


@pytest.fixture(scope="session")
def server(model_folder: Path) -> Iterator[Server]:
    worker = EngineWorker(lambda: load(model_folder))
    with running(worker) as started:
        started.wait_ready()
        yield started


@pytest.fixture(scope="session")
def ids_only_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A hybrid window model that has no tokenizer."""
    folder = write_mimo_v2_flash(
        tmp_path_factory.mktemp("ids_only"), 5, hybrid_layer_pattern=[0, 1], moe_layer_freq=[0, 0]
    )
    with running(EngineWorker(lambda: load(folder, seqs=1))) as started:
        started.wait_ready()
        yield started


@pytest.fixture(scope="session")
def llm(model_folder: Path) -> LLM:
    """The same model behind the Python API, as the reference."""
    return LLM.from_engine(load(model_folder), progress=False)


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test that used the server, it is idle and holds no page."""
    yield
    for name in {"server", "ids_only_server"} & set(request.fixturenames):
        request.getfixturevalue(name).wait_idle()

"""The `mimo-jax` command, in this process and as a terminal sees it."""

import io
import json
import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mimo_jax.cli import main
from mimo_jax.llm import LLM
from mimo_jax.sampling_params import SamplingParams
from tests.text.toys import TURN_END, byte_level_backend, write_folder
from tests.tiny import write_llama, write_mimo_v2_flash

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# One shape of prompt chunk and one of decode.
_SMALL = ["--max-model-len", "192", "--max-num-batched-tokens", "16", "--block-size", "8"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that speaks bytes."""
    backend = byte_level_backend()
    folder = write_llama(
        tmp_path_factory.mktemp("cli"),
        3,
        vocab_size=300,
        eos_token_id=backend.token_to_id(TURN_END),
        num_hidden_layers=2,
    )
    return write_folder(folder, backend, {"tokenizer_config.json": {"eos_token": TURN_END, "chat_template": _TEMPLATE}})


def _generate(model: Path, *arguments: str) -> int:
    return main(["generate", str(model), *_SMALL, "--ignore-eos", "--max-tokens", "12", *arguments])


def test_generate_streams_the_text_that_the_python_api_returns(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _generate(model, "--prompt", "Hello") == 0
    llm = LLM(model, max_model_len=192, max_num_batched_tokens=16, block_size=8, max_num_seqs=1, progress=False)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    assert capsys.readouterr().out == llm.generate("Hello", params)[0].outputs[0].text + "\n"


def test_generate_prints_one_json_object(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _generate(model, "--prompt", "Hello", "--json", "--temperature", "0.9", "--seed", "4") == 0
    first = json.loads(capsys.readouterr().out)
    assert _generate(model, "--prompt", "Hello", "--json", "--temperature", "0.9", "--seed", "4") == 0
    assert json.loads(capsys.readouterr().out) == first
    assert len(first["outputs"][0]["token_ids"]) == 12
    assert first["outputs"][0]["finish_reason"] == "length"


def test_a_model_without_a_tokenizer_takes_and_gives_token_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_mimo_v2_flash(tmp_path, 1, hybrid_layer_pattern=[0, 1], moe_layer_freq=[0, 1])
    assert _generate(folder, "--prompt", "1 2, 3") == 0
    assert len([int(word) for word in capsys.readouterr().out.split()]) == 12
    assert _generate(folder, "--prompt", "words") == 1
    assert "no tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt", ""], "prompt is empty"),
        (["--prompt", "x" * 300], "300 tokens"),
        (["--prompt", "x", "--max-tokens", "0"], "max_tokens=0"),
        (["--prompt", "x", "--max-tokens", "100000"], "max_tokens=100000"),
        (["--prompt", "x", "--temperature", "nan"], "temperature=nan"),
        (["--prompt", "x", "--top-p", "0"], "top_p=0"),
        (["--prompt", "x", "--max-model-len", "99999999"], "max_model_len=99999999"),
        (["--prompt", "x", "--block-size", "0"], "block_size=0"),
        (["--prompt", "x", "--hf-overrides", '{"no_such_key": 1}'], "no_such_key"),
    ],
)
def test_bad_input_is_one_line_that_names_it(
    model: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(model), *_SMALL, *arguments]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert error.startswith("mimo-jax: ")


def test_a_model_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "no/such/model", "--prompt", "x"]) == 1
    assert "no/such/model" in capsys.readouterr().err


def test_batch_refuses_bad_paths_before_it_loads_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["batch", "no/such/model", "-i", str(tmp_path / "none.jsonl"), "-o", str(tmp_path / "out.jsonl")]) == 1
    assert "none.jsonl" in capsys.readouterr().err


def test_batch_answers_every_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {
            "custom_id": f"line {place}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "any", "prompt": "ab" * (place + 1), "max_tokens": 3},
        }
        for place in range(3)
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines) + "no json\n")
    assert main(["batch", str(model), *_SMALL, "--max-num-seqs", "1", "-i", str(source), "-o", str(target)]) == 0
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers[:3]] == ["line 0", "line 1", "line 2"]
    assert [answer["error"] is None for answer in answers] == [True, True, True, False]
    assert "4 lines" in capsys.readouterr().err


def test_chat_remembers_the_conversation(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\nMore\n"))
    command = ["chat", str(model), *_SMALL, "--max-num-seqs", "1", "--ignore-eos", "--max-tokens", "5"]
    assert main(command) == 0
    llm = LLM(model, max_model_len=192, max_num_batched_tokens=16, block_size=8, max_num_seqs=1, progress=False)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    messages = [{"role": "user", "content": "Hi"}]
    answers = []
    for following in ("More", None):
        answers.append(llm.chat(messages, params)[0].outputs[0].text)
        messages += [{"role": "assistant", "content": answers[-1]}, {"role": "user", "content": following or "end"}]
    assert capsys.readouterr().out == "".join(answer + "\n" for answer in answers)


def test_chat_on_a_terminal_asks_answers_and_ends_with_ctrl_d(model: Path) -> None:
    command = ["chat", str(model), *_SMALL, "--max-num-seqs", "1", "--max-tokens", "5"]
    program = f"import sys; from mimo_jax.cli import main; sys.exit(main({command!r}))"
    terminal, side = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", program], stdin=side, stdout=side, stderr=subprocess.PIPE)
    os.close(side)
    os.write(terminal, b"Hi\n")
    os.write(terminal, b"\x04")
    _, errors = process.communicate(timeout=120)
    os.close(terminal)
    assert process.returncode == 0, errors.decode()
    assert b"Type a message" in errors


def test_overrides_that_are_no_object_are_refused_by_name(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for overrides in ("[1]", "x"):
        with pytest.raises(SystemExit) as ended:
            _generate(model, "--prompt", "x", "--hf-overrides", overrides)
        assert ended.value.code == 2
        assert "--hf-overrides" in capsys.readouterr().err


@pytest.mark.parametrize("closed", ["<&-", "2>&-"])
def test_a_closed_standard_stream_is_no_traceback(model: Path, closed: str) -> None:
    program = "import sys; from mimo_jax.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "chat", str(model), *_SMALL, "--max-num-seqs", "1"]
    shell = " ".join(shlex.quote(word) for word in command)
    ended = subprocess.run(["sh", "-c", f"echo | {shell} {closed}"], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_reader_that_leaves_early_is_no_error(model: Path) -> None:
    program = "import sys; from mimo_jax.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "generate", str(model), *_SMALL, "--ignore-eos", "--prompt", "Hello"]
    shell = " ".join(shlex.quote(word) for word in command)
    ended = subprocess.run(["sh", "-c", f"{shell} | true"], capture_output=True, text=True, timeout=120)
    assert ended.stderr == ""

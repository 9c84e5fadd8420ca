"""A batch that was cut off goes on where it was, and touches no file that is not its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mimo_jax.llm import LLM
from serve.batch_files import BatchError
from serve.batches import run_batch
from tests.serve.batch_lines import check_idle, line, mixed_lines, write_input
from tests.serve.client import wait_for


@pytest.fixture(scope="module")
def whole(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """An input with bad lines in it, and the output of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("batch")
    lines = mixed_lines(14)
    lines[4:4] = [b"no JSON", b"", line("refused", prompt=[])]
    path = write_input(folder, lines)
    run_batch(llm, path, folder / "whole.jsonl")
    return path, (folder / "whole.jsonl").read_bytes()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.43, 0.81, 0.999, 1.0])
def test_a_cut_output_is_completed_to_that_of_an_uninterrupted_run(
    llm: LLM, tmp_path: Path, whole: tuple[Path, bytes], share: float
) -> None:
    path, expected = whole
    output = tmp_path / "output.jsonl"
    rest = expected[: int(len(expected) * share)]
    output.write_bytes(rest)
    summary = run_batch(llm, path, output)
    assert output.read_bytes() == expected
    assert summary.kept == rest.count(b"\n")
    assert (summary.lines, summary.failed) == (16, 2)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.replace(b'"text 1"', b'"text 2"'),
        lambda data: data.split(b"\n", 1)[1],
        lambda data: data + data[: data.index(b"\n") + 1],
        lambda data: b"my notes, not yet finished",
        lambda data: data[:50] + b"\n" + data[50:],
        lambda data: data + b"{",
        lambda data: b"\n" + data,
    ],
    ids=[
        "other custom_id",
        "a line lost",
        "a line more",
        "another file",
        "broken line",
        "rest",
        "empty line",
    ],
)
def test_an_output_that_does_not_answer_the_input_is_left_alone(
    llm: LLM, tmp_path: Path, whole: tuple[Path, bytes], damage: Any
) -> None:
    path, expected = whole
    output = tmp_path / "output.jsonl"
    output.write_bytes(damage(expected))
    with pytest.raises(BatchError, match=r"output\.jsonl: line \d+ is no answer to the input"):
        run_batch(llm, path, output)
    assert output.read_bytes() == damage(expected)
    check_idle(llm)


def test_files_that_cannot_be_these_are_refused(llm: LLM, tmp_path: Path) -> None:
    path = write_input(tmp_path, [line("a")])
    content = path.read_bytes()
    (tmp_path / "link").symlink_to(path)
    for source, output in (
        (path, path),
        (path, tmp_path / "link"),
        (path, tmp_path),
        (path, tmp_path / "nowhere" / "output"),
        (tmp_path / "missing", tmp_path / "output"),
    ):
        with pytest.raises(BatchError):
            run_batch(llm, source, output)
    assert path.read_bytes() == content
    assert not (tmp_path / "output").exists()


def test_an_interrupt_leaves_nothing_queued_and_a_valid_output(
    llm: LLM, tmp_path: Path, whole: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = whole
    output = tmp_path / "output.jsonl"
    step, steps = llm.engine.step, iter(range(1000))

    def interrupted() -> Any:
        if next(steps) == 60:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_batch(llm, path, output)
    check_idle(llm)
    written = output.read_bytes()
    assert 0 < len(written) < len(expected)
    assert written.endswith(b"\n")
    assert expected.startswith(written)


_BATCH = """
import sys, time
from pathlib import Path
from mimo_jax.llm import LLM
from serve.batches import run_batch

llm = LLM(sys.argv[1], dtype="float32", max_model_len=128, max_num_seqs=4, max_num_batched_tokens=16,
          block_size=8, progress=False)
step = llm.engine.step
llm.engine.step = lambda: (time.sleep(0.02), step())[1]
run_batch(llm, Path(sys.argv[2]), Path(sys.argv[3]))
"""


def test_a_run_that_was_killed_goes_on_where_it_was(
    llm: LLM, model_folder: Path, tmp_path: Path, whole: tuple[Path, bytes]
) -> None:
    path, expected = whole
    output = tmp_path / "output.jsonl"
    process = subprocess.Popen([sys.executable, "-c", _BATCH, str(model_folder), str(path), str(output)])
    try:
        wait_for(lambda: output.exists() and output.read_bytes().count(b"\n") >= 3, 90)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
    written = output.read_bytes()
    assert expected.startswith(written)
    assert written != expected
    summary = run_batch(llm, path, output)
    assert output.read_bytes() == expected
    assert summary.kept >= 3

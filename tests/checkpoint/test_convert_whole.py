"""A conversion makes a folder that is whole, or none."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mimo_jax import CheckpointError
from mimo_jax.checkpoint import converted, new_folder
from mimo_jax.checkpoint.checkpoint import open_checkpoint
from mimo_jax.convert import convert_model
from tests.contracts.source import ROOT

# The command, which waits when all but mimo_jax.json is written: a small model is converted faster than a test can act.
WAITING = """
import time
from mimo_jax.checkpoint import converted
copy = converted._copy_tokenizer
converted._copy_tokenizer = lambda *arguments: (copy(*arguments), time.sleep(100))
"""


def start(model: Path, out: Path, before: str = ":", patch: str = "") -> subprocess.Popen[str]:
    """The command, in a shell that has run `before`."""
    code = patch + "import sys; from mimo_jax.cli import main; sys.exit(main())"
    command = ["sh", "-c", f'{before}; exec "$@"', "sh", sys.executable, "-c", code, "convert", str(model), str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def wait_for(file: Path, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120
    while not file.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.002)


def test_an_interrupt_leaves_nothing_and_says_nothing(tmp_path: Path) -> None:
    process = start(Path("mimo-tiny"), tmp_path / "out", patch=WAITING)
    wait_for(tmp_path / ".out.part" / "config.json", process)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_conversion_leaves_is_no_model_and_the_next_one_takes_its_place(
    made: Any, tmp_path: Path
) -> None:
    process = start(Path("mimo-tiny"), tmp_path / "out", patch=WAITING)
    wait_for(tmp_path / ".out.part" / "config.json", process)
    process.kill()
    process.communicate()
    (part,) = tmp_path.iterdir()
    with pytest.raises(CheckpointError):
        open_checkpoint(part)
    (part / "a file").write_text("")
    (part / "a link").symlink_to(tmp_path)
    original, _ = made("v2.5", None)
    convert_model(original, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == ["config.json", "mimo_jax.json", "weights"]
    assert open_checkpoint(tmp_path / "out").config.layers == 5


def test_an_error_leaves_nothing(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, _ = made("v2.5", None)
    monkeypatch.setattr(converted, "config_to_json", lambda config: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert_model(original, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_of_two_conversions_to_one_folder_one_is_told(made: Any, tmp_path: Path) -> None:
    """At once, and the first is not disturbed."""
    original, _ = made("v2.5", None)
    with new_folder.new_folder(tmp_path / "out") as part:
        (part / "the other's").write_text("")
        with pytest.raises(CheckpointError, match=r"out: is being written by another process"):
            convert_model(original, tmp_path / "out")
    assert [file.name for file in tmp_path.rglob("*")] == ["out", "the other's"]


def test_a_folder_that_is_there_in_the_end_is_not_touched(tmp_path: Path) -> None:
    writing = new_folder.new_folder(tmp_path / "out")
    writing.__enter__()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(CheckpointError, match="there already"):
        writing.__exit__(None, None, None)
    assert [file.name for file in tmp_path.rglob("*")] == ["out", "mine"]


def test_one_who_waited_while_another_finished_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening the part folder and locking it."""
    flock = new_folder.fcntl.flock

    def late(*arguments: Any) -> None:
        (tmp_path / ".out.part").rename(tmp_path / "elsewhere")
        flock(*arguments)

    monkeypatch.setattr(new_folder.fcntl, "flock", late)
    with pytest.raises(CheckpointError, match="another process"), new_folder.new_folder(tmp_path / "out"):
        raise AssertionError
    assert [file.name for file in tmp_path.iterdir()] == ["elsewhere"]


def test_one_who_came_while_another_finished_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between looking for the folder and making the part folder."""
    flock = new_folder.fcntl.flock

    def late(*arguments: Any) -> None:
        (tmp_path / "out").mkdir()
        flock(*arguments)

    monkeypatch.setattr(new_folder.fcntl, "flock", late)
    with pytest.raises(CheckpointError, match="there already"), new_folder.new_folder(tmp_path / "out"):
        raise AssertionError
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["file/out", "proc/out", "there", "link", ".", "nowhere/..", "a\0b", "n" * 300])
def test_a_place_that_cannot_be_written_is_named_before_weights_are_read(
    name: str, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, _ = made("v2.5", None)
    (tmp_path / "file").write_text("")
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "proc").symlink_to("/proc")  # where root cannot write either
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(converted, "save_arrays", lambda *arguments: pytest.fail("weights were read"))
    with pytest.raises(CheckpointError, match=r"there already|cannot be written"):
        convert_model(original, tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_disk_without_room_is_refused_at_once(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, _ = made("v2.5", None)
    usage = new_folder.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(new_folder.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    monkeypatch.setattr(converted, "save_arrays", lambda *arguments: pytest.fail("weights were read"))
    with pytest.raises(CheckpointError, match=r"out: needs [\d,]+ bytes; its disk has 1,000 left"):
        convert_model(original, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_is_said_on_one_line(made: Any, tmp_path: Path) -> None:
    """Played with a limit for the size of files."""
    original, _ = made("v2.5", None)
    process = start(original, tmp_path / "out", "ulimit -f 10")
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, output, len(errors.splitlines())) == (1, "", 1)
    assert "cannot be written" in errors
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_not_touched(made: Any, tmp_path: Path) -> None:
    original, _ = made("v2.5", None)
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(CheckpointError, match="there already"):
        convert_model(original, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]

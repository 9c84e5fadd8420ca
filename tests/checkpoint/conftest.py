"""What the checkpoint tests share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mimo_jax.convert import convert_model
from tests import tiny
from tests.checkpoint.published import publish


@pytest.fixture
def flash(tmp_path: Path) -> Path:
    """V2-Flash in three shards."""
    return tiny.write_mimo_v2_flash(tmp_path / "flash", 1, shards=3)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str | None], tuple[Path, Path]]:
    """The original of a published layout, and what it is converted to."""
    folder = tmp_path_factory.mktemp("converted")

    def make(name: str, quantization: str | None) -> tuple[Path, Path]:
        original, out = folder / name, folder / f"{name} {quantization}"
        if not original.exists():
            publish(original, name)
        if not out.exists():
            convert_model(original, out, quantization=quantization)
        return original, out

    return make

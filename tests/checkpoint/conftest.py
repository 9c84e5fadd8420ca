"""What the checkpoint tests share."""

from pathlib import Path

import pytest

from tests import tiny


@pytest.fixture
def flash(tmp_path: Path) -> Path:
    """V2-Flash in three shards."""
    return tiny.write_mimo_v2_flash(tmp_path / "flash", 1, shards=3)

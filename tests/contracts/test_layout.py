"""Files and functions stay short, and what is public is explained. Exceptions are listed here, with a reason."""

import inspect
from pathlib import Path

import pytest

import mimo_jax
from tests.contracts.source import ROOT, Source, functions, parse, product

FILE_LINES, KERNEL_FILE_LINES = 300, 400
FUNCTION_LINES, KERNEL_FUNCTION_LINES = 50, 120
KERNEL_FILES = ("gpu.py", "cpu.py", "cpu.cc", "xla.py", "reference.py")

# "file" or "file::function" -> why it may be longer
EXCEPTIONS: dict[str, str] = {}

TESTS = tuple(sorted((ROOT / "tests").rglob("*.py")))


def is_kernel(name: str) -> bool:
    return name.startswith("pallas_kernels/") and Path(name).name in KERNEL_FILES


def test_there_is_product_code_to_check() -> None:
    assert len(product()) > 30


@pytest.mark.parametrize("source", product(), ids=lambda source: source.name)
def test_files_and_functions_of_the_product_are_short(source: Source) -> None:
    kernel = is_kernel(source.name)
    long = []
    if source.text.count("\n") > (KERNEL_FILE_LINES if kernel else FILE_LINES):
        long.append(source.name)
    for function in functions(source):
        lines = (function.end_lineno or 0) - function.lineno + 1
        if lines > (KERNEL_FUNCTION_LINES if kernel else FUNCTION_LINES):
            long.append(f"{source.name}::{function.name}")
    assert [name for name in long if name not in EXCEPTIONS] == []


def test_native_kernel_sources_are_short() -> None:
    for file in (ROOT / "pallas_kernels").rglob("*.cc"):
        name = file.relative_to(ROOT).as_posix()
        assert name in EXCEPTIONS or file.read_text().count("\n") <= KERNEL_FILE_LINES, name


@pytest.mark.parametrize("file", TESTS, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_files_of_the_tests_are_short(file: Path) -> None:
    source = parse(file)
    assert source.name in EXCEPTIONS or source.text.count("\n") <= FILE_LINES


def test_every_exception_is_still_needed() -> None:
    names = {source.name for source in (*product(), *map(parse, TESTS))}
    names |= {f"{source.name}::{function.name}" for source in product() for function in functions(source)}
    assert set(EXCEPTIONS) <= names
    assert all(EXCEPTIONS.values())


@pytest.mark.parametrize("source", product(), ids=lambda source: source.name)
def test_every_file_says_what_it_is(source: Source) -> None:
    first = source.tree.body[0] if source.tree.body else None
    assert first is None or source.text.startswith('"""'), f"{source.name} has no docstring"


@pytest.mark.parametrize("name", mimo_jax.__all__)
def test_what_is_public_has_a_docstring_of_its_own(name: str) -> None:
    public = getattr(mimo_jax, name)
    assert name in mimo_jax.__all__
    text = inspect.getdoc(public) if not inspect.isclass(public) else public.__doc__
    assert text, name
    assert not text.startswith(f"{name}("), f"{name}: a dataclass writes its signature where the docstring is missing"


def test_public_names_are_sorted_and_exist() -> None:
    assert len(set(mimo_jax.__all__)) == len(mimo_jax.__all__)
    assert all(hasattr(mimo_jax, name) for name in mimo_jax.__all__)

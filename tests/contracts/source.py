"""The product's source, parsed once, for the architecture tests."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("mimo_jax", "pallas_kernels", "sharding", "serve")


@dataclass(frozen=True)
class Source:
    name: str  # from the root, with slashes
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.name.split("/")[0]


@cache
def product() -> tuple[Source, ...]:
    """Every Python file of the four packages."""
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return tuple(parse(file) for file in files)


def parse(file: Path) -> Source:
    text = file.read_text()
    return Source(file.relative_to(ROOT).as_posix(), text, ast.parse(text, file.name))


@dataclass(frozen=True)
class Import:
    """One imported module. A lazy import stands inside a function, a typing one under `if TYPE_CHECKING`."""

    module: str
    names: tuple[str, ...]
    line: int
    lazy: bool


def imports(source: Source) -> Iterator[Import]:
    lazy = {id(node) for function in functions(source) for node in ast.walk(function)}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, (), node.lineno, id(node) in lazy)
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            yield Import("." * node.level + (node.module or ""), names, node.lineno, id(node) in lazy)


def functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node

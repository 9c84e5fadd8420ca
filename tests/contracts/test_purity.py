"""No hidden state: one file compiles, nothing mutable lives at module level, meshes stay in sharding/."""

import ast
import re

import pytest

from sharding.mesh import MESH_AXES
from tests.contracts.source import Source, product

COMPILES = "mimo_jax/steps.py"
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_CALLS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "OrderedDict", "Counter", "count"}
CHANGES = {
    "append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "clear", "remove", "discard", "sort",
}  # fmt: skip
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*$|__all__$")


def module_assignments(tree: ast.Module) -> list[tuple[str, ast.expr]]:
    found = []
    for node in tree.body:
        if isinstance(node, ast.Assign):
            found += [(target.id, node.value) for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            found.append((node.target.id, node.value))
    return found


def is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return name in MUTABLE_CALLS
    return isinstance(value, MUTABLE)


def changed_names(tree: ast.Module) -> set[str]:
    """Names that are changed in place somewhere: n[..] = .., del n[..], n.append(..), n += .., global n."""
    changed = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            changed.add(getattr(node.value, "id", ""))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            changed.add(getattr(node.func.value, "id", ""))
        elif isinstance(node, ast.AugAssign):
            changed.add(getattr(node.target, "id", ""))
        elif isinstance(node, ast.Global):
            changed.update(node.names)
    return changed


def mutable_state(tree: ast.Module) -> list[str]:
    changed = changed_names(tree)
    return [
        name
        for name, value in module_assignments(tree)
        if is_mutable(value) and (not CONSTANT.match(name) or name in changed)
    ]


@pytest.mark.parametrize("source", product(), ids=lambda source: source.name)
def test_no_module_has_mutable_state(source: Source) -> None:
    assert mutable_state(source.tree) == []
    assert not any(isinstance(node, ast.Global) for node in ast.walk(source.tree))


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("cache = {}", ["cache"]),
        ("seen: set[int] = set()", ["seen"]),
        ("NAMES = []\ndef f(): NAMES.append(1)", ["NAMES"]),
        ("TABLE = {}\ndef f(x): TABLE[x] = 1", ["TABLE"]),
        ("ids = itertools.count()", ["ids"]),
        ("TABLE = {'a': 1}\ndef f(x): return TABLE[x]", []),
        ("__all__ = ['a']", []),
        ("pair = (1, 2)", []),
    ],
)
def test_mutable_state_would_be_found(text: str, state: list[str]) -> None:
    assert mutable_state(ast.parse(text)) == state


def compile_calls(tree: ast.Module) -> list[int]:
    """Lines with jax.jit or jax.pmap, also when imported by name."""
    compilers = {"jit", "pmap", "pjit"}
    lines = []
    for node in ast.walk(tree):
        names = {node.attr} if isinstance(node, ast.Attribute) else set()
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
        if names & compilers:
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("source", product(), ids=lambda source: source.name)
def test_one_file_compiles(source: Source) -> None:
    assert source.name == COMPILES or compile_calls(source.tree) == []


def test_the_file_that_compiles_is_found() -> None:
    (steps,) = [source for source in product() if source.name == COMPILES]
    assert compile_calls(steps.tree)
    assert compile_calls(ast.parse("from jax import jit")) == [1]


@pytest.mark.parametrize("source", [s for s in product() if s.package != "sharding"], ids=lambda source: source.name)
def test_mesh_axes_are_named_in_sharding_alone(source: Source) -> None:
    """As the axis of a PartitionSpec, a mesh's shape or a collective; a plain word "data" elsewhere is no axis."""
    makers = {"PartitionSpec", "P", "psum", "all_gather", "ppermute", "axis_index", "all_to_all", "shard_map"}
    found = []
    for node in ast.walk(source.tree):
        axes: list[ast.AST] = []
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            axes = [*node.args, *(keyword.value for keyword in node.keywords)] if name in makers else []
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("mesh.shape"):
            axes = [node.slice]
        constants = [part.value for axis in axes for part in ast.walk(axis) if isinstance(part, ast.Constant)]
        found += [value for value in constants if value in MESH_AXES]
    assert found == []


@pytest.mark.parametrize("source", product(), ids=lambda source: source.name)
def test_trees_are_frozen(source: Source) -> None:
    """Nothing assigns an attribute of `params`, `cache` or `inputs`: a changed tree is a new tree."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            assert getattr(node.value, "id", "") not in ("params", "cache", "inputs", "config"), node.lineno

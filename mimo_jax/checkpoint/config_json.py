"""ModelConfig as JSON and back, strictly: no field is guessed, an unknown one is an error."""

import dataclasses
import enum
import types
import typing
from typing import Any

from mimo_jax.config import ModelConfig


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    return dataclasses.asdict(config, dict_factory=lambda items: {name: _plain(value) for name, value in items})


def config_from_json(values: Any) -> ModelConfig:
    """Raises ValueError naming the field that is missing, unknown or of the wrong type."""
    config = _read(values, ModelConfig, "config")
    assert isinstance(config, ModelConfig)
    return config


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def _read(value: Any, kind: Any, name: str) -> Any:
    if isinstance(kind, types.UnionType):  # X | None
        (other,) = (one for one in typing.get_args(kind) if one is not types.NoneType)
        return None if value is None else _read(value, other, name)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{name} is {value!r}; a list is needed")
        return tuple(_read(one, typing.get_args(kind)[0], name) for one in value)
    if dataclasses.is_dataclass(kind):
        return _read_object(value, kind, name)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{name} is {value!r}; {kind.__name__} is needed")
    return value


def _read_object(value: Any, kind: Any, name: str) -> Any:
    hints = typing.get_type_hints(kind)
    if not isinstance(value, dict) or set(value) != set(hints):
        given = set(value) if isinstance(value, dict) else set()
        raise ValueError(f"{name}: fields {sorted(given ^ set(hints))} are missing or unknown")
    return kind(**{field: _read(value[field], hint, f"{name}.{field}") for field, hint in hints.items()})

"""Reading foreign configurations strictly: every key is used, expected or knowingly ignored."""

import math
from collections.abc import Iterable
from typing import Any, TypeVar

from mimo_jax.errors import CheckpointError

T = TypeVar("T")
_ABSENT = object()
_MOST = 4096


class ConfigReader:
    """Hands out the keys of a config and remembers which; `finish` refuses whatever nobody asked for."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values = values
        self._where = where
        self._used: set[str] = set()

    def require(self, key: str, kind: type[T]) -> T:
        """The value of a key that must be there and of this type; an int passes for a float, a number is above 0."""
        if key not in self._values:
            raise CheckpointError(f"{self._where}: key {key!r} is missing")
        return self._typed(key, self._values[key], kind)

    def count(self, key: str) -> int:
        """A number of layers or experts that must be there. Bounded, because lists of that length are made from it."""
        value = self.require(key, int)
        if not 0 < value <= _MOST:
            raise self.error(f"{key}={value}; 1 to {_MOST} are possible")
        return value

    def optional(self, key: str, kind: type[T], default: T) -> T:
        """The value, or the format's own default when the key is absent or null."""
        self._used.add(key)
        value = self._values.get(key)
        return default if value is None else self._typed(key, value, kind)

    def present(self, key: str) -> bool:
        return self._values.get(key) is not None

    def expect(self, key: str, *allowed: Any) -> None:
        """If the key is there it must have one of these values: other ones would change the model."""
        self._used.add(key)
        value = self._values.get(key, _ABSENT)
        if value is not _ABSENT and value not in allowed:
            raise CheckpointError(f"{self._where}: {key}={value!r} is not supported; {self._list(allowed)} is")

    def ignore(self, keys: Iterable[str]) -> None:
        self._used.update(keys)

    def finish(self) -> None:
        unknown = sorted(set(self._values) - self._used)
        if unknown:
            raise CheckpointError(
                f"{self._where}: unknown key {unknown[0]!r} (and {len(unknown) - 1} more unknown ones)"
            )

    def where(self, key: str) -> str:
        """How messages about what is inside an object name it."""
        return f"{self._where}: {key}"

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: {message}")

    def _typed(self, key: str, value: Any, kind: type[T]) -> T:
        self._used.add(key)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise CheckpointError(f"{self._where}: {key}={value!r} should be of type {kind.__name__}")
        if isinstance(value, int | float) and kind is not bool and not 0 < value < math.inf:
            raise CheckpointError(f"{self._where}: {key}={value!r}; a number above 0 is needed")
        return value

    @staticmethod
    def _list(allowed: tuple[Any, ...]) -> str:
        return " or ".join(repr(value) for value in allowed)


# Keys of config.json that say nothing about the forward pass.
HF_IGNORED = (
    "architectures",
    "model_type",
    "torch_dtype",
    "dtype",
    "transformers_version",
    "use_cache",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "attention_dropout",
    "_name_or_path",
    "auto_map",
    "pretraining_tp",
    "transformers.js_config",
    "is_llama_config",
    "_attn_implementation_autoset",
    "cache_implementation",
    "return_dict",
    "output_hidden_states",
    "output_attentions",
    "chunk_size_feed_forward",
    "is_encoder_decoder",
    "id2label",
    "label2id",
    "problem_type",
    "name",
)

# Keys of GGUF metadata outside "<architecture>.*" describe the file and its tokenizer.
GGUF_IGNORED_PREFIXES = ("general.", "tokenizer.", "quantize.", "split.", "GGUF.")

"""The two errors a caller can cause: a checkpoint that cannot be loaded, a request that cannot be served.

Both are ValueErrors whose message names the thing that is wrong, what was found and what is allowed.
"""


class CheckpointError(ValueError):
    """A model folder or file is missing, damaged, or of a kind this project does not read."""


class RequestError(ValueError):
    """One request cannot be served as asked. `param` names the argument or field that is wrong."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def short(value: object) -> str:
    """A value as text for a message, cut: an error must not repeat a megabyte."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

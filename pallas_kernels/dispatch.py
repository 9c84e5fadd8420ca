"""Which implementation of an op runs, and why. The one place that asks for the platform."""

from dataclasses import dataclass

import jax

IMPLEMENTATIONS = ("auto", "reference", "pallas", "interpret")


@dataclass(frozen=True)
class Choice:
    """`implementation` is "reference" (plain XLA), "pallas" or "interpret" (the kernel's body as plain JAX)."""

    op: str
    implementation: str
    why: str


def platform() -> str:
    """ "cpu" or "gpu": of the mesh in whose context this is traced (jax.set_mesh), else of JAX's default backend."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def choose(op: str, impl: str, refusal: str | None) -> Choice:
    """What runs when `impl` is asked for and the kernel takes these arrays (`refusal` is None) or says what it cannot.

    Raises ValueError when a kernel is asked for by name and refuses.
    """
    if impl not in IMPLEMENTATIONS:
        names = ", ".join(repr(name) for name in IMPLEMENTATIONS)
        raise ValueError(f"{op}: impl={impl!r}; {names} are possible")
    if impl == "reference":
        return Choice(op, "reference", "asked for")
    if impl != "auto":
        if refusal is not None:
            raise ValueError(f"{op}: impl={impl!r} cannot take {refusal}")
        return Choice(op, impl, "asked for")
    where = platform()
    if where != "gpu":
        return Choice(op, "reference", f"no kernel for platform {where!r}")
    if refusal is not None:
        return Choice(op, "reference", f"the kernel cannot take {refusal}")
    return Choice(op, "pallas", "platform 'gpu'")

"""`mimo-jax convert`: a model once read, in the form it is computed in, so that it opens quickly from then on."""

from pathlib import Path

import jax

from mimo_jax.checkpoint.checkpoint import open_checkpoint
from mimo_jax.checkpoint.converted import write_converted
from mimo_jax.checkpoint.load import load_weights
from mimo_jax.engine.setup import auto_dtype
from mimo_jax.models import resolve_model
from sharding import Rules, make_mesh


def convert_model(
    model: str | Path, out: Path, *, dtype: str = "auto", quantization: str | None = None, progress: bool = False
) -> None:
    """Writes MODEL to the new folder `out`, itself a MODEL.

    dtype          of plain matrices: "auto" (what an engine on this machine uses), "float32" or "bfloat16"
    quantization   as for the engine: None keeps each weight in its format

    One layer at a time is in memory. Raises CheckpointError when `out` is there already or cannot be written, or when
    the model cannot be loaded; either is known, where it can be, before weights are read.
    """
    device = jax.devices()[0]
    if dtype == "auto":
        dtype = auto_dtype(device)
    checkpoint = open_checkpoint(resolve_model(model))
    specs = checkpoint.specs(dtype, quantization)
    weights = load_weights(checkpoint, specs, make_mesh(device), Rules(), progress=progress)
    write_converted(checkpoint, weights, specs, dtype, out)

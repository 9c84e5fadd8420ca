"""From logical axes to a NamedSharding."""

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.rules import Rules


def array_sharding(shape: tuple[int, ...], axes: tuple[str, ...], rules: Rules, mesh: Mesh) -> NamedSharding:
    """Where an array with these logical axes goes. Raises ValueError when a split does not divide or is asked twice."""
    if len(shape) != len(axes):
        raise ValueError(f"shape {shape} has {len(shape)} dimensions, axes {axes} name {len(axes)}")
    parts = tuple(rules.mesh_axis(axis) for axis in axes)
    used = [part for part in parts if part is not None]
    if len(set(used)) != len(used):
        raise ValueError(f"axes {axes} would be split over the same mesh axis twice: {parts}")
    for size, axis, part in zip(shape, axes, parts, strict=True):
        if part is not None and size % mesh.shape[part]:
            raise ValueError(
                f"axis {axis!r} of size {size} does not divide by mesh axis {part!r} of {mesh.shape[part]}"
            )
    return NamedSharding(mesh, PartitionSpec(*parts))

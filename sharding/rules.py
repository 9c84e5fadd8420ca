"""Rules: which mesh axis a logical axis is split over."""

from dataclasses import dataclass, field

LOGICAL_AXES = (
    "vocab",
    "embed",
    "heads",
    "kv_heads_full",
    "kv_heads_window",
    "head_dim",
    "ffn",
    "experts",
    "expert_ffn",
    "router_experts",
    "pages",
    "page",
)


@dataclass(frozen=True)
class Rules:
    """`splits` maps a logical axis to a mesh axis; an axis without an entry is replicated."""

    splits: tuple[tuple[str, str], ...] = field(default=())

    def __post_init__(self) -> None:
        for logical, _ in self.splits:
            if logical not in LOGICAL_AXES:
                raise ValueError(f"unknown logical axis {logical!r}; known are {', '.join(LOGICAL_AXES)}")

    def mesh_axis(self, logical: str) -> str | None:
        if logical not in LOGICAL_AXES:
            raise ValueError(f"unknown logical axis {logical!r}; known are {', '.join(LOGICAL_AXES)}")
        return dict(self.splits).get(logical)

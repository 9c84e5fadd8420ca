"""What a model is: sizes, layer kinds and options. Architecture only, no runtime choices.

`ModelConfig` is frozen and hashable, so that it can be a static argument of a jitted function. Checkpoint families
(`mimo_jax/families/`) are its only makers besides `tiny_config`.
"""

import enum
from dataclasses import dataclass


def _at_least_one(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value}; at least 1 is needed")


class LayerKind(enum.Enum):
    """Which keys a layer's queries see, and so which pool of the cache holds them."""

    FULL = "F"
    WINDOW = "W"


class FfnKind(enum.Enum):
    """What follows attention in a layer: one gated FFN, or a mixture of experts."""

    DENSE = "dense"
    MOE = "moe"


@dataclass(frozen=True)
class RopeScaling:
    """Stretched rotary frequencies.

    `kind` is "linear" (Gemma 3), "llama3" (Llama 3.1 and later) or "divisors" (the same, as GGUF files keep it: one
    divisor per frequency).
    """

    kind: str
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_max_position_tokens: int = 8192
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True)
class AttentionDims:
    """One attention kind. Full and window layers of a model may differ in every number here."""

    heads: int
    kv_heads: int
    head_dim: int  # of queries and keys
    v_dim: int
    rotary_dims: int  # the first dims of each head that are rotated; the frequencies are spread over these alone
    rope_theta: float
    scale: float  # multiplies query . key; 1 / sqrt(head_dim) unless the checkpoint says otherwise
    window_tokens: int | None = None  # visible keys, the query's own included; None: all earlier ones
    has_sink: bool = False
    value_scale: float = 1.0
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        _at_least_one(heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim, v_dim=self.v_dim)
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.rotary_dims % 2 or not 0 < self.rotary_dims <= self.head_dim:
            raise ValueError(f"rotary_dims={self.rotary_dims}; an even number up to head_dim={self.head_dim} is needed")
        if self.window_tokens is not None:
            _at_least_one(window_tokens=self.window_tokens)


@dataclass(frozen=True)
class MoeDims:
    """A mixture of experts with a sigmoid router, selection-only bias and no shared expert (MiMo-V2)."""

    experts: int
    experts_per_token: int
    ffn: int
    normalise_top_k: bool = True
    routed_scale: float = 1.0

    def __post_init__(self) -> None:
        _at_least_one(ffn=self.ffn)
        if not 0 < self.experts_per_token <= self.experts:
            raise ValueError(f"experts_per_token={self.experts_per_token}; 1 to experts={self.experts} are possible")


@dataclass(frozen=True)
class MtpDims:
    """Multi-token prediction: draft heads behind the trunk. Head i predicts the token i + 2 places ahead.

    Each is one decoder layer with a dense FFN, fed with the embedding of a token and a hidden state of the trunk.
    """

    heads: int
    kind: LayerKind = LayerKind.WINDOW
    hidden_first: bool = False  # the order of the two halves that the projection sees
    zero_first_embedding: bool = False  # MiMo-7B: nothing but zeros beside the hidden state of position 0
    # Which hidden state a head is fed: the trunk's, behind the final norm or before it; or, chained, its predecessor's.
    normed_hidden: bool = True
    chained: bool = False

    def __post_init__(self) -> None:
        if self.heads < 1:
            raise ValueError(f"mtp.heads={self.heads}; a model without draft heads has mtp=None")

    @property
    def hidden_states(self) -> int:
        """How many kinds of hidden states the heads are fed."""
        return self.heads if self.chained else 1


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of one decoder. `layer_kinds` and `ffn_kinds` have one entry per layer."""

    family: str
    vocab: int
    embed: int
    layer_kinds: tuple[LayerKind, ...]
    ffn_kinds: tuple[FfnKind, ...]
    full: AttentionDims | None
    window: AttentionDims | None
    ffn: int  # of the dense layers
    max_position_tokens: int
    moe: MoeDims | None = None
    activation: str = "silu"  # or "gelu_tanh"
    norm_epsilon: float = 1e-5
    tied_head: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False  # a second norm behind attention and FFN, before the residual (Gemma)
    embedding_scale: float = 1.0
    mtp: MtpDims | None = None

    def __post_init__(self) -> None:
        _at_least_one(vocab=self.vocab, embed=self.embed, max_position_tokens=self.max_position_tokens)
        if FfnKind.DENSE in self.ffn_kinds or self.mtp is not None:
            _at_least_one(ffn=self.ffn)
        if not self.norm_epsilon > 0:
            raise ValueError(f"norm_epsilon={self.norm_epsilon}; a number above 0 is needed")
        if len(self.layer_kinds) != len(self.ffn_kinds):
            raise ValueError(f"{len(self.layer_kinds)} layer kinds but {len(self.ffn_kinds)} ffn kinds")
        if not self.layer_kinds:
            raise ValueError("a model needs at least one layer")
        if self.activation not in ("silu", "gelu_tanh"):
            raise ValueError(f"activation={self.activation!r}; 'silu' and 'gelu_tanh' are known")
        if FfnKind.MOE in self.ffn_kinds and self.moe is None:
            raise ValueError("a layer has a mixture of experts but moe is None")
        for kind in self.kinds:
            self.dims(kind)
        if self.window is not None and self.window.window_tokens is None:
            raise ValueError("window layers need window_tokens")
        if self.mtp is not None and (self.mtp.kind not in self.kinds):
            raise ValueError(f"draft heads are {self.mtp.kind.name} layers, and the trunk has none")
        if self.mtp is not None and (self.dims(self.mtp.kind).window_tokens or self.mtp.heads) < self.mtp.heads:
            raise ValueError("a draft head looks back further than its window")

    @property
    def layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds that occur, in a fixed order (a set's order would change the compiled program from run to run)."""
        return tuple(kind for kind in LayerKind if kind in self.layer_kinds)

    @property
    def cached_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer that has keys and values: the trunk's, then the draft heads'."""
        return self.layer_kinds + ((self.mtp.kind,) * self.mtp.heads if self.mtp is not None else ())

    @property
    def draft_heads(self) -> int:
        return 0 if self.mtp is None else self.mtp.heads

    def lookahead(self, kind: LayerKind) -> int:
        """Tokens behind a step's own that its draft heads keep in the pool of a layer kind."""
        return self.draft_heads if self.mtp is not None and self.mtp.kind is kind else 0

    @property
    def pattern(self) -> str:
        """The layer kinds as a string, for instance FWWWWF."""
        return "".join(kind.value for kind in self.layer_kinds)

    def dims(self, kind: LayerKind) -> AttentionDims:
        dims = self.full if kind is LayerKind.FULL else self.window
        if dims is None:
            raise ValueError(f"the model has {kind.name} layers but no dims for them")
        return dims


def tiny_config() -> ModelConfig:
    """A MiMo-V2 small enough to compile in a second. Its sizes differ pairwise, so that a swapped axis cannot pass."""
    full = AttentionDims(
        heads=12, kv_heads=2, head_dim=18, v_dim=10, rotary_dims=6, rope_theta=5e6, scale=18**-0.5, value_scale=0.707
    )
    window = AttentionDims(
        heads=8,
        kv_heads=4,
        head_dim=14,
        v_dim=9,
        rotary_dims=4,
        rope_theta=1e4,
        scale=14**-0.5,
        window_tokens=11,
        has_sink=True,
        value_scale=0.707,
    )
    kinds = tuple(LayerKind(letter) for letter in "FWWFW")
    return ModelConfig(
        family="mimo_v2",
        vocab=101,
        embed=48,
        layer_kinds=kinds,
        ffn_kinds=(FfnKind.DENSE,) + (FfnKind.MOE,) * (len(kinds) - 1),
        full=full,
        window=window,
        ffn=56,
        max_position_tokens=512,
        moe=MoeDims(experts=7, experts_per_token=3, ffn=20),
    )

"""The parameter tree and its one specification.

`param_specs(config)` returns `Params` filled with `ArraySpec`; random init, loading, sharding and the memory table are
tree-maps over it. Absent options are None, so a tree has exactly the arrays its model uses.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from mimo_jax.config import AttentionDims, FfnKind, LayerKind, ModelConfig


@dataclass(frozen=True)
class ArraySpec:
    """What one parameter is. `axes` are logical axis names (see sharding/rules.py), one a dimension."""

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str, ...]
    init: str = "normal"  # or "ones"

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@struct.dataclass
class Attention:
    query: Any  # [heads * head_dim, embed]
    key: Any  # [kv_heads * head_dim, embed]
    value: Any  # [kv_heads * v_dim, embed]
    output: Any  # [embed, heads * v_dim]
    query_bias: Any = None
    key_bias: Any = None
    value_bias: Any = None
    query_norm: Any = None  # [head_dim]
    key_norm: Any = None
    sink: Any = None  # [heads] float32


@struct.dataclass
class Dense:
    gate: Any  # [ffn, embed]
    up: Any  # [ffn, embed]
    down: Any  # [embed, ffn]


@struct.dataclass
class Moe:
    router: Any  # [experts, embed] float32
    router_bias: Any  # [experts] float32, for the selection only
    gate: Any  # [experts, ffn, embed]
    up: Any  # [experts, ffn, embed]
    down: Any  # [experts, embed, ffn]


@struct.dataclass
class Layer:
    attention_norm: Any  # [embed] float32, like every norm
    attention: Attention
    ffn_norm: Any
    ffn: Any  # Dense or Moe
    post_attention_norm: Any = None
    post_ffn_norm: Any = None


@struct.dataclass
class MtpHead:
    """One draft head: a projection of [embedding; hidden state], a layer, and a norm before the model's own head."""

    embed_norm: Any  # [embed]
    hidden_norm: Any  # [embed]
    projection: Any  # [embed, 2 * embed]
    layer: Layer
    final_norm: Any  # [embed]


@struct.dataclass
class Params:
    """All arrays of a model, or their specs or sources: the tree is the same."""

    embedding: Any  # [vocab, embed]
    layers: tuple[Layer, ...]
    final_norm: Any  # [embed]
    head: Any = None  # [vocab, embed]; None: the embedding is the head
    mtp: tuple[MtpHead, ...] = ()


def parameter_name(path: Any) -> str:
    """Of a path in a `Params` tree: layers.0.attention.query, layers.0.attention.query.scale"""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def param_specs(config: ModelConfig, dtype: Any = jnp.bfloat16) -> Params:
    """`Params` of ArraySpec. Matrices have `dtype`; norms, sinks and the router are float32."""
    kinds = zip(config.layer_kinds, config.ffn_kinds, strict=True)
    embedding = ArraySpec((config.vocab, config.embed), dtype, ("vocab", "embed"))
    return Params(
        embedding=embedding,
        layers=tuple(_layer_specs(config, kind, ffn_kind, dtype) for kind, ffn_kind in kinds),
        final_norm=_norm(config.embed),
        head=None if config.tied_head else embedding,
        mtp=tuple(_mtp_specs(config, dtype) for _ in range(config.draft_heads)),
    )


def init_params(key: Array, config: ModelConfig, dtype: Any = jnp.float32) -> Params:
    """Random parameters: matrices normal with deviation 1 / sqrt(in), norms one, biases and sinks normal."""
    specs = param_specs(config, dtype)
    leaves, tree = jax.tree.flatten(specs)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(tree, [_init(k, spec) for k, spec in zip(keys, leaves, strict=True)])


def _init(key: Array, spec: ArraySpec) -> Array:
    if spec.init == "ones":
        return jnp.ones(spec.shape, spec.dtype)
    deviation = spec.shape[-1] ** -0.5 if len(spec.shape) > 1 else 0.5
    return (jax.random.normal(key, spec.shape, jnp.float32) * deviation).astype(spec.dtype)


def _layer_specs(config: ModelConfig, kind: LayerKind, ffn_kind: FfnKind, dtype: Any) -> Layer:
    post_norm = _norm(config.embed) if config.post_norms else None
    return Layer(
        attention_norm=_norm(config.embed),
        attention=_attention_specs(config, config.dims(kind), kind, dtype),
        ffn_norm=_norm(config.embed),
        ffn=_moe_specs(config, dtype) if ffn_kind is FfnKind.MOE else _dense_specs(config, dtype),
        post_attention_norm=post_norm,
        post_ffn_norm=post_norm,
    )


def _mtp_specs(config: ModelConfig, dtype: Any) -> MtpHead:
    assert config.mtp is not None
    return MtpHead(
        embed_norm=_norm(config.embed),
        hidden_norm=_norm(config.embed),
        projection=ArraySpec((config.embed, 2 * config.embed), dtype, ("embed", "embed")),
        layer=_layer_specs(config, config.mtp.kind, FfnKind.DENSE, dtype),
        final_norm=_norm(config.embed),
    )


def _attention_specs(config: ModelConfig, dims: AttentionDims, kind: LayerKind, dtype: Any) -> Attention:
    # 4 full and 8 window KV heads divide differently over devices, so they have different names.
    kv = "kv_heads_full" if kind is LayerKind.FULL else "kv_heads_window"
    queries, keys, values = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim, dims.kv_heads * dims.v_dim
    bias = config.qkv_bias
    head_norm = ArraySpec((dims.head_dim,), jnp.float32, ("head_dim",), "ones") if config.qk_norm else None
    return Attention(
        query=ArraySpec((queries, config.embed), dtype, ("heads", "embed")),
        key=ArraySpec((keys, config.embed), dtype, (kv, "embed")),
        value=ArraySpec((values, config.embed), dtype, (kv, "embed")),
        output=ArraySpec((config.embed, dims.heads * dims.v_dim), dtype, ("embed", "heads")),
        query_bias=ArraySpec((queries,), dtype, ("heads",)) if bias else None,
        key_bias=ArraySpec((keys,), dtype, (kv,)) if bias else None,
        value_bias=ArraySpec((values,), dtype, (kv,)) if bias else None,
        query_norm=head_norm,
        key_norm=head_norm,
        sink=ArraySpec((dims.heads,), jnp.float32, ("heads",)) if dims.has_sink else None,
    )


def _dense_specs(config: ModelConfig, dtype: Any) -> Dense:
    wide = ArraySpec((config.ffn, config.embed), dtype, ("ffn", "embed"))
    return Dense(gate=wide, up=wide, down=ArraySpec((config.embed, config.ffn), dtype, ("embed", "ffn")))


def _moe_specs(config: ModelConfig, dtype: Any) -> Moe:
    moe = config.moe
    assert moe is not None  # ModelConfig checks it
    wide = ArraySpec((moe.experts, moe.ffn, config.embed), dtype, ("experts", "expert_ffn", "embed"))
    return Moe(
        router=ArraySpec((moe.experts, config.embed), jnp.float32, ("router_experts", "embed")),
        router_bias=ArraySpec((moe.experts,), jnp.float32, ("router_experts",)),
        gate=wide,
        up=wide,
        down=ArraySpec((moe.experts, config.embed, moe.ffn), dtype, ("experts", "embed", "expert_ffn")),
    )


def _norm(size: int) -> ArraySpec:
    return ArraySpec((size,), jnp.float32, ("embed",), "ones")

"""The published MiMo-V2 models without their files: config values, and names, types and shapes of their tensors.

Values are those of the published config.json files and tensor tables; for V2-Flash, whose config.json we have not seen
whole, those that its report and several engines agree on.
"""

from typing import Any

from mimo_jax.families.source import FP8, Form, Forms

_BLOCK = 128
_DRAFT_HEADS = 3

_COMMON: dict[str, Any] = {
    "num_hidden_layers": 48,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "head_dim": 192,
    "swa_head_dim": 192,
    "v_head_dim": 128,
    "swa_v_head_dim": 128,
    "partial_rotary_factor": 0.334,
    "rope_theta": 10000000,
    "swa_rope_theta": 10000,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "attention_chunk_size": 128,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "attention_value_scale": 0.707,
    "attention_bias": False,
    "intermediate_size": 16384,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": None,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": None,
    "hidden_act": "silu",
    "layernorm_epsilon": 1e-5,
    "vocab_size": 152576,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1048576,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [_BLOCK, _BLOCK],
    },
}
_FULL_LAYERS = (0, 5, 11, 17, 23, 29, 35, 41, 47)
_PRO_FULL_LAYERS = (0, 7, 15, 23, 31, 39, 47, 55, 62, 69)


def _model(full_layers: tuple[int, ...], **own: Any) -> dict[str, Any]:
    values = _COMMON | own
    layers = values["num_hidden_layers"]
    values["hybrid_layer_pattern"] = [int(index not in full_layers) for index in range(layers)]
    values["moe_layer_freq"] = [int(index > 0) for index in range(layers)]
    return values


# The values of their config.json
PUBLISHED: dict[str, dict[str, Any]] = {
    "mimo-v2-flash": _model(
        _FULL_LAYERS, model_type="mimo_v2_flash", rope_theta=5000000, max_position_embeddings=262144
    ),
    "mimo-v2.5": _model(_FULL_LAYERS, model_type="mimo_v2", attention_projection_layout="fused_qkv"),
    "mimo-v2.5-pro": _model(
        _PRO_FULL_LAYERS,
        model_type="mimo_v2",
        attention_projection_layout="fused_qkv",
        num_hidden_layers=70,
        hidden_size=6144,
        num_attention_heads=128,
        num_key_value_heads=8,
        swa_num_attention_heads=128,
        attention_value_scale=0.612,
        n_routed_experts=384,
    ),
}


def published_forms(config: dict[str, Any], heads: int = _DRAFT_HEADS) -> Forms:
    """Names, types and shapes of the text model's tensors: fp8 with blocks of 128, draft heads included."""
    embed, vocab = config["hidden_size"], config["vocab_size"]
    forms = {
        "model.embed_tokens.weight": Form("bfloat16", (vocab, embed)),
        "lm_head.weight": Form("bfloat16", (vocab, embed)),
        "model.norm.weight": Form("bfloat16", (embed,)),
    }
    for index, window in enumerate(config["hybrid_layer_pattern"]):
        prefix = f"model.layers.{index}."
        forms |= _attention(prefix, config, bool(window))
        forms |= _norms(prefix, ("input_layernorm", "post_attention_layernorm"), embed)
        forms |= _experts(prefix, config) if config["moe_layer_freq"][index] else _dense(prefix, config)
    for index in range(heads):
        prefix = f"model.mtp.layers.{index}."
        forms |= _attention(prefix, config, window=True) | _dense(prefix, config)
        names = ("enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm")
        forms |= _norms(prefix, names, embed)
        forms[f"{prefix}eh_proj.weight"] = Form("bfloat16", (embed, 2 * embed))
    return forms


def _norms(prefix: str, names: tuple[str, ...], embed: int) -> dict[str, Form]:
    return {f"{prefix}{name}.weight": Form("bfloat16", (embed,)) for name in names}


def _attention(prefix: str, config: dict[str, Any], window: bool) -> dict[str, Form]:
    kind = "swa_" if window else ""
    heads, kv_heads = config[f"{kind}num_attention_heads"], config[f"{kind}num_key_value_heads"]
    head_dim, v_dim, embed = config[f"{kind}head_dim"], config[f"{kind}v_head_dim"], config["hidden_size"]
    rows = (heads * head_dim, kv_heads * head_dim, kv_heads * v_dim)
    prefix += "self_attn."
    chunks = config["num_key_value_heads"]
    # Blocks are counted in each chunk [Q; K; V]; a block that two parts share is the first one's.
    ends = [-(-sum(rows[: part + 1]) // chunks // _BLOCK) for part in range(3)]
    if config.get("attention_projection_layout") == "fused_qkv":
        forms = _fp8(f"{prefix}qkv_proj.weight", sum(rows), embed, chunks * ends[2])
    else:
        own = (ends[0], ends[1] - ends[0], ends[2] - ends[1])
        parts = zip("qkv", rows, own, strict=True)
        forms = {}
        for part, part_rows, blocks in parts:
            forms |= _fp8(f"{prefix}{part}_proj.weight", part_rows, embed, chunks * blocks)
    forms[f"{prefix}o_proj.weight"] = Form("bfloat16", (embed, heads * v_dim))
    if window:
        forms[f"{prefix}attention_sink_bias"] = Form("bfloat16", (heads,))
    return forms


def _dense(prefix: str, config: dict[str, Any]) -> dict[str, Form]:
    return _gated(f"{prefix}mlp.", config["hidden_size"], config["intermediate_size"])


def _experts(prefix: str, config: dict[str, Any]) -> dict[str, Form]:
    experts, embed = config["n_routed_experts"], config["hidden_size"]
    forms = {
        f"{prefix}mlp.gate.weight": Form("float32", (experts, embed)),
        f"{prefix}mlp.gate.e_score_correction_bias": Form("float32", (experts,)),
    }
    for expert in range(experts):
        forms |= _gated(f"{prefix}mlp.experts.{expert}.", embed, config["moe_intermediate_size"])
    return forms


def _gated(prefix: str, embed: int, width: int) -> dict[str, Form]:
    return (
        _fp8(f"{prefix}gate_proj.weight", width, embed)
        | _fp8(f"{prefix}up_proj.weight", width, embed)
        | _fp8(f"{prefix}down_proj.weight", embed, width)
    )


def _fp8(name: str, rows: int, columns: int, blocks: int | None = None) -> dict[str, Form]:
    """A matrix and its factors; `blocks` of rows where they are not those of the matrix itself."""
    scale = (blocks if blocks is not None else -(-rows // _BLOCK), -(-columns // _BLOCK))
    return {name: Form(FP8, (rows, columns)), f"{name}_scale_inv": Form("float32", scale)}

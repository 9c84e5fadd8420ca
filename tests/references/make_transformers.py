"""Remakes or checks `transformers.npz`: what Hugging Face transformers computes for the tiny checkpoints.

    python -m tests.references.make_transformers            # writes the file
    python -m tests.references.make_transformers --check    # exit 1 if a committed value no longer holds

Needs torch and transformers, and imports nothing of the product. Everything is eager and float32, without a
cache: each greedy token is the argmax of a full forward pass.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

from tests import tiny

COMMITTED = Path(__file__).with_name("transformers.npz")
# Two float32 machines: each is up to 2.1e-5 from the float64 oracle on these checkpoints.
LOG_PROB_TOLERANCE = 5e-5
GREEDY_TOKENS = 24

Arrays = dict[str, np.ndarray]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the committed file, write nothing")
    check = parser.parse_args().check
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    made = make()
    if not check:
        np.savez_compressed(COMMITTED, **made)
        print(f"wrote {COMMITTED.name}: {COMMITTED.stat().st_size} bytes, {len(made)} arrays")
        return 0
    with np.load(COMMITTED) as committed:
        complaints = differences(dict(committed), made)
    print("\n".join(complaints) or f"{COMMITTED.name} holds: {len(made)} arrays")
    return 1 if complaints else 0


def make() -> Arrays:
    prompt = tiny.prompt()
    made: Arrays = {
        "versions": np.array([f"transformers {transformers.__version__}", f"torch {torch.__version__}"]),
        "prompt": np.array(prompt, np.int32),
    }
    for case in tiny.cases():
        if not case.in_transformers:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            model = load(case.into(Path(scratch) / "hub"), Path(scratch) / "native")
        made[f"{case.name}/log_probs"] = log_probs(model, prompt)
        made[f"{case.name}/greedy"], made[f"{case.name}/greedy_gaps"] = greedy(model, prompt)
    return made


def differences(committed: Arrays, made: Arrays) -> list[str]:
    """One line for each array that is missing, of another shape, or too far off. Versions may differ."""
    complaints = [f"{name}: only in one of the two" for name in sorted(committed.keys() ^ made.keys())]
    for name in sorted(committed.keys() & made.keys() - {"versions"}):
        old, new = committed[name], made[name]
        if old.shape != new.shape:
            complaints.append(f"{name}: shape {old.shape} committed, {new.shape} now")
        elif new.dtype == np.float32:
            worst = float(np.abs(old - new).max())
            if not worst <= LOG_PROB_TOLERANCE:
                complaints.append(f"{name}: off by {worst:.2e}, {LOG_PROB_TOLERANCE:.0e} allowed")
        elif not np.array_equal(old, new):
            complaints.append(f"{name}: ids {old.tolist()} committed, {new.tolist()} now")
    return complaints


def load(hub: Path, native: Path) -> Any:
    """The model in eval mode. Refuses a checkpoint that does not fill the model exactly."""
    config = transformers.PreTrainedConfig.get_config_dict(hub)[0]
    eager = {"attn_implementation": "eager"}
    if config["model_type"].startswith("mimo_v2"):
        write_native_mimo(hub, native, config)
        hub = native
        eager["experts_implementation"] = "eager"  # the grouped kernel wants widths that divide by four
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        hub, dtype=torch.float32, output_loading_info=True, **eager
    )
    unused = {key: names for key, names in report.items() if names}
    assert not unused, f"{hub.name}: {unused}"
    return model.eval()


def write_native_mimo(hub: Path, native: Path, config: dict[str, Any]) -> None:
    """Says a hub checkpoint in the words of the native class, which knows split q/k/v only."""
    native_config(config).save_pretrained(native)
    tensors: Arrays = {}
    for shard in sorted(hub.glob("*.safetensors")):
        tensors |= load_file(shard)
    for name in [name for name in tensors if name.endswith(".qkv_proj.weight")]:
        kind = "swa_" if config["hybrid_layer_pattern"][int(name.split(".")[2])] else ""
        queries = config[f"{kind}num_attention_heads"] * config[f"{kind}head_dim"]
        keys = config[f"{kind}num_key_value_heads"] * config[f"{kind}head_dim"]
        parts = np.split(tensors.pop(name), [queries, queries + keys])
        for part, rows in zip("qkv", parts, strict=True):
            tensors[name.replace("qkv_proj", f"{part}_proj")] = np.ascontiguousarray(rows)
    save_file(tensors, native / "model.safetensors", metadata={"format": "pt"})


def native_config(config: dict[str, Any]) -> transformers.PreTrainedConfig:
    """Every name is given: the class ignores the hub's and would fall back to the published sizes.

    `sliding_window` counts the query itself, as the hub's does; `sliding_window_size` is left out, because
    the class would add one to it. KV heads of window layers are fixed at twice those of full layers.
    """
    assert config["swa_num_key_value_heads"] == 2 * config["num_key_value_heads"]
    same = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
        "head_dim v_head_dim hidden_act max_position_embeddings moe_intermediate_size num_experts_per_tok "
        "n_routed_experts routed_scaling_factor n_group topk_group norm_topk_prob attention_value_scale "
        "attention_bias attention_dropout tie_word_embeddings sliding_window"
    )
    rotary = {"rope_type": "default", "partial_rotary_factor": config["partial_rotary_factor"]}
    return transformers.MiMoV2FlashConfig(
        **{key: config[key] for key in same.split()},
        rms_norm_eps=config["layernorm_epsilon"],
        layer_types=["sliding_attention" if window else "full_attention" for window in config["hybrid_layer_pattern"]],
        mlp_layer_types=["sparse" if experts else "dense" for experts in config["moe_layer_freq"]],
        rope_parameters={
            "full_attention": rotary | {"rope_theta": float(config["rope_theta"])},
            "sliding_attention": rotary | {"rope_theta": float(config["swa_rope_theta"])},
        },
    )


@torch.no_grad()
def log_probs(model: Any, token_ids: list[int]) -> np.ndarray:
    """[tokens, vocab] float32."""
    logits = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return torch.log_softmax(logits.double(), dim=-1).float().numpy()


def greedy(model: Any, token_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The continuation, and how far the best log-probability was above the second at each step."""
    ids, gaps = list(token_ids), []
    for _ in range(GREEDY_TOKENS):
        row = log_probs(model, ids)[-1]
        second, best = np.sort(row)[-2:]
        ids.append(int(row.argmax()))
        gaps.append(best - second)
    return np.array(ids[len(token_ids) :], np.int32), np.array(gaps, np.float32)


if __name__ == "__main__":
    sys.exit(main())

"""Remakes or checks `gemma_transformers.json`: what transformers computes for Gemma 3 270M.

    python -m tests.references.make_gemma_transformers --gemma3 GEMMA3.gguf
    python -m tests.references.make_gemma_transformers --gemma3 GEMMA3.gguf --check

Needs torch, transformers and gguf, and imports nothing of the product. The GGUF's weights are dequantised to float32
and put into `Gemma3ForCausalLM` by hand; the prompts are those of `llama_cpp.json`. llama.cpp looks GELU up in a
half-precision table and is off by up to 1e-2 on this model; here everything is float32.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

COMMITTED = Path(__file__).with_name("gemma_transformers.json")
PROMPTS = Path(__file__).with_name("llama_cpp.json")
LOG_PROB_TOLERANCE = 1e-4
LISTED_TOKENS = 200
DECIMALS = 6
FULL_EVERY = 6  # no gemma3 GGUF states the pattern or the window layers' rotary base
WINDOW_THETA = 10000.0

# Per block: the name in the GGUF -> the name in transformers.
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gemma3", type=Path, required=True, help="Gemma 3 270M, Q4_K_M")
    parser.add_argument("--check", action="store_true", help="compare with the committed file, write nothing")
    arguments = parser.parse_args()
    made = make(arguments.gemma3)
    if not arguments.check:
        text = json.dumps(made, separators=(",", ":")).replace('{"name":', '\n{"name":')
        COMMITTED.write_text(text + "\n")
        print(f"wrote {COMMITTED.name}: {COMMITTED.stat().st_size} bytes")
        return 0
    complaints = differences(json.loads(COMMITTED.read_text()), made)
    print("\n".join(complaints) or f"{COMMITTED.name} holds")
    return 1 if complaints else 0


def make(source: Path) -> dict[str, Any]:
    given = json.loads(PROMPTS.read_text())["gemma3"]
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    assert digest == given["sha256"], f"{source} is not the file behind {PROMPTS.name}"
    model = load(source)
    return {
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "sha256": digest,
        "sample_ids": given["sample_ids"],
        "prompts": [run(model, prompt, given["sample_ids"]) for prompt in given["prompts"]],
    }


def load(source: Path) -> Any:
    """Every weight of the file goes to one parameter, and every parameter gets one."""
    reader = gguf.GGUFReader(source)
    model = transformers.Gemma3ForCausalLM(config(reader)).to(torch.float32).eval()
    state = {name_in_transformers(t.name): weight(t) for t in reader.tensors}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model


def config(reader: gguf.GGUFReader) -> transformers.Gemma3TextConfig:
    def field(name: str) -> Any:
        return reader.fields[f"gemma3.{name}"].contents()

    layers = field("block_count")
    return transformers.Gemma3TextConfig(
        vocab_size=next(int(t.shape[1]) for t in reader.tensors if t.name == "token_embd.weight"),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=layers,
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        head_dim=field("attention.key_length"),
        query_pre_attn_scalar=field("attention.key_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        sliding_window=field("attention.sliding_window"),
        max_position_embeddings=field("context_length"),
        hidden_activation="gelu_pytorch_tanh",
        layer_types=["sliding_attention" if (layer + 1) % FULL_EVERY else "full_attention" for layer in range(layers)],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": float(field("rope.freq_base"))},
            "sliding_attention": {"rope_type": "default", "rope_theta": WINDOW_THETA},
        },
        attn_implementation="eager",
        tie_word_embeddings=True,
    )


def name_in_transformers(name: str) -> str:
    if not name.startswith("blk."):
        return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{BLOCK_NAMES[part]}.{kind}"


def weight(tensor: gguf.ReaderTensor) -> torch.Tensor:
    """float32 [out, in]. GGUF norms hold the weight itself, transformers the weight minus 1."""
    values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    return torch.from_numpy(values - 1 if tensor.name.endswith("norm.weight") else values)


@torch.no_grad()
def run(model: Any, prompt: dict[str, Any], sample: list[int]) -> dict[str, Any]:
    """Natural-log probabilities of the first token after the prompt: the likeliest ids and a fixed sample."""
    logits = model(torch.tensor([prompt["prompt_ids"]]), use_cache=False, logits_to_keep=1).logits[0, -1]
    row = torch.log_softmax(logits.double(), dim=-1).numpy()
    top = np.argsort(-row, kind="stable")[:LISTED_TOKENS]
    return {
        "name": prompt["name"],
        "first_top_ids": top.tolist(),
        "first_top_log_probs": rounded(row[top]),
        "first_sample_log_probs": rounded(row[sample]),
    }


def rounded(values: np.ndarray) -> list[float]:
    return [round(float(value), DECIMALS) for value in values]


def differences(committed: dict[str, Any], made: dict[str, Any]) -> list[str]:
    if committed["sha256"] != made["sha256"]:
        return ["another GGUF file than the committed values are of"]
    complaints = []
    for old, new in zip(committed["prompts"], made["prompts"], strict=True):
        now = dict(zip(new["first_top_ids"], new["first_top_log_probs"], strict=True))
        then = zip(old["first_top_ids"], old["first_top_log_probs"], strict=True)
        pairs = [(value, now.get(token, value)) for token, value in then]  # a last place may change hands
        pairs += zip(old["first_sample_log_probs"], new["first_sample_log_probs"], strict=True)
        worst = max(abs(one - two) for one, two in pairs)
        if worst > LOG_PROB_TOLERANCE:
            complaints.append(f"{old['name']}: off by {worst:.2e}, {LOG_PROB_TOLERANCE:.0e} allowed")
    return complaints


if __name__ == "__main__":
    sys.exit(main())

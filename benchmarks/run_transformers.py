"""Measures Hugging Face transformers. Started by `benchmarks.decode` with a peer's interpreter and a workload.

Imports nothing of the product.
"""

from collections.abc import Sequence
from typing import Any

import gguf
import torch  # type: ignore[import-not-found, unused-ignore]
import transformers  # type: ignore[import-not-found, unused-ignore]

from benchmarks.workload import read_workload, report, versions

# GGUF's name of a tensor in block N, behind "blk.N.", and transformers', behind "model.layers.N."
LAYER_NAMES = (
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
)
OTHER_NAMES = (("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head"))


class Transformers:
    """Forward passes with the default cache and attention, without the overhead of `generate`."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache: Any = None
        self.tokens: list[int] = []

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        self.cache = transformers.DynamicCache(config=self.model.config)
        self._forward(torch.tensor(prompts))

    def step(self) -> None:
        self._forward(torch.tensor(self.tokens)[:, None])

    def _forward(self, ids: Any) -> None:
        output = self.model(input_ids=ids, cache=self.cache, use_cache=True, logits_to_keep=1)
        self.tokens = output.logits[:, -1].argmax(-1).tolist()


def load(path: str, dtype: Any) -> Any:
    """LlamaForCausalLM with the dequantised weights of a llama-type GGUF."""
    reader = gguf.GGUFReader(path)
    config = transformers.LlamaConfig(**config_fields(reader))
    torch.set_default_dtype(dtype)
    model = transformers.LlamaForCausalLM(config).eval()
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
        kind = tensor.name.removesuffix(".weight").rpartition(".")[2]
        if kind in heads:
            weight = halves_apart(weight, heads[kind])
        state[hub_name(tensor.name)] = weight.to(dtype)
    missing, unexpected = model.load_state_dict(state, strict=False)
    model.tie_weights()
    if unexpected or set(missing) - ({"lm_head.weight"} if config.tie_word_embeddings else set()):
        raise ValueError(f"{path}: missing {missing}, unexpected {unexpected}")
    return model


def config_fields(reader: Any) -> dict[str, Any]:
    """A GGUF's keys in transformers' vocabulary."""

    def key(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    return {
        "vocab_size": key("vocab_size"),
        "hidden_size": key("embedding_length"),
        "intermediate_size": key("feed_forward_length"),
        "num_hidden_layers": key("block_count"),
        "num_attention_heads": key("attention.head_count"),
        "num_key_value_heads": key("attention.head_count_kv"),
        "max_position_embeddings": key("context_length"),
        "rms_norm_eps": key("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": key("rope.freq_base")},
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
    }


def hub_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`"""
    if not name.startswith("blk."):
        return dict(OTHER_NAMES)[name.removesuffix(".weight")] + ".weight"
    _, layer, kind, _ = name.split(".")
    return f"model.layers.{layer}.{dict(LAYER_NAMES)[kind]}.weight"


def halves_apart(weight: Any, heads: int) -> Any:
    """Undoes what llama-type GGUFs do to query and key rows [heads * head, embed]: rotary pairs lie side by side."""
    rows, embed = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, embed).swapaxes(1, 2).reshape(rows, embed)


def main() -> None:
    workload = read_workload()
    torch.set_num_threads(workload.threads)
    runner = Transformers(load(workload.model, getattr(torch, workload.weights)))
    weights = str(runner.model.dtype).removeprefix("torch.")
    with torch.inference_mode():
        report(workload, lambda sequences: runner, weights=weights, versions=versions("torch", "transformers"))


if __name__ == "__main__":
    main()

"""Remakes or checks `llama_cpp.json`: what llama.cpp computes for SmolLM2-135M and Gemma 3 270M.

    python -m tests.references.make_llama_cpp --smollm2 SMOLLM2.gguf --gemma3 GEMMA3.gguf
    python -m tests.references.make_llama_cpp --smollm2 SMOLLM2.gguf --gemma3 GEMMA3.gguf --check

Needs llama-cpp-python and gguf, and imports nothing of the product. Each model is first expanded to float32
weights, because llama.cpp would otherwise also round the activations to eight bits; its cache is float32 too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

from tests.references.prompts import Prompt, gemma3_prompts, smollm2_prompts

COMMITTED = Path(__file__).with_name("llama_cpp.json")
# Gemma's bound is wide because llama.cpp looks GELU up in a half-precision table: feeding a prompt token by
# token instead of at once already moves its log-probabilities by up to 5e-3. SmolLM2 has no GELU.
LOG_PROB_TOLERANCE = {"smollm2": 2e-4, "gemma3": 2e-2}
GREEDY_TOKENS = 48
LISTED_TOKENS = 200
CONTEXT_TOKENS = 1088  # the longest prompt and its continuation
DECIMALS = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", type=Path, required=True, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--gemma3", type=Path, required=True, help="Gemma 3 270M, Q4_K_M")
    parser.add_argument("--check", action="store_true", help="compare with the committed file, write nothing")
    arguments = parser.parse_args()
    made = {
        "versions": {"llama-cpp-python": llama_cpp.__version__},
        "settings": {"weights": "float32", "cache": "float32", "flash_attention": False, "swa_full": True},
        "smollm2": record(arguments.smollm2, smollm2_prompts()),
        "gemma3": record(arguments.gemma3, gemma3_prompts()),
    }
    if not arguments.check:
        COMMITTED.write_text(compact(made))
        print(f"wrote {COMMITTED.name}: {COMMITTED.stat().st_size} bytes")
        return 0
    complaints = differences(json.loads(COMMITTED.read_text()), made)
    print("\n".join(complaints) or f"{COMMITTED.name} holds")
    return 1 if complaints else 0


def compact(made: dict[str, Any]) -> str:
    """JSON with one line for each prompt, so that a change is seen where it is."""
    text = json.dumps(made, separators=(",", ":"))
    for start in ('{"name":', '"smollm2":', '"gemma3":'):
        text = text.replace(start, "\n" + start)
    return text + "\n"


def record(source: Path, prompts: tuple[Prompt, ...]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        expanded = Path(scratch) / "float32.gguf"
        expand(source, expanded)
        model = llama_cpp.Llama(
            str(expanded),
            n_ctx=CONTEXT_TOKENS,
            n_batch=CONTEXT_TOKENS,
            n_ubatch=CONTEXT_TOKENS,  # a prompt is one batch
            n_threads=2,
            n_threads_batch=2,
            type_k=llama_cpp.GGML_TYPE_F32,
            type_v=llama_cpp.GGML_TYPE_F32,
            flash_attn=False,
            swa_full=True,  # the window is then only a mask: nothing is ever evicted
            verbose=False,
        )
        sample = np.random.default_rng(7).choice(model.n_vocab(), LISTED_TOKENS, replace=False)
        made = [run(model, prompt, sample) for prompt in prompts]
        model.close()
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    return {"sha256": digest, "sample_ids": sorted(sample.tolist()), "prompts": made}


def expand(source: Path, target: Path) -> None:
    """The same GGUF with every tensor as float32 and every other field as it was."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        if name == "general.file_type":
            writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        else:
            element = entry.types[-1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, entry.contents(), entry.types[0], element)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def run(model: llama_cpp.Llama, prompt: Prompt, sample: np.ndarray) -> dict[str, Any]:
    """Greedy decoding with the cache; an end-of-text token does not stop it.

    `first_*` are natural-log probabilities of the first token after the prompt: of the likeliest ids, and of
    a fixed sample of ids. `greedy_gaps` say how far the chosen token was above the second.
    """
    prompt_ids = model.tokenize(prompt.text.encode(), special=True)[: prompt.tokens]
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(model.ctx), True)
    model.reset()
    model.eval(prompt_ids)
    first = row = log_probs(model)
    top = np.argsort(-first, kind="stable")[:LISTED_TOKENS]
    greedy: list[tuple[int, float, float]] = []
    for _ in range(GREEDY_TOKENS):
        second, best = np.partition(row, -2)[-2:]
        greedy.append((int(row.argmax()), float(best), float(best - second)))
        model.eval([greedy[-1][0]])
        row = log_probs(model)
    return {
        "name": prompt.name,
        "prompt_ids": prompt_ids,
        "greedy_ids": [chosen for chosen, _, _ in greedy],
        "greedy_log_probs": rounded(best for _, best, _ in greedy),
        "greedy_gaps": rounded(gap for _, _, gap in greedy),
        "first_top_ids": top.tolist(),
        "first_top_log_probs": rounded(first[top]),
        "first_sample_log_probs": rounded(first[np.sort(sample)]),
    }


def log_probs(model: llama_cpp.Llama) -> np.ndarray:
    """[vocab] float64, after the last evaluated token."""
    pointer = llama_cpp.llama_get_logits_ith(model.ctx, -1)
    logits = np.ctypeslib.as_array(pointer, (model.n_vocab(),)).astype(np.float64)
    logits -= logits.max()
    return logits - np.log(np.exp(logits).sum())


def rounded(values: Any) -> list[float]:
    return [round(float(value), DECIMALS) for value in values]


def differences(committed: dict[str, Any], made: dict[str, Any]) -> list[str]:
    complaints = []
    for model, tolerance in LOG_PROB_TOLERANCE.items():
        if committed[model]["sha256"] != made[model]["sha256"]:
            complaints.append(f"{model}: another GGUF file than the committed values are of")
        for old, new in zip(committed[model]["prompts"], made[model]["prompts"], strict=True):
            complaints += [f"{model}/{old['name']}: {text}" for text in prompt_differences(old, new, tolerance)]
    return complaints


def prompt_differences(old: dict[str, Any], new: dict[str, Any], tolerance: float) -> list[str]:
    """Continuations are compared up to the first choice that was nearly a tie."""
    if old["prompt_ids"] != new["prompt_ids"]:
        return [f"the text became {len(new['prompt_ids'])} other ids, {len(old['prompt_ids'])} committed"]
    clear = [gap > 2 * tolerance for gap in old["greedy_gaps"]] + [False]
    steps = clear.index(False)
    if old["greedy_ids"][:steps] != new["greedy_ids"][:steps]:
        return [f"greedy ids {old['greedy_ids'][:steps]} committed, {new['greedy_ids'][:steps]} now"]
    now = dict(zip(new["first_top_ids"], new["first_top_log_probs"], strict=True))
    then = zip(old["first_top_ids"], old["first_top_log_probs"], strict=True)
    pairs = [(value, now.get(token, value)) for token, value in then]  # a last place may change hands
    pairs += zip(old["first_sample_log_probs"], new["first_sample_log_probs"], strict=True)
    pairs += zip(old["greedy_log_probs"][:steps], new["greedy_log_probs"][:steps], strict=True)
    worst = max(abs(one - two) for one, two in pairs)
    return [] if worst <= tolerance else [f"log-probabilities off by {worst:.2e}, {tolerance:.0e} allowed"]


if __name__ == "__main__":
    sys.exit(main())

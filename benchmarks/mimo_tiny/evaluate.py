"""What a written mimo-tiny does with held-out questions.

python -m benchmarks.mimo_tiny.evaluate
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.mimo_tiny.acceptance import mean_accepted_length
from benchmarks.mimo_tiny.batches import ROW_TOKENS, Batch, encode, pack
from benchmarks.mimo_tiny.corpus import KINDS, Document, Part, documents
from mimo_jax import LLM, SamplingParams
from mimo_jax.checkpoint.checkpoint import open_checkpoint
from mimo_jax.checkpoint.load import load_params
from mimo_jax.config import ModelConfig
from mimo_jax.params import Params
from mimo_jax.text import Tokenizer
from sharding import Rules, make_mesh

FOLDER = Path(__file__).parents[2] / "mimo_jax" / "mimo_tiny"
MOST_TOKENS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--each", type=int, default=64, help="questions of each kind")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--show", type=int, default=0, help="print so many answers of each kind")
    options = parser.parse_args()
    llm = LLM(options.folder, progress=False)
    asked = held_out(options.each)
    written = answers(llm, asked, options.temperature)
    shown = dict.fromkeys(KINDS, 0)
    for document, text in zip(asked, written, strict=True):
        if shown[document.kind] < options.show:
            shown[document.kind] += 1
            print(f"--- {document.kind}: {question(document)}\n{text}")
    print(json.dumps(shares(asked, written), indent=2))
    params, config = read_params(options.folder)
    length = mean_accepted_length(params, held_out_batches(options.each, llm.tokenizer), config)
    print(f"tokens a step on held-out text, estimated: {length:.2f} of {1 + config.draft_heads}")
    metrics = llm.engine.speculation.metrics
    print(f"tokens a step in these answers: {metrics.mean_accepted_length:.2f} ({metrics.steps} verifying steps)")


def read_params(folder: Path) -> tuple[Params, ModelConfig]:
    """The weights of a folder in float32."""
    checkpoint = open_checkpoint(folder)
    return load_params(checkpoint, jnp.float32, make_mesh(jax.devices()[0]), Rules()), checkpoint.config


def held_out(each: int) -> list[Document]:
    """`each` held-out documents of every kind."""
    found: dict[str, list[Document]] = {kind: [] for kind in KINDS}
    for document in documents(Part.HELD_OUT):
        found[document.kind].append(document)
        if min(map(len, found.values())) >= each:
            break
    return [document for kind in KINDS for document in found[kind][:each]]


def held_out_batches(each: int, tokenizer: Tokenizer) -> list[Batch]:
    """The texts of the same documents, one in a row, eight rows a batch."""
    texts = [encode(document, tokenizer) for document in held_out(each)]
    texts = [text for text in texts if len(text[0]) <= ROW_TOKENS]
    return [pack(texts[first : first + 8]) for first in range(0, len(texts) // 8 * 8, 8)]


def answers(llm: LLM, asked: Sequence[Document], temperature: float = 0.0) -> list[str]:
    """The model's first answer to each document's question."""
    params = SamplingParams(temperature=temperature, max_tokens=MOST_TOKENS, seed=0)
    return [output.outputs[0].text for output in llm.generate([document.prompt() for document in asked], params)]


def shares(asked: Sequence[Document], written: Sequence[str]) -> dict[str, dict[str, float]]:
    """Of each kind: how many answers are `valid` in its form, and how many are word for word the expected ones."""
    found = {}
    for kind in KINDS:
        pairs = [pair for pair in zip(asked, written, strict=True) if pair[0].kind == kind]
        found[kind] = {
            "answers": len(pairs),
            "valid": round(sum(valid(document, text) for document, text in pairs) / len(pairs), 3),
            "expected": round(sum(document.answer() == text for document, text in pairs) / len(pairs), 3),
        }
    return found


def valid(document: Document, text: str) -> bool:
    """Whether an answer has the form of its kind, whatever it says."""
    if document.kind == "json":
        return _is_json(text)
    if document.kind == "function":
        return _compiles(text)
    if document.kind == "arithmetic":
        return text.endswith(".") and text.count("The answer is") == document.answer().count("The answer is")
    calls = text.count("<tool_call>")
    closed = text.count("</parameter>\n</function>\n</tool_call>")
    return calls == closed == document.answer().count("<tool_call>")


def question(document: Document) -> str:
    return next(str(message["content"]) for message in document.messages if message["role"] == "user")


def _is_json(text: str) -> bool:
    try:
        value: Any = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict | list)


def _compiles(text: str) -> bool:
    try:
        compile(text.removeprefix("```python\n").removesuffix("\n```"), "answer", "exec")
    except SyntaxError:
        return False
    return text.startswith("```python\ndef ") and text.endswith("\n```")


if __name__ == "__main__":
    main()

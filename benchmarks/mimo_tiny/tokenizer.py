"""mimo-tiny's tokenizer: a byte-level BPE in the form of MiMo's (Qwen2's), trained on the generated text."""

import itertools
import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from benchmarks.mimo_tiny.corpus import TEMPLATE, Part, documents

VOCAB = 1000
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Parts of the text that a client reads, so they are single tokens but not left out as control tokens are.
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Words with one leading character, digits one at a time, runs of symbols, line ends, spaces: what Qwen2 splits by.
SPLIT = (
    r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|[^\r\n\p{L}\p{N}]?[\p{L}]+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(sample: int = 6000) -> tokenizers.Tokenizer:
    """From the first `sample` training documents; the same every time."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    added = [AddedToken(text, normalized=False, special=True) for text in SPECIAL]
    added += [AddedToken(text, normalized=False, special=False) for text in MARKS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(added),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [document.text() for document in itertools.islice(documents(Part.TRAIN), sample)]
    for token in (*SPECIAL, *MARKS):  # they are never split, so nothing is learned from their letters
        texts = [text.replace(token, "\n") for text in texts]
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens(added)
    return backend


def write_tokenizer(folder: Path, backend: tokenizers.Tokenizer) -> None:
    """tokenizer.json, and tokenizer_config.json with the chat template, as a model folder has them."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"), pretty=False)
    config: dict[str, Any] = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": _added_tokens(backend),
        "chat_template": TEMPLATE.read_text(encoding="utf-8"),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _added_tokens(backend: tokenizers.Tokenizer) -> dict[str, dict[str, Any]]:
    return {
        str(token_id): {
            "content": token.content,
            "lstrip": token.lstrip,
            "normalized": token.normalized,
            "rstrip": token.rstrip,
            "single_word": token.single_word,
            "special": token.special,
        }
        for token_id, token in sorted(backend.get_added_tokens_decoder().items())
    }

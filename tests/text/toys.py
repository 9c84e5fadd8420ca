"""Small tokenizers, written by hand so that a test shows every id it expects."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

BOS, EOS, TURN_END, TAG = "<s>", "<|eos|>", "<|im_end|>", "<think>"
SPACE_MARK = "\u2581"


def byte_level_backend(merges: Sequence[tuple[str, str]] = (("h", "i"), ("Ġ", "hi"))) -> Tokenizer:
    """The byte alphabet in code point order, the merges, <s> <|eos|> <|im_end|> (special), <think> (not
    special).
    """
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in (BOS, EOS, TURN_END)])
    backend.add_tokens([AddedToken(TAG, normalized=False)])
    return backend


def sentencepiece_backend(space_prefix: bool = True) -> Tokenizer:
    """<unk> <s> </s>, the 256 byte tokens, then a few pieces; a space in front as in Llama 2 if asked for."""
    pieces = ["<unk>", BOS, "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [SPACE_MARK, "h", "i", "o", ".", "hi", f"{SPACE_MARK}hi", SPACE_MARK * 2]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("h", "i"), (SPACE_MARK, "hi"), (SPACE_MARK, SPACE_MARK)]
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = Tokenizer(model)
    steps: list[Any] = [normalizers.Prepend(SPACE_MARK)] if space_prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE_MARK)])
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", BOS, "</s>")])
    return backend


def surround(backend: Tokenizer, template: str) -> Tokenizer:
    """Makes the post-processor add tokens: "<s> $A", "<s> $A <|eos|>"."""
    texts = [text for text in template.split() if text != "$A"]
    ids = [(text, backend.token_to_id(text)) for text in texts]
    backend.post_processor = processors.TemplateProcessing(single=template, pair=None, special_tokens=ids)
    return backend


def write_folder(folder: Path, backend: Tokenizer, files: Mapping[str, Any] | None = None) -> Path:
    """tokenizer.json beside `files`, each a JSON value or, for other suffixes, text."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in (files or {}).items():
        text = json.dumps(content) if name.endswith(".json") else content
        (folder / name).write_text(text, encoding="utf-8")
    return folder

"""Remakes or checks `tokenizer_ids.json`: what llama.cpp makes of a fixed set of hard texts.

    python -m tests.references.make_tokenizer_ids --smollm2 SMOLLM2.gguf --gemma3 GEMMA3.gguf
    python -m tests.references.make_tokenizer_ids --smollm2 SMOLLM2.gguf --gemma3 GEMMA3.gguf --check

Needs llama-cpp-python and imports nothing of the product. Only vocabularies are loaded, so it takes seconds.
"""

import argparse
import ctypes
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp

COMMITTED = Path(__file__).with_name("tokenizer_ids.json")
PIECE_BYTES = 1024

# One vocabulary, read with other rules: the key is set while loading, the file stays as it is.
SMOLLM2_SPLITS = ("gpt-2", "llama-bpe", "qwen2", "qwen35", "deepseek-v3", "default")

PYTHON_CODE = (
    'def f(x: int) -> str:\n    """Doc."""\n\tif x != 10_000:\n        return f"{x!r:>8}"\n    return None  # end\n'
)
C_CODE = '#include <stdio.h>\nint main(void) {\n  for (int i=0;i<1<<4;++i) printf("%d\\n", i);\n}\n'
JSON_CODE = '{"a": [1, 2.5e-3, null, true], "b\\u00e9": {"c": "\\"q\\""}}'

TEXTS = (
    # spaces, tabs, newlines
    "",
    " ",
    "  ",
    " leading",
    "trailing ",
    "  two  spaces  inside   three    four ",
    " " * 33,
    "a" + " " * 40 + "b",
    "\t",
    "\tindented\t\ttwice",
    "\n",
    "\n\n\n",
    "line\nline\n\nparagraph\n",
    "\n" * 40,
    " \n \n  \n",
    "dos\r\nline\r\n\r\n",
    "\r",
    "\u00a0non\u00a0breaking\u00a0",
    "\u3000wide\u2003em\u2009thin\u200bzero\ufeffmark",
    "\x0b\x0cvertical\x1c\x85next",
    # numbers
    "7",
    "1234567",
    "3.14159 1,000,000 -42 +7 1e-10 0xFF 0b1010",
    "a1b22c333d4444",
    "2026-09-30T12:34:56Z",
    "\u0661\u0662\u0663\u0664 \u0967\u0968\u0969 \uff11\uff12\uff13 \u00bd\u00b2\u2167\u3289",
    "١٢٣abc٤",
    # words and punctuation
    "Hello, world!",
    "don't I'LL we've THEY'RE he'd 'tis it's'M o'clock 'S 's 'ſ",
    "McDonald's iPhone15Pro camelCaseWord snake_case_word SCREAMING-KEBAB",
    "...!!!???---===***///\\\\\\|||~~~^^^```'''\"\"\"",
    "(a)[b]{c}<d>$e%f&g@h#i",
    "«quote» “double” ‘single’ — – … ¿qué? ¡sí!",
    "€5 £10 ¥100 ₿1 5°C ±5 × ÷ ∑ √ ≠ ≤",
    "x" * 300,
    "pneumonoultramicroscopicsilicovolcanoconiosis" * 4,
    "aaaaabbbbbababababa" * 3,
    "=" * 70 + "\n" + "-" * 71,
    # code
    PYTHON_CODE,
    C_CODE,
    JSON_CODE,
    '<div class="x"><h1>T</h1><p>a &amp; b</p><s>old</s></div>',
    "https://example.org/a/b?c=d&e=%20f#g user@example.org C:\\dir\\file.txt",
    "SELECT * FROM t WHERE a<>'b' AND c>=1;--x",
    "\\begin{equation} \\frac{a}{b} = \\alpha_{i}^{2} \\end{equation}",
    # scripts
    "안녕하세요 세계 한국어 \u1112\u1161\u11ab",
    "你好，世界。这是一个测试！繁體中文",
    "こんにちは世界カタカナ、漢字かな交じり文。",
    "مرحبا بالعالم، كيف الحال؟ لغة عربيّة",
    "שלום עולם",
    "Привет, мир! Ёлка",
    "नमस्ते दुनिया क्षत्रिय",
    "สวัสดีชาวโลก",
    "Ελληνικά άλφα Tiếng Việt Türkçe İıŞ",
    "e\u0301 a\u0308 n\u0303 o\u0302\u0323 \u00e9",
    "Z\u0351\u036b\u0343\u036a\u0302a\u0363\u0369l\u0368g\u0348o\u035d",
    # emoji
    "😀 😃😄 \U0001f937\U0001f3fd\u200d♀\ufe0f 👍🏿 ❤\ufe0f ☃",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
    "🇩🇪🇫🇷🏴󠁧󠁢󠁥󠁮󠁧󠁿 1️⃣ #️⃣",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝒜 𠮷 𓀀 𐍈",
    # characters that vocabularies rarely hold
    "\U000e0041\U0010ffff\ue000\uf8ff\uffff",
    "\ufffd\ufffd x\ufffd",
    "\x00\x01\x02nul\x7f\x1b[31mred\x1b[0m\x80\x9f",
    "ꙮ ꧁꧂ ᚠᛇᚻ ⡏⠉ ☭ ﷽ ﷺ ﬁ ﬀ",
    # what looks like the vocabulary's own notation
    "<0x0A><0xE5> <0x> <0x0a>",
    "\u2581already\u2581\u2581marked \u2581",
    "Ġword Ċ ĉ Äł",
    "[UNK] <unk> <s> </s> <pad> <mask> [multimodal]",
    # special tokens in text
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|>b <|im_end|> c<|endoftext|>",
    "<|im_start|> <|im_end|",
    "|im_end|><|im_end|><|im_end|>",
    "<bos>begins with BOS",
    "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    " <bos> x <eos><unused0><unused99>",
    "<jupyter_code>x=1<jupyter_output>",
    "<repo_name><reponame><file_sep>",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smollm2", type=Path, required=True)
    parser.add_argument("--gemma3", type=Path, required=True)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    made = {
        "made_with": f"llama-cpp-python {llama_cpp.__version__}",
        "texts": list(TEXTS),
        "vocabularies": vocabularies(arguments.smollm2, arguments.gemma3),
    }
    if not arguments.check:
        COMMITTED.write_text(dump(made), encoding="ascii")
        print(f"{COMMITTED.name}: {len(TEXTS)} texts, {len(made['vocabularies'])} vocabularies")
        return 0
    differences = compare(json.loads(COMMITTED.read_text(encoding="ascii")), made)
    print("\n".join(differences) or f"{COMMITTED.name} still holds")
    return 1 if differences else 0


def vocabularies(smollm2: Path, gemma3: Path) -> dict[str, Any]:
    made = {"smollm2": read(smollm2, {}), "gemma3": read(gemma3, {})}
    for name in SMOLLM2_SPLITS:
        made[f"smollm2 split as {name}"] = read(smollm2, {"tokenizer.ggml.pre": name})
    made["gemma3 with a space in front"] = read(gemma3, {"tokenizer.ggml.add_space_prefix": True})
    return made


def read(path: Path, overrides: dict[str, str | bool]) -> dict[str, Any]:
    """What llama.cpp makes of the texts with one vocabulary; `overrides` replaces keys of the file.

    ids, ids_with_special: a list for each text, without and with what the file adds around it. Special-token
        text is parsed in both.
    text, text_without_special: the joined pieces of `ids`; null where they are the text itself.
    pieces_sha256: over all ids, "<length>:<bytes>" of the piece, special tokens as their text.
    end_ids: where llama.cpp ends a generation.
    """
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False, kv_overrides=overrides or None)
    vocabulary = llama_cpp.llama_model_get_vocab(model.model)
    size = llama_cpp.llama_vocab_n_tokens(vocabulary)
    digest = hashlib.sha256()
    for token_id in range(size):
        data = piece(vocabulary, token_id, special=True)
        digest.update(b"%d:" % len(data) + data)
    ids = [tokenize(vocabulary, text, add_special=False) for text in TEXTS]
    return {
        "overrides": overrides,
        "vocab_size": size,
        "end_ids": [i for i in range(size) if llama_cpp.llama_vocab_is_eog(vocabulary, i)],
        "pieces_sha256": digest.hexdigest(),
        "ids": ids,
        "ids_with_special": [tokenize(vocabulary, text, add_special=True) for text in TEXTS],
        "text": [joined(vocabulary, i, text, special=True) for i, text in zip(ids, TEXTS, strict=True)],
        "text_without_special": [
            joined(vocabulary, i, text, special=False) for i, text in zip(ids, TEXTS, strict=True)
        ],
    }


def tokenize(vocabulary: Any, text: str, add_special: bool) -> list[int]:
    data = text.encode()
    buffer = (llama_cpp.llama_token * (len(data) + 8))()
    count = llama_cpp.llama_tokenize(vocabulary, data, len(data), buffer, len(buffer), add_special, True)
    if count < 0:
        raise RuntimeError(f"{text!r} needs {-count} tokens")
    return list(buffer[:count])


def piece(vocabulary: Any, token_id: int, special: bool) -> bytes:
    buffer = (ctypes.c_char * PIECE_BYTES)()
    length = llama_cpp.llama_token_to_piece(vocabulary, token_id, buffer, PIECE_BYTES, 0, special)
    if length < 0:
        raise RuntimeError(f"token {token_id} has {-length} bytes")
    return buffer.raw[:length]


def joined(vocabulary: Any, ids: list[int], text: str, special: bool) -> str | None:
    made = b"".join(piece(vocabulary, i, special) for i in ids).decode()
    return None if made == text else made


def dump(made: dict[str, Any]) -> str:
    """JSON with a line of its own for every text of every vocabulary, so that a change is a readable diff."""
    lines = ["{", f' "made_with": {json.dumps(made["made_with"])},']
    lines += [f' "texts": {listing(made["texts"])},', ' "vocabularies": {']
    for name, vocabulary in made["vocabularies"].items():
        lines.append(f" {json.dumps(name)}: {{")
        for key, value in vocabulary.items():
            by_text = isinstance(value, list) and len(value) == len(TEXTS)
            lines.append(f" {json.dumps(key)}: {listing(value) if by_text else json.dumps(value)},")
        lines[-1] = lines[-1].removesuffix(",")
        lines.append(" },")
    lines[-1] = " }"
    return "\n".join([*lines, " }", "}"]) + "\n"


def listing(values: list[Any]) -> str:
    return "[\n  " + ",\n  ".join(map(json.dumps, values)) + "\n ]"


def compare(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """One readable line for each difference."""
    if old["texts"] != new["texts"]:
        return ["the texts differ: make the file again"]
    lines = []
    for name in sorted(old["vocabularies"].keys() | new["vocabularies"].keys()):
        before, after = old["vocabularies"].get(name, {}), new["vocabularies"].get(name, {})
        for key in sorted(before.keys() | after.keys()):
            was, now = before.get(key), after.get(key)
            if was == now:
                continue
            if isinstance(was, list) and isinstance(now, list) and len(was) == len(now) == len(TEXTS):
                lines += [
                    f"{name}, {key}, {text!r}: was {w}, is {n}"
                    for text, w, n in zip(TEXTS, was, now, strict=True)
                    if w != n
                ]
            else:
                lines.append(f"{name}, {key}: was {was}, is {now}")
    return lines


if __name__ == "__main__":
    sys.exit(main())

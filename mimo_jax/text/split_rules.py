"""How a byte-level vocabulary in a GGUF file cuts text into words before merging: the meaning of
`tokenizer.ggml.pre`.
"""

from dataclasses import dataclass
from pathlib import Path

from mimo_jax.errors import CheckpointError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ANY_CASE_CONTRACTIONS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_CHINESE_JAPANESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""


@dataclass(frozen=True)
class SplitRule:
    """Patterns applied one after the other, each within the pieces the one before has left."""

    patterns: tuple[str, ...]
    whole_words_first: bool = False  # a word that is itself a token is not merged from its parts
    add_bos: bool = False  # where the file does not say


def split_rule(name: object, source: Path) -> SplitRule:
    """The rule called `name`. Raises CheckpointError naming an unknown one: guessing would give wrong ids
    silently.
    """
    if name in ("gpt-2", "phi-2", "gigachat", "mellum", "exaone4", "a.x-4.0"):
        return SplitRule((_GPT2,))
    if name in ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"):
        return SplitRule((r"\p{N}", _GPT2))
    if name in ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"):
        return SplitRule((_words(letters=r"\p{L}", digits=r"\p{N}{1,3}"),), whole_words_first=True, add_bos=True)
    if name in (
        "qwen2",
        "deepseek-r1-qwen",
        "kormo",
        "f2llmv2",
        "megrez",
        "stablelm2",
        "hunyuan",
        "solar-open",
    ):
        return SplitRule((_words(letters=r"\p{L}", digits=r"\p{N}"),))
    if name == "qwen35":
        return SplitRule((_words(letters=r"\p{L}\p{M}", digits=r"\p{N}"),))
    if name == "deepseek-v3":
        return SplitRule((r"\p{N}{1,3}", _CHINESE_JAPANESE, _deepseek_words()))
    if name == "default":
        return SplitRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
    raise CheckpointError(
        f"{source}: tokenizer.ggml.pre is {name!r}; the families of gpt-2, smollm, llama-bpe, qwen2, qwen35, "
        "deepseek-v3 and default are read"
    )


def _words(letters: str, digits: str) -> str:
    """The pattern Llama 3 and Qwen share; they differ in how many digits stay together."""
    word = rf"[^\r\n\p{{L}}\p{{N}}]?[{letters}]+"
    symbols = rf" ?[^\s{letters}\p{{N}}]+[\r\n]*"
    return f"{_ANY_CASE_CONTRACTIONS}|{word}|{digits}|{symbols}|{_SPACES}"


def _deepseek_words() -> str:
    word = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    symbols = r" ?[\p{P}\p{S}]+[\r\n]*"
    return f"{_ASCII_PUNCTUATION}[A-Za-z]+|{word}|{symbols}|{_SPACES}"

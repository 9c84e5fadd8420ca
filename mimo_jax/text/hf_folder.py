"""A tokenizer from a model folder in the Hugging Face form.

Read, where present: tokenizer.json (the vocabulary and its rules), tokenizer_config.json and
special_tokens_map.json (token roles, add_bos_token), chat_template.jinja or chat_template.json, config.json
and generation_config.json (ids that end generation).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from mimo_jax.errors import CheckpointError
from mimo_jax.text.chat import ChatTemplate
from mimo_jax.text.tokenizer import SPACE_MARK, PieceCoding, Tokenizer, stop_token_ids

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_PROBE = "a"


@dataclass(frozen=True)
class FolderFiles:
    """The JSON files of a folder; {} for one that is absent."""

    folder: Path
    tokenizer: dict[str, Any]
    tokenizer_config: dict[str, Any]
    special_tokens_map: dict[str, Any]
    config: dict[str, Any]
    generation_config: dict[str, Any]

    def role_text(self, role: str) -> str | None:
        """The text of a token role. An explicit null in tokenizer_config.json means that there is none."""
        for file in (self.tokenizer_config, self.special_tokens_map):
            if role in file:
                value = file[role]
                return value.get("content") if isinstance(value, dict) else value
        return None


def load_folder_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a model folder, or None if it has no tokenizer.json.

    Raises CheckpointError for a file that cannot be parsed, a decoder of an unknown kind, and files that
    contradict each other.
    """
    if not (folder / "tokenizer.json").is_file():
        return None
    files = FolderFiles(
        folder,
        *(
            _read_json(folder / f"{name}.json")
            for name in ("tokenizer", "tokenizer_config", "special_tokens_map", "config", "generation_config")
        ),
    )
    backend = _backend(files)
    ids = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    special = {token.content: token_id for token_id, token in added.items() if token.special}
    coding, strips = _decoding(files)
    vocab_size = max(ids.values(), default=-1) + 1
    bos = _bos_token_id(files, ids)
    eos = ids.get(files.role_text("eos_token") or "")
    prefix, suffix = _surroundings(files, backend, bos, eos)
    return Tokenizer(
        backend=backend,
        coding=coding,
        vocab_size=vocab_size,
        bos_token_id=bos,
        stop_token_ids=stop_token_ids([*_declared_stops(files), eos], special, vocab_size),
        special_ids=frozenset(special.values()),
        # The SentencePiece decoder restores spaces in added tokens too: Gemma's runs of spaces are such
        # tokens.
        literal_ids=frozenset(added if coding is PieceCoding.BYTE_LEVEL else ()),
        prefix_ids=prefix,
        suffix_ids=suffix,
        strips_leading_space=strips,
        chat_template=_chat_template(files),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}; an object is needed")
    return value


def _backend(files: FolderFiles) -> tokenizers.Tokenizer:
    path = files.folder / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path}: is no tokenizer ({error})") from error
    # Some files keep the settings of their training run.
    backend.no_truncation()
    backend.no_padding()
    _add_missing_tokens(files, backend)
    return backend


def _add_missing_tokens(files: FolderFiles, backend: tokenizers.Tokenizer) -> None:
    """Adds tokens that only tokenizer_config.json lists."""
    listed = files.tokenizer_config.get("added_tokens_decoder") or {}
    for token_id, token in sorted((int(key), value) for key, value in listed.items()):
        if backend.id_to_token(token_id) is not None:
            continue
        options = {key: bool(token.get(key, False)) for key in ("special", "normalized", "lstrip", "rstrip")}
        backend.add_tokens([AddedToken(token["content"], **options)])
        if backend.token_to_id(token["content"]) != token_id:
            raise CheckpointError(
                f"{files.folder}: tokenizer_config.json gives {token['content']!r} the id {token_id}, "
                f"tokenizer.json leaves {backend.token_to_id(token['content'])}"
            )


def _decoding(files: FolderFiles) -> tuple[PieceCoding, bool]:
    """How pieces are written, and whether the decoder drops one leading space."""
    steps = _decoder_steps(files.tokenizer.get("decoder"))
    kinds = {step.get("type") for step in steps}
    if kinds == {"ByteLevel"}:
        return PieceCoding.BYTE_LEVEL, False
    restores_spaces = "Metaspace" in kinds or any(
        step.get("type") == "Replace" and step.get("pattern") == {"String": SPACE_MARK} for step in steps
    )
    if restores_spaces and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        strips = any(
            step["type"] == "Strip" or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in steps
        )
        return PieceCoding.SENTENCEPIECE, strips
    found = ", ".join(sorted(map(str, kinds))) or "none"
    raise CheckpointError(
        f"{files.folder / 'tokenizer.json'}: the decoder is {found}; ByteLevel and SentencePiece "
        "(Replace, ByteFallback, Fuse, Strip, Metaspace) are read"
    )


def _decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for part in decoder.get("decoders", []) for step in _decoder_steps(part)]
    return [decoder]


def _surroundings(
    files: FolderFiles, backend: tokenizers.Tokenizer, bos: int | None, eos: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What comes before and after a text: what the post-processor adds, then add_bos_token and add_eos_token.

    The two switches, where a file has them, overrule the post-processor, as in the Llama and Gemma
    tokenizers.
    """
    plain = backend.encode(_PROBE, add_special_tokens=False).ids
    full = backend.encode(_PROBE, add_special_tokens=True).ids
    starts = [n for n in range(len(full) - len(plain) + 1) if full[n : n + len(plain)] == plain]
    if full and not (plain and starts):
        raise CheckpointError(
            f"{files.folder / 'tokenizer.json'}: the text {_PROBE!r} has the ids {plain}, after "
            f"post-processing {full}; only tokens before and after a text are supported"
        )
    start = starts[0] if starts else 0
    prefix, suffix = full[:start], full[start + len(plain) :]
    config, path = files.tokenizer_config, files.folder / "tokenizer_config.json"
    for switch, token_id in (("add_bos_token", bos), ("add_eos_token", eos)):
        if config.get(switch) and token_id is None:
            raise CheckpointError(f"{path}: {switch} is true, but no such token is named")
    if config.get("add_bos_token") is not None and bos is not None:
        prefix = ([bos] if config["add_bos_token"] else []) + [i for i in prefix if i != bos]
    if config.get("add_eos_token") is not None and eos is not None:
        suffix = [i for i in suffix if i != eos] + ([eos] if config["add_eos_token"] else [])
    return tuple(prefix), tuple(suffix)


def _bos_token_id(files: FolderFiles, ids: Mapping[str, int]) -> int | None:
    if "bos_token" in files.tokenizer_config or "bos_token" in files.special_tokens_map:
        return ids.get(files.role_text("bos_token") or "")
    value = files.config.get("bos_token_id")
    return value if isinstance(value, int) and value in ids.values() else None


def _declared_stops(files: FolderFiles) -> list[int]:
    """`eos_token_id` of both config files, an id or a list of ids; a multimodal model keeps it in
    text_config.
    """
    declared: list[int] = []
    places = (files.generation_config, files.config, files.config.get("text_config") or {})
    for place in places:
        value = place.get("eos_token_id")
        found = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) for token_id in found):
            raise CheckpointError(f"{files.folder}: eos_token_id is {value!r}; an id or a list of ids is needed")
        declared += found
    return declared


def _chat_template(files: FolderFiles) -> ChatTemplate | None:
    found = _template_source(files)
    if found is None:
        return None
    path, source = found
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        if "default" not in named:
            raise CheckpointError(f"{path}: has the chat templates {sorted(map(str, named))}; none is called default")
        source = named["default"]
    if not isinstance(source, str):
        raise CheckpointError(f"{path}: the chat template is a {type(source).__name__}; text is needed")
    texts = {role: text for role in _ROLES if (text := files.role_text(role)) is not None}
    return ChatTemplate(source, texts, origin=str(path))


def _template_source(files: FolderFiles) -> tuple[Path, Any] | None:
    """A file of its own comes before the entry in tokenizer_config.json."""
    jinja, own_json = files.folder / "chat_template.jinja", files.folder / "chat_template.json"
    if jinja.is_file():
        return jinja, jinja.read_text(encoding="utf-8")
    for path, content in (
        (own_json, _read_json(own_json)),
        (files.folder / "tokenizer_config.json", files.tokenizer_config),
    ):
        if content.get("chat_template") is not None:
            return path, content["chat_template"]
    return None

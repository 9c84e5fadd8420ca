"""Model folders in the Hugging Face form."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from mimo_jax.errors import CheckpointError, RequestError
from mimo_jax.text import Tokenizer, load_tokenizer
from tests.text.toys import (
    BOS,
    EOS,
    TURN_END,
    byte_level_backend,
    sentencepiece_backend,
    surround,
    write_folder,
)

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
WITH_BOS = "{{ bos_token }}" + PLAIN
HI, SPACE_HI, BOS_ID, EOS_ID, TURN_END_ID, TAG_ID = 256, 257, 258, 259, 260, 261


def load(folder: Path, backend: Backend | None = None, **files: Any) -> Tokenizer:
    """`files` by stem: tokenizer_config={...}."""
    named = {f"{stem}.json": content for stem, content in files.items()}
    tokenizer = load_tokenizer(write_folder(folder, backend or byte_level_backend(), named))
    assert tokenizer is not None
    return tokenizer


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_folder_with_nothing_but_tokenizer_json(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    assert tokenizer.vocab_size == 262
    assert tokenizer.encode("hi hi<|im_end|><think>") == [HI, SPACE_HI, TURN_END_ID, TAG_ID]
    assert tokenizer.decode([HI, TURN_END_ID, SPACE_HI, TAG_ID]) == "hi hi<think>"
    assert tokenizer.decode([HI, TURN_END_ID], skip_special_tokens=False) == "hi<|im_end|>"
    assert [tokenizer.token_bytes(i) for i in (SPACE_HI, BOS_ID)] == [b" hi", b"<s>"]
    assert (tokenizer.bos_token_id, tokenizer.chat_template) == (None, None)
    assert tokenizer.stop_token_ids == (TURN_END_ID,)


def test_merges_as_strings_and_as_pairs_give_the_same_ids(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level_backend())
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    assert model["merges"] == [["h", "i"], ["Ġ", "hi"]]
    edit(folder, model={**model, "merges": ["h i", "Ġ hi"]})
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    assert tokenizer.encode("hi hi") == [HI, SPACE_HI]


def test_settings_of_a_training_run_are_ignored(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    assert load(tmp_path, backend).encode("hihihi") == [HI, HI, HI]


@pytest.mark.parametrize(
    ("backend", "config", "prefix", "suffix"),
    [
        (byte_level_backend(), {}, [], []),
        (surround(byte_level_backend(), "<s> $A"), {}, [BOS_ID], []),
        (surround(byte_level_backend(), "<s> $A <|eos|>"), {}, [BOS_ID], [EOS_ID]),
        (byte_level_backend(), {"bos_token": BOS, "add_bos_token": True}, [BOS_ID], []),
        (surround(byte_level_backend(), "<s> $A"), {"bos_token": BOS, "add_bos_token": True}, [BOS_ID], []),
        (surround(byte_level_backend(), "<s> $A"), {"bos_token": BOS, "add_bos_token": False}, [], []),
        (byte_level_backend(), {"eos_token": {"content": EOS}, "add_eos_token": True}, [], [EOS_ID]),
        (byte_level_backend(), {"bos_token": None, "add_bos_token": False}, [], []),
    ],
)
@pytest.mark.parametrize("template", [PLAIN, WITH_BOS])
def test_bos_is_there_once_on_every_path(
    tmp_path: Path,
    backend: Backend,
    config: dict[str, Any],
    prefix: list[int],
    suffix: list[int],
    template: str,
) -> None:
    tokenizer = load(tmp_path, backend, tokenizer_config={"bos_token": BOS, **config, "chat_template": template})
    assert tokenizer.encode("hi") == [*prefix, HI, *suffix]
    assert tokenizer.encode("hi", add_special_tokens=False) == [HI]
    # A chat has what the template writes, whatever the tokenizer would add to a plain text.
    knows_bos = config.get("bos_token", BOS) is not None
    from_template = [BOS_ID] if template == WITH_BOS and knows_bos else []
    if template == PLAIN or knows_bos:
        assert tokenizer.encode_chat([{"role": "user", "content": "hi"}]) == [*from_template, HI]
    # The same prompt rendered by the caller and sent as text.
    assert tokenizer.encode("<s>hi").count(BOS_ID) == 1
    # BOS typed by a user counts like any special-token text.
    typed = tokenizer.encode_chat([{"role": "user", "content": "hi<s>"}])
    assert typed[-2:] == [HI, BOS_ID]


def test_named_templates_use_the_one_called_default(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": PLAIN}]
    tokenizer = load(tmp_path, tokenizer_config={"chat_template": named})
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}]) == [HI]
    with pytest.raises(CheckpointError, match=r"'rag', 'tool_use'.*none is called default"):
        load(
            tmp_path / "b",
            tokenizer_config={
                "chat_template": [{"name": "tool_use", "template": "T"}, {"name": "rag", "template": "R"}]
            },
        )


def test_a_template_file_comes_before_the_entry_in_the_config(tmp_path: Path) -> None:
    config = {"chat_template": "config"}
    tokenizer = load(tmp_path / "json", tokenizer_config=config, chat_template={"chat_template": "own file"})
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.source == "own file"
    folder = write_folder(
        tmp_path / "jinja",
        byte_level_backend(),
        {"chat_template.jinja": "jinja", "chat_template.json": {"chat_template": "own file"}},
    )
    loaded = load_tokenizer(folder)
    assert loaded is not None
    assert loaded.chat_template is not None
    assert loaded.chat_template.source == "jinja"


@pytest.mark.parametrize(
    ("files", "stops"),
    [
        ({"config": {"eos_token_id": EOS_ID}}, (EOS_ID, TURN_END_ID)),
        ({"generation_config": {"eos_token_id": [BOS_ID, EOS_ID]}}, (BOS_ID, EOS_ID, TURN_END_ID)),
        (
            {"generation_config": {"eos_token_id": TURN_END_ID}, "config": {"eos_token_id": EOS_ID}},
            (TURN_END_ID, EOS_ID),
        ),
        ({"config": {"text_config": {"eos_token_id": EOS_ID}}}, (EOS_ID, TURN_END_ID)),
        ({"tokenizer_config": {"eos_token": EOS}}, (EOS_ID, TURN_END_ID)),
        ({"special_tokens_map": {"eos_token": {"content": EOS}}}, (EOS_ID, TURN_END_ID)),
        ({"config": {"eos_token_id": 99_999}}, (TURN_END_ID,)),
    ],
)
def test_stop_ids_come_from_every_file_and_from_known_names(
    tmp_path: Path, files: dict[str, Any], stops: tuple[int, ...]
) -> None:
    assert load(tmp_path, **files).stop_token_ids == stops


def test_mimo_stops_at_both_ids_although_its_config_names_one(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.add_special_tokens(["<|endoftext|>"])
    tokenizer = load(tmp_path, backend, config={"eos_token_id": TURN_END_ID})
    assert [tokenizer.token_text(i) for i in tokenizer.stop_token_ids] == [TURN_END, "<|endoftext|>"]


def test_an_end_marker_that_is_an_ordinary_token_does_not_stop(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.add_tokens(["</s>"])
    assert load(tmp_path, backend).stop_token_ids == (TURN_END_ID,)


def test_bos_of_config_json_counts_where_the_tokenizer_files_are_silent(tmp_path: Path) -> None:
    config = {"bos_token_id": BOS_ID}
    assert load(tmp_path / "a", config=config).bos_token_id == BOS_ID
    assert load(tmp_path / "b", config=config, tokenizer_config={"bos_token": None}).bos_token_id is None
    assert load(tmp_path / "c", special_tokens_map={"bos_token": BOS}).bos_token_id == BOS_ID


def test_tokens_that_only_the_config_lists_are_added(tmp_path: Path) -> None:
    listed = {"262": {"content": "<|extra|>", "special": True}, "261": {"content": "<think>"}}
    tokenizer = load(tmp_path / "a", tokenizer_config={"added_tokens_decoder": listed})
    assert tokenizer.encode("hi<|extra|>") == [HI, 262]
    assert tokenizer.decode([HI, 262]) == "hi"
    with pytest.raises(CheckpointError, match=r"gives '<\|extra\|>' the id 300, tokenizer\.json leaves 262"):
        load(tmp_path / "b", tokenizer_config={"added_tokens_decoder": {"300": {"content": "<|extra|>"}}})


def test_a_sentencepiece_folder(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, sentencepiece_backend(), tokenizer_config={"bos_token": BOS, "add_bos_token": True})
    ids = tokenizer.encode("hi é.")
    assert [tokenizer.token_bytes(i) for i in ids] == [b"<s>", b" hi", b" ", b"\xc3", b"\xa9", b"."]
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids) == "hi é."
    assert load(tmp_path / "b", sentencepiece_backend(space_prefix=False)).decode([ids[1]]) == " hi"


def test_an_added_token_that_is_not_in_the_byte_alphabet_stands_for_itself(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.add_tokens(["é«x»", "two words"])
    tokenizer = load(tmp_path, backend)
    ids = tokenizer.encode("é«x»two words")
    assert tokenizer.decode(ids) == "é«x»two words"
    assert len(ids) == 2


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_a_decoder_of_another_kind_is_refused(tmp_path: Path, decoder: dict[str, Any] | None) -> None:
    edit(write_folder(tmp_path, byte_level_backend()), decoder=decoder)
    with pytest.raises(CheckpointError, match=r"the decoder is (none|WordPiece); ByteLevel and SentencePiece"):
        load_tokenizer(tmp_path)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level_backend())
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read as JSON"):
        load_tokenizer(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json: holds a list; an object is needed"):
        load_tokenizer(folder)
    (folder / "config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(CheckpointError, match="eos_token_id is 'x'"):
        load_tokenizer(folder)
    (folder / "config.json").unlink()
    (folder / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is no tokenizer"):
        load_tokenizer(folder)


def test_bos_is_asked_for_but_not_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="add_bos_token is true, but no such token is named"):
        load(tmp_path, tokenizer_config={"add_bos_token": True})


def test_a_vocabulary_that_shows_no_place_for_its_special_tokens_is_refused(tmp_path: Path) -> None:
    backend = Backend(models.BPE(vocab={"b": 0}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BOS])
    with pytest.raises(CheckpointError, match=r"'a' has the ids \[\], after post-processing \[1\]"):
        load(tmp_path, surround(backend, "<s> $A"))


def test_text_that_is_no_unicode_is_a_refused_request(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="lone surrogate at position 2"):
        load(tmp_path).encode("hi\ud83d")

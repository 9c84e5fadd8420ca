"""GGUF files: the same model as the Hugging Face form, every block format, and damage at every byte."""

import dataclasses
import math
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest

from mimo_jax import CheckpointError, Params
from mimo_jax.checkpoint.checkpoint import open_checkpoint
from mimo_jax.checkpoint.gguf import read_gguf, read_tensor
from mimo_jax.checkpoint.load import load_params
from mimo_jax.rope import inverse_frequencies
from sharding import Rules, make_mesh
from tests import tiny
from tests.checkpoint.gguf_write import write_gguf

Kind = gguf.GGMLQuantizationType
# Rows must be whole blocks of 32.
WHOLE_BLOCKS = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
# No GGUF states Gemma's scale or pattern: they follow from the architecture.
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window_pattern": 6, "num_hidden_layers": 7}
WRITERS: dict[str, Callable[[Path], Path]] = {
    "llama": lambda folder: tiny.write_llama(folder, 4, head_dim=16, **WHOLE_BLOCKS),
    "llama_tied_scaled": lambda folder: tiny.write_llama(
        folder, 5, head_dim=16, tie_word_embeddings=True, rope_scaling=tiny.llama3_scaling(), **WHOLE_BLOCKS
    ),
    "qwen2": lambda folder: tiny.write_qwen2(folder, 6, **(WHOLE_BLOCKS | {"num_attention_heads": 4})),
    "qwen3": lambda folder: tiny.write_qwen3(folder, 7, head_dim=16, **WHOLE_BLOCKS),
    "gemma3": lambda folder: tiny.write_gemma3_text(folder, 8, **WHOLE_BLOCKS, **GEMMA),
}
# The largest error of one weight against its row's largest weight.
FORMATS = {Kind.F32: 0.0, Kind.F16: 2**-11, Kind.BF16: 2**-8, Kind.Q8_0: 1 / 127}


def load(path: Path) -> Params:
    return load_params(open_checkpoint(path), np.float32, make_mesh(jax.devices()[0]), Rules())


def approximate(value: Any) -> Any:
    """Floats of a GGUF have single precision."""
    if isinstance(value, dict):
        return {key: approximate(one) for key, one in value.items()}
    return pytest.approx(value, rel=1e-6) if isinstance(value, float) else value


@pytest.mark.parametrize("name", WRITERS)
def test_a_gguf_says_the_same_architecture_as_the_hugging_face_form(name: str, tmp_path: Path) -> None:
    folder = WRITERS[name](tmp_path / "hf")
    one = open_checkpoint(folder).config
    two = open_checkpoint(write_gguf(folder, tmp_path / "model.gguf", Kind.F32)).config
    assert one.full is not None
    assert two.full is not None
    np.testing.assert_allclose(inverse_frequencies(two.full), inverse_frequencies(one.full), rtol=1e-6)
    if name == "llama_tied_scaled":  # the same frequencies, said by divisors
        two = dataclasses.replace(two, full=dataclasses.replace(two.full, rope_scaling=one.full.rope_scaling))
    assert dataclasses.asdict(two) == approximate(dataclasses.asdict(one))


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", WRITERS)
def test_a_gguf_holds_the_same_weights_as_the_hugging_face_form(name: str, kind: Kind, tmp_path: Path) -> None:
    """Exactly for float32 (with equal configs, log-probabilities are then equal); within the format's step else."""
    folder = WRITERS[name](tmp_path / "hf")
    wanted, tree = jax.tree.flatten(load(folder))
    got, gguf_tree = jax.tree.flatten(load(write_gguf(folder, tmp_path / "model.gguf", kind)))
    assert gguf_tree == tree
    for one, two in zip(wanted, got, strict=True):
        assert two.dtype == one.dtype
        largest = np.abs(one).max(axis=-1, keepdims=True)
        assert (np.abs(np.asarray(two) - np.asarray(one)) <= FORMATS[kind] * largest).all()


QUANTISED = [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.TQ1_0, Kind.TQ2_0, Kind.MXFP4]
# gguf reads these but cannot make them: any bytes are a valid block.
READ_ONLY = [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS]


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # random scales may be inf or nan
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, *QUANTISED, *READ_ONLY], ids=lambda kind: kind.name)
def test_every_format_reads_in_whole_and_in_rows(kind: Kind, tmp_path: Path) -> None:
    values_per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = (5, 2 * max(values_per_block, 32))
    draw = np.random.default_rng(3)
    if kind in READ_ONLY:
        size_bytes = math.prod(shape) // values_per_block * block_bytes
        stored = draw.integers(0, 256, (shape[0], size_bytes // shape[0]), np.uint8)
    else:
        stored = gguf.quantize(draw.standard_normal(shape).astype(np.float32), kind)
    wanted = gguf.dequantize(stored, kind).reshape(shape)
    file = read_gguf(one_tensor(tmp_path / "one.gguf", stored, kind))
    whole = read_tensor(file, "w")
    assert whole.dtype == np.float32
    np.testing.assert_array_equal(whole, wanted)
    for first, last in ((0, 1), (1, 4), (4, 5)):
        np.testing.assert_array_equal(read_tensor(file, "w", (first, last)), wanted[first:last])


def one_tensor(path: Path, stored: np.ndarray, kind: Kind) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# ---- damage ----


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole Llama of one layer, a few kilobytes."""
    folder = tmp_path_factory.mktemp("small")
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
    hub = tiny.write_llama(folder / "hf", 1, head_dim=4, num_hidden_layers=1, vocab_size=11, **sizes)
    return write_gguf(hub, folder / "small.gguf", Kind.F32)


def header_bytes(path: Path) -> int:
    return min(tensor.offset for tensor in read_gguf(path).tensors.values())


def test_the_undamaged_file_opens(small: Path) -> None:
    assert open_checkpoint(small).config.layers == 1


def test_a_file_cut_at_any_byte_is_refused(small: Path, tmp_path: Path) -> None:
    data, path = small.read_bytes(), tmp_path / "cut.gguf"
    end = max(tensor.offset + tensor.size_bytes for tensor in read_gguf(small).tensors.values())
    for size_bytes in (*range(header_bytes(small) + 64), *range(header_bytes(small), end, 97), end - 1):
        path.write_bytes(data[:size_bytes])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            open_checkpoint(path)


def test_damage_in_the_header_gives_a_checkpoint_error_or_another_whole_model(small: Path, tmp_path: Path) -> None:
    """Never another exception, never the memory or time that a damaged length asks for."""
    data, path = bytearray(small.read_bytes()), tmp_path / "damaged.gguf"
    draw = random.Random(5)
    messages = []
    tracemalloc.start()
    for _ in range(500):
        damaged = bytearray(data)
        for _ in range(draw.choice((1, 1, 2, 8))):
            damaged[draw.randrange(header_bytes(small))] = draw.choice((0, 1, 127, 255, draw.randrange(256)))
        path.write_bytes(damaged)
        try:
            open_checkpoint(path)
        except CheckpointError as error:
            messages.append(str(error))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(messages) > 150
    assert all("damaged.gguf" in message for message in messages)
    assert peak_bytes < 32 << 20


@pytest.mark.parametrize("start", [b"", b"GGU", b"GGML", b"\0" * 64, b"PK\3\4" * 9])
def test_what_is_no_gguf_is_refused(start: bytes, tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(start)
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        open_checkpoint(tmp_path / "no.gguf")


@pytest.mark.parametrize("version", [0, 1, 4, 3 << 24])
def test_another_version_is_refused(version: int, small: Path, tmp_path: Path) -> None:
    data = bytearray(small.read_bytes())
    data[4:8] = version.to_bytes(4, "little")
    (tmp_path / "v.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=f"version {version}"):
        open_checkpoint(tmp_path / "v.gguf")


def test_an_unknown_architecture_is_refused_and_the_known_ones_listed(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_tensor("w", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"a\.gguf.*'mamba'.*gemma3"):
        open_checkpoint(path)


def renamed(small: Path, target: Path, old: bytes, new: bytes) -> Path:
    data = small.read_bytes()
    assert data.count(old) == 1
    assert len(old) == len(new)
    target.write_bytes(data.replace(old, new))
    return target


@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "output_norm.weight", "token_embd.weight"])
def test_a_missing_tensor_is_named(name: str, small: Path, tmp_path: Path) -> None:
    path = renamed(small, tmp_path / "m.gguf", b"\0" + name.encode(), b"\0" + name.encode().replace(b"w", b"W", 1))
    with pytest.raises(CheckpointError, match=rf"m\.gguf.*{name} is missing"):
        open_checkpoint(path)


def test_an_unknown_tensor_type_is_named(small: Path, tmp_path: Path) -> None:
    data = bytearray(small.read_bytes())
    place = data.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8  # one dimension follows the name
    data[place : place + 4] = (250).to_bytes(4, "little")
    (tmp_path / "t.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"t\.gguf.*output_norm\.weight.*250"):
        open_checkpoint(tmp_path / "t.gguf")


def test_overrides_are_refused_because_there_is_no_config_json(small: Path) -> None:
    with pytest.raises(CheckpointError, match="hf_overrides"):
        open_checkpoint(small, hf_overrides={"vocab_size": 3})

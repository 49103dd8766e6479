"""GGUF files: hostile and damaged headers are refused by field, cheaply; what is read agrees with the gguf package."""

import os
import random
import shutil
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import LlamaForCausalLM

from hetsplit.errors import ConfigError
from hetsplit.weights import open_checkpoint
from hetsplit.weights.gguf import read_gguf
from tests.models import save_gguf

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def text(value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: bytes | str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(
    name: bytes | str = "t", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0, rank: int | None = None
) -> bytes:
    head = text(name) + struct.pack("<I", len(dims) if rank is None else rank)
    return head + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


def document(
    entries: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    *,
    version: int = 3,
    magic: bytes = b"GGUF",
    counts: tuple[int, int] | None = None,
    data: int = 1024,
) -> bytes:
    n_tensors, n_entries = counts or (len(tensors), len(entries))
    head = magic + struct.pack("<IQQ", version, n_tensors, n_entries) + b"".join(entries) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + b"\0" * data


def alignment(value: int) -> bytes:
    return entry("general.alignment", U32, struct.pack("<I", value))


def array(kind: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + items


NESTED = b"".join(struct.pack("<IQ", ARRAY, 1) for _ in range(1000))

HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "three bytes": (b"GGU", "magic needs 4 bytes"),
    "magic only": (b"GGUF", "version needs 4 bytes"),
    "other magic": (document(magic=b"GGML"), "magic is b'GGML'"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
    "version 1": (document(version=1), "version is 1;"),
    "version 4": (document(version=4), "version is 4;"),
    "version swapped": (document(version=0x03000000), "version is 50331648 (big-endian?)"),
    "tensor count 2^63": (document(counts=(2**63, 0)), f"tensor count is {2**63}"),
    "tensor count too high": (document(counts=(40, 0)), "tensor"),
    "metadata count 2^62": (document(counts=(0, 2**62)), f"metadata count is {2**62}"),
    "metadata count too high": (document(counts=(0, 60_000)), "metadata entry"),
    "key length 2^62": (document((struct.pack("<Q", 2**62) + b"key",)), f"key length is {2**62}"),
    "string length 2^30": (
        document((entry("name", STRING, struct.pack("<Q", 2**30) + b"x"),), data=64),
        f"metadata 'name': string value length is {2**30}",
    ),
    "string over the file": (document((entry("name", STRING, struct.pack("<Q", 5000)),)), "'name': string value needs"),
    "array of 2^60": (document((entry("a", ARRAY, array(U32, 2**60)),)), f"metadata 'a': array length is {2**60}"),
    "array over the file": (document((entry("a", ARRAY, array(U32, 4000)),)), "metadata 'a': value needs 16000 bytes"),
    "strings over the file": (document((entry("a", ARRAY, array(STRING, 4000)),)), "'a': the length of string"),
    "a string of 2^62 in an array": (
        document((entry("a", ARRAY, array(STRING, 2, text("x") + struct.pack("<Q", 2**62))),)),
        f"metadata 'a': string 1 of 2 needs {2**62} bytes",
    ),
    "array nested 1000 deep": (document((entry("a", ARRAY, NESTED + array(U32, 0)),)), "metadata 'a': arrays inside"),
    "array of unknown type": (document((entry("a", ARRAY, array(13, 1)),)), "metadata 'a': value type 13"),
    "unknown value type": (document((entry("a", 99, b"1234"),)), "metadata 'a': value type 99"),
    "boolean of 7": (document((entry("a", BOOL, b"\7"),)), "metadata 'a': a boolean is 7"),
    "duplicate key": (document((entry("a", BOOL, b"\1"),) * 2), "the key 'a' is there twice"),
    "key not UTF-8": (document((entry(b"\xff\xfe", BOOL, b"\1"),)), "metadata entry 0: key is not valid UTF-8"),
    "value not UTF-8": (
        document((entry("a", STRING, text(b"\xc3")),)),
        "metadata 'a': string value is not valid UTF-8",
    ),
    "item not UTF-8": (document((entry("a", ARRAY, array(STRING, 1, text(b"\xc3"))),)), "'a': a string is not valid"),
    "alignment 0": (document((alignment(0),)), "general.alignment is 0"),
    "alignment 3": (document((alignment(3),)), "general.alignment is 3"),
    "alignment 2^30": (document((alignment(2**30),)), f"general.alignment is {2**30}"),
    "alignment as text": (document((entry("general.alignment", STRING, text("32")),)), "general.alignment is '32'"),
    "alignment as list": (
        document((entry("general.alignment", ARRAY, array(U32, 1, struct.pack("<I", 32))),)),
        "general.alignment is [32]",
    ),
    "alignment as float": (document((entry("general.alignment", F32, struct.pack("<f", 33.5)),)), "alignment is 33.5"),
    "name length 2^62": (document(tensors=(struct.pack("<Q", 2**62),)), "tensor 0: name length"),
    "name not UTF-8": (document(tensors=(tensor(b"\xff"),)), "tensor 0: name is not valid UTF-8"),
    "name twice": (document(tensors=(tensor(), tensor(offset=128))), "tensor 't': the name is there twice"),
    "0 dimensions": (document(tensors=(tensor(dims=()),)), "tensor 't': number of dimensions is 0"),
    "5 dimensions": (document(tensors=(tensor(dims=(1,) * 5),)), "tensor 't': number of dimensions is 5"),
    "2^31 dimensions": (document(tensors=(tensor(rank=2**31),)), f"number of dimensions is {2**31}"),
    "dimensions 2^32 x 2^32": (document(tensors=(tensor(dims=(2**32, 2**32)),)), "elements"),
    "dimension 2^64-1": (document(tensors=(tensor(dims=(2**64 - 1, 2)),)), f"dimension 0 is {2**64 - 1}"),
    "dimension 0": (document(tensors=(tensor(dims=(32, 0)),)), "dimension 1 is 0"),
    "type 255": (document(tensors=(tensor(kind=255),)), "tensor 't': type 255 is not known"),
    "type 4, removed": (document(tensors=(tensor(kind=4),)), "tensor 't': type 4 is not known"),
    "Q4_1 row of 33": (document(tensors=(tensor(dims=(33, 2), kind=3),)), "row length 33 is no multiple of Q4_1"),
    "Q6_K row of 128": (document(tensors=(tensor(dims=(128, 2), kind=14),)), "row length 128 is no multiple of Q6_K"),
    "offset past the end": (document(tensors=(tensor(offset=2**20),)), "tensor 't': offset and size end"),
    "offset 2^64-32": (document(tensors=(tensor(offset=2**64 - 32),)), "tensor 't': offset and size end"),
    "size past the end": (document(tensors=(tensor(dims=(257,)),)), "tensor 't': offset and size end"),
    "offset not aligned": (document(tensors=(tensor(offset=16),)), "tensor 't': offset 16 is no multiple"),
    "overlap": (document(tensors=(tensor("a"), tensor("b", offset=96))), "tensor 'b': offset"),
    "same place": (document(tensors=(tensor("a"), tensor("b"))), "overlaps another tensor"),
}


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.timeout(10)
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused_by_field(name: str, tmp_path: Path) -> None:
    content, words = HOSTILE[name]
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(path)
    assert words in str(caught.value) and str(path) in str(caught.value)
    assert tracemalloc.get_traced_memory()[1] < 20 * 2**20


@pytest.mark.timeout(10)
def test_a_header_that_really_is_long_stays_within_bounds(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(document((entry("a", ARRAY, array(BOOL, 2**22 + 1)),), data=2**23))
    with pytest.raises(ConfigError, match=r"metadata 'a': array length is 4194305"):
        read_gguf(path)
    path.write_bytes(document((entry("a", STRING, struct.pack("<Q", 65 * 2**20)),), data=66 * 2**20))
    with pytest.raises(ConfigError, match=r"metadata 'a': string value length is 68157440"):
        read_gguf(path)


def test_the_hostile_files_are_near_misses(tmp_path: Path) -> None:
    """Their harmless twin is read, so that each is refused for its one fault."""
    entries = (alignment(64), entry("a", ARRAY, array(STRING, 2, text("x") + text("é"))), entry("b", BOOL, b"\1"))
    path = tmp_path / "x.gguf"
    head = document(entries, (tensor("a"), tensor("b", (64, 2), 3, 128)), data=0)
    path.write_bytes(head + b"\0" * (-len(head) % 64) + b"\0" * 208)
    file = read_gguf(path)
    assert file.metadata == {"general.alignment": 64, "a": ["x", "é"], "b": True}
    assert [(t.name, t.type, t.shape, t.size) for t in file.tensors.values()] == [
        ("a", "F32", (32,), 128),
        ("b", "Q4_1", (2, 64), 80),
    ]
    start = len(head) + -len(head) % 64
    assert [t.offset for t in file.tensors.values()] == [start, start + 128]


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_are_read(version: int, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(document((), (tensor(),), version=version))
    assert read_gguf(path).tensors["t"].shape == (32,)


def test_random_damage_raises_nothing_but_config_errors(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    path = save_gguf(llama, tmp_path / "x.gguf", fields=lambda writer: writer.add_token_list(["a"] * 97))
    whole = path.read_bytes()
    header = min(tensor.offset for tensor in read_gguf(path).tensors.values())
    rng = random.Random(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(header)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        path.write_bytes(damaged)
        try:
            open_checkpoint(path)
        except ConfigError:
            refused += 1
    assert refused > 200


def every_value(writer: gguf.GGUFWriter) -> None:
    for size in (8, 16, 32, 64):
        getattr(writer, f"add_uint{size}")(f"x.u{size}", 2**size - 1)
        getattr(writer, f"add_int{size}")(f"x.i{size}", -(2 ** (size - 1)))
    writer.add_float32("x.f32", 1.5)
    writer.add_float64("x.f64", 0.1)
    writer.add_bool("x.yes", True)
    writer.add_bool("x.no", False)
    writer.add_string("x.text", "naïve 😀\n")
    writer.add_array("x.texts", ["", "é", "<|end|>"])
    writer.add_array("x.ints", [1, -2, 3])
    writer.add_array("x.floats", [0.5, -1.0])
    writer.add_array("x.bools", [True, False])


def test_metadata_and_tensors_agree_with_the_gguf_package(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    path = save_gguf(llama, tmp_path / "x.gguf", quant="Q8_0", fields=every_value)
    reader = gguf.GGUFReader(path)
    file = read_gguf(path)
    wanted: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items() if name[:5] != "GGUF."}
    assert file.metadata == wanted
    assert type(file.metadata["x.yes"]) is bool and type(file.metadata["x.bools"][0]) is bool
    assert list(file.tensors) == [found.name for found in reader.tensors]
    for found in reader.tensors:
        mine = file.tensors[found.name]
        assert (mine.type, list(mine.shape)) == (found.tensor_type.name, found.shape.tolist()[::-1])
        assert (mine.offset, mine.size) == (found.data_offset, found.n_bytes)


# The real file.


def test_smollm2_header(smollm2_path: Path) -> None:
    file = read_gguf(smollm2_path)
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert file.metadata["tokenizer.ggml.tokens"][:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert len(file.metadata) == 33 and len(file.tensors) == 272
    assert file.tensors["token_embd.weight"].type == "Q8_0"


def test_smollm2_cut_at_random_points(smollm2_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    shutil.copy(smollm2_path, path)
    size = path.stat().st_size
    rng = random.Random(0)
    points = [size - 1, *(rng.randrange(size) for _ in range(10)), *(rng.randrange(1_700_000) for _ in range(5)), 23]
    for point in sorted(points, reverse=True):
        os.truncate(path, point)
        with pytest.raises(ConfigError, match=r"cut\.gguf: GGUF (tensor|metadata|header)"):
            open_checkpoint(path)


def test_smollm2_facts(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    spec = checkpoint.spec
    assert (spec.n_layers, spec.width, spec.heads, spec.kv_heads, spec.head_dim) == (30, 576, 9, 3, 64)
    assert (spec.context, spec.vocab_size, spec.tied_head, spec.bos_id, spec.eos_ids) == (8192, 49152, True, 1, (2,))
    assert (spec.norm_eps, checkpoint.stored_dtype) == (1e-5, "bfloat16")
    np.testing.assert_allclose(spec.rotary[0].inv_freq, 100000.0 ** -(np.arange(32) / 32), rtol=1e-6)

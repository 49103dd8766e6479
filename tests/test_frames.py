"""The bulk lane's bytes: the same as the generated class writes and reads, small enough, and safe to read."""

import struct
import tracemalloc

import numpy as np
import pytest

from hetsplit import frames
from hetsplit._pb import hetsplit_pb2 as pb
from hetsplit.errors import RemoteProtocolError
from hetsplit.kv import KvBlock, KvFill
from hetsplit.protocol import (
    HEADER_BYTES,
    MESSAGE_BYTES,
    Begin,
    BlockFrame,
    Done,
    LayerSum,
    Message,
    Progress,
    Receiver,
    Sender,
    raw_bytes,
)
from hetsplit.spec import DType
from tests.faults import BYTES, TOKENS, field, flip, good_messages, to_bytes, to_frame, varint
from tests.toy import ToyEngine, ToyStore, kv_layout, random_block

# Written by hand from the encoding document: two blocks of one position, one head, width 2, float16.
GOLDEN = bytes.fromhex(
    "12 0c  1801  2208 003c 0040 0042 0044"  # layer 0 and start 0 are defaults and not written
    "12 11  0801 10ac02 1801  2208 00bc 00c0 0038 0000"  # layer 1, start 300
)
GOLDEN_BLOCKS = [
    KvBlock(0, 0, np.array([[[1, 2]]], np.float16), np.array([[[3, 4]]], np.float16)),
    KvBlock(1, 300, np.array([[[-1, -2]]], np.float16), np.array([[[0.5, 0]]], np.float16)),
]


def generated(blocks: list[KvBlock]) -> bytes:
    message = pb.TransferMessage()
    for block in blocks:
        payload = bytes(raw_bytes(block.keys)) + bytes(raw_bytes(block.values))
        message.blocks.add(layer=block.layer, start=block.start, count=block.count, payload=payload)
    return message.SerializeToString()


def read_by_class(data: bytes) -> list[BlockFrame]:
    message = pb.TransferMessage.FromString(data)
    return [BlockFrame(b.layer, b.start, b.count, memoryview(b.payload)) for b in message.blocks]


def test_golden_bytes() -> None:
    assert frames.encode_blocks(GOLDEN_BLOCKS) == GOLDEN
    assert generated(GOLDEN_BLOCKS) == GOLDEN
    assert frames.decode(GOLDEN) == [to_frame(block) for block in GOLDEN_BLOCKS]


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("seed", range(8))
def test_the_generated_class_reads_and_writes_the_same_bytes(dtype: DType, seed: int) -> None:
    rng = np.random.default_rng(seed)
    layout = kv_layout(int(rng.integers(1, 5)), int(rng.integers(1, 20)), 300, dtype)
    blocks = [random_block(layout, 0, 0, 1, seed)]
    for _ in range(rng.integers(0, 4)):
        layer, start, count = int(rng.integers(300)), int(rng.integers(2 ** int(rng.integers(1, 31)))), rng.integers(50)
        blocks.append(random_block(layout, layer, start, 1 + int(count), seed))
    data = frames.encode_blocks(blocks)
    assert data == generated(blocks)
    assert frames.decode(data) == read_by_class(data) == [to_frame(block) for block in blocks]


CONTROL: list[Message] = [
    Begin("0123456789abcdef", 0, 2**32 - 1, "bfloat16"),
    Begin("", 0, 0, "", ""),
    Begin("Größe", 7, 8, "float16", "raw"),
    Progress(0),
    Progress(2**32 - 1, 2**32 - 1),
    Done((), 0.0, 0.0),
    Done((LayerSum(1, 2, 2**64 - 1), LayerSum(0, 0, 0)), 1e-9, 1e9),
]


@pytest.mark.parametrize("message", CONTROL, ids=lambda m: type(m).__name__)
def test_control_messages_come_back(message: Message) -> None:
    assert frames.decode(to_bytes(message)) == [message]


def test_one_message_may_hold_several_parts() -> None:
    messages = good_messages(ToyEngine(), "t")
    joined = b"".join(map(to_bytes, messages))
    assert frames.decode(joined) == messages
    assert len(pb.TransferMessage.FromString(joined).blocks) == len(messages) - 2


def test_nothing_is_nothing() -> None:
    assert frames.decode(b"") == []


def test_a_payload_is_not_copied() -> None:
    block = random_block(kv_layout(), 0, 0, 100)
    data = frames.encode_blocks([block])
    (frame,) = frames.decode(data)
    assert isinstance(frame, BlockFrame)
    assert frame.payload.obj is data


UNKNOWN = {
    "varint": field(9, 2**64 - 1),
    "bytes": field(9, b"later"),
    "fixed32": varint(9 << 3 | 5) + b"abcd",
    "fixed64": varint(9 << 3 | 1) + b"abcdefgh",
    "big number": field(2**29 - 1, 1),
    "a known number of another type": varint(1 << 3 | 5) + b"abcd",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_fields_are_skipped_as_the_generated_class_does(name: str) -> None:
    body = field(3, 1) + field(4, b"\x01\x02")
    data = UNKNOWN[name] + field(2, UNKNOWN[name] + body + UNKNOWN[name]) + UNKNOWN[name]
    assert frames.decode(data) == read_by_class(data) == [BlockFrame(0, 0, 1, memoryview(b"\x01\x02"))]


def test_a_known_field_of_the_wrong_type_is_an_unknown_one() -> None:
    fixed64 = b"\x08\x01\x10\x01\x18\x01\x20\x01"  # would read as a block's header
    for number in range(1, 5):
        data = varint(number << 3 | 1) + fixed64
        assert frames.decode(data) == []
        assert not pb.TransferMessage.FromString(data).blocks
    wrong = field(2, varint(4 << 3 | 1) + fixed64 + field(1, b"\x05") + varint(3 << 3 | 5) + b"abcd")
    assert frames.decode(wrong) == read_by_class(wrong) == [BlockFrame(0, 0, 0, memoryview(b""))]


def test_the_last_value_of_a_header_counts() -> None:
    data = field(2, field(1, 5) + field(1, 0) + field(3, 7) + field(3, 1) + field(4, b"a") + field(4, b"b"))
    assert frames.decode(data) == read_by_class(data) == [BlockFrame(0, 0, 1, memoryview(b"b"))]


MALFORMED = {
    "a tag alone": b"\x12",
    "a length alone": b"\x12\x05",
    "a length past the end": b"\x12\x05abcd",
    "an unfinished tag": b"\x80",
    "an unfinished length": b"\x12\x80",
    "a varint of eleven bytes": b"\x08" + b"\x80" * 10 + b"\x00",
    "a short fixed32": b"\x0dabc",
    "a short fixed64": b"\x09abcdefg",
    "a group's start": b"\x13",
    "a group's end": b"\x14",
    "wire type 6": b"\x16",
    "wire type 7": b"\x17",
    "field 0": b"\x00\x01",
    "a bad block inside": field(2, b"\x22\x7fabc"),
    "a bad Begin inside": field(1, b"\x0a\x7f"),
    "a Begin that is no UTF-8": field(1, field(1, b"\xff\xfe")),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_bytes_are_a_named_error(name: str) -> None:
    with pytest.raises(RemoteProtocolError, match="not a TransferMessage"):
        frames.decode(MALFORMED[name])


def test_a_varint_may_have_ten_bytes() -> None:
    assert frames.decode(b"\x48" + b"\xff" * 9 + b"\x01") == []
    with pytest.raises(RemoteProtocolError, match="64 bits"):
        frames.decode(b"\x48" + b"\xff" * 9 + b"\x02")


def test_an_oversized_message_is_refused() -> None:
    block = random_block(kv_layout(1, 1, 1), 0, 0, MESSAGE_BYTES // 8)
    with pytest.raises(RemoteProtocolError, match=rf"a message of \d+ bytes, at most {MESSAGE_BYTES} allowed"):
        frames.decode(frames.encode_blocks([block]))


HOSTILE_HEADERS = [
    field(2, field(1, 2**32) + field(4, b"x")),
    field(2, field(3, 2**63) + field(4, b"x")),
    field(2, field(2, 2**64 - 1) + field(3, 2**64 - 1)),
    varint(2 << 3 | 2) + varint(2**62),
    field(2, varint(4 << 3 | 2) + varint(2**62)),
    field(4, field(1, varint(3 << 3 | 2) + varint(2**62))),
]


@pytest.mark.parametrize("data", HOSTILE_HEADERS, ids=lambda data: data[:12].hex())
def test_a_hostile_header_allocates_nothing(data: bytes) -> None:
    engine = ToyEngine()
    receiver = Receiver("t", range(9), engine.layout, KvFill(ToyStore(engine, 10), engine.layout, range(9)))
    receiver.feed(Begin("t", 0, 9, "float32"))
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            for message in frames.decode(data):
                receiver.feed(message)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def arrives(messages: list[bytes]) -> bytes:
    """What a receiver's store holds after a whole transfer. Raises what the receiver raises."""
    engine = ToyEngine()
    span = range(len(TOKENS) - 1)
    store = ToyStore(engine, len(TOKENS))
    receiver = Receiver("t", span, engine.layout, KvFill(store, engine.layout, span))
    for data in messages:
        for message in frames.decode(data):
            receiver.feed(message)
    receiver.end()
    receiver.fill.finish()
    return store.data.tobytes()


def test_every_truncation_of_every_message_is_noticed() -> None:
    good = [to_bytes(m) for m in good_messages(ToyEngine(), "t")]
    want = arrives(good)
    for index, data in enumerate(good):
        for size in range(len(data)):
            try:
                got = arrives([*good[:index], data[:size], *good[index + 1 :]])
            except RemoteProtocolError:
                continue
            # Only the times in Done, which say nothing about the cache, may be cut off unnoticed.
            assert index == len(good) - 1
            assert got == want


def test_every_flipped_bit_of_every_message_is_noticed_or_harmless() -> None:
    good = [to_bytes(m) for m in good_messages(ToyEngine(), "t")]
    want = arrives(good)
    for index, data in enumerate(good):
        step = 1 if len(data) < 200 else 11  # payload bits are all alike
        for bit in [*range(0, min(128, 8 * len(data))), *range(128, 8 * len(data), step)]:
            try:
                got = arrives([*good[:index], flip(data, bit), *good[index + 1 :]])
            except RemoteProtocolError:
                continue
            assert got == want, f"message {index}, bit {bit}"


@pytest.mark.parametrize("name", BYTES)
def test_hostile_bytes_are_a_named_error(name: str) -> None:
    tamper, why = BYTES[name]
    with pytest.raises(RemoteProtocolError, match=why):
        arrives(tamper([to_bytes(m) for m in good_messages(ToyEngine(), "t")]))


def test_noise_never_raises_anything_else() -> None:
    rng = np.random.default_rng(0)
    for _ in range(3000):
        data = rng.bytes(int(rng.integers(0, 60)))
        try:
            frames.decode(data)
        except RemoteProtocolError:
            continue


SHAPES = [
    (8, 128, 1, DType.FLOAT32, 2048, 2048),  # case O12
    (8, 128, 1, DType.FLOAT32, 2048, 100),
    (3, 64, 30, DType.BFLOAT16, 300, 256),
    (1, 1, 200, DType.FLOAT16, 2, 1),
    (7, 13, 5, DType.FLOAT32, 1234, 17),
    (1, (MESSAGE_BYTES - HEADER_BYTES) // 8, 2, DType.FLOAT32, 3, 2),
    (1, (MESSAGE_BYTES - HEADER_BYTES) // 16 + 1, 1, DType.FLOAT32, 3, 3),  # two positions just do not fit
]


@pytest.mark.parametrize(("heads", "width", "layers", "dtype", "positions", "chunk"), SHAPES)
def test_no_message_is_too_large(heads: int, width: int, layers: int, dtype: DType, positions: int, chunk: int) -> None:
    layout = kv_layout(heads, width, layers, dtype)
    sender = Sender("t", range(positions), layout)
    assert len(frames.encode(sender.begin())) <= MESSAGE_BYTES

    def pieces():
        for start in range(0, positions, chunk):
            shape = (min(chunk, positions - start), heads, width)
            zeros = np.zeros(shape, dtype.numpy)
            for layer in range(layers):
                yield from sender.blocks(KvBlock(layer, start, zeros, zeros))

    payload = 0
    for group in frames.joined(pieces(), MESSAGE_BYTES - HEADER_BYTES):
        data = frames.encode_blocks(group)
        assert len(data) <= MESSAGE_BYTES
        payload += sum(len(frame.payload) for frame in frames.decode(data))
    assert payload == layout.span_bytes(positions) == sender.bytes
    assert len(frames.encode(sender.done(queue_s=1, prefill_s=1))) <= MESSAGE_BYTES


def test_waiting_blocks_are_joined() -> None:
    layout = kv_layout()
    blocks = [random_block(layout, layer, 0, 2) for layer in range(3)]
    assert [len(group) for group in frames.joined(iter(blocks), MESSAGE_BYTES)] == [3]
    assert [len(group) for group in frames.joined(iter(blocks), 2 * (2 * 64 + 64))] == [2, 1]
    assert [len(group) for group in frames.joined(iter(blocks), 1)] == [1, 1, 1]
    assert list(frames.joined(iter(()), 1)) == []


def test_digests_are_those_the_proto_describes() -> None:
    import xxhash

    sender = Sender("t", range(2), kv_layout(layers=1))
    sender.begin()
    want = xxhash.xxh3_64()
    for start in range(2):
        block = random_block(sender.layout, 0, start, 1)
        list(sender.blocks(block))
        want.update(struct.pack("<II", start, 1) + block.keys.tobytes() + block.values.tobytes())
    assert sender.done(queue_s=0, prefill_s=0).layers == (LayerSum(2, 2, want.intdigest()),)

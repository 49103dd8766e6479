"""The bytes of a transfer: `TransferMessage` of the committed proto, written and read by hand where it carries blocks.

Owns the bulk lane's encoding: headers and payload joined once on the way out, a `memoryview` on the way in, so that a
payload is copied once on each side. Control parts go through the generated classes. Knows no gRPC and no rules of
the transfer (`protocol`). Source: the Protocol Buffers encoding document (varints, tag = field << 3 | wire type).
"""

from collections.abc import Iterator, Sequence

from google.protobuf.message import DecodeError

from hetsplit._pb import hetsplit_pb2 as pb
from hetsplit.errors import RemoteProtocolError
from hetsplit.kv import KvBlock
from hetsplit.protocol import (
    MESSAGE_BYTES,
    Begin,
    BlockFrame,
    Done,
    LayerSum,
    Message,
    Progress,
    raw_bytes,
)

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_BEGIN, _BLOCKS, _PROGRESS, _DONE = 1, 2, 3, 4


def encode(message: Begin | Progress | Done) -> bytes:
    """One control message as the bytes of a `TransferMessage`."""
    match message:
        case Begin():
            body = pb.Begin(
                transfer_id=message.transfer_id,
                start=message.start,
                stop=message.stop,
                dtype=message.dtype,
                codec=message.codec,
            )
            return pb.TransferMessage(begin=body).SerializeToString()
        case Progress():
            return pb.TransferMessage(
                progress=pb.Progress(ahead=message.ahead, computed=message.computed)
            ).SerializeToString()
        case Done():
            sums = [pb.LayerSum(positions=s.positions, blocks=s.blocks, digest=s.digest) for s in message.layers]
            done = pb.Done(layers=sums, queue_s=message.queue_s, prefill_s=message.prefill_s)
            return pb.TransferMessage(done=done).SerializeToString()


def encode_blocks(blocks: Sequence[KvBlock]) -> bytes:
    """Blocks as the bytes of one `TransferMessage`: the same as the generated class writes, one copy of the payload."""
    parts: list[bytes | memoryview] = []
    for block in blocks:
        keys, values = raw_bytes(block.keys), raw_bytes(block.values)
        size = keys.nbytes + values.nbytes
        head = b"".join(
            _tag(number, _VARINT) + _varint(value)
            for number, value in ((1, block.layer), (2, block.start), (3, block.count))
            if value
        )
        head += _tag(4, _BYTES) + _varint(size)
        parts += [
            _tag(_BLOCKS, _BYTES) + _varint(len(head) + size) + head,
            keys,
            values,
        ]
    return b"".join(parts)


def joined(blocks: Iterator[KvBlock], room: int) -> Iterator[list[KvBlock]]:
    """Blocks in groups that fit into one message of `room` bytes; each single block is known to fit."""
    group: list[KvBlock] = []
    size = 0
    for block in blocks:
        added = block.keys.nbytes + block.values.nbytes + 64
        if group and size + added > room:
            yield group
            group, size = [], 0
        group.append(block)
        size += added
    if group:
        yield group


def decode(data: bytes) -> list[Message]:
    """The messages in the bytes of one `TransferMessage`. Raises `RemoteProtocolError` on anything malformed."""
    if len(data) > MESSAGE_BYTES:
        raise RemoteProtocolError(f"a message of {len(data)} bytes, at most {MESSAGE_BYTES} allowed")
    try:
        return [message for number, body in _fields(memoryview(data)) if (message := _message(number, body))]
    except (DecodeError, ValueError) as error:
        raise RemoteProtocolError(f"a message that is not a TransferMessage: {error}") from error


def _message(number: int, body: memoryview | int) -> Message | None:
    if isinstance(body, int):
        return None  # an unknown field of a later version
    if number == _BLOCKS:
        return _block(body)
    if number == _BEGIN:
        begin = pb.Begin.FromString(body.tobytes())
        return Begin(begin.transfer_id, begin.start, begin.stop, begin.dtype, begin.codec)
    if number == _PROGRESS:
        progress = pb.Progress.FromString(body.tobytes())
        return Progress(progress.ahead, progress.computed)
    if number == _DONE:
        done = pb.Done.FromString(body.tobytes())
        sums = tuple(LayerSum(s.positions, s.blocks, s.digest) for s in done.layers)
        return Done(sums, done.queue_s, done.prefill_s)
    return None


def _block(body: memoryview) -> BlockFrame:
    header = {1: 0, 2: 0, 3: 0}
    payload = memoryview(b"")
    for number, value in _fields(body):
        if number in header and isinstance(value, int):
            header[number] = value
        elif number == 4 and isinstance(value, memoryview):
            payload = value
    return BlockFrame(header[1], header[2], header[3], payload)


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Field numbers with their values. Fixed-width fields are skipped: none that is read by hand has that type."""
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        number, kind = key >> 3, key & 7
        if kind not in (_VARINT, _FIXED64, _BYTES, _FIXED32) or not number:
            raise ValueError(f"field {number} of wire type {kind}")
        if kind == _VARINT:
            value, at = _read_varint(data, at)
            yield number, value
            continue
        size, at = _read_varint(data, at) if kind == _BYTES else (_FIXED_BYTES[kind], at)
        if at + size > len(data):
            raise ValueError(f"field {number} of {size} bytes, {len(data) - at} are left")
        if kind == _BYTES:
            yield number, data[at : at + size]
        at += size


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for i, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            if value >> 64:
                raise ValueError("a varint of more than 64 bits")
            return value, at + i + 1
    raise ValueError("a varint of more than ten bytes, or one that is cut off")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _tag(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)

"""Hostile transfers: what a broken or malicious sender may do, each with the words its error must hold.

`STREAMS` tamper with the messages of a good transfer of 9 positions in chunks of 4 over 3 layers; `BYTES` tamper with
its encoded messages, of which there is one per block. `HostilePrefill` serves any of them to a real decode worker.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from hetsplit import frames
from hetsplit._pb import hetsplit_pb2 as pb
from hetsplit.engines import Prefiller
from hetsplit.kv import KvBlock
from hetsplit.protocol import MESSAGE_BYTES, BlockFrame, Done, Message, Progress, Sender, raw_bytes
from hetsplit.wire import Call
from hetsplit.worker.service import describe

TOKENS = tuple((37 * i + 5) % 97 for i in range(10))
SPAN = range(9)
CHUNK = 4
BLOCKS = slice(1, -1)
"""Where the blocks are in `good_messages`: 3 chunks of 3 layers, between Begin and Done."""


def to_frame(block: KvBlock) -> BlockFrame:
    payload = bytes(raw_bytes(block.keys)) + bytes(raw_bytes(block.values))
    return BlockFrame(block.layer, block.start, block.count, memoryview(payload))


def to_bytes(message: Message) -> bytes:
    """A message as the generated class writes it; header values may be whatever a uint32 holds."""
    if not isinstance(message, BlockFrame):
        return frames.encode(message)
    block = pb.Block(layer=message.layer, start=message.start, count=message.count, payload=bytes(message.payload))
    return pb.TransferMessage(blocks=[block]).SerializeToString()


def good_messages(
    engine: Prefiller, transfer_id: str, tokens: Sequence[int] = TOKENS, chunk: int = CHUNK
) -> list[Message]:
    span = range(len(tokens) - 1)
    sender = Sender(transfer_id, span, engine.layout)
    messages: list[Message] = [sender.begin()]
    for block in engine.prefill(tokens, span, chunk=chunk, stop=threading.Event()):
        messages += [to_frame(piece) for piece in sender.blocks(block)]
    return [*messages, sender.done(queue_s=0.0, prefill_s=0.0)]


def at(index: int, **changes: object) -> Callable[[list[Message]], list[Message]]:
    """Replaces fields of one message."""

    def tamper(messages: list[Message]) -> list[Message]:
        messages[index] = replace(messages[index], **changes)
        return messages

    return tamper


def payload(index: int, change: Callable[[bytes], bytes]) -> Callable[[list[Message]], list[Message]]:
    def tamper(messages: list[Message]) -> list[Message]:
        frame = messages[index]
        assert isinstance(frame, BlockFrame)
        messages[index] = replace(frame, payload=memoryview(change(bytes(frame.payload))))
        return messages

    return tamper


def sums(layer: int, **changes: object) -> Callable[[list[Message]], list[Message]]:
    def tamper(messages: list[Message]) -> list[Message]:
        done = messages[-1]
        assert isinstance(done, Done)
        layers = list(done.layers)
        layers[layer] = replace(layers[layer], **changes)
        messages[-1] = replace(done, layers=tuple(layers))
        return messages

    return tamper


def without(*indices: int) -> Callable[[list[Message]], list[Message]]:
    return lambda messages: [m for i, m in enumerate(messages) if i not in indices]


def swapped(a: int, b: int) -> Callable[[list[Message]], list[Message]]:
    def tamper(messages: list[Message]) -> list[Message]:
        messages[a], messages[b] = messages[b], messages[a]
        return messages

    return tamper


def flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def forty_of_35(messages: list[Message]) -> list[Message]:
    """A header that says 4 positions over data for 3."""
    return payload(4, lambda data: data[: len(data) * 3 // 4])(messages)


def fewer_layers(messages: list[Message]) -> list[Message]:
    done = messages[-1]
    assert isinstance(done, Done)
    return [*messages[:-1], replace(done, layers=done.layers[:-1])]


STREAMS: dict[str, tuple[Callable[[list[Message]], list[Message]], str]] = {
    "nothing at all": (lambda m: [], "ended early, at position 0 of 9"),
    "only Begin": (lambda m: m[:1], "ended early, at position 0 of 9"),
    "cut in half": (lambda m: m[:5], "ended early, at position 4 of 9"),
    "no Done": (lambda m: m[:-1], "ended early, at position 9 of 9, without Done"),
    "the last chunk dropped": (without(7, 8, 9), "Done too early: layer 0 ends at position 8, expected 9"),
    "the last block dropped": (without(9), "Done too early: layer 2 ends at position 8, expected 9"),
    "a block dropped": (without(5), "layer 1: block starts at position 8, expected 4"),
    "a block doubled": (lambda m: [*m[:5], m[4], *m[5:]], "layer 0: block starts at position 4, expected 8"),
    "two chunks of a layer swapped": (swapped(1, 4), "layer 0: block starts at position 4, expected 0"),
    "Done in the middle": (lambda m: [*m[:5], m[-1], *m[5:-1]], "Done too early"),
    "a short payload": (payload(3, lambda data: data[:-4]), "a payload of 252 bytes, expected 256"),
    "a long payload": (payload(3, lambda data: data + bytes(4)), "a payload of 260 bytes, expected 256"),
    "no payload": (payload(3, lambda data: b""), "a payload of 0 bytes, expected 256"),
    "a count over the data": (forty_of_35, "a payload of 192 bytes, expected 256"),
    "a count under the data": (at(4, count=3), "a payload of 256 bytes, expected 192"),
    "a count of zero": (at(4, count=0, payload=memoryview(b"")), "a block of 0 positions"),
    "a huge count": (at(4, count=2**32 - 1), "block ends at position 4294967299, the span ends at 9"),
    "past the span": (at(7, count=2, payload=memoryview(bytes(128))), "block ends at position 10, the span ends at 9"),
    "a start too far": (at(4, start=5), "block starts at position 5, expected 4"),
    "a start too early": (at(4, start=3), "block starts at position 3, expected 4"),
    "a huge start": (at(1, start=2**32 - 1), "block starts at position 4294967295, expected 0"),
    "a layer too high": (at(4, layer=3), "layer 3 of 3"),
    "a huge layer": (at(4, layer=2**32 - 1), "layer 4294967295 of 3"),
    "another layer": (at(4, layer=1), "layer 1: block starts at position 4, expected 8"),
    "a flipped bit in keys": (payload(4, lambda data: flip(data, 100)), "layer 0: received"),
    "a flipped bit in values": (payload(9, lambda data: flip(data, 8 * len(data) - 1)), "layer 2: received"),
    "keys and values exchanged": (payload(4, lambda data: data[128:] + data[:128]), "layer 0: received"),
    "two payloads exchanged": (lambda m: swap_payloads(m, 1, 2), "layer 0: received"),
    "another transfer": (at(0, transfer_id="another"), "begins as another"),
    "another start": (at(0, start=1), "begins as .* \\[1, 9\\)"),
    "a shorter span": (at(0, stop=8), "begins as .* \\[0, 8\\)"),
    "a longer span": (at(0, stop=10), "begins as .* \\[0, 10\\)"),
    "another dtype": (at(0, dtype="float16"), "a payload of 256 bytes, expected 128"),
    "an unknown dtype": (at(0, dtype="int8"), "dtype 'int8', allowed: float32, bfloat16, float16"),
    "no dtype": (at(0, dtype=""), "dtype '', allowed"),
    "an unknown codec": (at(0, codec="zip"), "codec 'zip', allowed: raw"),
    "a wrong digest": (sums(1, digest=1), "layer 1: received"),
    "a wrong block count": (sums(0, blocks=2), "layer 0: received"),
    "a wrong position count": (sums(2, positions=8), "layer 2: received"),
    "sums of too few layers": (fewer_layers, "Done sums up 2 layers, expected 3"),
    "no sums": (at(-1, layers=()), "Done sums up 0 layers, expected 3"),
    "no Begin": (without(0), "BlockFrame while the transfer is OPEN"),
    "Progress first": (lambda m: [Progress(0), *m], "Progress while the transfer is OPEN"),
    "Done first": (lambda m: [m[-1], *m], "Done while the transfer is OPEN"),
    "two Begins": (lambda m: [m[0], *m], "Begin while the transfer is STREAMING"),
    "two Dones": (lambda m: [*m, m[-1]], "Done while the transfer is DONE"),
    "a block after Done": (lambda m: [*m, m[1]], "BlockFrame while the transfer is DONE"),
    "Progress after Done": (lambda m: [*m, Progress(0)], "Progress while the transfer is DONE"),
    "Begin after Done": (lambda m: [*m, m[0]], "Begin while the transfer is DONE"),
    "more computed than asked": (
        lambda m: [m[0], Progress(0, 10), *m[1:]],
        "Progress says 10 positions, the span has 9",
    ),
    "a clock that is no number": (at(-1, queue_s=math.nan), "queue_s nan"),
    "an endless clock": (at(-1, prefill_s=math.inf), "prefill_s inf"),
    "a clock that runs backwards": (at(-1, prefill_s=-1.0), "prefill_s -1"),
}


def swap_payloads(messages: list[Message], a: int, b: int) -> list[Message]:
    one, other = messages[a], messages[b]
    assert isinstance(one, BlockFrame)
    assert isinstance(other, BlockFrame)
    messages[a], messages[b] = replace(one, payload=other.payload), replace(other, payload=one.payload)
    return messages


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: int | bytes) -> bytes:
    """A protobuf field with any value, such as no generated class would write."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def block(layer: int, start: int, count: int, data: bytes = bytes(256)) -> bytes:
    return field(2, field(1, layer) + field(2, start) + field(3, count) + field(4, data))


def put(index: int, data: bytes) -> Callable[[list[bytes]], list[bytes]]:
    return lambda messages: [*messages[:index], data, *messages[index + 1 :]]


BYTES: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "a message cut short": (lambda m: [*m[:4], m[4][:-1], *m[5:]], "field 2 of"),
    "a message of noise": (put(4, b"\xff" * 40), "not a TransferMessage"),
    "an empty message for a block": (put(4, b""), "layer 0: block starts at position 8, expected 4"),
    "an oversized message": (put(4, block(0, 4, 4, bytes(MESSAGE_BYTES))), f"at most {MESSAGE_BYTES} allowed"),
    "a layer of 2^32": (put(4, block(2**32, 4, 4)), "layer 4294967296 of 3"),
    "a layer of 2^64-1": (put(4, block(2**64 - 1, 4, 4)), "layer 18446744073709551615 of 3"),
    "a start of 2^63": (put(4, block(0, 2**63, 4)), "block starts at position 9223372036854775808, expected 4"),
    "a count of 2^63": (put(4, block(0, 4, 2**63)), "block ends at position 9223372036854775812"),
    "a length of 2^62": (put(4, varint(2 << 3 | 2) + varint(2**62) + bytes(64)), "field 2 of 4611686018427387904"),
    "an inner length of 2^62": (
        put(4, field(2, field(3, 4) + varint(4 << 3 | 2) + varint(2**62) + bytes(64))),
        "field 4 of 4611686018427387904 bytes, 64 are left",
    ),
    "a varint without an end": (put(4, b"\x12" + b"\x80" * 40), "a varint of more than ten bytes"),
    "a group": (put(4, b"\x13\x14"), "field 2 of wire type 3"),
    "a Begin of noise": (put(0, field(1, b"\xff\xff\xff")), "not a TransferMessage"),
    "a Done of noise": (put(-1, field(4, b"\x0a\xff")), "not a TransferMessage"),
}


Script = Callable[[pb.PrefillRequest, Call], Iterable[bytes]]


class HostilePrefill:
    """A `wire.Service` that answers each prefill with `script`; it looks like a worker that holds `engine`."""

    def __init__(self, engine: Prefiller, script: Script) -> None:
        self.engine = engine
        self.script = script
        self.requests: list[pb.PrefillRequest] = []

    def describe(self) -> pb.Description:
        return describe(self.engine, "prefill")

    def pair(self, request: pb.PairRequest) -> pb.PairReply:
        raise NotImplementedError

    def prefill(self, request: pb.PrefillRequest, call: Call) -> Iterator[bytes]:
        self.requests.append(request)
        yield from self.script(request, call)

    def push(self, messages: Iterator[list[Message]], call: Call) -> None:
        raise NotImplementedError

    def generate(self, request: pb.GenerateRequest, call: Call) -> Iterator[pb.GenerateEvent]:
        raise NotImplementedError
        yield


def stream_script(engine: Prefiller, tamper: Callable[[list[Message]], list[Message]]) -> Script:
    """Serves a tampered transfer of what the request asks."""
    return lambda request, call: [to_bytes(m) for m in tamper(requested(engine, request))]


def bytes_script(engine: Prefiller, tamper: Callable[[list[bytes]], list[bytes]]) -> Script:
    return lambda request, call: tamper([to_bytes(m) for m in requested(engine, request)])


def requested(engine: Prefiller, request: pb.PrefillRequest) -> list[Message]:
    return good_messages(engine, request.transfer_id, tuple(request.tokens), request.chunk)


def silent_script(engine: Prefiller, after: int) -> Script:
    """Sends `after` messages of a good transfer and then nothing, with the call open."""

    def script(request: pb.PrefillRequest, call: Call) -> Iterator[bytes]:
        ended = threading.Event()
        call.on_end(ended.set)
        for message in requested(engine, request)[:after]:
            yield to_bytes(message)
        ended.wait(20)

    return script

"""Laws of one transfer: a sender and a receiver joined without any I/O, the table of states, identities."""

import itertools
import math
import random
from dataclasses import fields, replace

import numpy as np
import pytest

from hetsplit.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from hetsplit.kv import KvBlock, KvFill
from hetsplit.protocol import (
    HEADER_BYTES,
    MESSAGE_BYTES,
    TRANSITIONS,
    VERSION,
    Begin,
    BlockFrame,
    Done,
    Identity,
    Message,
    Progress,
    Receiver,
    Sender,
    State,
    raw_bytes,
)
from hetsplit.spec import DType, KvLayer, Rope
from tests.faults import SPAN, STREAMS, TOKENS, good_messages, to_frame
from tests.test_kv import interleaved
from tests.toy import LAYERS, ROPE, ToyEngine, ToyStore, kv_layout, random_block

ENGINE = ToyEngine()
CLOCKS = {"queue_s": 0.5, "prefill_s": 1.5}


def a_receiver(engine: ToyEngine, prompt: int, transfer_id: str = "t") -> tuple[Receiver, ToyStore]:
    span = range(max(prompt - 1, 0))
    store = engine.reserve(prompt + 1)
    return Receiver(transfer_id, span, engine.layout, KvFill(store, engine.layout, span)), store


def finish(receiver: Receiver, messages: list[Message]) -> None:
    for message in messages:
        receiver.feed(message)
    receiver.end()


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 9, 40])
@pytest.mark.parametrize("seed", range(6))
def test_what_is_sent_is_what_arrives(n: int, seed: int) -> None:
    """The split law without a network: any chunking, any order between layers, heartbeats anywhere."""
    engine, rng = ToyEngine(), random.Random(seed)
    tokens = [rng.randrange(97) for _ in range(n)]
    sender = Sender("t", range(n - 1), engine.layout)
    receiver, store = a_receiver(engine, n)
    receiver.feed(sender.begin())
    for layer, part in interleaved(range(n - 1), rng):
        if rng.random() < 0.3:
            receiver.feed(sender.progress(rng.randrange(4)))
        for piece in sender.blocks(engine.block(layer, part.start, tokens[part.start : part.stop])):
            receiver.feed(to_frame(piece))
    receiver.feed(sender.done(**CLOCKS))
    receiver.end()
    kept = receiver.fill.finish().length
    for layer in range(LAYERS):
        want = engine.block(layer, 0, tokens[:kept])
        assert (store.data[layer, 0, :kept] == want.keys).all()
        assert (store.data[layer, 1, :kept] == want.values).all()
    assert receiver.done is not None
    assert (receiver.done.queue_s, receiver.done.prefill_s) == (0.5, 1.5)
    assert receiver.bytes == sender.bytes == engine.layout.span_bytes(n - 1)
    assert receiver.state is sender.state is State.DONE


@pytest.mark.parametrize("dtype", DType)
def test_the_wire_carries_the_senders_dtype(dtype: DType) -> None:
    """A float32 receiver takes what any sender has; the store converts."""
    sending, receiving = ToyEngine(dtype=dtype), ToyEngine()
    receiver, store = a_receiver(receiving, len(TOKENS))
    finish(receiver, good_messages(sending, "t"))
    receiver.fill.finish()
    want = sending.block(1, 0, TOKENS[:6]).values.astype(np.float32)
    assert (store.data[1, 1, :6] == want).all()


@pytest.mark.parametrize("name", STREAMS)
def test_a_hostile_stream_is_a_named_error_and_seals_nothing(name: str) -> None:
    tamper, why = STREAMS[name]
    receiver, store = a_receiver(ENGINE, len(TOKENS))
    with pytest.raises(RemoteProtocolError, match=f"^transfer t: .*{why}"):
        finish(receiver, tamper(good_messages(ENGINE, "t")))
    assert receiver.state is State.FAILED
    assert store.sealed is None
    for message in good_messages(ENGINE, "t"):  # and nothing is accepted any more
        with pytest.raises(RemoteProtocolError, match="while the transfer is FAILED"):
            receiver.feed(message)
    with pytest.raises(RemoteProtocolError):
        receiver.end()


def test_the_good_stream_of_the_faults_is_good() -> None:
    receiver, store = a_receiver(ENGINE, len(TOKENS))
    finish(receiver, good_messages(ENGINE, "t"))
    receiver.fill.finish()
    assert store.sealed == len(SPAN) - 3


def test_every_flipped_bit_of_a_payload_is_noticed() -> None:
    engine = ToyEngine()
    good = good_messages(engine, "t", TOKENS[:4])
    for index, message in enumerate(good):
        if not isinstance(message, BlockFrame):
            continue
        for bit in range(0, 8 * len(message.payload), 7):
            data = bytearray(message.payload)
            data[bit // 8] ^= 1 << bit % 8
            bad = [*good[:index], replace(message, payload=memoryview(bytes(data))), *good[index + 1 :]]
            receiver, _ = a_receiver(engine, 4)
            with pytest.raises(RemoteProtocolError, match="the sender says"):
                finish(receiver, bad)


MESSAGES: dict[type, Message] = {
    Begin: Begin("t", 0, 9, "float32"),
    BlockFrame: to_frame(ENGINE.block(0, 0, TOKENS[:4])),
    Progress: Progress(1),
    Done: good_messages(ENGINE, "t")[-1],
}
ILLEGAL = [pair for pair in itertools.product(State, MESSAGES) if pair not in TRANSITIONS]


def test_the_table_of_states() -> None:
    assert len(TRANSITIONS) == 4
    assert len(ILLEGAL) == 12
    assert not [pair for pair in TRANSITIONS if pair[0] in (State.DONE, State.FAILED)]


@pytest.mark.parametrize(("state", "kind"), ILLEGAL, ids=lambda x: getattr(x, "name", None) or x.__name__)
def test_a_receiver_refuses_what_the_table_does_not_hold(state: State, kind: type) -> None:
    receiver, store = a_receiver(ENGINE, len(TOKENS))
    receiver.state = state
    with pytest.raises(RemoteProtocolError, match=f"{kind.__name__} while the transfer is {state.name}"):
        receiver.feed(MESSAGES[kind])
    assert receiver.state is State.FAILED
    assert store.written == 0


@pytest.mark.parametrize(("state", "kind"), ILLEGAL, ids=lambda x: getattr(x, "name", None) or x.__name__)
def test_a_sender_refuses_what_the_table_does_not_hold(state: State, kind: type) -> None:
    sender = Sender("t", SPAN, ENGINE.layout)
    sender.state = state
    send = {
        Begin: sender.begin,
        BlockFrame: lambda: list(sender.blocks(ENGINE.block(0, 0, TOKENS[:4]))),
        Progress: lambda: sender.progress(0),
        Done: lambda: sender.done(**CLOCKS),
    }
    with pytest.raises(LocalProtocolError, match=f"{kind.__name__} while the transfer is {state.name}"):
        send[kind]()
    assert sender.state is State.FAILED


def wrong_block(**changes: object) -> KvBlock:
    return replace(ENGINE.block(0, 0, TOKENS[:4]), **changes)


FLOAT = np.zeros((4, 2, 4), np.float32)
WRONG_BLOCKS = {
    "gap": (wrong_block(start=1), "block starts at position 1, expected 0"),
    "layer": (wrong_block(layer=LAYERS), f"layer {LAYERS} of {LAYERS}"),
    "empty": (wrong_block(keys=FLOAT[:0], values=FLOAT[:0]), "a block of 0 positions"),
    "too long": (ENGINE.block(0, 0, [1] * 10), "the span ends at 9"),
    "dtype of keys": (wrong_block(keys=FLOAT.astype(np.float16)), "keys are .* float16, expected .* float32"),
    "dtype of values": (wrong_block(values=FLOAT.astype(np.float64)), "values are .* float64, expected .* float32"),
    "byte order": (wrong_block(values=FLOAT.astype(">f4")), "values are .*, expected .* float32"),
    "fewer values": (wrong_block(values=FLOAT[:3]), r"values are \(3, 2, 4\) float32, expected \(4, 2, 4\)"),
    "heads": (wrong_block(keys=FLOAT[:, :1]), r"keys are \(4, 1, 4\)"),
    "width": (wrong_block(keys=FLOAT[:, :, :3]), r"keys are \(4, 2, 3\)"),
    "rank": (wrong_block(keys=FLOAT.reshape(4, 8)), r"keys are \(4, 8\)"),
}


@pytest.mark.parametrize("name", WRONG_BLOCKS)
def test_a_sender_refuses_an_engines_wrong_block(name: str) -> None:
    block, why = WRONG_BLOCKS[name]
    sender = Sender("t", SPAN, ENGINE.layout)
    sender.begin()
    with pytest.raises(LocalProtocolError, match=why):
        list(sender.blocks(block))
    assert sender.state is State.FAILED
    assert sender.bytes == 0


def test_a_sender_is_not_done_before_its_last_block() -> None:
    sender = Sender("t", SPAN, ENGINE.layout)
    sender.begin()
    list(sender.blocks(ENGINE.block(0, 0, TOKENS[:9])))
    with pytest.raises(LocalProtocolError, match="done too early: layer 1 ends at position 0, expected 9"):
        sender.done(**CLOCKS)


def test_blocks_that_are_not_contiguous_travel_whole() -> None:
    wide = np.arange(2 * 4 * 2 * 8, dtype=np.float32).reshape(2, 4, 2, 8)[..., ::2]
    block = KvBlock(0, 0, wide[0], wide[1])
    sender = Sender("t", SPAN, ENGINE.layout)
    sender.begin()
    (piece,) = sender.blocks(block)
    assert bytes(raw_bytes(piece.keys)) == wide[0].tobytes()
    receiver, store = a_receiver(ENGINE, len(TOKENS))
    receiver.feed(Begin("t", 0, 9, "float32"))
    receiver.feed(to_frame(piece))
    assert (store.data[0, 0, :4] == wide[0]).all()


SHAPES = [
    (8, 128, DType.FLOAT32, 2048),  # case O12: 16 MiB of one layer
    (8, 128, DType.BFLOAT16, 4096),
    (1, 1, DType.FLOAT16, 3),
    (3, 7, DType.FLOAT32, 20_000),
    (1, (MESSAGE_BYTES - HEADER_BYTES) // 8, DType.FLOAT32, 2),  # exactly one position in each message
]


@pytest.mark.parametrize(("heads", "width", "dtype", "count"), SHAPES)
def test_a_big_block_is_cut_into_pieces_that_fit(heads: int, width: int, dtype: DType, count: int) -> None:
    layout = kv_layout(heads, width, 1, dtype)
    sender = Sender("t", range(count), layout)
    sender.begin()
    shape = (count, heads, width)
    block = KvBlock(0, 0, np.zeros(shape, dtype.numpy), np.zeros(shape, dtype.numpy))
    at = 0
    for piece in sender.blocks(block):
        assert piece.start == at
        assert 0 < piece.count * layout.position_bytes(0) <= MESSAGE_BYTES - HEADER_BYTES
        at = piece.stop
    assert at == count
    assert sender.done(**CLOCKS).layers[0].positions == count


def test_a_position_that_no_message_holds_is_refused_at_once() -> None:
    layout = kv_layout(1, (MESSAGE_BYTES - HEADER_BYTES) // 8 + 1, 1)
    with pytest.raises(ConfigError, match=r"layer 0: one position takes \d+ bytes, at most \d+ can travel"):
        Sender("t", range(1), layout)


def test_random_bits_arrive_as_they_are() -> None:
    layout = ENGINE.layout
    receiver, store = a_receiver(ENGINE, len(TOKENS))
    sender = Sender("t", SPAN, layout)
    blocks = [random_block(layout, layer, 0, 9) for layer in range(LAYERS)]
    messages: list[Message] = [sender.begin()]
    for block in blocks:
        messages += [to_frame(piece) for piece in sender.blocks(block)]
    finish(receiver, [*messages, sender.done(**CLOCKS)])
    for block in blocks:
        assert store.data[block.layer, 0, :6].tobytes() == block.keys[:6].tobytes()
        assert store.data[block.layer, 1, :6].tobytes() == block.values[:6].tobytes()


IDENTITY = Identity.of(ENGINE.spec, ENGINE.layout, "tok", "weights")
DIFFERENT = {
    "protocol": VERSION + 1,
    "architecture": "other",
    "width": 17,
    "heads": 8,
    "intermediate": 33,
    "rotary": (ROPE, ROPE, None),
    "layers": (KvLayer(2, 4), KvLayer(2, 4), KvLayer(2, 4, 128)),
    "tokenizer": "other",
    "weights": "other",
}


def test_equal_identities_do_not_differ() -> None:
    assert IDENTITY.difference(IDENTITY) is None
    assert IDENTITY.difference(replace(IDENTITY)) is None


def test_every_field_of_an_identity_is_tried() -> None:
    assert DIFFERENT.keys() == {field.name for field in fields(Identity)}


@pytest.mark.parametrize("name", DIFFERENT)
def test_each_field_that_differs_is_named(name: str) -> None:
    difference = IDENTITY.difference(replace(IDENTITY, **{name: DIFFERENT[name]}))
    assert difference is not None
    assert difference.startswith(name)
    assert " here, " in difference
    assert difference.rstrip(")").count("there") == 1
    if name not in ("layers", "rotary"):
        assert repr(getattr(IDENTITY, name)) in difference
        assert repr(DIFFERENT[name]) in difference
    mixed = IDENTITY.difference(replace(IDENTITY, **{name: DIFFERENT[name]}), mixed_weights=True)
    assert (mixed is None) == (name == "weights")


def test_frequencies_may_differ_by_rounding_only() -> None:
    def difference(*inv_freq: float, scale: float = 1.0) -> str | None:
        return IDENTITY.difference(replace(IDENTITY, rotary=(ROPE, ROPE, Rope(inv_freq, scale))))

    assert difference(1.0 + 5e-7, 0.01) is None
    assert (difference(1.0, 0.01 * (1 + 2e-6)) or "").startswith(
        "rotary of layer 2: inv_freq[1]: 0.01 here, 0.01000002 there"
    )
    assert difference(1.0) == "rotary of layer 2: inv_freq: 2 RoPE frequencies here, 1 there"
    assert difference(1.0, math.nan) is not None
    assert difference(1.0, 0.01, scale=1 + 5e-7) is None
    assert difference(1.0, 0.01, scale=1.1) == "rotary of layer 2: scale: 1.0 here, 1.1 there"


def test_a_layer_without_rotation_is_not_one_with_it() -> None:
    none = replace(IDENTITY, rotary=(ROPE, ROPE, None))
    assert none.difference(IDENTITY) == "rotary of layer 2: no RoPE here, RoPE there"
    assert IDENTITY.difference(replace(IDENTITY, rotary=(ROPE, ROPE))) == "rotary: 3 layers here, 2 there"


def test_mixed_weights_is_offered_where_weights_differ() -> None:
    assert "mixed_weights=True" in (IDENTITY.difference(replace(IDENTITY, weights="q4")) or "")

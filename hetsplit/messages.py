"""Between our own types and the generated control messages, in both directions. No decisions, no I/O."""

from dataclasses import asdict, fields

from hetsplit._pb import hetsplit_pb2 as pb
from hetsplit.protocol import Identity
from hetsplit.result import Timing, Token
from hetsplit.sampling import SamplingParams
from hetsplit.spec import KvLayer, Rope


def identity_to_pb(identity: Identity) -> pb.Identity:
    layers = [pb.Layer(kv_heads=x.kv_heads, head_dim=x.head_dim, window=x.window or 0) for x in identity.layers]
    plain = {f.name: getattr(identity, f.name) for f in fields(identity) if f.name not in ("layers", "rotary")}
    distinct = [rope for rope in dict.fromkeys(identity.rotary) if rope is not None]
    ropes = [pb.Rope(inv_freq=rope.inv_freq, scale=rope.scale) for rope in distinct]
    of_layer = [0 if rope is None else 1 + distinct.index(rope) for rope in identity.rotary]
    return pb.Identity(layers=layers, ropes=ropes, rope_of_layer=of_layer, **plain)


def identity_from_pb(message: pb.Identity) -> Identity:
    ropes = [None, *(Rope(tuple(rope.inv_freq), rope.scale) for rope in message.ropes)]
    return Identity(
        protocol=message.protocol,
        architecture=message.architecture,
        width=message.width,
        heads=message.heads,
        intermediate=message.intermediate,
        rotary=tuple(ropes[i] if i < len(ropes) else None for i in message.rope_of_layer),
        layers=tuple(KvLayer(x.kv_heads, x.head_dim, x.window or None) for x in message.layers),
        tokenizer=message.tokenizer,
        weights=message.weights,
    )


def sampling_to_pb(params: SamplingParams) -> pb.Sampling:
    return pb.Sampling(**{f.name: getattr(params, f.name) for f in fields(params)})


def sampling_from_pb(message: pb.Sampling) -> SamplingParams:
    """Raises `RequestError` as `SamplingParams` does."""
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        seed=message.seed if message.HasField("seed") else None,
        stop=tuple(message.stop),
        max_tokens=message.max_tokens,
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )


def token_to_pb(token: Token) -> pb.TokenEvent:
    top = [pb.TokenLogprob(id=i, logprob=p) for i, p in token.top]
    return pb.TokenEvent(id=token.id, text=token.text, finish=token.finish or "", logprob=token.logprob, top=top)


def token_from_pb(event: pb.TokenEvent) -> Token:
    logprob = event.logprob if event.HasField("logprob") else None
    return Token(event.id, event.text, event.finish or None, logprob, tuple((t.id, t.logprob) for t in event.top))


def timing_to_pb(timing: Timing) -> pb.Timing:
    return pb.Timing(**asdict(timing))


def timing_from_pb(message: pb.Timing) -> Timing:
    return Timing(**{f.name: getattr(message, f.name) for f in fields(Timing)})

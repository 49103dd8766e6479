from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Layer(_message.Message):
    __slots__ = ("kv_heads", "head_dim", "window")
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    kv_heads: int
    head_dim: int
    window: int
    def __init__(self, kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., window: _Optional[int] = ...) -> None: ...

class Rope(_message.Message):
    __slots__ = ("inv_freq", "scale")
    INV_FREQ_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    inv_freq: _containers.RepeatedScalarFieldContainer[float]
    scale: float
    def __init__(self, inv_freq: _Optional[_Iterable[float]] = ..., scale: _Optional[float] = ...) -> None: ...

class Identity(_message.Message):
    __slots__ = ("protocol", "architecture", "width", "heads", "intermediate", "ropes", "layers", "tokenizer", "weights", "rope_of_layer")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    INTERMEDIATE_FIELD_NUMBER: _ClassVar[int]
    ROPES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ROPE_OF_LAYER_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    architecture: str
    width: int
    heads: int
    intermediate: int
    ropes: _containers.RepeatedCompositeFieldContainer[Rope]
    layers: _containers.RepeatedCompositeFieldContainer[Layer]
    tokenizer: str
    weights: str
    rope_of_layer: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, protocol: _Optional[int] = ..., architecture: _Optional[str] = ..., width: _Optional[int] = ..., heads: _Optional[int] = ..., intermediate: _Optional[int] = ..., ropes: _Optional[_Iterable[_Union[Rope, _Mapping]]] = ..., layers: _Optional[_Iterable[_Union[Layer, _Mapping]]] = ..., tokenizer: _Optional[str] = ..., weights: _Optional[str] = ..., rope_of_layer: _Optional[_Iterable[int]] = ...) -> None: ...

class Description(_message.Message):
    __slots__ = ("identity", "role", "engine", "device", "dtype", "model", "version", "context", "template", "live")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    identity: Identity
    role: str
    engine: str
    device: str
    dtype: str
    model: str
    version: str
    context: int
    template: str
    live: int
    def __init__(self, identity: _Optional[_Union[Identity, _Mapping]] = ..., role: _Optional[str] = ..., engine: _Optional[str] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., model: _Optional[str] = ..., version: _Optional[str] = ..., context: _Optional[int] = ..., template: _Optional[str] = ..., live: _Optional[int] = ...) -> None: ...

class PairRequest(_message.Message):
    __slots__ = ("prefill", "mixed_weights", "push", "pushed")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    MIXED_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    PUSHED_FIELD_NUMBER: _ClassVar[int]
    prefill: _containers.RepeatedScalarFieldContainer[str]
    mixed_weights: bool
    push: bool
    pushed: Description
    def __init__(self, prefill: _Optional[_Iterable[str]] = ..., mixed_weights: bool = ..., push: bool = ..., pushed: _Optional[_Union[Description, _Mapping]] = ...) -> None: ...

class PairReply(_message.Message):
    __slots__ = ("decode", "prefill", "warnings")
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    decode: Description
    prefill: _containers.RepeatedCompositeFieldContainer[Description]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, decode: _Optional[_Union[Description, _Mapping]] = ..., prefill: _Optional[_Iterable[_Union[Description, _Mapping]]] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("transfer_id", "tokens", "start", "stop", "chunk", "identity", "mixed_weights")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    MIXED_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    start: int
    stop: int
    chunk: int
    identity: Identity
    mixed_weights: bool
    def __init__(self, transfer_id: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., chunk: _Optional[int] = ..., identity: _Optional[_Union[Identity, _Mapping]] = ..., mixed_weights: bool = ...) -> None: ...

class TransferMessage(_message.Message):
    __slots__ = ("begin", "blocks", "progress", "done")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    begin: Begin
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    progress: Progress
    done: Done
    def __init__(self, begin: _Optional[_Union[Begin, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("transfer_id", "start", "stop", "dtype", "codec")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    start: int
    stop: int
    dtype: str
    codec: str
    def __init__(self, transfer_id: _Optional[str] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., dtype: _Optional[str] = ..., codec: _Optional[str] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("layer", "start", "count", "payload")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    layer: int
    start: int
    count: int
    payload: bytes
    def __init__(self, layer: _Optional[int] = ..., start: _Optional[int] = ..., count: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("ahead", "computed")
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    ahead: int
    computed: int
    def __init__(self, ahead: _Optional[int] = ..., computed: _Optional[int] = ...) -> None: ...

class LayerSum(_message.Message):
    __slots__ = ("positions", "blocks", "digest")
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    positions: int
    blocks: int
    digest: int
    def __init__(self, positions: _Optional[int] = ..., blocks: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("layers", "queue_s", "prefill_s")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedCompositeFieldContainer[LayerSum]
    queue_s: float
    prefill_s: float
    def __init__(self, layers: _Optional[_Iterable[_Union[LayerSum, _Mapping]]] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ...) -> None: ...

class PushReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop", "max_tokens", "ignore_eos", "logprobs")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    max_tokens: int
    ignore_eos: bool
    logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., max_tokens: _Optional[int] = ..., ignore_eos: bool = ..., logprobs: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("text", "tokens", "messages", "sampling", "mode", "prefill", "mixed_weights", "chunk", "identity")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    MIXED_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    text: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    sampling: Sampling
    mode: str
    prefill: _containers.RepeatedScalarFieldContainer[str]
    mixed_weights: bool
    chunk: int
    identity: Identity
    def __init__(self, text: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., mode: _Optional[str] = ..., prefill: _Optional[_Iterable[str]] = ..., mixed_weights: bool = ..., chunk: _Optional[int] = ..., identity: _Optional[_Union[Identity, _Mapping]] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("accepted", "progress", "token", "finished", "reserved")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    progress: RequestProgress
    token: TokenEvent
    finished: Finished
    reserved: Reserved
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., progress: _Optional[_Union[RequestProgress, _Mapping]] = ..., token: _Optional[_Union[TokenEvent, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("prompt_tokens", "max_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    max_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class RequestProgress(_message.Message):
    __slots__ = ("ahead", "done", "total")
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    ahead: int
    done: int
    total: int
    def __init__(self, ahead: _Optional[int] = ..., done: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("transfer_id", "tokens")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, transfer_id: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("id", "logprob")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenEvent(_message.Message):
    __slots__ = ("id", "text", "finish", "logprob", "top")
    ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    id: int
    text: str
    finish: str
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, id: _Optional[int] = ..., text: _Optional[str] = ..., finish: _Optional[str] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("timing",)
    TIMING_FIELD_NUMBER: _ClassVar[int]
    timing: Timing
    def __init__(self, timing: _Optional[_Union[Timing, _Mapping]] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("queue_s", "prefill_s", "transfer_s", "exposed_transfer_s", "first_token_s", "decode_s", "sent_bytes", "codec", "mode", "why")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    prefill_s: float
    transfer_s: float
    exposed_transfer_s: float
    first_token_s: float
    decode_s: float
    sent_bytes: int
    codec: str
    mode: str
    why: str
    def __init__(self, queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., exposed_transfer_s: _Optional[float] = ..., first_token_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., sent_bytes: _Optional[int] = ..., codec: _Optional[str] = ..., mode: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

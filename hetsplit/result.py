"""What a request returns: `Token`, `Timing`, `Completion`.

The bench, the log line, the wire and the tests read the same objects. Knows nothing of how they come about.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. `text` is what became certain with it: empty inside a character or a possible stop string.

    `finish` is None but on the last token: "stop" (end-of-sequence id or stop string) or "length". `logprob` and
    `top` (id, logprob) are natural logarithms before penalty and temperature, where they were asked for.
    """

    id: int
    text: str
    finish: str | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Timing:
    """Where a request's time went, each phase measured by the side that runs it. Seconds, bytes.

    `queue_s` waiting on both sides; `prefill_s` on the prefill side from its first unit of work to the last block;
    `transfer_s` the time in which the sender had bytes under way; `exposed_transfer_s` the decode side's wait beyond
    queue, prefill and one round trip; `first_token_s` from the request's arrival at the decode side to its first token;
    `decode_s` from the first token to the last. `mode` is "split", "push" or "local", and `why` says what chose it.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    exposed_transfer_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    sent_bytes: int = 0
    codec: str = "raw"
    mode: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. `tokens` holds every generated token, an end-of-sequence token included."""

    text: str
    tokens: tuple[Token, ...]
    finish: str
    prompt_tokens: int
    timing: Timing

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

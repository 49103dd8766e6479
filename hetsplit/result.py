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

    `queue_s` waiting on both sides, time lost with prefill peers that failed included; `prefill_s` on the prefill side
    from its first unit of work to the last block, without pauses for want of room for blocks not yet sent;
    `transfer_s` the time in which the decode side was receiving blocks: for each message with blocks, the time since
    the message before it came (the sender sends a small one ahead of blocks that follow after a pause, so waiting for
    blocks that are not computed yet does not count); `exposed_transfer_s` the decode side's wait beyond queue, prefill
    and one round trip (pull: that of a small call, measured beforehand; push: from reserving room to the sender's first
    message, whatever the sender did meanwhile); `first_token_s` from the request's arrival at the decode side to its
    first token; `decode_s` from the first token to the last. `mode` is "split", "push" or "local", and `why` says what
    chose it.
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

    @property
    def link_rate(self) -> float | None:
        """Bytes per second while blocks were under way; None where `transfer_s` is too short (1 ms) to tell."""
        return self.sent_bytes / self.transfer_s if self.sent_bytes and self.transfer_s >= 1e-3 else None


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

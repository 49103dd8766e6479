"""gRPC: the only package that knows it. Stubs, server, channel options, deadlines, and the mapping of errors.

Owns how bytes travel: `Peer` dials a worker, `Server` serves a `Service`. Knows nothing of engines or of a transfer's
rules. Invariants: every wait ends (a connect time-out, or `Silence`, which cancels a call on which nothing moves);
handlers never compute; no limit of gRPC is lifted; each error class that may travel comes back as itself.
"""

from hetsplit.wire.client import Peer, Stream
from hetsplit.wire.server import Call, Server, Service
from hetsplit.wire.shared import HEARTBEAT_S, REQUEST_BYTES, TRAVELS, Silence, Timeouts

__all__ = [
    "HEARTBEAT_S",
    "REQUEST_BYTES",
    "TRAVELS",
    "Call",
    "Peer",
    "Server",
    "Service",
    "Silence",
    "Stream",
    "Timeouts",
]

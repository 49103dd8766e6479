"""hetsplit: prefill a prompt on one device, decode it on another."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetsplit.engines import Decoder, Prefiller, load
    from hetsplit.errors import HetsplitError
    from hetsplit.kv import KvBlock
    from hetsplit.result import Completion, Timing, Token
    from hetsplit.sampling import SamplingParams
    from hetsplit.spec import ModelSpec
    from hetsplit.split import Split, connect
    from hetsplit.worker import Worker

__version__ = "0.1.0"

_HOME = {
    "Completion": "result",
    "Decoder": "engines",
    "HetsplitError": "errors",
    "KvBlock": "kv",
    "ModelSpec": "spec",
    "Prefiller": "engines",
    "SamplingParams": "sampling",
    "Split": "split",
    "Timing": "result",
    "Token": "result",
    "Worker": "worker",
    "connect": "split",
    "load": "engines",
}

# Written out, since type checkers and linters read it.
__all__ = [
    "Completion",
    "Decoder",
    "HetsplitError",
    "KvBlock",
    "ModelSpec",
    "Prefiller",
    "SamplingParams",
    "Split",
    "Timing",
    "Token",
    "Worker",
    "connect",
    "load",
]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for, so that `import hetsplit` needs neither torch nor grpc."""
    if name in _HOME:
        return getattr(import_module(f"hetsplit.{_HOME[name]}"), name)
    raise AttributeError(f"module 'hetsplit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

"""Does the transfer hide behind prefill? A link as fast as prefill makes keys and values (rho = 1), three ways to send.

stream  what hetsplit does: each layer's block leaves as soon as it exists
blob    the whole prefill first, then the whole cache over the same lane
replay  a cache that was computed before: the link alone (Tx)

Two processes, one compute thread each, in two network namespaces whose link is shaped with `tbf`; where that is not
possible, a token bucket in the sender stands in (and the record says so). Tp is the compute time of the blob runs,
Tx the ready time of the replay runs; the link is set so that Tp / Tx is 1. "Ready" is the time until the decode side
has sealed the cache.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import netns, record

TOKENS, CHUNK = 1024, 256
KINDS = ("replay", "blob", "stream")
TOLERANCE = 0.02


def prompt() -> list[int]:
    return [(37 * i + 5) % 49_000 + 100 for i in range(TOKENS + 1)]


def load_engine() -> Any:
    import torch

    torch.set_num_threads(1)
    import hetsplit

    return hetsplit.load(record.smollm2(), dtype="bfloat16", device="cpu")


class Whole:
    """A prefiller that yields nothing until everything is computed; `keep` makes it compute only once."""

    def __init__(self, engine: Any, keep: bool) -> None:
        self._engine, self._keep, self._kept = engine, keep, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def prefill(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        blocks = self._kept or list(self._engine.prefill(*args, **kwargs))
        if self._keep:
            self._kept = blocks
        yield from blocks


class Bucket:
    """The stand-in for `tbf`: holds a worker's messages back to `bytes_per_s`."""

    bytes_per_s = float("inf")

    def slow(self, service: Any) -> None:
        inner = service.prefill

        def prefill(request: Any, call: Any) -> Iterator[bytes]:
            free = time.monotonic()
            for data in inner(request, call):
                yield data
                free = max(free, time.monotonic()) + len(data) / self.bytes_per_s
                time.sleep(max(0.0, free - time.monotonic()))

        service.prefill = prefill


def serve(host: str) -> None:
    """The prefill process: one worker for each way to send. Reads rates (bytes/s, token bucket) from stdin."""
    from hetsplit.security import ServerSecurity
    from hetsplit.worker import Worker

    engine = load_engine()
    engines = {"stream": engine, "blob": Whole(engine, keep=False), "replay": Whole(engine, keep=True)}
    bucket = Bucket()
    with ExitStack() as stack:
        workers = {}
        for kind, each in engines.items():
            security = ServerSecurity(insecure=True)
            worker = Worker(each, role="prefill", address=f"{host}:0", security=security)
            workers[kind] = stack.enter_context(worker).address
            bucket.slow(worker.service)
        print(json.dumps(workers), flush=True)
        for line in sys.stdin:
            bucket.bytes_per_s = float(line)
            print(json.dumps("set"), flush=True)


def receive(addresses: dict[str, str]) -> None:
    """The decode process: runs one transfer for each kind that it reads from stdin."""
    from hetsplit._pb import hetsplit_pb2 as pb
    from hetsplit.kv import KvFill
    from hetsplit.messages import identity_to_pb
    from hetsplit.protocol import Receiver
    from hetsplit.security import Credentials
    from hetsplit.wire import Peer
    from hetsplit.worker import fill as filling
    from hetsplit.worker.service import identity_of

    engine = load_engine()
    peers = {kind: Peer(address, Credentials(insecure=True)) for kind, address in addresses.items()}
    for peer in peers.values():
        peer.describe()
    span = range(TOKENS)
    print(json.dumps(engine.layout.span_bytes(TOKENS)), flush=True)
    for number, line in enumerate(sys.stdin):
        store = engine.reserve(TOKENS + 1)
        fill = KvFill(store, engine.layout, span)
        receiver = Receiver(str(number), span, engine.layout, fill)
        identity = identity_to_pb(identity_of(engine))
        request = pb.PrefillRequest(
            transfer_id=str(number), tokens=prompt(), stop=TOKENS, chunk=CHUNK, identity=identity
        )
        start = time.monotonic()
        filling.receive(peers[line.strip()].prefill(request), receiver, wake=lambda: None)
        while not fill.settle():
            pass
        fill.finish()
        ready_s = time.monotonic() - start
        store.release()
        print(json.dumps({"ready_s": ready_s, "prefill_s": receiver.done.prefill_s}), flush=True)


class Child:
    """A process of this script that answers one JSON line per line of input."""

    def __init__(self, argv: list[str]) -> None:
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read(self) -> Any:
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a child process ended with {self._process.wait()}")
        return json.loads(line)

    def ask(self, line: object) -> Any:
        print(line, file=self._process.stdin, flush=True)
        return self.read()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(10)
        self._process.stdin.close()
        self._process.stdout.close()


class Bench:
    """The two processes and the link between them."""

    def __init__(self, stack: ExitStack) -> None:
        script = [sys.executable, str(Path(__file__).resolve())]
        reason = netns.unavailable()
        self._hosts = None if reason else stack.enter_context(netns.two_hosts())
        self.link = f"token bucket in the sender ({reason})" if reason else "tbf between two network namespaces"
        host = self._hosts.addresses[0] if self._hosts else "127.0.0.1"
        self._prefill = stack.enter_context(Child(self._on(0, [*script, "--serve", host])))
        addresses = self._prefill.read()
        self._decode = stack.enter_context(Child(self._on(1, [*script, "--receive", json.dumps(addresses)])))
        self.kv_bytes = self._decode.read()

    def shape(self, bytes_per_s: float) -> None:
        if self._hosts:
            self._hosts.shape(bytes_per_s * 8)
        else:
            self._prefill.ask(bytes_per_s)

    def run(self, kind: str) -> dict[str, float]:
        return self._decode.ask(kind)

    def _on(self, host: int, argv: list[str]) -> list[str]:
        return self._hosts.command(host, argv) if self._hosts else argv


def measure(budget_s: float, repeats: int) -> tuple[dict[str, float], int, dict[str, Any]]:
    """Rounds until `repeats` of them count or `budget_s` has passed; figures are medians over those that count.

    A round sets the link by the compute time that the last blob has just shown, runs every kind, and counts when Tp,
    the mean of that and of its own blob's compute time, is within `TOLERANCE` of Tx. The speed of a shared machine
    changes by half for seconds at a time, and a round across such a change compares two machines.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        bench = Bench(stack)
        for kind in KINDS:
            bench.run(kind)  # warm-up, and the replay's cache is computed
        bench.shape(rate := bench.kv_bytes / bench.run("blob")["prefill_s"])
        carried = bench.run("replay")["ready_s"] * rate  # bytes with all that goes around them
        counted: list[dict[str, float]] = []
        before_s, dropped = bench.run("blob")["prefill_s"], 0
        while len(counted) < repeats and (passed_s := time.monotonic() - started) < budget_s * (1 if counted else 3):
            found, before_s = one_round(bench, carried, before_s)
            steady = abs(found["rho"] - 1) <= TOLERANCE
            counted += [found] if steady else []
            dropped += not steady
        if not counted:
            raise SystemExit(
                f"no round in {passed_s:.0f} s kept Tp / Tx within {TOLERANCE} of 1: the machine is too noisy"
            )
    notes = {"link": bench.link, "tokens": TOKENS, "chunk": CHUNK, "unsteady_rounds_dropped": dropped}
    return {name: median(r[name] for r in counted) for name in counted[0]}, len(counted), notes


def one_round(bench: Bench, carried: float, before_s: float) -> tuple[dict[str, float], float]:
    """A round's figures, and the compute time of its blob, which the next round starts from."""
    bench.shape(rate := carried / before_s)
    link_s, stream_s = (bench.run(kind)["ready_s"] for kind in ("replay", "stream"))
    blob = bench.run("blob")
    prefill_s = (before_s + blob["prefill_s"]) / 2
    return {
        "blob_over_stream_rho1": blob["ready_s"] / stream_s,
        "hidden_share_rho1": 1 - (stream_s - prefill_s) / link_s,
        "rho": prefill_s / link_s,
        "prefill_s": prefill_s,
        "link_s": link_s,
        "blob_ready_s": blob["ready_s"],
        "stream_ready_s": stream_s,
        "link_mbit_per_s": rate * 8 / 1e6,
    }, blob["prefill_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record.add_options(parser)
    parser.add_argument("--serve", metavar="HOST", help=argparse.SUPPRESS)
    parser.add_argument("--receive", metavar="ADDRESSES", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
    elif options.receive:
        receive(json.loads(options.receive))
    else:
        found, rounds, notes = measure(45.0, 99) if options.quick else measure(180.0, 25)
        record.write(options, "overlap", found, rounds, notes)


if __name__ == "__main__":
    main()

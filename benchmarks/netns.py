"""Two hosts on one machine: network namespaces joined by a veth pair, the link shaped with a token bucket (`tbf`).

Needs root, `ip` and `tc`. Used by benchmarks, by tests and by the two-machine example. Names and addresses are made
fresh for each use; everything is deleted at the end.
"""

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


def unavailable() -> str | None:
    """Why two hosts cannot be made here; None when they can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"network namespaces need {' and '.join(missing)} (iproute2)"
    name = f"hs{secrets.token_hex(3)}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"this machine makes no network namespaces: {error.stderr.strip()}"
    return None


@dataclass(frozen=True)
class Hosts:
    """Two joined namespaces and their addresses."""

    names: tuple[str, str]
    addresses: tuple[str, str]

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """`argv` as it is run on host 0 or 1."""
        return ["ip", "netns", "exec", self.names[host], *argv]

    def shape(self, bits_per_s: float) -> None:
        """Limit both directions of the link."""
        for name in self.names:
            rate = ("rate", f"{bits_per_s:.0f}bit", "burst", "128kb", "latency", "50ms")
            _run(["tc", "-n", name, "qdisc", "replace", "dev", f"v{name}", "root", "tbf", *rate])


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    tag = secrets.token_hex(3)
    names = (f"hs{tag}a", f"hs{tag}b")
    subnet = f"10.{64 + secrets.randbelow(64)}.{secrets.randbelow(256)}"
    addresses = (f"{subnet}.1", f"{subnet}.2")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", f"v{names[0]}", "netns", names[0], "type", "veth", "peer", f"v{names[1]}", "netns", names[1])
        for name, address in zip(names, addresses, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", f"v{name}")
            _ip("-n", name, "link", "set", f"v{name}", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield Hosts(names, addresses)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*argv: str) -> None:
    _run(["ip", *argv])


def _run(argv: Sequence[str]) -> None:
    subprocess.run(argv, check=True, capture_output=True, text=True)

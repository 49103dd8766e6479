"""What an address may look like, and whether it is free."""

import errno
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from hetsplit import security
from hetsplit.address import PROBE_S, check_free, is_local, parse_address
from hetsplit.errors import ConfigError

GOOD = {
    "127.0.0.1:0": ("127.0.0.1", 0),
    "localhost:50051": ("localhost", 50051),
    "gpu-box.lan:65535": ("gpu-box.lan", 65535),
    "10.0.0.2:1": ("10.0.0.2", 1),
    "[::1]:50051": ("::1", 50051),
    "[fe80::1%eth0]:5": ("fe80::1%eth0", 5),
    "[::]:80": ("::", 80),
    "unix:/run/hetsplit.sock": ("unix:/run/hetsplit.sock", None),
    "unix:///run/hetsplit.sock": ("unix:///run/hetsplit.sock", None),
    "unix:relative": ("unix:relative", None),
}
BAD = {
    "": "expected HOST:PORT",
    "localhost": "expected HOST:PORT",
    ":50051": "expected HOST:PORT",
    "::1:50051": "expected HOST:PORT",
    "::1": "expected HOST:PORT",
    "[::1]": "expected HOST:PORT",
    "[::1:5": "expected HOST:PORT",
    "::1]:5": "expected HOST:PORT",
    "a b:5": "expected HOST:PORT",
    " localhost:5": "expected HOST:PORT",
    "localhost:5\n": "expected HOST:PORT",
    "http://localhost:5": "expected HOST:PORT",
    "localhost:5/path": "expected HOST:PORT",
    "dns:localhost:5": "expected HOST:PORT",
    "ho[st:5": "expected HOST:PORT",
    "host]:5": "expected HOST:PORT",
    "höst:5": "expected HOST:PORT",
    "localhost:": "port ''",
    "localhost:x": "port 'x'",
    "localhost:-1": "port '-1'",
    "localhost:+1": "port '\\+1'",
    "localhost:1.5": "port '1.5'",
    "localhost:65536": "port '65536', allowed: 0 to 65535",
    "localhost:٣": "expected HOST:PORT",
    "localhost:" + "9" * 5000: "allowed: 0 to 65535",
    "[]:5": "'' is no IPv6 address",
    "[127.0.0.1]:5": "'127.0.0.1' is no IPv6 address",
    "[::g]:5": "'::g' is no IPv6 address",
    "unix:": "the path of the Unix socket is missing",
    "unix:/tmp/\udcff": "printable ASCII",
    "unix:/tmp/ö": "printable ASCII",
    "unix:/tmp/a\n": "printable ASCII",
}


@pytest.mark.parametrize("text", GOOD)
def test_addresses(text: str) -> None:
    assert parse_address(text) == GOOD[text]


@pytest.mark.parametrize("text", BAD, ids=lambda text: repr(text[:20]))
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=BAD[text]) as caught:
        parse_address(text)
    assert repr(text)[:40] in str(caught.value)
    assert len(str(caught.value)) < 400


def test_security_still_gives_the_names() -> None:
    assert (security.parse_address, security.is_local) == (parse_address, is_local)


def busy(path: Path, closing: ExitStack) -> None:
    """A listener whose queue of connections is full."""
    server = closing.enter_context(socket.socket(socket.AF_UNIX))
    server.bind(str(path))
    server.listen(0)
    while True:
        client = closing.enter_context(socket.socket(socket.AF_UNIX))
        client.setblocking(False)
        if code := client.connect_ex(str(path)):
            assert code == errno.EAGAIN
            return


@pytest.mark.timeout(20)
def test_a_socket_whose_owner_takes_no_more_is_in_use(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with ExitStack() as closing:
        busy(path, closing)
        start = time.monotonic()
        with pytest.raises(ConfigError, match=r"cannot listen on unix:.*in use"):
            check_free(f"unix:{path}")
        assert time.monotonic() - start < PROBE_S + 4
    check_free(f"unix:{path}")  # what is left of a dead worker


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_port_in_use_is_named(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"{host}:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cannot listen on {address}: .*in use"):
            check_free(address)
    check_free(address)
    check_free(f"{host}:0")


def test_a_socket_path_that_is_too_long_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot listen on unix:.*File name too long"):
        check_free(f"unix:{tmp_path}/{'x' * 300}/socket")

"""Who may talk to whom: what is open, tokens, files."""

from pathlib import Path

import pytest

from hetsplit.errors import ConfigError
from hetsplit.security import (
    Credentials,
    ServerSecurity,
    check_dial,
    check_listen,
    is_local,
    read_pem,
    read_token,
)

TOKEN = "0123456789abcdef"
LOCAL = ["127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1", "unix:/tmp/x"]
OPEN = [
    "0.0.0.0:1",
    "[::]:1",
    "10.0.0.2:1",
    "gpu-box:1",
    "[fe80::1]:1",
    "localhost.evil.example:1",
    "127.0.0.1.nip.io:1",
]


@pytest.mark.parametrize("address", LOCAL)
def test_loopback_needs_no_ceremony(address: str) -> None:
    assert is_local(address)
    check_listen(address, ServerSecurity())
    check_dial(address, Credentials())


@pytest.mark.parametrize("address", OPEN)
def test_anything_else_needs_tls_and_a_token(address: str) -> None:
    assert not is_local(address)
    with pytest.raises(ConfigError, match=r"--tls-cert F --tls-key F and --token-file F.*--insecure") as caught:
        check_listen(address, ServerSecurity())
    assert address in str(caught.value)
    with pytest.raises(ConfigError, match=r"--tls-ca F.* and the token.*--token-file F.*--insecure") as caught:
        check_dial(address, Credentials())
    assert address in str(caught.value)
    check_listen(address, ServerSecurity(b"cert", b"key", TOKEN))
    check_dial(address, Credentials(b"ca", TOKEN))
    check_listen(address, ServerSecurity(insecure=True))
    check_dial(address, Credentials(insecure=True))


def test_only_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        check_listen("0.0.0.0:1", ServerSecurity(token=TOKEN))
    assert "give --tls-cert F --tls-key F, listen" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        check_listen("0.0.0.0:1", ServerSecurity(b"cert", b"key"))
    assert "give --token-file F, listen" in str(caught.value)
    with pytest.raises(ConfigError, match=r"without the token \(token=, --token-file F\);"):
        check_dial("gpu:1", Credentials(ca=b"ca"))
    with pytest.raises(ConfigError, match=r"without the CA certificate \(tls=, --tls-ca F\);"):
        check_dial("gpu:1", Credentials(token=TOKEN))


@pytest.mark.parametrize("half", [ServerSecurity(cert=b"c"), ServerSecurity(key=b"k", insecure=True)])
def test_half_of_tls_is_refused_everywhere(half: ServerSecurity) -> None:
    with pytest.raises(ConfigError, match="both files: --tls-cert and --tls-key"):
        check_listen("127.0.0.1:1", half)


BAD_TOKENS = [
    "",
    "short",
    "0123456789abcde",
    "with a space in it",
    "tab\tin the middle",
    "new\nline-in-the-middle",
    "ünïcödé-tøken-1234",
]


@pytest.mark.parametrize("token", BAD_TOKENS)
@pytest.mark.parametrize("kind", [Credentials, ServerSecurity])
def test_a_token_that_protects_nothing_is_refused(kind: type, token: str) -> None:
    """An empty one, most of all: a worker that holds it would ask for none."""
    with pytest.raises(ConfigError, match="at least 16 printable ASCII characters without spaces") as caught:
        kind(token=token)
    assert not token or token not in str(caught.value)


@pytest.mark.parametrize("content", [TOKEN, TOKEN + "\n", f"  {TOKEN}\r\n", "x" * 200])
def test_a_token_file(tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    file.write_bytes(content.encode())
    assert read_token(file) == content.strip()
    assert read_token(str(file)) == content.strip()


@pytest.mark.parametrize("content", BAD_TOKENS)
def test_a_bad_token_file(tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    file.write_bytes(content.encode())
    with pytest.raises(ConfigError, match=r"token file .*/token: expected at least 16 printable") as caught:
        read_token(file)
    assert not content or content not in str(caught.value).replace(str(file), "")


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"token file .*/none"):
        read_token(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"CA certificate .*/none: No such file"):
        read_pem(tmp_path / "none", "CA certificate")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_pem(tmp_path, "CA certificate")


def test_pem_files(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_bytes(b"-----BEGIN CERTIFICATE-----\n")
    assert read_pem(file, "CA certificate") == file.read_bytes()
    file.write_bytes(b"\x30\x82")
    with pytest.raises(ConfigError, match=r"CA certificate .*ca.pem: not a PEM file"):
        read_pem(file, "CA certificate")


def test_secrets_do_not_show() -> None:
    assert TOKEN not in repr(Credentials(b"ca", TOKEN)) + repr(ServerSecurity(b"cert", b"key", TOKEN))
    assert "key" not in repr(ServerSecurity(b"cert", b"secret key", TOKEN)).replace("insecure", "")

"""The commands: what they refuse and how fast, what they print where, and how a worker ends."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import hetsplit
from hetsplit.cli import app
from hetsplit.errors import ConfigError
from tests.tokens import TEXT, give_tokenizer

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 5.0
GENERATE = ("--device", "cpu", "--dtype", "float32", "--max-tokens", "8")


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape with other weights."""
    from tests.models import build_llama, save_folder

    folder = tmp_path_factory.mktemp("other")
    model = build_llama(vocab_size=300)
    model.model.norm.weight.data *= 1.5
    return give_tokenizer(save_folder(model, folder))


@pytest.fixture(scope="session")
def expected(tiny: Path) -> str:
    """The text that the model alone gives, through the library."""
    from hetsplit import connect, load

    with connect(None, load(tiny, device="cpu", dtype="float32")) as split:
        return split.complete(TEXT, max_tokens=8).text


@pytest.fixture
def worker_for() -> Iterator[Callable[..., str]]:
    """`worker_for(path, role)`: the address of a worker in this process."""
    from hetsplit import Worker, load

    workers = []

    def start(path: Path, role: str, **options: object) -> str:
        workers.append(Worker(load(path, device="cpu", dtype="float32"), role=role, **options))
        return workers[-1].address

    yield start
    for worker in workers:
        worker.close()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for localhost, and its key."""
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("tls")
    plain = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, *plain))
    return folder / "cert.pem", folder / "key.pem"


def cli(*args: object, stdin: str | bytes | None = None) -> Result:
    """The command in this process."""
    return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)


@contextmanager
def command(*args: object, **options: object) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own, killed at the end if it still runs."""
    line = [sys.executable, "-m", "hetsplit", *map(str, args)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(line, cwd=ROOT, text=True, **(pipes | options)) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return server.getsockname()[1]


def facts(line: str) -> dict[str, str]:
    assert line.startswith("ready "), line
    return dict(word.split("=", 1) for word in line.split()[1:])


# What is refused.


def refused(result: Result, code: int, *named: str) -> None:
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    for text in named:
        assert text in lines[0]


@pytest.fixture(autouse=True)
def _soon(request: pytest.FixtureRequest, expected: str) -> Iterator[None]:
    """Whatever is refused is refused within five seconds. `expected` has loaded the libraries."""
    start = time.monotonic()
    yield
    if request.node.name.startswith("test_refused"):
        assert time.monotonic() - start < LIMIT_S


@pytest.mark.parametrize("run", ["worker", "generate"])
def test_refused_missing_model(run: str, tmp_path: Path) -> None:
    prompt = ["hello"] if run == "generate" else []
    refused(cli(run, tmp_path / "nothing", *prompt), 2, str(tmp_path / "nothing"), "no such folder or file")


@pytest.mark.parametrize("run", ["worker", "generate"])
def test_refused_truncated_file(run: str, tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(tiny, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    prompt = ["hello"] if run == "generate" else []
    refused(cli(run, folder, *prompt), 2, "model.safetensors")


@pytest.mark.parametrize("extra", [(), ("--chat",)])
def test_refused_prompt_over_the_context(tiny: Path, extra: tuple[str, ...]) -> None:
    refused(cli("generate", tiny, "x" * 400, *extra), 2, "tokens leaves no free position, the context is 256")


def test_refused_prompt_over_the_workers_context(tiny: Path, worker_for: Callable[..., str]) -> None:
    address = worker_for(tiny, "decode")
    refused(cli("generate", tiny, "x" * 400, "--decode", address), 2, "the context is 256")


@pytest.mark.parametrize(("prompt", "stdin"), [("", None), ("-", "")])
def test_refused_empty_prompt(tiny: Path, prompt: str, stdin: str | None) -> None:
    refused(cli("generate", tiny, prompt, stdin=stdin), 2, "empty prompt")


def test_refused_prompt_that_is_no_text(tiny: Path) -> None:
    refused(cli("generate", tiny, "-", stdin=b"\xff\xfe"), 2, "not UTF-8")


def test_refused_model_without_a_tokenizer(llama_dir: Path) -> None:
    refused(cli("generate", llama_dir, "hello"), 2, "tokenizer")


@pytest.mark.parametrize("side", ["--prefill", "--decode"])
def test_refused_peer_that_is_not_there(tiny: Path, side: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    refused(cli("generate", tiny, "hello", side, address), 4, address)


def test_refused_decode_worker_whose_prefill_is_not_there(tiny: Path, worker_for: Callable[..., str]) -> None:
    address = f"127.0.0.1:{free_port()}"
    decode = worker_for(tiny, "decode")
    refused(cli("generate", tiny, "hello", "--prefill", address, "--decode", decode), 4, address)


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model must not be looked for: that may download it."""

    def fail(*args: object, **options: object) -> None:
        raise AssertionError("the model was touched")

    monkeypatch.setattr("hetsplit.preflight.locate", fail)


@pytest.mark.parametrize("side", ["--prefill", "--decode"])
def test_refused_dead_peer_before_the_model_is_looked_at(untouched: None, side: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    refused(cli("generate", "org/name", "hello", side, address), 4, address)


def test_refused_dead_prefill_of_a_decode_worker_before_the_model_is_looked_at(
    untouched: None, tiny: Path, worker_for: Callable[..., str]
) -> None:
    decode, address = worker_for(tiny, "decode"), f"127.0.0.1:{free_port()}"
    refused(cli("generate", "org/name", "hello", "--prefill", address, "--decode", decode), 4, address)


@contextmanager
def silent_servers(count: int) -> Iterator[list[str]]:
    """Addresses where connections are taken and never answered."""
    with ExitStack() as closing:
        servers = [closing.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        yield [f"127.0.0.1:{server.getsockname()[1]}" for server in servers]


def test_refused_silent_peers_are_asked_at_once_and_given_the_time_asked_for(untouched: None) -> None:
    with silent_servers(4) as addresses:
        sides = [word for address in addresses for word in ("--prefill", address)]
        start = time.monotonic()
        refused(cli("generate", "org/name", "hello", *sides, "--connect-timeout", "0.8"), 4, addresses[0])
    assert 0.7 < time.monotonic() - start < 2.4


def test_refused_prompt_before_the_weights_are_read(
    tiny: Path, worker_for: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = worker_for(tiny, "decode")
    monkeypatch.setattr("hetsplit.weights.checkpoint.StoredCheckpoint.fingerprint", None)
    refused(cli("generate", tiny, "x" * 400, "--decode", address), 2, "the context is 256")


@pytest.mark.parametrize("shown", [True, False])
def test_refused_download_shows_its_progress_on_a_terminal(shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(model: str, *, progress: bool = False) -> None:
        asked.append(progress)
        raise ConfigError("not today")

    monkeypatch.setattr("hetsplit.preflight.locate", refuse)
    monkeypatch.setattr("hetsplit.terminal.interactive", lambda: shown)
    refused(cli("generate", "org/name", "hello"), 2, "not today")
    refused(cli("demo", "--model", "org/name"), 2, "not today")
    assert asked == [shown, shown]


def test_refused_another_model_on_the_decode_side(tiny: Path, other: Path, worker_for: Callable[..., str]) -> None:
    decode = worker_for(other, "decode")
    refused(cli("generate", tiny, "hello", "--decode", decode), 3, decode, "weights", "here", "there")


def test_refused_another_model_on_the_prefill_side(tiny: Path, other: Path, worker_for: Callable[..., str]) -> None:
    prefill = worker_for(other, "prefill")
    refused(cli("generate", tiny, "hello", "--prefill", prefill), 3, prefill, "weights")


def test_refused_model_that_neither_side_holds(tiny: Path, other: Path, worker_for: Callable[..., str]) -> None:
    prefill, decode = worker_for(tiny, "prefill"), worker_for(tiny, "decode")
    sides = ("--prefill", prefill, "--decode", decode)
    refused(cli("generate", other, "hello", *sides), 3, decode, "weights")
    assert cli("generate", tiny, TEXT, *sides, *GENERATE).exit_code == 0


@pytest.mark.parametrize(("side", "role"), [("--prefill", "decode"), ("--decode", "prefill")])
def test_refused_worker_of_the_other_role(tiny: Path, side: str, role: str, worker_for: Callable[..., str]) -> None:
    address = worker_for(tiny, role)
    refused(cli("generate", tiny, "hello", side, address), 3, address, f"role {role}", f"{side[2:]} is needed")


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--temperature", "-1", "at least 0"),
        ("--temperature", "nan", "at least 0"),
        ("--top-k", "-2", "-1"),
        ("--top-p", "1.5", "at most 1"),
        ("--min-p", "2", "0 to 1"),
        ("--repetition-penalty", "0", "0.01 to 100"),
        ("--seed", "-1", "0 to"),
        ("--stop", "", "stop"),
        ("--max-tokens", "0", "from 1"),
        ("--logprobs", "21", "0 to 20"),
        ("--chunk", "0", "1 to 65536"),
    ],
)
def test_refused_sampling_value(tiny: Path, option: str, value: str, allowed: str) -> None:
    name = option[2:].replace("-", "[-_]")
    result = cli("generate", tiny, "hello", option, value)
    refused(result, 2, value, allowed)
    assert re.search(name, result.stderr)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("generate", "m", "hello", "--stop", "\udcff"), ("stop", "\\udcff", "valid Unicode")),
        (("generate", "m", "bad \udcff"), ("prompt is not UTF-8",)),
        (("generate", "~no-such-user/x", "hello"), ("~no-such-user/x", "home directory")),
        (("generate", "x" * 400, "hello"), ("xxx...", "too long")),
        (("generate", "m", "hello", "--decode", "unix:/tmp/\udcff"), ("unix:/tmp/\\udcff", "printable ASCII")),
        (("generate", "m", "hello", "--prefill", "unix:/tmp/\udcff"), ("unix:/tmp/\\udcff", "printable ASCII")),
        (("worker", "m", "--listen", "unix:/tmp/\udcff"), ("unix:/tmp/\\udcff", "printable ASCII")),
        (("worker", "~no-such-user/x"), ("~no-such-user/x", "home directory")),
        (("worker", "/tmp/\udcff"), ("/tmp/\\udcff", "no path")),
        (("demo", "--model", "~no-such-user/x"), ("~no-such-user/x", "home directory")),
    ],
)
def test_refused_text_that_is_none(args: tuple[str, ...], named: tuple[str, ...]) -> None:
    refused(cli(*args), 2, *named)


def test_refused_prompt_of_a_demo_that_is_no_text(tiny: Path) -> None:
    refused(cli("demo", "--model", tiny, "--prompt", "bad \udcff"), 2, "surrogate")


@pytest.mark.parametrize("command", [("worker", "m"), ("generate", "m", "hello")])
@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--connect-timeout", "0", "above 0 and below 86400"),
        ("--connect-timeout", "nan", "above 0 and below 86400"),
        ("--silence-timeout", "1", "at least 2"),
        ("--silence-timeout", "inf", "above 0 and below 86400"),
    ],
)
def test_refused_timeout(command: tuple[str, ...], option: str, value: str, allowed: str) -> None:
    refused(cli(*command, option, value), 2, option, value, allowed)


def test_refused_sampling_value_before_the_model_is_looked_at(tmp_path: Path) -> None:
    refused(cli("generate", tmp_path / "nothing", "hello", "--temperature", "-1"), 2, "temperature")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--listen", "0.0.0.0:0"), "--tls-cert F --tls-key F and --token-file F"),
        (("--listen", "nowhere"), "expected HOST:PORT"),
        (("--listen", "127.0.0.1:70000"), "0 to 65535"),
        (("--listen", "[::zz]:1"), "IPv6"),
        (("--listen", "unix:"), "path"),
        (("--listen", "unix:/no/such/folder/socket"), "/no/such/folder"),
        (("--listen", "no.such.host.invalid:1", "--insecure"), "cannot listen on no.such.host.invalid:1"),
        (("--listen", "203.0.113.7:0", "--insecure"), "cannot listen on 203.0.113.7:0"),
        (("--prefill", "10.0.0.1:50051"), "refusing to dial 10.0.0.1:50051"),
        (("--prefill", "10.0.0.1"), "expected HOST:PORT"),
        (("--role", "prefill", "--prefill", "127.0.0.1:1"), "--role prefill"),
        (("--token-file", "/no/such/token"), "/no/such/token"),
        (("--tls-ca", "/no/such/ca"), "/no/such/ca"),
        (("--device", "abacus"), "abacus"),
        (("--dtype", "int3"), "int3"),
    ],
)
def test_refused_worker_options(tiny: Path, options: tuple[str, ...], named: str) -> None:
    refused(cli("worker", tiny, *options), 2, named)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--decode", "10.0.0.1:50051"), "refusing to dial 10.0.0.1:50051"),
        (("--prefill", "10.0.0.1:50051"), "refusing to dial 10.0.0.1:50051"),
        (("--decode", "x"), "expected HOST:PORT"),
        (("--decode", "127.0.0.1:1", "--prefill", "x"), "expected HOST:PORT"),
        (("--mode", "split"), "--prefill ADDR or --decode ADDR"),
        (("--device", "abacus"), "abacus"),
        (("--dtype", "int3"), "int3"),
    ],
)
def test_refused_generate_options(tiny: Path, options: tuple[str, ...], named: str) -> None:
    refused(cli("generate", tiny, "hello", *options), 2, named)


@pytest.fixture
def engine_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """What the loader of an engine `mine` is called with; beside it `gone`, whose library is missing."""
    from importlib.metadata import EntryPoint

    from hetsplit.engines import GROUP, installed, torch

    calls = []

    def load_mine(model: Path, **options: object) -> object:
        calls.append(options)
        if options["dtype"] not in (None, "float32"):
            raise ConfigError(f"dtype {options['dtype']!r}, allowed: float32")
        return torch.load(model, **options)

    monkeypatch.setattr(sys.modules[__name__], "load_mine", load_mine, raising=False)
    places = {"mine": f"{__name__}:load_mine", "gone": "no_such_library:load"}
    points = installed() | {name: EntryPoint(name, value, GROUP) for name, value in places.items()}
    monkeypatch.setattr("hetsplit.engines.installed", lambda: points)
    return calls


@pytest.mark.parametrize("command", [("worker", "m"), ("generate", "m", "hello")])
@pytest.mark.parametrize(
    ("engine", "named"),
    [
        ("abacus", ("engine 'abacus' is unknown", "allowed: gone, ", "mine, ")),
        ("gone", ("'gone' is not installed", "No module named 'no_such_library'")),
    ],
)
def test_refused_engine_before_the_model_is_looked_at(
    command: tuple[str, ...], engine: str, named: tuple[str, ...], untouched: None, engine_calls: list[object]
) -> None:
    refused(cli(*command, "--engine", engine), 2, *named)
    assert engine_calls == []


def test_refused_dtype_is_the_engines_own_affair(tiny: Path, engine_calls: list[object]) -> None:
    options = ("--engine", "mine", "--dtype", "int4")
    refused(cli("generate", tiny, "hello", *options), 2, "dtype 'int4', allowed: float32")
    refused(cli("worker", tiny, *options), 2, "dtype 'int4', allowed: float32")


@pytest.mark.parametrize(("prompt", "named"), [("x" * 400, "the context is 256"), ("", "empty prompt")])
def test_refused_prompt_with_another_engine(
    tiny: Path, prompt: str, named: str, engine_calls: list[object], worker_for: Callable[..., str]
) -> None:
    side = ("--decode", worker_for(tiny, "decode"))
    refused(cli("generate", tiny, prompt, "--engine", "mine", *side), 2, named)
    assert engine_calls == []


def test_refused_no_model_without_a_decode_worker() -> None:
    refused(cli("generate", "-", "hello"), 2, "--decode ADDR only")


def test_refused_certificate_without_key(tiny: Path, tmp_path: Path) -> None:
    cert = tmp_path / "cert.pem"
    cert.write_text("-----BEGIN CERTIFICATE-----\n")
    refused(cli("worker", tiny, "--tls-cert", cert), 2, "--tls-cert and --tls-key")
    refused(cli("worker", tiny, "--tls-cert", cert, "--tls-key", cert), 2, str(cert))


@pytest.mark.parametrize("content", [b"", b"short", b"two words of a long token", b"\xff" * 20])
def test_refused_token_file(tiny: Path, tmp_path: Path, content: bytes) -> None:
    token = tmp_path / "token"
    token.write_bytes(content)
    refused(cli("worker", tiny, "--token-file", token), 2, str(token))
    refused(cli("generate", tiny, "hello", "--token-file", token), 2, str(token))


def test_refused_port_in_use(tmp_path: Path) -> None:
    """Also before the model is looked at."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        refused(cli("worker", tmp_path / "nothing", "--listen", address), 2, f"cannot listen on {address}", "in use")


def test_refused_unix_socket_in_use(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        refused(cli("worker", tmp_path / "nothing", "--listen", f"unix:{path}"), 2, f"unix:{path}", "in use")
    assert path.is_socket()


def test_refused_unix_socket_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    refused(cli("worker", tmp_path / "nothing", "--listen", f"unix:{path}"), 2, f"unix:{path}", "no socket")
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("worker", "m", "--role", "cook"), ("cook", "'prefill', 'decode', 'both'")),
        (("generate", "m", "p", "--mode", "fast"), ("fast", "'auto', 'split', 'local'")),
        (("generate", "m", "p", "--temperature", "warm"), ("--temperature", "valid number")),
        (("generate", "m", "p", "--frobnicate"), ("--frobnicate",)),
        (("generate", "m"), ("PROMPT",)),
        (("frobnicate",), ("frobnicate",)),
    ],
)
def test_refused_usage(args: tuple[str, ...], named: tuple[str, ...]) -> None:
    result = cli(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    for text in named:
        assert text in result.stderr


# What is shown.


def test_version() -> None:
    result = cli("--version")
    assert (result.exit_code, result.stdout) == (0, f"hetsplit {hetsplit.__version__}\n")


@pytest.mark.parametrize("args", [(), ("worker",), ("generate",), ("engines",), ("demo",)])
def test_help_loads_neither_torch_nor_grpc(args: tuple[str, ...]) -> None:
    script = (
        "import sys; from hetsplit.cli import app\n"
        f"try: app({[*args, '--help']}, prog_name='hetsplit')\n"
        "finally: print([m for m in ('torch', 'grpc', 'numpy') if m in sys.modules], file=sys.stderr)"
    )
    line = [sys.executable, "-c", script]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "Usage: hetsplit" in done.stdout
    assert done.stderr.strip() == "[]"


def test_generate_here_writes_the_text_and_nothing_else(tiny: Path, expected: str) -> None:
    result = cli("generate", tiny, TEXT, *GENERATE)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == expected
    assert "local (no prefill worker is known)" in result.stderr
    names = ("queue", "prefill", "transfer", "exposed transfer", "first token", "decode", "sent, link rate")
    for name in names:
        assert re.search(rf"^{name} ", result.stderr, re.MULTILINE), name


def test_generate_with_another_engine(
    tiny: Path, expected: str, engine_calls: list[dict[str, object]], worker_for: Callable[..., str]
) -> None:
    sides = {"both": (), "prefill": ("--decode", worker_for(tiny, "decode"))}
    sides["decode"] = ("--prefill", worker_for(tiny, "prefill"))
    for role, side in sides.items():
        result = cli("generate", tiny, TEXT, "--engine", "mine", *side, *GENERATE)
        assert (result.exit_code, result.stdout) == (0, expected), result.stderr
        assert (engine_calls[-1]["role"], engine_calls[-1]["dtype"]) == (role, "float32")


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_worker_with_another_engine(
    tiny: Path, role: str, engine_calls: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = []
    monkeypatch.setattr("hetsplit.worker.Worker", lambda engine, **options: served.append(options["role"]))
    cli("worker", tiny, "--engine", "mine", "--role", role, "--device", "cpu")
    assert (served, engine_calls[0]["role"], engine_calls[0]["device"]) == ([role], role, "cpu")


def test_generate_reads_the_prompt_from_standard_input(tiny: Path, expected: str) -> None:
    assert cli("generate", tiny, "-", *GENERATE, stdin=TEXT).stdout == expected


def test_generate_decodes_here_with_a_prefill_worker(tiny: Path, expected: str, worker_for: Callable[..., str]) -> None:
    result = cli("generate", tiny, TEXT, "--prefill", worker_for(tiny, "prefill"), *GENERATE)
    assert (result.exit_code, result.stdout) == (0, expected), result.stderr
    assert "split (a prefill worker is known)" in result.stderr
    assert re.search(r"^sent, link rate +\d+\.\d+ MB \(raw\)", result.stderr, re.MULTILINE)


def test_generate_takes_the_prefill_worker_that_answers(
    tiny: Path, expected: str, worker_for: Callable[..., str]
) -> None:
    dead, alive = f"127.0.0.1:{free_port()}", worker_for(tiny, "prefill")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.filters", [])
        result = cli("generate", tiny, TEXT, "--prefill", dead, "--prefill", alive, *GENERATE)
    assert (result.exit_code, result.stdout) == (0, expected), result.stderr
    assert f"warning: prefill worker {dead}" in result.stderr


def test_generate_prefills_here_for_a_decode_worker(tiny: Path, expected: str, worker_for: Callable[..., str]) -> None:
    result = cli("generate", tiny, TEXT, "--decode", worker_for(tiny, "decode"), *GENERATE)
    assert (result.exit_code, result.stdout) == (0, expected), result.stderr
    assert re.search(r"^mode +push ", result.stderr, re.MULTILINE)


@pytest.mark.parametrize("named", [True, False])
def test_generate_with_two_workers_loads_nothing(
    tiny: Path, expected: str, named: bool, worker_for: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = ("--prefill", worker_for(tiny, "prefill"), "--decode", worker_for(tiny, "decode"))
    monkeypatch.setattr("hetsplit.engines.load", None)
    result = cli("generate", tiny if named else "-", TEXT, *sides, *GENERATE)
    assert (result.exit_code, result.stdout) == (0, expected), result.stderr
    assert re.search(r"^mode +split ", result.stderr, re.MULTILINE)


def test_generate_local_at_a_decode_worker_loads_nothing(
    tiny: Path, expected: str, worker_for: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = worker_for(tiny, "both")
    monkeypatch.setattr("hetsplit.engines.load", None)
    result = cli("generate", tiny, TEXT, "--decode", decode, "--mode", "local", *GENERATE)
    assert (result.exit_code, result.stdout) == (0, expected), result.stderr
    assert "local (asked for)" in result.stderr


def test_generate_as_a_chat(tiny: Path) -> None:
    from hetsplit import connect, load

    with connect(None, load(tiny, device="cpu", dtype="float32")) as split:
        chat = "".join(t.text for t in split.chat([{"role": "user", "content": TEXT}], max_tokens=8))
    assert cli("generate", tiny, TEXT, "--chat", *GENERATE).stdout == chat


def test_generate_hands_sampling_on(tiny: Path) -> None:
    from hetsplit import connect, load

    sampling = {"temperature": 1.5, "top_k": 50, "seed": 7, "logprobs": 2, "ignore_eos": True}
    with connect(None, load(tiny, device="cpu", dtype="float32")) as split:
        alone = split.complete(TEXT, max_tokens=8, **sampling)
    drawn = ("--temperature", "1.5", "--top-k", "50", "--seed", "7", "--logprobs", "2", "--ignore-eos")
    result = cli("generate", tiny, TEXT, *drawn, *GENERATE)
    assert result.stdout == alone.text
    rows = re.findall(r"^(\d+) +.* (-\d+\.\d{4}) +(\d+: -\d+\.\d{4}, \d+: -\d+\.\d{4}) *$", result.stderr, re.MULTILINE)
    assert [(int(token), logprob) for token, logprob, _ in rows] == [(t.id, f"{t.logprob:.4f}") for t in alone.tokens]


def test_a_failure_on_the_way_is_one_line(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hetsplit.errors import EngineError

    def fail(*args: object, **options: object) -> None:
        raise EngineError("first line\nsecond line")

    monkeypatch.setattr("hetsplit.engines.load", fail)
    refused(cli("generate", tiny, "hello"), 5, "first line second line")


def test_ctrl_c_exits_130(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hetsplit.engines.load", interrupted)
    result = cli("generate", tiny, "hello")
    assert result.exit_code == 130
    assert "Traceback" not in result.stderr


def test_timeouts_default_to_those_of_the_library_and_reach_both_ends(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hetsplit.wire import Timeouts

    given = []
    monkeypatch.setattr("hetsplit.worker.Worker", lambda *args, **options: given.append(options["timeouts"]))
    monkeypatch.setattr("hetsplit.split.connect", lambda *args, **options: given.append(options))
    asked = ("--connect-timeout", "4.5", "--silence-timeout", "6")
    for options in ((), asked):
        cli("worker", tiny, "--device", "cpu", *options)
        cli("generate", tiny, "hello", *GENERATE, *options)
    limits = [(t.connect_s, t.silence_s) for t in (Timeouts(), given[0], given[2])]
    limits += [(t["connect_timeout_s"], t["silence_timeout_s"]) for t in (given[1], given[3])]
    assert limits == [(3, 30), (3, 30), (4.5, 6), (3, 30), (4.5, 6)]


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_wait_for_the_end(second: signal.Signals) -> None:
    script = (
        "import threading; from contextlib import suppress; from hetsplit import cli\n"
        "with cli._ends_on_signal(), suppress(cli._Ended):\n"
        "    try: print('up', flush=True); threading.Event().wait()\n"
        "    finally: print('closing', flush=True); threading.Event().wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, text=True, stdout=subprocess.PIPE) as process:
        try:
            for line, number in (("up\n", signal.SIGINT), ("closing\n", second)):
                assert process.stdout.readline() == line
                process.send_signal(number)
            assert process.wait(20) == -second
        finally:
            process.kill()


# Workers in processes of their own.


@pytest.mark.e2e
def test_worker_says_what_it_is_and_ends_on_a_signal(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    options = ("--role", "decode", "--listen", f"unix:{path}", "--device", "cpu", "--dtype", "bfloat16")
    with command("worker", tiny, *options) as process:
        ready = facts(process.stdout.readline())
        assert path.is_socket()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert ready == {
        "address": f"unix:{path}",
        "role": "decode",
        "engine": "torch",
        "device": "cpu",
        "dtype": "bfloat16",
        "tls": "off",
        "token": "off",
        "model": str(tiny),
    }
    assert process.returncode == 0, err
    assert out == ""
    assert "Traceback" not in err
    assert not path.exists()


@pytest.mark.e2e
def test_worker_ends_on_a_signal_while_it_loads(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, threading\n"
        "class Halt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'hetsplit.engines.torch':\n"
        "            print('loading now', flush=True)\n"
        "            threading.Event().wait()\n"
        "sys.meta_path.insert(0, Halt())\n"
    )
    with command("worker", tiny, env=os.environ | {"PYTHONPATH": str(tmp_path)}) as process:
        assert process.stdout.readline() == "loading now\n"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in err


@pytest.mark.e2e
def test_worker_off_loopback_serves_those_who_have_token_and_ca(
    tiny: Path, expected: str, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    cert, key = certificate
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    wrong = tmp_path / "wrong"
    wrong.write_text("fedcba9876543210\n")
    tls = ("--tls-cert", cert, "--tls-key", key, "--token-file", token)
    device = ("--device", "cpu", "--dtype", "float32")
    with command("worker", tiny, "--role", "decode", "--listen", "0.0.0.0:0", *tls, *device) as process:
        ready = facts(process.stdout.readline())
        assert (ready["tls"], ready["token"]) == ("on", "on")
        address = f"localhost:{ready['address'].rpartition(':')[2]}"
        ask = ("generate", "-", TEXT, "--decode", address, "--max-tokens", "8", "--tls-ca", cert)
        result = cli(*ask, "--token-file", token)
        assert (result.exit_code, result.stdout) == (0, expected), result.stderr
        refused(cli(*ask), 3, "no token, or a wrong one")
        refused(cli(*ask, "--token-file", wrong), 3, "no token, or a wrong one")
        process.terminate()
        _, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "WARNING" not in err


@pytest.mark.e2e
def test_worker_off_loopback_at_own_risk_warns_loudly_and_ends_with_its_standard_input(tiny: Path) -> None:
    options = ("--listen", "0.0.0.0:0", "--insecure", "--device", "cpu", "--end-with-stdin")
    with command("worker", tiny, *options, stdin=subprocess.PIPE) as process:
        ready = facts(process.stdout.readline())
        assert (ready["tls"], ready["token"]) == ("off", "off")
        process.stdin.close()
        process.stdin = None
        _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert "WARNING: listening on 0.0.0.0:0 without TLS and a token (--insecure)" in err


@pytest.mark.e2e
def test_generate_whose_reader_leaves_ends_quietly(tiny: Path) -> None:
    with command("generate", tiny, TEXT, "--max-tokens", "150", "--ignore-eos", "--device", "cpu") as process:
        process.stdout.close()
        process.stdout = None
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" not in err


@pytest.mark.e2e
def test_refused_within_seconds_from_a_cold_start(tmp_path: Path) -> None:
    """Imports included; nothing but the process itself was started."""
    with command("worker", tmp_path / "nothing") as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in err

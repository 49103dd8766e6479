"""What commands show: text on standard output as it comes; progress and timings on standard error.

Owns how things look, nothing of what they mean. Invariant: standard output carries what was asked for only, generated
text or a table, so it can be piped; bars and spinners appear only where standard error is a terminal, plain lines
elsewhere.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TaskProgressColumn, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed
from rich.table import Table

from hetsplit.result import Completion, Token

if TYPE_CHECKING:
    from hetsplit.engines import Engine
    from hetsplit.split import Generation
    from hetsplit.survey import EngineFacts, PairFacts


LINE_S = 5.0
WIDTH_PIPED = 120


def say(text: str) -> None:
    """One line on standard error."""
    print(" ".join(text.splitlines()), file=sys.stderr, flush=True)


def interactive() -> bool:
    """Whether standard error is a terminal, where bars may move."""
    return _console().is_terminal


def load(model: str, *, engine: str = "torch", device: str, dtype: str | None, role: str) -> "Engine":
    """`engines.load`, with its progress shown. An engine that is not here is refused before the model is looked for."""
    from hetsplit import engines
    from hetsplit.weights import locate

    engines.loader(engine)
    path = locate(model, progress=interactive())
    with _loading(f"{model} into {engine}") as progress:
        return engines.load(path, engine=engine, device=device, dtype=dtype, role=role, progress=progress)


@contextmanager
def _loading(model: str) -> Iterator[Callable[[int, int], None]]:
    """Shows that a model loads; gives the function that takes how much of how much is done."""
    start = time.monotonic()
    console = _console()
    if console.is_terminal:
        with _progress(console, TextColumn("loading"), BarColumn(), TaskProgressColumn(), Elapsed()) as bar:
            task = bar.add_task("", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        say(f"loading {model}")
        yield lambda done, total: None
    say(f"loaded {model} in {time.monotonic() - start:.1f} s")


def stream(generation: "Generation", *, show: bool = True) -> Completion:
    """Runs a request to its end, its text written as it comes (unless not `show`)."""
    tokens: list[Token] = []
    with generation, _waiting(generation) as begun:
        for token in generation:
            if not tokens:
                begun()
            tokens.append(token)
            if show:
                sys.stdout.write(token.text)
                sys.stdout.flush()
    text = "".join(token.text for token in tokens)
    assert generation.timing is not None
    return Completion(text, tuple(tokens), tokens[-1].finish or "", generation.prompt_tokens, generation.timing)


@contextmanager
def _waiting(generation: "Generation") -> Iterator[Callable[[], None]]:
    """Shows the time until the first token; gives the function that says it has come."""
    text = f"prefill of {generation.prompt_tokens} tokens"
    console = _console()
    if not console.is_terminal:
        say(text)
        generation.on_progress = lines()
        yield lambda: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"))
    with _progress(console, *columns, Elapsed()) as bar:
        generation.on_progress = moves(bar, text)
        yield bar.stop


def moves(bar: Progress, text: str) -> Callable[[int, int, int], None]:
    """A `Generation.on_progress` that moves a bar: requests ahead while there are any, then positions done."""
    task = bar.add_task(text, total=None, count="")

    def heard(ahead: int, done: int, total: int) -> None:
        if ahead:
            bar.update(task, description=f"{ahead} ahead", count="")
        else:
            count = f"{done} of {total}" if total else ""
            bar.update(task, description=text, completed=done, total=total or None, count=count)

    return heard


def lines(clock: Callable[[], float] = time.monotonic) -> Callable[[int, int, int], None]:
    """A `Generation.on_progress` that says the same in lines, one each `LINE_S` seconds at most."""
    last = clock()

    def heard(ahead: int, done: int, total: int) -> None:
        nonlocal last
        if clock() - last < LINE_S or not (ahead or total):
            return
        last = clock()
        say(f"{ahead} ahead" if ahead else f"prefill: {done} of {total} positions")

    return heard


def show_timing(completion: Completion) -> None:
    """The table of a finished request, on standard error."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    for name, value in timing_rows(completion):
        table.add_row(name, value)
    _console().print(table)


def timing_rows(completion: Completion) -> list[tuple[str, str]]:
    """What the table says, row by row."""
    timing = completion.timing
    produced = len(completion.tokens)
    sent = "-"
    if timing.sent_bytes:
        megabytes = timing.sent_bytes / 1e6
        rate = f"{timing.link_rate / 1e6:.1f} MB/s" if timing.link_rate else "-"
        sent = f"{megabytes:.2f} MB ({timing.codec}), {rate}"
    return [
        ("mode", f"{timing.mode} ({timing.why})"),
        ("prompt", f"{completion.prompt_tokens} tokens"),
        ("generated", f"{produced} tokens, finish: {completion.finish}"),
        ("queue", f"{timing.queue_s:.3f} s"),
        ("prefill", f"{timing.prefill_s:.3f} s"),
        ("transfer", f"{timing.transfer_s:.3f} s"),
        ("exposed transfer", f"{timing.exposed_transfer_s:.3f} s"),
        ("first token", f"{timing.first_token_s:.3f} s"),
        ("decode", f"{timing.decode_s:.3f} s, {_rate(produced - 1, timing.decode_s)} tokens/s"),
        ("sent, link rate", sent),
    ]


def show_logprobs(completion: Completion) -> None:
    """Each token's natural logarithm of probability and the likeliest alternatives, on standard error."""
    table = Table("token", "text", "logprob", "likeliest (id: logprob)", box=None, pad_edge=False)
    for token in completion.tokens:
        top = ", ".join(f"{i}: {p:.4f}" for i, p in token.top)
        logprob = "-" if token.logprob is None else f"{token.logprob:.4f}"
        table.add_row(str(token.id), repr(token.text), logprob, top)
    _console().print(table)


@contextmanager
def counting(total: int) -> Iterator[Callable[[str], None]]:
    """Shows which of `total` measurements runs; gives the function that says that the next one begins."""
    console = _console()
    if not console.is_terminal or not total:
        yield lambda name: say(f"measuring {name}")
        return
    columns = (SpinnerColumn(), TextColumn("measuring {task.description}"), BarColumn(), TaskProgressColumn())
    with _progress(console, *columns, Elapsed()) as bar:
        task = bar.add_task("", total=total, completed=-1)
        yield lambda name: bar.update(task, description=name, advance=1)


def show_engines(found: "Sequence[EngineFacts]", *, with_model: bool, file: TextIO) -> None:
    """Which engines are here, what each does with the model, and why another does not."""
    table = Table("engine", "library", "installed", box=None, pad_edge=False)
    roles = ("prefill", "decode", "local prefill")
    for name in (*roles, "K/V", "device", "model") if with_model else ():
        table.add_column(name, overflow="fold")
    for each in found:
        has = [_yes(role in each.roles) if each.model else "-" for role in roles]
        row = (each.name, each.library, _yes(each.installed), *has, each.kv_dtype, each.device, Path(each.model).name)
        table.add_row(*(cell or "-" for cell in row[: len(table.columns)]))
    _show(table, {each.name: each.why_not for each in found}, file)


def show_pairs(pairs: "Sequence[PairFacts]", *, file: TextIO) -> None:
    """How far each pair agrees, and why another cannot be measured."""
    if pairs:
        print(file=file)
    columns = ("prefill", "decode", "K/V error, worst", "mean", "top-1", "KL (nats)", "tokens", "")
    table = Table(*columns, box=None, pad_edge=False)
    for pair in pairs:
        if (found := pair.agreement) is None:
            continue
        worst = f"{found.worst_kv_error:.2g} (layer {found.worst_layer})"
        figures = (worst, f"{found.mean_kv_error:.2g}", f"{100 * found.top1_ratio:.1f}%", f"{found.kl_nats:.2g}")
        tokens = f"{found.prompt_tokens} + {found.scored_tokens}"
        table.add_row(pair.prefiller, pair.decoder, *figures, tokens, "mixed weights" if pair.mixed_weights else "")
    _show(table, {f"{pair.prefiller} to {pair.decoder}": pair.why_not for pair in pairs}, file)


def _show(table: Table, reasons: Mapping[str, str], file: TextIO) -> None:
    """A table and the reasons below it; a reason is one line, however long."""
    console = Console(file=file, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = WIDTH_PIPED
    if table.row_count:
        console.print(table)
    for name, reason in reasons.items():
        if reason:
            console.print(f"{name}: {reason}", soft_wrap=True)


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def _rate(amount: float, seconds: float) -> str:
    return f"{amount / seconds:.1f}" if amount > 0 and seconds > 0 else "-"


def _console() -> Console:
    return Console(stderr=True, highlight=False, markup=False)


def _progress(console: Console, *columns: ProgressColumn) -> Progress:
    return Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)

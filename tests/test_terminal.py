"""What commands show of a request: progress while it waits, and its timing."""

import io

import pytest
from rich.console import Console
from rich.progress import Progress

from hetsplit import terminal
from hetsplit.result import Completion, Timing, Token


def rate(timing: Timing) -> str:
    completion = Completion("a", (Token(1, "a", "stop"),), "stop", 5, timing)
    return dict(terminal.timing_rows(completion))["sent, link rate"]


@pytest.mark.parametrize(
    ("timing", "shown"),
    [
        (Timing(), "-"),
        (Timing(sent_bytes=3_000_000, transfer_s=0.0), "3.00 MB (raw), -"),
        (Timing(sent_bytes=3_000_000, transfer_s=1.5), "3.00 MB (raw), 2.0 MB/s"),
    ],
)
def test_link_rate_is_bytes_over_busy_time(timing: Timing, shown: str) -> None:
    assert rate(timing) == shown


def test_a_bar_shows_the_queue_then_the_positions() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    with Progress(console=console, auto_refresh=False) as bar:
        heard = terminal.moves(bar, "prefill of 4096 tokens")
        task = bar.tasks[0]

        def state() -> tuple[str, float | None, float, str]:
            return task.description, task.total, task.completed, task.fields["count"]

        assert state() == ("prefill of 4096 tokens", None, 0, "")
        heard(2, 0, 4096)
        assert state() == ("2 ahead", None, 0, "")
        heard(0, 512, 4096)
        assert state() == ("prefill of 4096 tokens", 4096, 512, "512 of 4096")


def test_lines_say_the_same_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    heard = terminal.lines(lambda: now)
    for now in range(16):
        heard(max(0, 7 - now), 100 * now, 4096)
    now = 60.0
    heard(0, 0, 0)  # nothing is known yet
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["2 ahead", "prefill: 1000 of 4096 positions", "prefill: 1500 of 4096 positions"]

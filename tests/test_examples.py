"""Every example is run as its own text says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import netns

EXAMPLES = Path(__file__).parent.parent / "examples"
FRANCE = "Paris."

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def run(name: str, *argv: str, timeout: float = 100) -> str:
    command = [sys.executable, str(EXAMPLES / name), *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def worker(smollm2_path):
    """Starts `hetsplit worker` processes on free loopback ports; yields a function that gives their address."""
    started = []

    def start(role: str) -> str:
        command = [sys.executable, "-m", "hetsplit", "worker", str(smollm2_path), "--role", role]
        process = subprocess.Popen([*command, "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
        started.append(process)
        return re.search(r"address=(\S+)", process.stdout.readline())[1]

    yield start
    for process in started:
        process.terminate()
        assert process.wait(10) == 0
        process.stdout.close()


def test_quickstart(smollm2_path):
    assert "physics" in run("quickstart.py", str(smollm2_path))


def test_pull(smollm2_path, worker):
    out = run("pull.py", str(smollm2_path), worker("prefill"))
    assert FRANCE in out
    assert "mode='split'" in out


def test_push(smollm2_path, worker):
    out = run("push.py", str(smollm2_path), worker("decode"))
    assert "mode='push'" in out


@pytest.mark.root
@pytest.mark.skipif(netns.unavailable() is not None, reason=str(netns.unavailable()))
def test_two_machines(smollm2_path):
    out = run("two_machines/run.py", str(smollm2_path), "500")
    assert FRANCE in out

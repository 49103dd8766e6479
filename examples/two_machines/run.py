"""Types the commands of the README beside it on two network namespaces joined by a shaped link. Needs root on Linux.

Usage: run.py MODEL [LINK_MBIT]
"""

import re
import shlex
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))  # the root of the repository, also where hetsplit was installed by itself

from benchmarks import netns  # noqa: E402


def commands(hosts: netns.Hosts, model: str) -> dict[str, list[list[str]]]:
    """The README's shell blocks by their label, with this run's addresses, model and interpreter in place."""
    text = (HERE / "README.md").read_text()
    for written, address in zip(("192.168.1.10", "192.168.1.20"), hosts.addresses, strict=True):
        text = text.replace(written, address)
    blocks = re.findall(r"```sh ?(\w*)\n(.*?)```", text, re.DOTALL)
    names = {"hetsplit": [sys.executable, "-m", "hetsplit"], "model.gguf": [model]}
    typed = {}
    for label, block in blocks:
        lines = [shlex.split(line) for line in block.strip().splitlines()]
        typed[label or "keys"] = [[part for word in line for part in names.get(word, [word])] for line in lines]
    return typed


def make_keys(lines: list[list[str]], folder: str) -> None:
    for line in lines:
        if ">" in line:  # the one redirection that the README types
            output = subprocess.run(line[: line.index(">")], cwd=folder, check=True, capture_output=True)
            Path(folder, line[-1]).write_bytes(output.stdout)
        else:
            subprocess.run(line, cwd=folder, check=True, capture_output=True)


def start(stack: ExitStack, argv: list[str], folder: str) -> None:
    """A worker that has said that it is ready, and is ended with the stack."""
    worker = subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, text=True)
    stack.callback(worker.stdout.close)
    stack.callback(worker.wait, 10)
    stack.callback(worker.terminate)
    line = worker.stdout.readline()
    if not line:
        raise SystemExit(f"a worker ended with exit code {worker.wait()}")
    print(line, end="", flush=True)


def main() -> int:
    if reason := netns.unavailable():
        print(f"cannot run here: {reason}", file=sys.stderr)
        return 2
    link_mbit = float(sys.argv[2]) if len(sys.argv) > 2 else 1000.0
    with ExitStack() as stack:
        hosts = stack.enter_context(netns.two_hosts())
        hosts.shape(link_mbit * 1e6)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        typed = commands(hosts, str(Path(sys.argv[1]).resolve()))
        make_keys(typed["keys"], folder)
        start(stack, hosts.command(0, typed["prefill"][0]), folder)
        start(stack, hosts.command(1, typed["decode"][0]), folder)
        return subprocess.run(hosts.command(1, typed["use"][0]), cwd=folder, check=False, timeout=120).returncode


if __name__ == "__main__":
    raise SystemExit(main())

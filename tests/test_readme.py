"""Every command and every line of Python in the README is run as it stands, but for ports and the model's place."""

import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
FRANCE = "Paris."

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


COMMANDS = [line for block in blocks("sh") for line in block.splitlines()]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture(scope="module")
def ports():
    return {port: free_port() for port in ("7070", "7071")}


@pytest.fixture(scope="module")
def here(tmp_path_factory, smollm2_path):
    folder = tmp_path_factory.mktemp("readme")
    (folder / "model.gguf").symlink_to(smollm2_path)
    return folder


def typed(text: str, ports: dict[str, str]) -> str:
    for written, real in ports.items():
        text = text.replace(written, real)
    return text


def command(line: str, ports: dict[str, str]) -> list[str]:
    words = shlex.split(typed(line, ports))
    assert words[0] == "hetsplit", line
    return [sys.executable, "-m", "hetsplit", *words[1:]]


@pytest.fixture(scope="module")
def workers(here, ports):
    """The README's workers, ready."""
    started = []
    for line in (line for line in COMMANDS if line.startswith("hetsplit worker")):
        process = subprocess.Popen(command(line, ports), cwd=here, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert "address=" in process.stdout.readline()
    yield
    for process in started:
        process.terminate()
        assert process.wait(10) == 0
        process.stdout.close()


def test_the_readme_has_the_commands_that_these_tests_run():
    kinds = [" ".join(line.split()[:2]) for line in COMMANDS]
    assert kinds.count("hetsplit worker") == 2
    assert set(kinds) == {"pip install", "hetsplit worker", "hetsplit generate", "hetsplit engines"}
    assert len(blocks("python")) == 1


def test_pip_install(tmp_path):
    """Into a folder of its own and from the packages that are here, else as written."""
    (line,) = (line for line in COMMANDS if line.startswith("pip"))
    here = ["--target", str(tmp_path), "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([sys.executable, "-m", *shlex.split(line), *here], cwd=ROOT, check=True, capture_output=True)
    assert (tmp_path / "hetsplit" / "py.typed").exists()
    assert (tmp_path / "bin" / "hetsplit").exists()


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("hetsplit generate")])
def test_generate(line, here, ports, workers):
    done = subprocess.run(command(line, ports), cwd=here, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert FRANCE in done.stdout
    assert "first token" in done.stderr


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("hetsplit engines")])
def test_engines(line, here, ports):
    done = subprocess.run(command(line, ports), cwd=here, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^torch +torch .* yes +yes +yes +yes +bfloat16 .* model.gguf", done.stdout, re.MULTILINE)


def test_python(here, ports, workers):
    (block,) = blocks("python")
    code = [sys.executable, "-c", typed(block, ports)]
    done = subprocess.run(code, cwd=here, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "physics" in done.stdout


@pytest.mark.parametrize("path", re.findall(r"\]\((?!http)([^)#]+)\)", README))
def test_links_lead_somewhere(path):
    assert (ROOT / path).exists()

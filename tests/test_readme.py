"""Every command and every line of Python in the README is run as it stands, but for ports and the model's place."""

import os
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hetsplit.conformance import LAWS
from hetsplit.engines import installed
from tests.engines import site_of

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
    assert len(blocks("python")) == 2
    assert len(blocks("toml")) == 1


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
    block, _ = blocks("python")
    code = [sys.executable, "-c", typed(block, ports)]
    done = subprocess.run(code, cwd=here, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "physics" in done.stdout


def test_write_an_engine(gguf_of, tmp_path, monkeypatch):
    """The example is registered by the README's lines, and the README's test file passes with a tiny model."""
    (lines,) = map(tomllib.loads, blocks("toml"))
    _, test_file = blocks("python")
    ((name, value),) = lines["project"]["entry-points"]["hetsplit.engines"].items()
    site = site_of(ROOT / "examples" / "own_engine.py", f"[hetsplit.engines]\n{name} = {value}\n", tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{ROOT}")
    (tmp_path / "model.gguf").symlink_to(gguf_of("llama82"))
    (tmp_path / "test_own.py").write_text(test_file)
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "test_own.py"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert f"{3 * len(LAWS)} passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0


def test_the_table_of_engines_and_its_extras():
    rows = dict(re.findall(r"^\| `(\w+)`.*?\| `pip install (.*?)`", README, re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    ours = {name for name, point in installed().items() if point.value.startswith("hetsplit.")}
    assert rows.keys() == ours
    assert rows == {name: f"'.[{name}]'" if name in extras else "." for name in ours}


def test_the_number_of_laws_and_pairs():
    count = len({name for name, point in installed().items() if point.value.startswith("hetsplit.")})
    assert f"{len(LAWS)} laws are tested for each of\n  the {count**2} ordered pairs" in README


@pytest.mark.parametrize("path", re.findall(r"\]\((?!http)([^)#]+)\)", README))
def test_links_lead_somewhere(path):
    assert (ROOT / path).exists()

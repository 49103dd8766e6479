"""The law of imports, read from the source: which module may use which, and who may touch torch, gRPC and pickle."""

import ast
import re
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "hetsplit"

# A name with a dot wins over its package; a package's entry holds for all its modules.
LAYERS = {
    "errors": 0,
    "spec": 0,
    "result": 0,
    "rope": 1,
    "spec_fields": 1,
    "spec_hf": 1,
    "spec_gguf": 1,
    "_pb": 0,
    "address": 1,
    "kv": 1,
    "sampling": 1,
    "planner": 1,
    "codec": 2,
    "protocol": 2,
    "frames": 2,
    "scheduler": 2,
    "verify": 2,
    "cachefile": 2,
    "tokenizer": 2,
    "tokenizer_files": 2,
    "tokenizer_gguf": 2,
    "model": 2,
    "mlp": 2,
    "matrix": 2,
    "weights": 2,
    "messages": 3,
    "wire": 3,
    "security": 3,
    "profile": 3,
    "engines": 3,
    "worker": 4,
    "agreement": 4,
    "conformance": 6,
    "pool": 4,
    "split": 5,
    "server": 6,
    "bench": 6,
    "plots": 6,
    "cli": 6,
    "demo": 6,
    "preflight": 6,
    "survey": 6,
    "terminal": 6,
    "__main__": 7,
}

# Imports within one layer that are meant; a package's own modules may always use each other.
SIDEWAYS = {
    ("spec", "errors"),  # it refuses what is not supported
    ("spec_hf", "spec_fields"),
    ("spec_hf", "rope"),
    ("spec_gguf", "spec_fields"),
    ("spec_gguf", "rope"),
    ("frames", "protocol"),  # the bytes of the protocol's messages
    ("tokenizer", "tokenizer_files"),
    ("tokenizer", "tokenizer_gguf"),
    ("tokenizer", "weights"),  # GGUF metadata
    ("tokenizer_gguf", "tokenizer_files"),
    ("model", "matrix"),  # what its parameters are
    ("model", "mlp"),
    ("mlp", "matrix"),
    ("model", "weights"),  # what a checkpoint gives
    ("matrix", "weights"),  # blocks of quantised numbers
    ("agreement", "worker"),  # how peers compare what they hold
    ("wire", "security"),  # gRPC credentials are made from its keys and rules
    ("cli", "server"),  # the command line starts the others
    ("cli", "bench"),
    ("cli", "demo"),
    ("cli", "preflight"),
    ("cli", "survey"),
    ("cli", "terminal"),
    ("demo", "preflight"),
    ("demo", "terminal"),
    ("survey", "terminal"),
    ("cli", "plots"),
    ("bench", "plots"),
}

TORCH_ALLOWED = ("model", "mlp", "matrix", "weights", "engines.torch", "engines.transformers")
GRPC_ALLOWED = ("wire", "_pb")
# Libraries whose import name is not the name they are installed by.
DISTRIBUTIONS = {"grpc": "grpcio", "google": "protobuf", "llama_cpp": "llama-cpp-python", "mlx_lm": "mlx-lm"}
PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name below `hetsplit`; the package itself is ""."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def unit(module: str) -> str:
    """The entry of LAYERS that a module falls under; "" for the package itself."""
    return module if module in LAYERS else module.split(".", maxsplit=1)[0]


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, functions' bodies included, but those that only a type checker sees."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in node.orelse:
                yield other
                yield from runtime_nodes(other)
            continue
        yield node
        yield from runtime_nodes(node)


def imported(node: ast.AST) -> list[str]:
    """Dotted names that a node imports: statements, and `import_module` of a literal name."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(level=0, module=str(module), names=names):
            return [f"{module}.{alias.name}" for alias in names]
        case ast.ImportFrom(level=level, module=module) if level:
            return ["." * level + (module or "")]
        case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]):
            return [name] if ast.unparse(func).split(".")[-1] in ("import_module", "__import__") else []
    return []


def fault_of_import(module: str, name: str) -> str | None:
    """Why `module` may not import the dotted `name`; None when it may."""
    top = name.split(".", maxsplit=1)[0]
    if top in PICKLES:
        return "no pickle anywhere"
    if top == "torch" and not allowed(module, TORCH_ALLOWED):
        return f"torch is for {', '.join(TORCH_ALLOWED)} only"
    if top == "grpc" and not allowed(module, GRPC_ALLOWED):
        return f"grpc is for {', '.join(GRPC_ALLOWED)} only"
    if name.startswith("."):
        return "imports are written in full"
    if top != "hetsplit" or name in ("hetsplit", "hetsplit.__version__"):
        return None
    return fault_of_layer(module, name.removeprefix("hetsplit."))


def fault_of_layer(module: str, target: str) -> str | None:
    here, there = unit(module), unit(target)
    if there not in LAYERS:
        return f"{there!r} has no entry in LAYERS; import a public name from the module that defines it"
    if here == there or (here, there) in SIDEWAYS or LAYERS[there] < LAYERS.get(here, 0):
        return None
    return f"{there} (layer {LAYERS[there]}) is not below {here or 'the package'} (layer {LAYERS.get(here, 0)})"


def allowed(module: str, homes: tuple[str, ...]) -> bool:
    """Whether a module is one of `homes`, inside one, or an engine whose name begins like one (`torch_codec`)."""
    return any(module == home or module.startswith((home + ".", home + "_")) for home in homes)


def fault_of_pickle(node: ast.AST) -> str | None:
    """Whether a node reads pickled data by another name."""
    match node:
        case ast.Attribute(value=ast.Name(id="torch"), attr="load" | "save"):
            return f"torch.{node.attr} is pickle"
        case ast.ImportFrom(module="torch", names=names) if any(alias.name in ("load", "save") for alias in names):
            return "torch's load and save are pickle"
        case ast.keyword(arg="allow_pickle", value=value) if ast.unparse(value) != "False":
            return "allow_pickle must stay False"
    return None


def faults(module: str, source: str) -> list[str]:
    """Every breach of the law in a module's source, with its line."""
    if module and unit(module) not in LAYERS:
        return [f"hetsplit.{module} has no entry in LAYERS of {Path(__file__).name}"]
    tree = ast.parse(source)
    found = [] if ast.get_docstring(tree) else [f"hetsplit.{module} has no docstring"]
    for node in runtime_nodes(tree):
        reasons = [(name, fault_of_import(module, name)) for name in imported(node)]
        reasons.append(("", fault_of_pickle(node)))
        line = getattr(node, "lineno", 0)
        found += [f"hetsplit.{module}:{line}: {name} {reason}".rstrip() for name, reason in reasons if reason]
    return found


def test_the_package_keeps_the_law() -> None:
    found = [fault for module, path in sorted(modules().items()) for fault in faults(module, path.read_text())]
    assert not found, "\n".join(found)


def test_every_library_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    extras = [each for name, lines in project["optional-dependencies"].items() if name != "dev" for each in lines]
    declared = {re.split(r"[<>=!~\[; ]", line)[0].lower() for line in [*project["dependencies"], *extras]}
    nodes = [node for path in modules().values() for node in runtime_nodes(ast.parse(path.read_text()))]
    used = {name.split(".")[0] for node in nodes for name in imported(node) if not name.startswith(".")}
    used -= sys.stdlib_module_names | {"hetsplit"}
    assert {DISTRIBUTIONS.get(name, name) for name in used} <= declared


def test_the_guide_names_every_room() -> None:
    guide = (ROOT.parent / "CONTRIBUTING.md").read_text()
    rooms = {module.split(".")[0] for module in modules()} - {"", "__main__"}
    assert sorted(room for room in rooms if f"`{room}`" not in guide) == []


@pytest.mark.e2e
def test_the_source_distribution_holds_what_its_tests_import(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(line, cwd=ROOT.parent, check=True, capture_output=True, timeout=60)
    (file,) = tmp_path.iterdir()
    with tarfile.open(file) as archive:
        packed = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {"benchmarks/record.py", "tests/models.py", "hetsplit/cli.py", "Makefile", "constraints.txt"} <= packed
    assert not [name for name in packed if "__pycache__" in name]


def test_every_module_was_looked_at() -> None:
    assert {"", "errors", "kv", "sampling", "engines"} <= modules().keys()


BROKEN = [
    ("kv", "from hetsplit.wire import serve", "not below"),
    ("kv", "import hetsplit.sampling", "not below"),
    ("kv", "def f():\n    from hetsplit.protocol import Sender", "not below"),
    ("kv", "from hetsplit import worker", "not below"),
    ("kv", "from importlib import import_module\nimport_module('hetsplit.split')", "not below"),
    ("errors", "from hetsplit.spec import DType", "not below"),
    ("weights.gguf", "from hetsplit.tokenizer import Tokenizer", "not below"),
    ("wire", "from hetsplit.engines import load", "not below"),
    ("", "from hetsplit.errors import HetsplitError", "not below"),
    ("split", "from hetsplit import connect", "no entry in LAYERS"),
    ("kv", "from .spec import DType", "written in full"),
    ("helpers", "", "no entry in LAYERS"),
    ("kv", "import torch", "torch is for"),
    ("engines.llamacpp", "from torch.nn import functional", "torch is for"),
    ("engines", "def f():\n    import torch", "torch is for"),
    ("worker", "import grpc", "grpc is for"),
    ("worker", "from grpc import aio", "grpc is for"),
    ("kv", "import pickle", "no pickle"),
    ("weights", "import torch\nx = torch.load('f')", "is pickle"),
    ("weights", "from torch import load", "are pickle"),
    ("kv", "import numpy as np\nnp.load('f', allow_pickle=True)", "allow_pickle"),
    ("kv", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch", "torch is for"),
]


@pytest.mark.parametrize(("module", "body", "reason"), BROKEN)
def test_a_breach_is_found(module: str, body: str, reason: str) -> None:
    found = faults(module, f'"""Doc."""\n{body}\n')
    assert len(found) == 1
    assert reason in found[0]


KEPT = [
    ("kv", "from hetsplit.spec import DType"),
    ("spec", "from hetsplit.errors import ConfigError"),
    ("weights.gguf", "from hetsplit.weights.quant import dequantise\nimport torch"),
    ("engines", "from hetsplit.engines.torch import TorchEngine"),
    ("engines.torch", "from hetsplit.engines import Row\nfrom hetsplit import __version__"),
    ("engines.torch_codec", "import torch"),
    ("engines.transformers", "import torch"),
    ("tokenizer", "from hetsplit.weights import gguf"),
    ("cli", "from hetsplit.server import serve"),
    ("kv", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n    from hetsplit.wire import Link"),
    ("wire", "import grpc\nfrom hetsplit._pb import hetsplit_pb2"),
]


@pytest.mark.parametrize(("module", "body"), KEPT)
def test_what_the_law_allows_is_not_a_breach(module: str, body: str) -> None:
    assert faults(module, f'"""Doc."""\n{body}\n') == []


def test_a_missing_docstring_is_found() -> None:
    assert faults("kv", "x = 1\n") == ["hetsplit.kv has no docstring"]

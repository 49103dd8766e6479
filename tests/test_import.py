"""What `import hetsplit` costs and offers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import hetsplit

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "grpc", "transformers", "google.protobuf", "numpy")


def loaded_after(code: str) -> list[str]:
    """Which of the heavy libraries a fresh interpreter has loaded after `code`."""
    script = f"{code}\nimport json, sys\nprint(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_import_loads_nothing_heavy() -> None:
    assert loaded_after("import hetsplit") == []


def test_a_light_name_loads_neither_torch_nor_grpc() -> None:
    assert loaded_after("from hetsplit import HetsplitError, SamplingParams") == ["numpy"]


def test_names_are_listed_once_and_sorted_the_same_way() -> None:
    assert list(hetsplit._HOME) == hetsplit.__all__
    assert set(hetsplit.__all__) <= set(dir(hetsplit))


@pytest.mark.parametrize("name", hetsplit.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(hetsplit, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        hetsplit.conect  # noqa: B018

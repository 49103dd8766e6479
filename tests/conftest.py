"""Fixtures that several test files share: tiny models, their files, the real model, the device under test."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

ModelOf = Callable[[str], "LlamaForCausalLM"]
PathOf = Callable[[str], Path]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda", "mps"), default="cpu", help="run the laws on this device")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The device of `--device`; its absence is an error, since whoever names one wants it tested."""
    import torch

    name: str = request.config.getoption("--device")
    present = {"cpu": lambda: True, "cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    if not present[name]():
        pytest.exit(f"--device {name}: torch finds no such device here", returncode=pytest.ExitCode.USAGE_ERROR)
    return name


@pytest.fixture(autouse=True, scope="session")
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep fingerprints out of the user's own cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def model_of() -> ModelOf:
    """`model_of(name)`: transformers' model for a name of `tests.models.BUILDERS`, built once."""
    from tests.models import BUILDERS

    return cache(lambda name: BUILDERS[name]())


@pytest.fixture(scope="session")
def folder_of(model_of: ModelOf, tmp_path_factory: pytest.TempPathFactory) -> PathOf:
    """`folder_of(name)`: that model as a Hugging Face folder, written once. Copy it before changing it."""
    from tests.models import save_folder

    return cache(lambda name: save_folder(model_of(name), tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def gguf_of(model_of: ModelOf, tmp_path_factory: pytest.TempPathFactory) -> PathOf:
    """`gguf_of(name)`: that model as a float32 GGUF file, written once."""
    from tests.models import save_gguf

    return cache(lambda name: save_gguf(model_of(name), tmp_path_factory.mktemp(name) / f"{name}.gguf"))


@pytest.fixture(scope="session")
def llama(model_of: ModelOf) -> "LlamaForCausalLM":
    return model_of("llama")


@pytest.fixture(scope="session")
def llama_dir(folder_of: PathOf) -> Path:
    return folder_of("llama")


@pytest.fixture(scope="session")
def llama82(model_of: ModelOf) -> "LlamaForCausalLM":
    return model_of("llama82")


@pytest.fixture(scope="session")
def llama82_dir(folder_of: PathOf) -> Path:
    return folder_of("llama82")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of context 256 with a tokenizer."""
    from tests.models import build_llama, save_folder
    from tests.tokens import give_tokenizer

    return give_tokenizer(save_folder(build_llama(vocab_size=300), tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct as a Q4_1 GGUF file."""
    from tests.models import smollm2_gguf

    return smollm2_gguf()

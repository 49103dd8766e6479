"""All 16 ordered pairs of engines with the real model: the conformance suite, and text.

torch and llama.cpp read the GGUF file; transformers and MLX read its weights from a folder, rounded to bfloat16.
llama.cpp computes with 8-bit activations, so whatever is paired with it agrees within a tolerance.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hetsplit import connect
from hetsplit.conformance import LAWS, Law, Pair, Tolerance
from hetsplit.engines import Engine
from tests.engines import PAIRS, READS_GGUF, load_or_skip
from tests.export import export_folder

pytestmark = pytest.mark.e2e

TEXT = "The quick brown fox jumps over the lazy dog. The capital of France is"
SAID = " Paris.\n\nThe answer"


class RealEngines:
    def __init__(self, gguf: Path, folder: Path) -> None:
        self.gguf, self.folder = gguf, folder
        self._loaded: dict[str, Engine] = {}
        self._pairs: dict[tuple[str, ...], Pair] = {}

    def __call__(self, name: str) -> Engine:
        if name not in self._loaded:
            if name not in READS_GGUF and not self.folder.exists():
                export_folder(self.gguf, self.folder)
            path = self.gguf if name in READS_GGUF else self.folder
            self._loaded[name] = load_or_skip(name, path, device="cpu", dtype="bfloat16" if name == "torch" else None)
        return self._loaded[name]

    def pair(self, *names: str) -> Pair:
        if names not in self._pairs:
            prefiller, decoder = map(self, names)
            assert decoder.tokenizer is not None
            prompt = decoder.tokenizer.encode(TEXT)
            self._pairs[names] = Pair(prefiller, decoder, prompt, tolerance(names), mixed_weights=True)
        return self._pairs[names]


@pytest.fixture(scope="module")
def real(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngines]:
    yield RealEngines(smollm2_path, tmp_path_factory.mktemp("real") / "folder")


def tolerance(names: tuple[str, ...]) -> Tolerance:
    if "llamacpp" in names:
        return Tolerance(kv=0.12, logits=0.2)
    return Tolerance(kv=0.05, logits=0.1)


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_every_pair_keeps_the_laws_with_the_real_model(names: tuple[str, str], law: Law, real: RealEngines) -> None:
    law(real.pair(*names))


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_every_pair_says_the_same(names: tuple[str, str], real: RealEngines) -> None:
    with connect(*map(real, names), mode="split", mixed_weights=True) as split:
        assert split.complete(TEXT, temperature=0, max_tokens=6).text == SAID

"""llama.cpp's sequence-state blob: learnt, written and read back; a doctored one is refused by field."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from hetsplit.engines.llamacpp_blob import BlobLayout
from hetsplit.errors import EngineError
from hetsplit.spec import DType, KvLayer, KvLayout

LAYOUT = KvLayout((KvLayer(2, 4), KvLayer(1, 6)), DType.FLOAT16)
BLOB = BlobLayout((-5, 9, 0), 1, (8, 6))
PART = range(3, 8)


def halves(seed: int) -> list[NDArray[np.float16]]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((len(PART), row)).astype(np.float16) for row in BLOB.rows]


def written(sequence: int, layout: BlobLayout = BLOB) -> bytes:
    found: bytes = layout.write(PART, sequence, halves(1), halves(2)).tobytes()
    return found


def patched(blob: bytes, at: int, word: int) -> bytes:
    return blob[:at] + word.to_bytes(4, "little", signed=True) + blob[at + 4 :]


HEAD = 4 * len(BLOB.head)
FIRST_LAYER = HEAD + 4 * (2 + 3 * len(PART) + 2)


TRANSPOSED = replace(BLOB, transposed=True)


@pytest.mark.parametrize("layout", [BLOB, TRANSPOSED], ids=["rows", "transposed"])
def test_a_blob_gives_back_what_was_written(layout: BlobLayout) -> None:
    blob = written(7, layout)
    assert len(blob) == BLOB.size(PART)
    for found, expected in zip(layout.parse(blob, PART, 7), (halves(1), halves(2)), strict=True):
        assert [one.tobytes() for one in found] == [one.tobytes() for one in expected]


def test_transposed_values_lie_element_by_element() -> None:
    blob, (_, last) = written(7, TRANSPOSED), halves(2)
    assert blob.endswith(last.T.tobytes()) and blob[: -last.nbytes].endswith(
        bytes([1, 0, 0, 0, 2, 0, 0, 0, 6, 0, 0, 0])
    )


@pytest.mark.parametrize("layout", [BLOB, TRANSPOSED, replace(BLOB, head=(), id_at=None), replace(BLOB, id_at=None)])
def test_a_layout_is_learnt_from_blobs(layout: BlobLayout) -> None:
    found = BlobLayout.detect([(id, written(id, layout)) for id in (4, 6)], LAYOUT, PART)
    assert (found.id_at, found.rows, found.transposed) == (layout.id_at, layout.rows, layout.transposed)
    assert found.write(PART, 5, halves(1), halves(2)).tobytes() == written(5, layout)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda blob: patched(blob, HEAD, 2), "streams is 2, expected 1"),
        (lambda blob: patched(blob, HEAD + 4, 4), "cells is 4, expected 5"),
        (lambda blob: patched(blob, HEAD + 8 + 12, 9), "cell 1 is 9, expected 4"),
        (lambda blob: patched(blob, FIRST_LAYER - 8, 1), "transposed values is 1, expected 0"),
        (lambda blob: patched(blob, FIRST_LAYER - 4, 3), "layers is 3, expected 2"),
        (lambda blob: patched(blob, FIRST_LAYER, 0), r"keys of layer 0: \(0, 16\), expected \(1, 16\)"),
        (lambda blob: patched(blob, FIRST_LAYER + 4, 32), r"keys of layer 0: \(1, 32\), expected \(1, 16\)"),
        (lambda blob: blob[:-2], "values of layer 1"),
        (lambda blob: blob[: FIRST_LAYER + 4], "keys of layer 0: nothing"),
        (lambda blob: blob[:10], f"10 bytes, at least {FIRST_LAYER} expected"),
        (lambda blob: blob + bytes(4), "4 bytes after the last layer"),
    ],
    ids=["streams", "cells", "position", "transposed", "layers", "type", "row", "cut", "no layer", "no frame", "long"],
)
def test_a_doctored_blob_is_refused(change: Callable[[bytes], bytes], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        BLOB.parse(change(written(7)), PART, 7)
    with pytest.raises(EngineError, match="llama.cpp's state"):
        BlobLayout.detect([(id, change(written(id))) for id in (4, 6)], LAYOUT, PART)


def test_blobs_of_unequal_length_teach_nothing() -> None:
    with pytest.raises(EngineError, match="5 positions has 3, 3 bytes, about"):
        BlobLayout.detect([(4, b"abc"), (6, b"abc")], LAYOUT, PART)
    with pytest.raises(EngineError, match=f"has {BLOB.size(PART)}, {BLOB.size(PART) - 4} bytes"):
        BlobLayout.detect([(4, written(4)), (6, written(6)[4:])], LAYOUT, PART)

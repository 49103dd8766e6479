"""Stored bytes to torch tensors: plain types as views of the mapped file, quantised blocks to float32.

Block formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. The three most frequent are decoded
here, several times faster than by the `gguf` package, which decodes the rest; results are bit-equal to it.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from hetsplit.spec import DType
from hetsplit.weights.files import StoredTensor, TensorFile

_Bytes = NDArray[np.uint8]
_Floats = NDArray[np.float32]

_SLICE_ELEMENTS = 2**18
_PLAIN: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PLAIN_DTYPES: Final = {"F32": DType.FLOAT32, "F16": DType.FLOAT16, "BF16": DType.BFLOAT16}
PLAIN_TYPES: Final = frozenset(_PLAIN)
GGUF_TYPES: Final = PLAIN_TYPES | {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}


def load(file: TensorFile, tensor: StoredTensor) -> torch.Tensor:
    """The tensor in its shape: a view of the mapping for plain types, else a new float32 tensor."""
    if tensor.type not in _PLAIN:
        raw = np.frombuffer(file.data, np.uint8, tensor.size, tensor.offset)
        return torch.from_numpy(_dequantised(raw, tensor.type)).view(tensor.shape)
    dtype = _PLAIN[tensor.type]
    stored = torch.frombuffer(file.data, dtype=torch.uint8, count=tensor.size, offset=tensor.offset)
    aligned = stored if stored.data_ptr() % dtype.itemsize == 0 else stored.clone()
    return aligned.view(dtype).view(tensor.shape)


def _dequantised(raw: _Bytes, kind: str) -> _Floats:
    """Decoded slice by slice. In numpy: torch's thread teams cost more than they give when other threads compute."""
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = raw.reshape(-1, block_bytes)
    out = np.empty((len(blocks), block), np.float32)
    step = _SLICE_ELEMENTS // block
    with np.errstate(all="ignore"):  # a scale may be infinite in a damaged file; that is the file's affair
        for start in range(0, len(blocks), step):
            part, into = blocks[start : start + step], out[start : start + step]
            if kind in _KERNELS:
                _KERNELS[kind](part, into)
            else:
                into[:] = dequantize(part, GGMLQuantizationType[kind]).reshape(-1, block)
    return out


def _half(blocks: _Bytes, start: int) -> _Floats:
    """The float16 at byte `start` of each block, as float32 `[blocks, 1]`."""
    return blocks[:, start : start + 2].copy().view("<f2").astype(np.float32)


def _nibbles(packed: _Bytes, out: _Floats) -> None:
    """Low halves of a block's bytes are its first elements, high halves its last."""
    packed = np.ascontiguousarray(packed)
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4


def _q4_0(blocks: _Bytes, out: _Floats) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= 8
    out *= _half(blocks, 0)


def _q4_1(blocks: _Bytes, out: _Floats) -> None:
    _nibbles(blocks[:, 4:], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q8_0(blocks: _Bytes, out: _Floats) -> None:
    out[:] = blocks[:, 2:].view(np.int8)
    out *= _half(blocks, 0)


_KERNELS: Final[dict[str, Callable[[_Bytes, _Floats], None]]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}

"""Names of the safetensors element types, their sizes, and the torch dtypes they stand for."""

from __future__ import annotations

import torch

__all__ = ["ELEMENT_BITS", "FLOAT_NAMES", "name_of", "nbytes", "parse_dtype", "torch_dtype"]

# In the order of the safetensors crate's `Dtype` enum: its writer sorts tensors by this order, largest first.
_TABLE = (
    ("BOOL", 8, "bool"),
    ("F4", 4, ""),
    ("F6_E2M3", 6, ""),
    ("F6_E3M2", 6, ""),
    ("U8", 8, "uint8"),
    ("I8", 8, "int8"),
    ("F8_E5M2", 8, "float8_e5m2"),
    ("F8_E4M3", 8, "float8_e4m3fn"),
    ("F8_E8M0", 8, "float8_e8m0fnu"),
    ("F8_E4M3FNUZ", 8, "float8_e4m3fnuz"),
    ("F8_E5M2FNUZ", 8, "float8_e5m2fnuz"),
    ("I16", 16, "int16"),
    ("U16", 16, "uint16"),
    ("F16", 16, "float16"),
    ("BF16", 16, "bfloat16"),
    ("I32", 32, "int32"),
    ("U32", 32, "uint32"),
    ("F32", 32, "float32"),
    ("C64", 64, "complex64"),
    ("F64", 64, "float64"),
    ("I64", 64, "int64"),
    ("U64", 64, "uint64"),
)

ELEMENT_BITS: dict[str, int] = {name: bits for name, bits, _ in _TABLE}
RANK: dict[str, int] = {name: rank for rank, (name, _, _) in enumerate(_TABLE)}
FLOAT_NAMES = frozenset({"F64", "F32", "F16", "BF16"})
_TORCH_NAMES = {name: attribute for name, _, attribute in _TABLE}
_NAMES = {attribute: name for name, _, attribute in _TABLE if attribute}
_SPELLINGS = {"fp32": "float32", "fp16": "float16", "half": "float16", "float": "float32", "bf16": "bfloat16"}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a safetensors type name; looked up on use, because an old torch may lack it.

    Raises ValueError when there is none, with what to do about it.
    """
    attribute = _TORCH_NAMES.get(name)
    if attribute is None:
        raise ValueError(f"unknown element type {name!r}; known: {', '.join(_TORCH_NAMES)}")
    dtype = vars(torch).get(attribute) if attribute else None
    if dtype is None:
        raise ValueError(f"torch {torch.__version__} has no dtype for {name}; install a newer torch to read it")
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """The safetensors name of a torch dtype: ``torch.bfloat16`` -> ``"BF16"``."""
    attribute = str(dtype).removeprefix("torch.")
    if attribute not in _NAMES:
        raise ValueError(f"safetensors can't hold {dtype}")
    return _NAMES[attribute]


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A user's word for a dtype (``"bfloat16"``, ``"bf16"``, ``"BF16"``, ``torch.bfloat16``) as a torch dtype."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype in _TORCH_NAMES:
        return torch_dtype(dtype)
    attribute = dtype.lower().removeprefix("torch.")
    attribute = _SPELLINGS.get(attribute, attribute)
    if attribute not in _NAMES:
        raise ValueError(f"unknown dtype {dtype!r}; use bfloat16, float16 or float32")
    return torch_dtype(_NAMES[attribute])


def nbytes(name: str, shape: tuple[int, ...]) -> int:
    """Bytes that a tensor of this type and shape takes in a file. Raises ValueError for half a byte."""
    bits = ELEMENT_BITS[name]
    for size in shape:
        bits *= size
    if bits % 8:
        raise ValueError(f"{name} of shape {list(shape)} does not fill whole bytes")
    return bits // 8

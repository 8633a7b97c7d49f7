"""The header of a safetensors file: 8 bytes of length, then JSON that says where each tensor lies. Pure.

Headers come from files and from the pool, so every number is checked before it is used. Source of the format:
the README of huggingface/safetensors.
"""

from __future__ import annotations

import json
from math import prod
from typing import Any, Final, NamedTuple, TypeGuard

LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 100_000_000
MAX_DIMENSIONS: Final = 16
ITEM_BYTES: Final = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""By name of the dtype."""


class TensorPlace(NamedTuple):
    """A tensor; its bytes are [start, end) of the data, which begins after the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class BadHeader(ValueError):
    """A safetensors file that cannot be one. Its text says why."""


def header_bytes(first: bytes, file_bytes: int) -> int:
    """Length of the JSON, from the file's first 8 bytes. Raises BadHeader."""
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if len(first) < LENGTH_BYTES or not 2 <= length <= min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
        raise BadHeader(f"its header would have {length:,} bytes")
    return length


def parse_header(text: bytes, data_bytes: int) -> list[TensorPlace]:
    """The tensors in the order of their bytes. `data_bytes`: of the file after it. Raises BadHeader."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadHeader("its header is no JSON") from error
    if not isinstance(found, dict):
        raise BadHeader("its header is no object")
    found.pop("__metadata__", None)
    tensors = sorted((_place(name, said) for name, said in found.items()), key=lambda place: place[3:])
    end = 0
    for tensor in tensors:
        if tensor.start < end:
            raise BadHeader(f"tensor {tensor.name!r} overlaps another one")
        end = tensor.end
    if end > data_bytes:
        raise BadHeader(f"its tensors need {end:,} bytes, and it has {data_bytes:,}")
    return tensors


def _place(name: str, said: Any) -> TensorPlace:
    if not isinstance(said, dict):
        raise BadHeader(f"tensor {name!r} is no object")
    dtype, shape, offsets = said.get("dtype"), said.get("shape"), said.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise BadHeader(f"tensor {name!r} has the unknown dtype {dtype!r}")
    if not (_counts(shape) and len(shape) <= MAX_DIMENSIONS and _counts(offsets) and len(offsets) == 2):
        raise BadHeader(f"tensor {name!r} has an impossible shape or place")
    start, end = offsets
    if end - start != prod(shape) * ITEM_BYTES[dtype]:
        raise BadHeader(f"tensor {name!r} has not as many bytes as its shape")
    return TensorPlace(name, dtype, tuple(shape), start, end)


def _counts(said: Any) -> TypeGuard[list[int]]:
    """A list of sizes that 64 bits hold."""
    return isinstance(said, list) and all(type(one) is int and 0 <= one < 1 << 62 for one in said)

"""Blocks of docs/internals: messages of the pool protocol, rows of the slot table, entries of a segment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from docs.generate.markdown import table
from docs.generate.product import (
    PROTOCOL_VERSION,
    REPLIES,
    REQUESTS,
    ROW_DTYPE,
    SEGMENT_ENTRY_DTYPE,
    SEGMENT_VERSION,
    TABLE_VERSION,
)


def messages() -> str:
    """The protocol's version, and all messages by number."""
    parts = [f"Version of the protocol: {PROTOCOL_VERSION}.\n"]
    for title, kinds in (("Requests", REQUESTS), ("Replies", REPLIES)):
        parts.append(f"{title}:\n\n{_numbered(kinds)}")
    return "\n".join(parts)


def slot_rows() -> str:
    """The table's version, and the fields of a row."""
    return f"Version of the table: {TABLE_VERSION}.\n\n{_fields(ROW_DTYPE)}"


def segment_entries() -> str:
    """The format's version, and the fields of an entry of the index footer."""
    return f"Version of the format: {SEGMENT_VERSION}.\n\n{_fields(SEGMENT_ENTRY_DTYPE)}"


def _numbered(kinds: Iterable[Any]) -> str:
    rows = sorted((int(kind.__struct_config__.tag), kind) for kind in kinds)
    return table(
        ("number", "message", "fields"),
        (
            (str(number), f"`{kind.__name__}`", ", ".join(f"`{field}`" for field in kind.__struct_fields__))
            for number, kind in rows
        ),
    )


def _fields(dtype: np.dtype[Any]) -> str:
    rows = []
    for name in dtype.names or ():
        assert dtype.fields is not None  # as it has names
        kind, offset = dtype.fields[name][:2]
        rows.append((f"`{name}`", str(offset), str(kind.itemsize), _kind(kind)))
    size = f"A row has {dtype.itemsize} bytes, numbers are little-endian."
    return f"{size}\n\n{table(('field', 'offset', 'bytes', 'type'), rows)}"


def _kind(dtype: npt.DTypeLike) -> str:
    found = np.dtype(dtype)
    base, shape = found.subdtype or (found, ())
    words = {"u": "unsigned integer", "f": "float", "V": "bytes"}[base.kind]
    many = f", {shape[0]} of them" if shape else ""
    return words if base.kind == "V" else f"{8 * base.itemsize}-bit {words}{many}"

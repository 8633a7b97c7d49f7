"""Messages of the protocol with odd values in every field: digits, long and exotic text, numbers at the ends
of their ranges.
"""

from __future__ import annotations

import random
import types
import typing
from typing import Any, get_args, get_origin

from hypothesis import strategies as st

from pdserve.kvpool.protocol.cluster_messages import NamespaceSettings
from pdserve.security.tokens import digest
from tests.support.kvpool.node_model import KIB, key

KEYS = [key(n) for n in (*range(12), 20, 21, 22)]
INTS = [0, 1, 2, 3, 7, 63, 64, -1, -2, 255, 4 * KIB, 64 * KIB, 1 << 31, 1 << 32, 1 << 40]
INTS += [(1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63)]
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, float("inf"), float("-inf"), float("nan")]
TEXTS = ["", "a", "b", "c", "9" * 25, "9" * 5000, "float" + "9" * 5000, "int0", "float16", "٣٣", "²", "-1"]
TEXTS += ["x" * 600, "x" * 70_000, "a\nb", "a b ", "..", "\0", "\u202e", "🂡", "NaN", "inf", "lru", "arc"]
TEXTS += ["ttl", "keep", "dram", "ssd", "dram+ssd", "set", digest("t"), "0x10", "1e5", "١" * 5000]
FIELDS = ["dtype", "kv_dtype", "page_size", "parts"]
NUMBERS = [
    "64",
    "9" * 25,
    "9" * 5000,
    "float" + "9" * 5000,
    "int" + "9" * 20,
    "int0",
    "٣٣",
    "²",
    "-1",
    "auto",
]
LENGTHS = [1, 4 * KIB, 4 * KIB, 4 * KIB, 8 * KIB, 64 * KIB, 1 << 40, 0, -1]
SETTINGS = [name for name in NamespaceSettings.__struct_fields__ if not name.endswith("_token")]


def value_of(annotation: Any, name: str, random_: random.Random) -> Any:
    """A value of a field's type, an odd one more often than not."""
    pick = random_.choice
    if name == "geometry" and random_.random() < 0.8:
        return {pick(FIELDS): pick(NUMBERS)}
    if name == "name" and random_.random() < 0.5:
        return f"n{random_.randint(0, 1000)}"
    if name in ("segment_bytes", "lengths"):
        return [pick(LENGTHS) for _ in range(random_.randint(0, 2))]
    if annotation is bytes:
        return pick(KEYS) if random_.random() < 0.9 else random_.randbytes(random_.randint(0, 40))
    if annotation is NamespaceSettings and random_.random() < 0.8:  # one odd value, or all are refused
        odd = pick(SETTINGS)
        hint = typing.get_type_hints(NamespaceSettings)[odd]
        return NamespaceSettings(**{odd: value_of(hint, odd, random_)})
    plain = {int: INTS, str: TEXTS, bool: [False, True], float: FLOATS, type(None): [None]}
    if annotation in plain:
        return pick(plain[annotation])
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is list:
        return [value_of(arguments[0], "", random_) for _ in range(random_.randint(0, 4))]
    if origin is dict:
        return {pick(TEXTS): value_of(arguments[1], "", random_) for _ in range(random_.randint(0, 3))}
    if origin is tuple:
        return tuple(value_of(one, "", random_) for one in arguments)
    if origin is typing.Literal:
        return pick(arguments)
    if origin in (typing.Union, types.UnionType):
        return value_of(pick(arguments), name, random_)
    return message_of(annotation, random_)


HINTS: dict[type, dict[str, Any]] = {}


def message_of(kind: type[Any], random_: random.Random) -> Any:
    hints = HINTS.get(kind) or HINTS.setdefault(kind, typing.get_type_hints(kind))
    defaults = dict(zip(reversed(kind.__struct_fields__), reversed(kind.__struct_defaults__), strict=False))
    fields = {}
    for name in kind.__struct_fields__:
        if name in defaults and random_.random() < 0.6:
            continue
        fields[name] = value_of(hints[name], name, random_)
    return kind(**fields)


def odd(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Such messages for Hypothesis."""
    return st.integers(0, 1 << 32).map(lambda seed: message_of(kind, random.Random(seed)))

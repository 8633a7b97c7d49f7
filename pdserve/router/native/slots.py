"""Objects with many slots, most of which nearly always have the same values at first: a copy of one that has
them costs a tenth of a constructor that writes each. By the compiled module or in Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

T = TypeVar("T")


def plain_copied(of: T) -> T:
    """A new object of the same class with the same values in its slots, mutable ones too; those that have
    none have none there either. Its class and its bases have `__slots__`. Raises TypeError for others.
    """
    kind = type(of)
    made = object.__new__(kind)
    if hasattr(made, "__dict__"):
        raise TypeError(f"{kind.__name__} has more than slots")
    for base in kind.__mro__[:-1]:
        for name in base.__slots__:  # type: ignore[attr-defined]
            if hasattr(of, name):
                setattr(made, name, getattr(of, name))
    return made


if TYPE_CHECKING:
    copied = plain_copied
else:
    try:
        from pdserve.router.native._native import copied
    except ImportError:
        copied = plain_copied

"""What becomes of a fault: it is done, left out or fails, and each leaves a record."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.chaos.field import Field
from benchmarks.chaos.plan import DISTURBING, Fault
from benchmarks.chaos.records import Acted, Became
from benchmarks.stores import BenchError
from pdserve.errors import PoolError, PoolTimeout, PoolUnavailable


class LeftOut(BenchError):
    """The fault cannot be done here and now, or not to its end; what it began is repaired."""


@contextmanager
def recorded(field: Field, fault: Fault) -> Iterator[None]:
    """Note what becomes of the fault inside. Errors of the pool, the bench and the system end here."""
    at_s = time.monotonic()
    became: Became = "failed"
    why = "it was broken off"
    try:
        yield
        became, why = "done", ""
    except LeftOut as error:
        became, why = "left out", str(error)
    except (PoolError, BenchError, OSError) as error:
        # a fault that disturbs has its node to itself (a visit, which asks all, is left out where it finds
        # one away); the others may find theirs away through one
        away = isinstance(error, PoolUnavailable | PoolTimeout) and fault.kind not in DISTURBING
        became, why = "left out" if away else "failed", str(error)
    finally:
        field.note(Acted(at_s, fault.kind, f"node{fault.node}", became, why))

"""Copies that go past the CPU's cache ("non-temporal" stores). Pure.

An ordinary copy moves three bytes over the memory bus for each byte copied: the CPU fetches each line of the
target before it overwrites it. Non-temporal stores do not fetch. glibc's memcpy, and so NumPy's copies, uses
them above a size that GLIBC_TUNABLES sets when a process starts (glibc manual, "Hardware Capability
Tunables"). The default is near the size of the last cache.

Measured on one EPYC core, pages of 8 MiB: a write with its checksum 1.2 times as fast, a read 1.05 times. The
process that moves pages does not read them again, so nothing misses them in its cache. C libraries other than
glibc ignore the variable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

VARIABLE: Final = "GLIBC_TUNABLES"
TUNABLE: Final = "glibc.cpu.x86_non_temporal_threshold"
LEAST_BYTES: Final = 32 * 1024


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process whose copies shall stream. What the user has set stays."""
    tunables = base.get(VARIABLE, "")
    if TUNABLE in tunables:
        return dict(base)
    return {**base, VARIABLE: ":".join(filter(None, [tunables, f"{TUNABLE}={LEAST_BYTES:#x}"]))}


def are_on(environ: Mapping[str, str]) -> bool:
    """Whether copies of pages stream in the process with this environment."""
    return TUNABLE in environ.get(VARIABLE, "")

"""Which namespaces a node has after a start: what memory says, else what the tiers say. Pure.

The list of namespaces is kept twice: with the memory, and by the first tier, for a start after a reboot. When
memory has none, the newest of the tiers' lists counts. Pages of a tier count when their space is in the list.

The list with the memory may be the older one: the memory was full when it was to be saved. It still counts,
since the rows of the slot table are its, but pages in tiers count only where the tier's list agrees.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdserve.errors import FrameError
from pdserve.kvpool.namespaces.catalog import Namespaces


class TakenOver(msgspec.Struct, frozen=True):
    """`problems`: in words."""

    namespaces: Namespaces
    problems: list[str]


def take_over(memory: Namespaces, saved: Sequence[str | None]) -> TakenOver:
    """`memory`: as loaded at this start. `saved`: the list of each tier, None where it keeps none."""
    lists: list[Namespaces] = []
    problems = []
    for text in saved:
        try:
            lists.append(Namespaces() if text is None else Namespaces.load(text, memory.era))
        except FrameError as error:
            lists.append(Namespaces())
            problems.append(str(error))
    chosen = memory
    if memory.next_number == 1:  # it never had any: the memory is new
        chosen = max([memory, *lists], key=lambda found: (found.revision, found.next_number))
    newer = [found for found in lists if found.lineage == chosen.lineage and found.revision > chosen.revision]
    for namespace in list(chosen) if newer else ():
        if any(namespace.tier_space not in found.tier_spaces for found in newer):
            chosen.void_tiers(namespace.number)
    for found in [memory, *lists]:
        chosen.never_below(found.next_number, found.sequences_end)
    chosen.revision = max(found.revision for found in [chosen, *newer])
    return TakenOver(chosen, problems)

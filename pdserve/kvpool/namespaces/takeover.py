"""Which namespaces a node has after a start: what memory says, else what the tiers say. Pure.

Pages in a tier name their namespace by its number, so a page may be believed only where the list that was
saved with it gives that number to the same name, geometry, generation and space (another after each clear) as
the node's list does now. After a reboot memory says nothing; then the newest of the tiers' lists counts.
Numbers are never given out again, nor are sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.errors import FrameError
from pdserve.kvpool.namespaces.catalog import Namespace, Namespaces


def take_over(
    memory: Namespaces, saved: Sequence[str | None]
) -> tuple[Namespaces, list[set[int]], list[str]]:
    """The node's namespaces; for each tier the numbers that it may believe; what is wrong, in words."""
    lists: list[Namespaces] = []
    problems = []
    for text in saved:
        try:
            lists.append(Namespaces() if text is None else Namespaces.load(text))
        except FrameError as error:
            lists.append(Namespaces())
            problems.append(str(error))
    chosen = memory
    if memory.next_number == 1:  # it never had any: the memory is new
        chosen = max([memory, *lists], key=lambda found: found.next_number)
    believed = [
        {
            namespace.number
            for namespace in found
            if namespace.number in chosen and _identity(chosen[namespace.number]) == _identity(namespace)
        }
        for found in lists
    ]
    for found in [memory, *lists]:
        chosen.never_below(found.next_number, found.sequences_end)
    return chosen, believed, problems


def _identity(namespace: Namespace) -> tuple[str, dict[str, str], int, int]:
    return namespace.name, namespace.geometry, namespace.generation, namespace.space

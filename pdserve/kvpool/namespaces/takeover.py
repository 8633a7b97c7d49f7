"""Which namespaces a node has after a start: those saved in memory, otherwise those saved in a tier. Pure.

A page in a tier names its namespace by number. The page is valid only where the catalog saved in that tier
gives the number the same name, geometry, generation and space as the node's catalog now. After a reboot the
memory has no catalog; then the newest of the tiers' catalogs counts. Numbers and sequences are never given
out again.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.errors import FrameError
from pdserve.kvpool.namespaces.catalog import Namespace, Namespaces


def take_over(
    memory: Namespaces, saved: Sequence[str | None]
) -> tuple[Namespaces, list[set[int]], list[str]]:
    """The node's catalog; for each tier the numbers whose pages are valid; problems, for people."""
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

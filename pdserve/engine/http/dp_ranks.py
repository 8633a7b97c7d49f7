"""The data parallel rank of a request: the one whose memory has the conversation so far. Pure.

SGLang (0.5.23) gives requests to the ranks of `--dp-size` and of data parallel attention by their load. Each
rank has device and host memory of its own. So a conversation's next turn would rarely meet its pages there,
and would fetch them from the pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

REMEMBERED: Final = 65_536
"""Prompts whose ranks are known. 150 bytes each."""
MORE_REQUESTS: Final = 8
"""A rank may have so many requests more than twice those of the idlest, and still gets its conversations."""


class DpRanks:
    """Of one worker. A conversation is known by the last full page of each prompt, not by pages that many
    conversations begin with.
    """

    def __init__(self, ranks: int, remembered: int = REMEMBERED) -> None:
        self.count = ranks
        self._remembered = remembered
        self._rank_of: OrderedDict[bytes, int] = OrderedDict()  # by a prompt's last page
        self._last = -1

    def choose(self, chain: Sequence[bytes], running: Sequence[int]) -> int:
        """The rank of a prompt. `chain`: digests of its full pages. `running`: requests of each rank."""
        rank = self._home(chain)
        if rank is None or running[rank] > 2 * min(running) + MORE_REQUESTS:
            turns = range(self._last + 1, self._last + 1 + self.count)
            rank = self._last = min((turn % self.count for turn in turns), key=running.__getitem__)
        if chain:
            self._rank_of[chain[-1]] = rank
            self._rank_of.move_to_end(chain[-1])
            while len(self._rank_of) > self._remembered:
                self._rank_of.popitem(last=False)
        return rank

    def _home(self, chain: Sequence[bytes]) -> int | None:
        found = (self._rank_of.get(digest) for digest in reversed(chain))
        return next((rank for rank in found if rank is not None), None)

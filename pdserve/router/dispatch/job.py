"""What the dispatch of one call knows so far, and the load that it counts at a worker."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pdserve.router.dispatch.stream_marks import StreamMarks
from pdserve.router.fleet.registry import Fleet
from pdserve.router.fleet.worker import Worker
from pdserve.router.metrics.names import turn_label
from pdserve.router.metrics.stats import Stats
from pdserve.router.placement.planner import Plan

MAX_PROMPTS_TOLD = 1024
"""About 16 KiB of header."""


class Job:
    """One call on its way through the stages."""

    __slots__ = (
        "attempts",
        "cached_before",
        "is_prompt_counted",
        "marks",
        "pairs",
        "plan",
        "retry_until_s",
        "room_line",
        "suspects",
        "tried",
        "turns_line",
        "words",
    )

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.words = list(plan.reasons)
        """What decided, and what became of each stage: for the log and `x-pdserve-plan`."""
        self.marks: StreamMarks | None = None
        """Of the answer, if it is a stream of events."""
        self.attempts = 0
        """Decode workers that got the request and failed."""
        self.pairs = 0
        """Pairs of workers that failed it by the direct way."""
        self.tried: dict[str, int] = {}
        """Ids of the decode workers that failed, and what `Worker.probes_ready` was then."""
        self.retry_until_s = math.inf
        """Until then the call may wait for a worker. Set at the first failure."""
        self.suspects: list[Worker] = []
        """Workers that answered with an error that may be theirs or the request's: see `WorkerRequests`."""
        self.cached_before = b""
        """Header line for the decode worker: prompt tokens that were cached before this call."""
        self.room_line = b""
        """Header line for two workers that hand over directly (see `direct`); empty: none do now."""
        self.turns_line = b""
        """Header line for the decode worker: which earlier answers have recorded tokens in the prompt that
        was prefilled. Empty: it chooses itself."""
        self.is_prompt_counted = False

    def count_prompt(self, stats: Stats, tokens: Mapping[str, int]) -> None:
        """Count where the prompt's tokens came from; `tokens`: by tier, of `names.TIERS`. Only the first
        worker that says so counts: a later one finds what the first one computed.
        """
        if tokens and not self.is_prompt_counted:
            self.is_prompt_counted = True
            turn = turn_label(self.plan.turn)
            for tier, count in tokens.items():
                if count:
                    stats.turn_tokens[turn, tier] += count


class Claim:
    """A request's load at one worker, counted from the choice of the worker until `release`. Requests that
    arrive together see each other's claims, so they do not all choose the same worker.
    """

    __slots__ = ("_fleet", "_prefills", "_queued_tokens", "trial", "worker")

    def __init__(
        self, fleet: Fleet, worker: Worker, now_s: float, queued_tokens: int = 0, *, prefills: bool = False
    ) -> None:
        """`queued_tokens`: prompt tokens that the worker has to compute. `prefills`: another one answers."""
        self._fleet = fleet
        self._prefills = prefills
        if prefills:
            worker.prefilling += 1
        self._queued_tokens = queued_tokens
        self.worker = worker
        self.trial = fleet.on_selected(worker, now_s)
        """Number of the circuit's trial, see `Fleet.on_selected`."""
        if queued_tokens:
            fleet.on_queued(worker, queued_tokens)

    def on_computed(self) -> None:
        """The prompt waits no more. Can be called again."""
        if self._queued_tokens:
            self._fleet.on_queued(self.worker, -self._queued_tokens)
            self._queued_tokens = 0

    def release(self) -> None:
        """The worker has this request no more. Called once."""
        if self._queued_tokens:
            self.on_computed()
        if self._prefills:
            self.worker.prefilling -= 1
        self._fleet.on_released(self.worker)


def header_words(words: list[str]) -> bytes:
    """The plan's words as a header's value. Those of an added policy may hold anything."""
    said = ", ".join(words)
    if not said.isprintable():
        said = "".join(character if character.isprintable() else "?" for character in said)
    return said.encode("ascii", "replace")


def cached_before_header(cached_by_prompt: list[tuple[int, int, int]]) -> bytes:
    """The header line that tells a decode worker what each prompt had cached (device, host, pool) before an
    earlier worker computed it. Empty for more than MAX_PROMPTS_TOLD prompts.
    """
    if not 0 < len(cached_by_prompt) <= MAX_PROMPTS_TOLD:
        return b""
    return b"x-pdserve-prefilled: %b\r\n" % b",".join([b"%d/%d/%d" % each for each in cached_by_prompt])


def turns_header(turns: str) -> bytes:
    """The header line that has a decode worker use the tokens that a prefill worker used. `turns`: what that
    worker said, hexadecimal digits.
    """
    return b"x-pdserve-turns: %b\r\n" % (turns or "0").encode("ascii")

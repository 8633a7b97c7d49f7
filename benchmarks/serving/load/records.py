"""What is kept of each ask of a run. Pure."""

from __future__ import annotations

import msgspec


class Cached(msgspec.Struct, frozen=True):
    """Prompt tokens found cached: in all, and by place where the server tells (SGLang does). `ssd`: of those
    in storage, what the pool had below its memory (pdserve says).
    """

    total: int = 0
    device: int | None = None
    host: int | None = None
    storage: int | None = None
    ssd: int | None = None

    @property
    def dram(self) -> int | None:
        """In storage, and not on SSD as far as is known."""
        return None if self.storage is None else self.storage - (self.ssd or 0)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One ask and its answer. Times in s since the run began: `planned_s`, from which its latency counts;
    `due_s`, when the answer before it was there too; `sent_s`; the first token; the end. `asked_tokens`: the
    answer's planned length.
    """

    session: int
    turn: int
    planned_s: float
    due_s: float
    sent_s: float
    first_s: float | None
    done_s: float
    prompt_tokens: int
    output_tokens: int
    asked_tokens: int = 0
    reusable_tokens: int = 0
    cached: Cached = Cached()
    gaps_s: list[float] = []
    error: str = ""
    detail: str = ""
    server_timing: str = ""

    @property
    def first_token_s(self) -> float | None:
        return None if self.first_s is None or self.error else self.first_s - self.planned_s


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """`began_at_s`: by `time.time()`; `client_cpu`: of a core; `lags_s`: how late the client's event loop
    came to what was due.
    """

    model: str
    records: list[Record]
    wall_s: float
    began_at_s: float = 0.0
    client_cpu: float
    lags_s: list[float]
    open_loop: bool

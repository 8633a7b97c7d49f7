"""The rates of real workers, from a few requests to them while nothing else runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Final, TypeAlias

from benchmarks.serving.load.plan import Ask, Load, Span
from benchmarks.serving.load.records import Record
from benchmarks.simulate.rates import Rates
from benchmarks.stores import BenchError

REPEAT: Final = 3
SHORT_TOKENS: Final = 32
"""Prompts of the asks that measure steps."""
FIRST_SOURCE: Final = 1 << 52
"""Texts that no load has."""

Send: TypeAlias = Callable[[Load, int], Sequence[Record]]
"""Sends a load in the closed loop, with so many asks at a time. Raises BenchError."""


def measure_rates(send: Send, workers: int, prompt_tokens: int, together: int) -> Rates:
    """The rates of `workers` equal workers that compute their prompts themselves. `together`: requests of a
    worker that steps are measured with, at least 2. Raises BenchError where a request fails.
    """
    first_ms = _first_token_ms(send(_asks(1, prompt_tokens, 1), 1))
    prefill_ms_per_token = first_ms / prompt_tokens
    alone = _gap_ms(send(_asks(2, SHORT_TOKENS, 24, count=1), 1))
    many = _gap_ms(send(_asks(3, SHORT_TOKENS, 24, count=workers * together), workers * together))
    each = max(0.0, (many - alone) / (together - 1))
    return Rates(
        prefill_ms_per_token=prefill_ms_per_token,
        step_ms=max(0.0, alone - each),
        step_ms_per_request=each,
    )


def measure_hop(send: Send, rates: Rates, prompt_tokens: tuple[int, int]) -> tuple[float, float]:
    """(ms of a hand-over, ms for each token of its prompt) of a prefill and a decode worker, beyond the time
    to compute the prompt: from the first token of short prompts and of long ones. Raises BenchError.
    """
    short, long = prompt_tokens
    beyond = [
        max(0.0, _first_token_ms(send(_asks(4 + number, length, 1), 1)) - length * rates.prefill_ms_per_token)
        for number, length in enumerate((short, long))
    ]
    each = max(0.0, (beyond[1] - beyond[0]) / (long - short))
    return max(0.0, beyond[0] - short * each), each


def _asks(which: int, prompt_tokens: int, output_tokens: int, count: int = REPEAT) -> Load:
    """Asks with nothing in common. `which` tells those of several calls apart."""
    return Load(
        tuple(
            (
                Ask(
                    number,
                    1,
                    None,
                    (Span(FIRST_SOURCE + 1000 * which + number, prompt_tokens),),
                    output_tokens,
                    prompt_tokens,
                ),
            )
            for number in range(count)
        ),
        keeps_history=False,
        seed=which,
    )


def _first_token_ms(records: Sequence[Record]) -> float:
    return 1e3 * median(record.first_token_s for record in _good(records) if record.first_token_s is not None)


def _gap_ms(records: Sequence[Record]) -> float:
    """The median time between two tokens."""
    gaps_s = [gap_s for record in _good(records) for gap_s in record.gaps_s]
    if not gaps_s:
        raise BenchError("the time of a step cannot be measured: the answers had one token each")
    return 1e3 * median(gaps_s)


def _good(records: Sequence[Record]) -> Sequence[Record]:
    for record in records:
        if record.error:
            raise BenchError(f"the workers' rates cannot be measured: {record.error} {record.detail}")
    return records

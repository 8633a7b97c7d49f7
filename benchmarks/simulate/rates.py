"""How fast workers and the pool are: given, or measured by `python -m benchmarks weights`. Pure but for reading."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import msgspec

from benchmarks.serving.parts import Sample
from pdserve.errors import ConfigError


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """The rates of one worker, and of the way to the pool and back."""

    prefill_ms_per_token: float
    step_ms: float
    """A decode step for nobody; each request adds `step_ms_per_request`."""
    step_ms_per_request: float
    pool_ms_per_token: float = 0.0
    hop_ms: float = 0.0
    """What a hand-over takes, however long the prompt is: publishing, and the decode worker's first step."""


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """Rates as a user says them; None: not said."""

    prefill_tokens_s: float | None = None
    pool_tokens_s: float | None = None
    hop_ms: float | None = None
    step_ms: float | None = None
    step_ms_per_request: float | None = None


def combine(given: Given, samples: list[Sample]) -> Rates:
    """What is given goes over what was measured. Raises ConfigError where neither says a rate."""
    prefill_ms = None if given.prefill_tokens_s is None else 1e3 / given.prefill_tokens_s
    pool_ms = None if given.pool_tokens_s is None else 1e3 / given.pool_tokens_s
    if prefill_ms is None:
        prefill_ms = _median(
            one.prefill.get("compute", 0.0) / (one.prompt_tokens - one.cached_tokens)
            for one in samples
            if one.prompt_tokens > one.cached_tokens
        )
    if pool_ms is None:
        pool_ms = _median(one.decode.get("pull", 0.0) / one.prompt_tokens for one in samples)
    hop_ms = given.hop_ms
    if hop_ms is None:
        hop_ms = _median(
            one.router.get("publish", 0.0) + one.decode.get("queue", 0.0) + one.decode.get("compute", 0.0)
            for one in samples
        )
    if not prefill_ms:
        raise ConfigError("how fast is a prefill worker? Give --prefill-tokens-s, or --weights FILE")
    if given.step_ms is None or given.step_ms_per_request is None:
        raise ConfigError("how long is a decode step? Give --step-ms and --step-ms-per-request")
    return Rates(
        prefill_ms_per_token=prefill_ms,
        step_ms=given.step_ms,
        step_ms_per_request=given.step_ms_per_request,
        pool_ms_per_token=pool_ms or 0.0,
        hop_ms=hop_ms or 0.0,
    )


def read_samples(path: Path) -> list[Sample]:
    """The samples in the raw lines of `python -m benchmarks weights --json`; its other lines are passed over. Raises
    ConfigError.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--weights {path}: {error.strerror or error}") from error
    found = []
    for line in lines:
        try:
            found.append(msgspec.json.decode(line, type=Sample))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue  # the origin, or the medians of a turn
    if not found:
        raise ConfigError(f"--weights {path}: it has no sample of `python -m benchmarks weights --json`")
    return found


def _median(values: object) -> float | None:
    found = list(values)  # type: ignore[call-overload]
    return median(found) if found else None

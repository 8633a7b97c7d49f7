"""Which checks there are, in the order in which they run. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, Literal

import msgspec

Outcome = Literal["passed", "failed", "skipped"]
NO_GPU: Final = "not here: no GPU"
TOTAL_S: Final = 900.0


class Check(msgspec.Struct, frozen=True):
    """One check. `shows`: what is known once it has passed."""

    name: str
    shows: str
    needs_gpu: bool = True


class Group(msgspec.Struct, frozen=True):
    """Checks that one process does one after the other."""

    name: str
    limit_s: float
    checks: tuple[Check, ...]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one check: `says` the facts, the fault, or why it did not run."""

    check: str
    outcome: Outcome
    says: str = ""
    seconds: float = 0.0


GROUPS: Final = (
    Group(
        "machine",
        60.0,
        (
            Check("machine", "what this machine is", needs_gpu=False),
            Check("packages", "torch sees the GPU, and SGLang's kernels can be loaded"),
        ),
    ),
    Group(
        "sglang",
        240.0,
        (Check("self-check", "SGLang has every place that pdserve leans on; page hashes agree", False),),
    ),
    Group(
        "tensors",
        180.0,
        (
            Check("copies by kernel", "HiCache copies pages between GPU and host, page_first"),
            Check("copies direct", "the same, page_first_direct"),
            Check("copies by layer", "the same by kernel, layer_first"),
            Check("pool", "pages of the GPU come back from a pool node, moved by a page mover"),
        ),
    ),
    Group(
        "transports",
        120.0,
        (
            Check("UCX", "UCX moves host memory over this machine's network", needs_gpu=False),
            Check("UCX CUDA", "UCX moves memory of the GPU (cuda_copy)"),
            Check("UCX between processes", "the same by cuda_ipc"),
            Check("UCX GPU-direct", "the same by gdr_copy"),
        ),
    ),
    Group(
        "serving",
        480.0,
        (
            Check("plain", "SGLang alone serves the model"),
            Check("cold", "a worker with the pool answers as SGLang alone"),
            Check("device hit", "the same, from the GPU's cache"),
            Check("pool hit", "the same, from the pool"),
            Check("kill -9", "the same after the worker was killed, from the pool"),
            Check("disaggregated", "a prefill and a decode worker on this GPU answer as SGLang alone"),
            Check("prefill killed", "the same when the prefill worker is gone"),
            Check("bench multiturn", "conversations through the router"),
        ),
    ),
    Group("gaps", 240.0, (Check("bench gaps", "tokens of a stream while a page mover works beside it"),)),
)


def chosen(names: Sequence[str]) -> tuple[Group, ...]:
    """The groups of these names; none: all. Raises ValueError for a name that there is not."""
    if unknown := set(names) - {group.name for group in GROUPS}:
        listed = ", ".join(group.name for group in GROUPS)
        raise ValueError(f"no group of checks is named {', '.join(sorted(unknown))}: there are {listed}")
    return tuple(group for group in GROUPS if not names or group.name in names)


def not_here(group: Group) -> list[Result]:
    """What cannot be checked without a GPU."""
    return [Result(check=one.name, outcome="skipped", says=NO_GPU) for one in group.checks if one.needs_gpu]


def missing(group: Group, found: Collection[Result], why: str) -> Iterator[Result]:
    """Of the checks without a result the first is the one that broke off; the others did not run."""
    done = {result.check for result in found}
    outcome: Outcome = "failed"
    for check in group.checks:
        if check.name not in done:
            yield Result(check=check.name, outcome=outcome, says=why)
            outcome, why = "skipped", "an earlier check broke off"


def is_good(results: Iterable[Result]) -> bool:
    """Nothing failed."""
    return all(result.outcome != "failed" for result in results)

"""The measurements of a release, one after the other, in about half an hour on two cores, which they want to
themselves.

Raw lines go to `--out`, one file a measurement; a failure does not stop the others, is named at the end, and
makes the exit status 1. `--only` takes names of the table below; those marked * run only where they are
named.
"""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from benchmarks.lib.report import choices, fail_with, say, script
from tests.support.processes import stopped_cleanly

DOCUMENTS: Final = "long-input-short-output,scale=0.1,users=4,rounds=3"
COMPARE: Final = (
    "compare",
    "--concurrency",
    "1",
    "--repeat",
    "3",
    "--silence",
    "60",
    "--pool-capacity",
    "1GiB",
)
DEMO: Final = ("--model", "models/smollm2-135m")
SHAPES: Final = (
    "compare",
    *DEMO,
    "--sizes",
    "small",
    "--concurrency",
    "1",
    "--repeat",
    "3",
    "--silence",
    "60",
)
# float32: processors without bfloat16 instructions compute it almost three times as fast
FLAGS: Final = ("--", "--dtype", "float32")
RUNS: Final[dict[str, tuple[str, ...]]] = {
    "compare-small": (
        *(*COMPARE, "--sizes", "small", "--minutes", "14", "--load", DOCUMENTS),
        *("--load", "eic,scale=0.04,rounds=3", *FLAGS),
    ),
    "compare-large": (
        *(*COMPARE, "--sizes", "large", "--minutes", "7.7", "--load", DOCUMENTS),
        *("--load", "no-reuse,scale=0.1,rounds=2", "--against", "plain,file,agg,disagg", *FLAGS),
    ),
    # what others publish, a fortieth and a sixteenth as long
    "agents*": (
        *(*SHAPES, "--minutes", "14", "--load", "agents,scale=0.025,users=4,rounds=10"),
        *("--against", "plain-two,pool-two", *FLAGS),
    ),
    "rounds*": (
        *(*SHAPES, "--minutes", "14", "--load", "rounds,scale=0.0625,users=4"),
        *("--against", "plain,file,mooncake,agg,disagg", *FLAGS),
    ),
    "cliff*": (  # the pool has memory for six of ten rounds: 4,644 tokens of 46,080 bytes
        *(*SHAPES, "--minutes", "14", "--load", "rounds,scale=0.0625,users=6", "--pool-capacity", "204MiB"),
        *("--against", "plain,agg,agg-ssd", *FLAGS),
    ),
    "claude*": ("agents", *DEMO, *FLAGS),
    "ttft": ("ttft", "--tokens", "1024", "--repeat", "4", "--silence", "60", *FLAGS),
    "router": ("router", "--seconds", "0.8"),
    "pool": ("pool", "--path", "shm,ucx,tcp", "--seconds", "1"),
    "stall*": (
        "stall",
        "--tokens",
        "4000",
        "--output-tokens",
        "200",
        "--rounds",
        "4",
        "--silence",
        "60",
        *FLAGS,
    ),
    "compare-rate*": (
        *(*COMPARE, "--sizes", "small", "--minutes", "12", "--rate", "0.2", "--against", "file,agg,disagg"),
        *("--load", "long-input-short-output,scale=0.14,users=4,rounds=4", *FLAGS),
    ),
    "compare-vllm*": (
        *(*COMPARE, "--sizes", "small", "--minutes", "8", "--load", DOCUMENTS, "--against", "plain,agg,vllm"),
        *FLAGS,
    ),
    "weights*": ("weights",),
    "policies*": ("policies",),
}
NAMES: Final = tuple(name.removesuffix("*") for name in RUNS)


def main(
    out: Annotated[Path, typer.Option(help="Directory of the raw lines.")] = Path("benchmarks/results"),
    only: Annotated[str, typer.Option(help=f"Separated by commas: {', '.join(RUNS)}.")] = "",
) -> None:
    wanted = choices("only", only, NAMES) if only else [name for name in RUNS if not name.endswith("*")]
    out.mkdir(parents=True, exist_ok=True)
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    failed = []
    with stopped_cleanly():
        for name, words in zip(NAMES, RUNS.values(), strict=True):
            if name in wanted:
                say(f"== python -m benchmarks.{' '.join(words)}")
                script_name, *more = words
                command = [sys.executable, "-m", f"benchmarks.{script_name}", "--format", "json", *more]
                with (out / f"{name}-{today}.jsonl").open("wb") as lines:
                    if status := subprocess.run(command, stdout=lines, check=False).returncode:
                        failed.append(f"{name} (status {status})")
    fail_with(failed)


if __name__ == "__main__":
    script(main, __doc__)

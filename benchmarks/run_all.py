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

COMPARE: Final = "compare --concurrency 1 --repeat 3 --silence 60"
SHAPE: Final = f"{COMPARE} --model models/smollm2-135m --sizes small --minutes 14"
DOCUMENTS: Final = "--load long-input-short-output,scale=0.1,users=4,rounds=3"
# float32: processors without bfloat16 instructions compute it almost three times as fast
FLAGS: Final = "-- --dtype float32"
PLOT: Final = "--plot docs/pictures/NAME.png"
RUNS: Final[dict[str, str]] = {
    "compare-small": f"{COMPARE} --sizes small --minutes 14 --pool-capacity 1GiB {DOCUMENTS} "
    f"--load eic,scale=0.04,rounds=3 {FLAGS}",
    "compare-large": f"{COMPARE} --sizes large --minutes 7.7 --pool-capacity 1GiB {DOCUMENTS} "
    f"--load no-reuse,scale=0.1,rounds=2 --against plain,file,agg,disagg {FLAGS}",
    # what others publish, scaled down. An odd number of users: else each would have a worker in turn
    "agents*": f"{SHAPE} --load agents,scale=0.025,users=3,rounds=10 "
    f"--against plain-two,pool-two {PLOT} {FLAGS}",
    "rounds*": f"{SHAPE} --load rounds,scale=0.0625,users=3,rounds=11 --restart "
    f"--against plain,file,mooncake,agg,disagg {PLOT} {FLAGS}",
    # the pool has memory for six of ten rounds: 4,644 tokens of 46,080 bytes
    "cliff*": f"{SHAPE} --load rounds,scale=0.0625,users=6 --pool-capacity 204MiB "
    f"--against plain,agg,agg-ssd {PLOT} {FLAGS}",
    "none*": f"{SHAPE} --load no-reuse,scale=0.1,rounds=2 --against plain,file,agg,disagg {FLAGS}",
    "lmbench*": f"{SHAPE} {DOCUMENTS} --against plain,file,agg,disagg {FLAGS}",
    "claude*": f"claude --model models/smollm2-135m {FLAGS}",
    "spread": "spread",
    "ttft": f"ttft --tokens 1024 --repeat 4 --silence 60 {FLAGS}",
    "router": "router --seconds 0.8",
    "pool": "pool --path shm,ucx,tcp --seconds 1",
    "beside*": "beside",
    "compare-rate*": f"{COMPARE} --sizes small --minutes 12 --pool-capacity 1GiB --rate 0.2 "
    f"--load long-input-short-output,scale=0.14,users=4,rounds=4 --against file,agg,disagg {FLAGS}",
    "compare-vllm*": f"{COMPARE} --sizes small --minutes 8 --pool-capacity 1GiB {DOCUMENTS} "
    f"--against plain,agg,vllm {FLAGS}",
    "weights*": "weights",
    "policies*": "policies",
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
                say(f"== python -m benchmarks.{words}")
                script_name, *more = words.replace("NAME", name).split()
                command = [sys.executable, "-m", f"benchmarks.{script_name}", "--format", "json", *more]
                with (out / f"{name}-{today}.jsonl").open("wb") as lines:
                    if status := subprocess.run(command, stdout=lines, check=False).returncode:
                        failed.append(f"{name} (status {status})")
    fail_with(failed)


if __name__ == "__main__":
    script(main, __doc__)

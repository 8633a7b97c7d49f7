"""The time of a placement decision by policy and number of workers, against another checkout.

    python benchmarks/decisions.py [--against /path/to/other/checkout] [--rounds 7]

Two processes, one for each checkout, take turns; the least time of the rounds counts. A decision is the plan
of one request and the load that it counts at its workers, which is taken off again as at its end. Every
request is a turn of one of 512 sessions, and every fourth one the first of a new session.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

SIZES = (2, 8, 64, 256)
POLICIES = ("least_loaded", "affinity", "cache_aware", "load_aware")
REQUESTS = 2000


def main() -> None:
    """Print a row for each policy and size, in microseconds."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--against", type=Path, help="Another checkout to measure in turns.")
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.serve:
        serve()
        return
    here = Path(__file__).parent.parent
    checkouts = [here, *([given.against] if given.against else [])]
    processes = [started(path) for path in checkouts]
    print(f"{'policy':14}{'workers':>8}" + "".join(f"{str(path)[-24:]:>26}" for path in checkouts) + "  (us)")
    for policy in POLICIES:
        for size in SIZES:
            least = [float("inf")] * len(checkouts)
            for _ in range(given.rounds):
                for number, process in enumerate(processes):
                    least[number] = min(least[number], asked(process, policy, size))
            print(f"{policy:14}{size:8}" + "".join(f"{one:26.1f}" for one in least), flush=True)
    for process in processes:
        process.terminate()
        process.wait(10)


def started(checkout: Path) -> subprocess.Popen[str]:
    """The process that measures this checkout."""
    return subprocess.Popen(
        [sys.executable, str(Path(__file__)), "--serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(checkout)},
    )


def asked(process: subprocess.Popen[str], policy: str, size: int) -> float:
    """Microseconds for a decision, of one round."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([policy, size]) + "\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def serve() -> None:
    """Measure what is asked for on standard input, until its end."""
    for line in sys.stdin:
        policy, size = json.loads(line)
        print(measured(policy, size), flush=True)


def measured(policy: str, size: int) -> float:
    """Microseconds for a decision of this policy with so many workers, half of which prefill."""
    from pdserve.router.api.endpoints import ENDPOINTS
    from pdserve.router.config.router import RouterConfig
    from pdserve.router.fleet.registry import Fleet
    from pdserve.router.fleet.worker import Role, WorkerInfo
    from pdserve.router.placement.placer import Placer
    from pdserve.router.placement.planner import RequestFacts
    from pdserve.router.placement.prefix_index import Prefix
    from pdserve.router.sessions.keys import named

    config = RouterConfig(prefill_policy=policy, decode_policy=policy)
    fleet = Fleet(())
    for number in range(2 * size):
        role: Role = "prefill" if number % 2 else "decode"
        worker = fleet.members.join(f"http://10.0.{number // 250}.{number % 250}:30000", role)
        fleet.on_info(worker, WorkerInfo(role, "m"))
        fleet.on_probe_ready(worker)
        worker.pool_up = True
    placer = Placer(config, fleet)
    asked = []
    for number in range(REQUESTS):
        session = named(f"session-{number if number % 4 == 0 else number % 512}")
        prefix = Prefix(tuple(range(1000 * (number % 512), 1000 * (number % 512) + 16)))
        facts = RequestFacts(
            ENDPOINTS["/v1/chat/completions"],
            session=session,
            prompt_tokens_estimate=4200,
            turn=number,
            draw=number * 7919,
            prefix=prefix,
        )
        asked.append(facts)
    running: list[tuple[object, object]] = []
    spent_s = 0.0
    for number, facts in enumerate(asked):
        assert facts.session is not None
        now_s = number * 0.01
        last = placer.sessions.get(facts.session, now_s)
        begun_s = time.perf_counter()
        plan = placer.plan(facts, fleet.snapshot("m", now_s), last, now_s)
        fleet.on_selected(plan.decode, now_s)
        if plan.prefill is not None:
            fleet.on_selected(plan.prefill, now_s)
            fleet.on_queued(plan.prefill, 1000)
        if len(running) >= 2 * size:  # as many as two for each worker are under way
            decode, prefill = running.pop(number % len(running))
            fleet.on_released(decode)  # type: ignore[arg-type]
            if prefill is not None:
                fleet.on_queued(prefill, -1000)  # type: ignore[arg-type]
                fleet.on_released(prefill)  # type: ignore[arg-type]
        spent_s += time.perf_counter() - begun_s
        running.append((plan.decode, plan.prefill))
        begun = placer.on_answering(facts, plan, plan.decode, f"r{number}", now_s)
        placer.on_answered(facts, begun, 100, now_s)
    return 1e6 * spent_s / REQUESTS


if __name__ == "__main__":
    main()

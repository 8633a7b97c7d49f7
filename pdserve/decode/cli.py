"""`pdserve decode`, `pdserve agg` and `pdserve elastic`."""

from __future__ import annotations

from pdserve.engine.worker import RoleParts, Worker, WorkerConfig
from pdserve.settings.command_line import config_command


def run(config: WorkerConfig) -> int:
    """Serve as a decode worker until stopped; the exit status."""
    from pdserve.engine.launch import run_worker

    return run_worker(config, "decode", _parts)


def run_aggregated(config: WorkerConfig) -> int:
    """Serve as an aggregated worker until stopped; the exit status."""
    from pdserve.engine.launch import run_worker

    return run_worker(config, "agg", _aggregated_parts)


def run_elastic(config: WorkerConfig) -> int:
    """Serve as an elastic worker until stopped; the exit status. It has the routes of an aggregated one: the
    router decides for each request which of them it uses.
    """
    from pdserve.engine.launch import run_worker

    return run_worker(config, "elastic", _aggregated_parts)


def _parts(worker: Worker) -> RoleParts:
    # imports SGLang: only once the process is prepared for it
    from pdserve.decode.worker import parts

    return parts(worker)


def _aggregated_parts(worker: Worker) -> RoleParts:
    from pdserve.decode.worker import aggregated_parts

    return aggregated_parts(worker)


command = config_command(
    WorkerConfig,
    run,
    help="Run a decode worker: SGLang pulling pages from the pool and writing conversations back.",
    extra_args_key="engine.extra_args",
)
agg_command = config_command(
    WorkerConfig,
    run_aggregated,
    help="Run an aggregated worker: prefill and decode in one SGLang, pages shared through the pool.",
    extra_args_key="engine.extra_args",
)
elastic_command = config_command(
    WorkerConfig,
    run_elastic,
    help="Run an elastic worker: the router has it prefill or decode, as each request needs.",
    extra_args_key="engine.extra_args",
)

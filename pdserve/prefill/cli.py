"""`pdserve prefill`."""

from __future__ import annotations

from pdserve.engine.worker import RoleParts, Worker, WorkerConfig
from pdserve.settings.command_line import config_command


def run(config: WorkerConfig) -> int:
    """Serve until stopped; the exit status."""
    from pdserve.engine.launch import run_worker

    return run_worker(config, "prefill", _parts)


def _parts(worker: Worker) -> RoleParts:
    # imports SGLang: only once the process is prepared for it
    from pdserve.prefill.worker import parts

    return parts(worker)


command = config_command(
    WorkerConfig,
    run,
    help="Run a prefill worker: SGLang plus /pd/prefill, pages published to the pool.",
    extra_args_key="engine.extra_args",
)

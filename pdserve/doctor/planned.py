"""What `pdserve up` would do on a machine, as findings. Nothing is started."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pdserve.capacity.facts import Fit, Machine
from pdserve.capacity.gather import read_model
from pdserve.capacity.report import assignment, memory_table
from pdserve.doctor.facts import Finding
from pdserve.errors import ConfigError
from pdserve.up.config import read_cluster_file
from pdserve.up.fitting import fitted


def findings(file: Path, model: str | None, extra_args: Sequence[str], machine: Machine) -> Iterator[Finding]:
    """`file`: a cluster file. `model`, `extra_args`: as for `pdserve up`. Raises ConfigError for a file that
    cannot be read; what does not fit is a finding.
    """
    cluster = read_cluster_file(file, {"worker.engine.model_path": model}, {})
    try:
        _, fit = fitted(cluster, extra_args, machine, read_model)
    except ConfigError as error:
        yield Finding("plan", "fail", str(error))
        return
    if fit is None:
        says = "no worker is for a GPU here" if machine.gpus else "there is no GPU here"
        yield Finding("plan", "ok", f"{says}: workers run on the CPU, with the sizes of the file")
        return
    yield from _of(fit)


def _of(fit: Fit) -> Iterator[Finding]:
    for worker in fit.workers:
        yield Finding("GPUs", "ok", assignment(fit, worker))
    for row in memory_table(fit):
        yield Finding("host memory", "ok", row)
    for note in fit.notes:
        yield Finding("plan", note.level, f"{note.about}: {note.says}", note.change)

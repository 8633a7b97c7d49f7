"""The prefill role: its routes on SGLang's app."""

from __future__ import annotations

from pdserve.engine.worker import RoleParts, Worker
from pdserve.prefill.routes import Prefill


def parts(worker: Worker) -> RoleParts:
    """`/pd/prefill`."""
    prefill = Prefill(
        worker.engine,
        worker.pool,
        names=worker.names,
        publish_timeout_s=worker.config.publish_timeout_s,
        metrics=worker.metrics,
        hands_over=worker.config.handoff == "direct",
    )
    return RoleParts([prefill.router()])

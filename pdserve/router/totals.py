"""What all of a router's processes have together, read out of their metrics, for the admin API. Pure."""

from __future__ import annotations

from typing import Any

from pdserve.router.live import Samples, read_samples
from pdserve.router.workers import Worker


class Totals:
    """Of one moment."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    @classmethod
    def read(cls, exposition: str) -> Totals | None:
        """None where a process has not said what it has: that may be just what is asked for."""
        samples = read_samples(exposition)
        return None if samples["processes_silent", ()] else cls(samples)

    def in_flight(self, worker: Worker) -> int:
        """Requests at the worker."""
        return self._count("worker_requests_in_flight", worker=worker.id, role=worker.role)

    def tenant(self, name: str) -> dict[str, Any]:
        """What the tenant has and has used, of which the latter since the router's start."""
        requests, tokens = "tenant_requests_total", "tenant_tokens_total"
        return {
            "running": self._count("tenant_running", tenant=name),
            "waiting": self._count("tenant_waiting", tenant=name),
            "use": {
                "requests": self._count(requests, tenant=name, outcome="admitted"),
                "refused": self._count(requests, tenant=name, outcome="refused"),
                "prompt_tokens": self._count(tokens, tenant=name, kind="prompt"),
                "output_tokens": self._count(tokens, tenant=name, kind="output"),
            },
        }

    def _count(self, name: str, **labels: str) -> int:
        return int(self._samples.get((name, tuple(sorted(labels.items()))), 0))

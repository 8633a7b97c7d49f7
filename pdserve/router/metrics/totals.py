"""What all of a router's processes have together, read out of their metrics, for the admin API and its live
page. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from pdserve.router.metrics.names import PREFIX

Samples = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]
"""By name without the router's prefix, and labels."""


def read_samples(exposition: str) -> Samples:
    """The router's own of an exposition. Raises ValueError for what is none."""
    return {
        (sample.name.removeprefix(PREFIX), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if sample.name.startswith(PREFIX)
    }


class Totals:
    """Of one moment."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    @classmethod
    def read(cls, exposition: str) -> Totals | None:
        """As `of`, from an exposition. Raises ValueError for what is none."""
        return cls.of(read_samples(exposition))

    @classmethod
    def of(cls, samples: Samples) -> Totals | None:
        """None where a process has not said what it has: that may be just what is asked for."""
        return None if samples["processes_silent", ()] else cls(samples)

    def in_flight(self, worker_id: str, role: str) -> int:
        """Requests at the worker."""
        return self._count("worker_requests_in_flight", worker=worker_id, role=role)

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

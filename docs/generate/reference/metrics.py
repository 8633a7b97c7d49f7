"""docs/reference/metrics.md, from the definitions of the metrics."""

from __future__ import annotations

from docs.generate.markdown import table
from docs.generate.product import METRICS, Definition

HEAD = """# Metrics

All metrics are in Prometheus' text form. Metric names stay as they are: dashboards depend on them.

- Units are seconds, bytes, tokens and pages. Where the unit is empty, the metric is a count.
- Labels have few values. Text that a user sends is never a label value.
- [Observability](../observability.md) says how to collect and show them.
"""
PLACES = {
    "Router": "At `/metrics` of the router's port and of its admin port.",
    "Workers": "At `/metrics` of each worker's port, beside SGLang's own metrics (`sglang:*`).",
    "Pool nodes": "At `/metrics` of the address in the node's option `metrics`.",
}


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, definitions in METRICS.items():
        parts.append(f"## {title}\n\n{PLACES[title]}\n")
        parts.append(table(("metric", "type", "unit", "labels", "meaning"), map(_cells, definitions)))
    return "\n".join(parts)


def _cells(one: Definition) -> tuple[str, ...]:
    labels = ", ".join(f"`{label}`" for label in one.labels)
    return f"`{one.full_name}`", one.kind, one.unit, labels, one.says

"""OpenTelemetry traces of a process, where it was given a collector; elsewhere nothing of it is imported.

A request is written down as it goes, by plain time stamps, and told when it is over: of its spans only the
first is begun at once, because its id travels on in `traceparent` (W3C Trace Context), so that the spans of
workers are found below the router's. Telling is the work of OpenTelemetry's own thread, with a bounded queue:
a collector that is slow or away costs spans and no request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pdserve import __version__
from pdserve.errors import ConfigError
from pdserve.extras import how_to_install, is_installed, needed_by

EXPORT_TIMEOUT_S = 5.0
"""For one batch; at the end of the process, for what is left."""
PASSED_ON = (b"traceparent", b"tracestate")


class Tracing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Traces of requests for an OpenTelemetry collector. Needs `pip install 'pdserve[otel]'`."""

    endpoint: str = ""
    """OTLP over HTTP, such as `http://127.0.0.1:4318/v1/traces`; empty: no traces."""
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Share of traced requests among those without `traceparent`."""


class Trace:
    """One request in one process: its first span, and what it was made of. Times are of time.monotonic()."""

    def __init__(
        self, tracer: Any, span: Any, context: Any, headers: dict[bytes, bytes], now_s: float
    ) -> None:
        self._tracer = tracer
        self._span = span
        self._context = context
        self._wall_ns = time.time_ns() - int(now_s * 1e9)
        self.headers = headers
        """`traceparent` (and `tracestate`) for whoever works on the request next."""

    def part(self, name: str, start_s: float, end_s: float, **attributes: Any) -> None:
        """A span below the first one."""
        span = self._tracer.start_span(
            name, self._context, attributes=attributes, start_time=self._wall_ns + int(start_s * 1e9)
        )
        span.end(self._wall_ns + int(max(start_s, end_s) * 1e9))

    def end(self, now_s: float, error: str = "", **attributes: Any) -> None:
        """The request is over; `error`: what went wrong."""
        self._span.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if error:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(self._wall_ns + int(now_s * 1e9))


class Tracer:
    """Traces of this process, for `service`. Raises ConfigError where OpenTelemetry is not installed."""

    def __init__(self, config: Tracing, service: str, exporter: Any = None) -> None:
        """`exporter` takes the spans in place of the configured collector, at once (tests)."""
        with needed_by("tracing.endpoint", "otel"):
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(config.sample_ratio),
            resource=Resource.create({"service.name": service, "service.version": __version__}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            SimpleSpanProcessor(exporter)
            if exporter is not None
            else BatchSpanProcessor(OTLPSpanExporter(config.endpoint, timeout=EXPORT_TIMEOUT_S))
        )
        self._tracer = self._provider.get_tracer("pdserve", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._kind = trace.SpanKind.SERVER
        self._within = trace.set_span_in_context

    def begin(self, name: str, headers: Mapping[bytes, bytes], now_s: float, **attributes: Any) -> Trace:
        """A request has come, with these headers."""
        given = {word.decode(): headers[word].decode("latin-1") for word in PASSED_ON if word in headers}
        span = self._tracer.start_span(
            name, self._propagator.extract(given), kind=self._kind, attributes=attributes
        )
        context = self._within(span)
        passed: dict[str, str] = {}
        self._propagator.inject(passed, context)
        return Trace(
            self._tracer,
            span,
            context,
            {word.encode(): value.encode("latin-1") for word, value in passed.items()},
            now_s,
        )

    def close(self) -> None:
        """Tell what is left. Blocks for at most a few times EXPORT_TIMEOUT_S."""
        self._provider.shutdown()


def check_tracing(config: Tracing) -> None:
    """Raises ConfigError where OpenTelemetry is missing. Imports nothing and starts no thread, as a Tracer
    does.
    """
    if config.endpoint and not is_installed("otel"):
        raise ConfigError(f"tracing.endpoint needs OpenTelemetry: {how_to_install('otel')}")


def open_tracer(config: Tracing, service: str) -> Tracer | None:
    """A tracer where the configuration has a collector. Raises ConfigError."""
    return Tracer(config, service) if config.endpoint else None


current_trace: ContextVar[Trace | None] = ContextVar("pdserve_trace", default=None)
"""Of the request that the running task serves."""


@contextmanager
def timed(name: str, **attributes: Any) -> Iterator[None]:
    """The block becomes a span of the request that is served, if that is traced."""
    trace = current_trace.get()
    if trace is None:
        yield
        return
    start_s = time.monotonic()
    try:
        yield
    finally:
        trace.part(name, start_s, time.monotonic(), **attributes)

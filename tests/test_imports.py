"""The import rules of the design: imports run one way, pure modules do no I/O, SGLang stays behind the
engine.

Read from the source (ast), so imports inside functions and under TYPE_CHECKING count too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parent.parent / "pdserve"

IMPURE = (
    *("asyncio", "time", "random", "secrets", "threading", "subprocess"),
    *("os", "io", "pathlib", "tempfile", "shutil", "mmap", "socket", "selectors"),
    *("torch", "sglang", "ucxx", "httpx", "uvicorn", "fastapi", "starlette"),
)
"""What a pure module may not import. Randomness and time are inputs; paths are for those who open files."""

PURE = (
    "pdserve.errors",
    "pdserve.kvpool.protocol.messages",
    "pdserve.kvpool.protocol.cluster_messages",
    "pdserve.kvpool.protocol.base",
    "pdserve.kvpool.cluster.ring",
    "pdserve.kvpool.core.durable_answers",
    "pdserve.kvpool.cluster.state",
    "pdserve.kvpool.cluster.membership",
    "pdserve.kvpool.cluster.failure_detector",
    "pdserve.kvpool.cluster.rebalance_plan",
    "pdserve.kvpool.core.sharding.heat",
    "pdserve.kvpool.client.deadline",
    "pdserve.kvpool.core.sharding.held_replicas",
    "pdserve.kvpool.core.sharding.hot_pages",
    "pdserve.kvpool.core.sharding.ownership",
    "pdserve.kvpool.core.sharding.coordinator",
    "pdserve.kvpool.client.routing",
    "pdserve.kvpool.client.replica_hints",
    "pdserve.kvpool.core.store.slot_allocator",
    "pdserve.kvpool.core.store.index",
    "pdserve.kvpool.namespaces.catalog",
    "pdserve.kvpool.namespaces.validation",
    "pdserve.kvpool.namespaces.registry",
    "pdserve.kvpool.core.namespace_admin",
    "pdserve.kvpool.namespaces.access",
    "pdserve.kvpool.node.serving.fair_queue",
    "pdserve.kvpool.node.serving.request_split",
    "pdserve.sizes",
    "pdserve.kvpool.core.sessions",
    "pdserve.kvpool.core.page_listing",
    "pdserve.kvpool.node.metrics.families",
    "pdserve.kvpool.node.metrics.names",
    "pdserve.metric",
    "pdserve.router.metrics.names",
    "pdserve.router.request.timing",
    "pdserve.router.admin.live_frames",
    "pdserve.engine.metric_names",
    "pdserve.kvpool.core.events",
    "pdserve.kvpool.core.state",
    "pdserve.kvpool.core.store.page_store",
    "pdserve.kvpool.core.store.slab_recency",
    "pdserve.kvpool.core.store.victims",
    "pdserve.kvpool.core.store.lazy_free",
    "pdserve.kvpool.core.store.restore",
    "pdserve.kvpool.core.store.invariants",
    "pdserve.kvpool.core.store.table_scan",
    "pdserve.kvpool.core.reads",
    "pdserve.kvpool.core.startup_hold",
    "pdserve.kvpool.core.status_report",
    "pdserve.kvpool.core.writes",
    "pdserve.kvpool.core.waits",
    "pdserve.kvpool.protocol.slot_table",
    "pdserve.kvpool.policies*",
    "pdserve.kvpool.core.tiering.coordinator",
    "pdserve.kvpool.core.tiering.demotion",
    "pdserve.kvpool.core.tiering.promotion",
    "pdserve.kvpool.tiers.backoff",
    "pdserve.kvpool.namespaces.takeover",
    "pdserve.kvpool.tiers.ssd.segment_format",
    "pdserve.kvpool.tiers.ssd.compaction",
    "pdserve.bench.dice",
    "pdserve.bench.chaos.plan",
    "pdserve.bench.chaos.pages",
    "pdserve.bench.chaos.records",
    "pdserve.bench.chaos.judge.expectations",
    "pdserve.bench.chaos.judge.judge",
    "pdserve.bench.soak.drift",
    "pdserve.engine.drain",
    "pdserve.engine.http.cache_report",
    "pdserve.bench.serving.load.plan",
    "pdserve.bench.serving.load.words",
    "pdserve.bench.serving.load.records",
    "pdserve.bench.serving.figures",
    "pdserve.bench.serving.summary",
    "pdserve.bench.serving.report.goals",
    "pdserve.bench.serving.contenders",
    "pdserve.bench.serving.parts",
    "pdserve.router.placement.planner",
    "pdserve.router.placement.policies*",
    "pdserve.router.sessions.table",
    "pdserve.router.fleet.registry",
    "pdserve.router.fleet.changes",
    "pdserve.router.fleet.worker",
    "pdserve.router.dispatch.resume",
    "pdserve.router.dispatch.retry_budget",
    "pdserve.router.api.request_body",
    "pdserve.router.fleet.models",
    "pdserve.router.placement.cost",
    "pdserve.router.placement.request_facts",
    "pdserve.router.placement.placer",
    "pdserve.router.config.placement",
    "pdserve.router.placement.prefix_index",
    "pdserve.router.sessions.keys",
    "pdserve.router.tenants.registry",
    "pdserve.router.admission.queue",
    "pdserve.router.tenants.cache_salt",
    "pdserve.router.request.token_usage",
    "pdserve.up.restart",
    "pdserve.up.toml",
    "pdserve.up.scraping",
    "pdserve.doctor.facts",
    "pdserve.doctor.judge",
    "pdserve.engine.prompt_identity",
)
PURE_MAY = {"pdserve.up.toml": ("pathlib",)}

WORKERS = ("pdserve.prefill*", "pdserve.decode*")
ENGINE = ("pdserve.engine*",)
SGLANG_ADAPTER = ("pdserve.kvpool.hicache.backend*",)


class Rule(NamedTuple):
    """Modules like `who` may not import modules like `what`, but for `unless` (modules that may)."""

    who: tuple[str, ...]
    what: tuple[str, ...]
    why: str
    unless: tuple[str, ...] = ()


RULES = (
    Rule(
        (
            "pdserve.errors",
            "pdserve.pages",
            "pdserve.settings.config_file",
            "pdserve.settings.command_line",
            "pdserve.logs",
            "pdserve.tokens",
            "pdserve.tracing",
        ),
        ("pdserve.kvpool*", "pdserve.router*", *ENGINE, *WORKERS, "pdserve.up*", "pdserve.bench*"),
        "the foundation imports no part",
    ),
    Rule(
        ("pdserve.kvpool*",),
        (*ENGINE, *WORKERS, "pdserve.router*", "pdserve.up*", "pdserve.bench*"),
        "the pool knows no engine, worker or router",
    ),
    Rule(
        ("pdserve.kvpool.transports*", "pdserve.kvpool.tiers*"),
        (
            "pdserve.kvpool.node.node*",
            "pdserve.kvpool.client.client",
            "pdserve.kvpool.client.async_client",
            *SGLANG_ADAPTER,
        ),
        "transports and tiers are below node and client",
    ),
    Rule(
        ("pdserve.kvpool*",),
        SGLANG_ADAPTER,
        "only the engine uses the HiCache adapter",
        unless=SGLANG_ADAPTER,
    ),
    Rule(
        ENGINE,
        (*WORKERS, "pdserve.router*", "pdserve.up*", "pdserve.bench*"),
        "the engine is below the workers",
    ),
    Rule(
        ("pdserve.router*",),
        (*ENGINE, *WORKERS, "pdserve.up*", *SGLANG_ADAPTER, "torch", "sglang"),
        "the router reaches workers over HTTP and the pool through its client",
    ),
    Rule(
        ("pdserve.up*",),
        ("pdserve.router*", *ENGINE, *WORKERS, "pdserve.kvpool*", "torch", "sglang"),
        "the supervisor runs processes and knows none of them",
    ),
    Rule(
        ("pdserve*",),
        ("sglang",),
        "SGLang is imported in the engine and the HiCache adapter",
        unless=(*ENGINE, *SGLANG_ADAPTER, *WORKERS),
    ),
    Rule(
        ("pdserve*",),
        ("pdserve.cli", "pdserve.__main__"),
        "the command is on top",
        unless=("pdserve.__main__",),
    ),
)


def matches(module: str, patterns: tuple[str, ...]) -> bool:
    """`a.b` matches itself and its submodules; `a.b*` also `a.bc`."""
    return any(fnmatchcase(module, pattern) or module.startswith(f"{pattern}.") for pattern in patterns)


def imported(source: str, module: str, *, is_package: bool = False) -> Iterator[tuple[str, int]]:
    """Modules that a source imports, each with its line. `from a import b` counts as `a` and as `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                home = parts[: len(parts) - node.level + is_package]
                base = ".".join([*home, base] if base else home)
            yield base, node.lineno
            for name in node.names:
                yield f"{base}.{name.name}", node.lineno


def violations(sources: Mapping[str, str]) -> list[str]:
    """Every broken rule in `sources` (module name to text), one line each."""
    found = set()
    for module, source in sources.items():
        for target, line in imported(source, module):
            top = target.split(".")[0]
            if matches(module, PURE) and top in IMPURE and top not in PURE_MAY.get(module, ()):
                found.add(f"{module}:{line} imports {top}: a pure module does no I/O and reads no clock")
            for rule in RULES:
                if (
                    matches(module, rule.who)
                    and matches(target, rule.what)
                    and not matches(module, rule.unless)
                ):
                    found.add(f"{module}:{line} imports {target}: {rule.why}")
    return sorted(found)


def package_sources() -> dict[str, str]:
    sources = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return sources


def test_imports_run_one_way() -> None:
    assert violations(package_sources()) == []


def test_no_relative_imports() -> None:
    relative = [
        f"{module}:{node.lineno}"
        for module, source in package_sources().items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        (
            "pdserve.kvpool.cluster.ring",
            "import time",
            "pdserve.kvpool.cluster.ring:1 imports time: a pure module",
        ),
        (
            "pdserve.kvpool.policies.lru",
            "from os import path",
            "pdserve.kvpool.policies.lru:1 imports os: a pure",
        ),
        (
            "pdserve.kvpool.core.state",
            "def f():\n    import torch",
            "pdserve.kvpool.core.state:2 imports torch: a pure",
        ),
        ("pdserve.router.app.router", "from pdserve.engine import x", "imports pdserve.engine: the router"),
        ("pdserve.router.app.router", "import sglang.srt", "imports sglang.srt: the router"),
        (
            "pdserve.kvpool.node.node",
            "from pdserve.kvpool.hicache.backend import B",
            "only the engine uses the HiCache adapter",
        ),
        (
            "pdserve.kvpool.transports.shm",
            "from pdserve.kvpool import client",
            "transports and tiers are below",
        ),
        ("pdserve.kvpool.client.client", "from pdserve import decode", "the pool knows no engine"),
        ("pdserve.engine.start", "import pdserve.prefill.worker", "the engine is below the workers"),
        ("pdserve.bench.cli", "import sglang", "SGLang is imported in the engine"),
        ("pdserve.pages", "from pdserve.kvpool import messages", "the foundation imports no part"),
        ("pdserve.settings.config_file", "from . import cli", "the command is on top"),
    ],
)
def test_the_check_finds_a_broken_rule(module: str, source: str, expected: str) -> None:
    found = violations({module: source})
    assert found
    assert any(expected in line for line in found)


def test_the_check_accepts_what_is_allowed() -> None:
    allowed = {
        "pdserve.kvpool.hicache.backend": "import sglang, torch\nfrom pdserve.kvpool.client.client import C",
        "pdserve.engine.start": "import sglang\nfrom pdserve.kvpool.hicache.backend import B",
        "pdserve.decode.worker": "from pdserve.engine.start import run\nimport asyncio",
        "pdserve.router.app.router": "from pdserve.kvpool.client.client import C\nimport asyncio, time",
        "pdserve.kvpool.core.state": "from pdserve.kvpool.core.store.index import I\nimport dataclasses",
    }
    assert violations(allowed) == []

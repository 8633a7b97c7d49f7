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
    "pdserve.kvpool.messages",
    "pdserve.kvpool.cluster_messages",
    "pdserve.kvpool.wire",
    "pdserve.kvpool.ring",
    "pdserve.kvpool.forgetting",
    "pdserve.kvpool.cluster_state",
    "pdserve.kvpool.membership",
    "pdserve.kvpool.detector",
    "pdserve.kvpool.migration",
    "pdserve.kvpool.heat",
    "pdserve.kvpool.deadline",
    "pdserve.kvpool.replicas",
    "pdserve.kvpool.replication",
    "pdserve.kvpool.ownership",
    "pdserve.kvpool.sharing",
    "pdserve.kvpool.views",
    "pdserve.kvpool.hints",
    "pdserve.kvpool.slots",
    "pdserve.kvpool.index",
    "pdserve.kvpool.namespaces",
    "pdserve.kvpool.namespace_settings",
    "pdserve.kvpool.registry",
    "pdserve.kvpool.administration",
    "pdserve.kvpool.access",
    "pdserve.kvpool.fairness",
    "pdserve.kvpool.parts",
    "pdserve.kvpool.sizes",
    "pdserve.kvpool.leases",
    "pdserve.kvpool.listing",
    "pdserve.kvpool.metrics",
    "pdserve.kvpool.metric_names",
    "pdserve.metric",
    "pdserve.router.metric_names",
    "pdserve.router.first_token",
    "pdserve.router.live",
    "pdserve.engine.metric_names",
    "pdserve.kvpool.events",
    "pdserve.kvpool.state",
    "pdserve.kvpool.store",
    "pdserve.kvpool.slabs",
    "pdserve.kvpool.ordering",
    "pdserve.kvpool.sweeping",
    "pdserve.kvpool.restoring",
    "pdserve.kvpool.conservation",
    "pdserve.kvpool.recovery",
    "pdserve.kvpool.reading",
    "pdserve.kvpool.early",
    "pdserve.kvpool.reporting",
    "pdserve.kvpool.writing",
    "pdserve.kvpool.waits",
    "pdserve.kvpool.table",
    "pdserve.kvpool.policies*",
    "pdserve.kvpool.below",
    "pdserve.kvpool.tiering",
    "pdserve.kvpool.promotion",
    "pdserve.kvpool.tiers.backoff",
    "pdserve.kvpool.tiers.names",
    "pdserve.kvpool.tiers.segment_format",
    "pdserve.kvpool.tiers.segment_plan",
    "pdserve.bench.chaos.dice",
    "pdserve.bench.chaos.plan",
    "pdserve.bench.chaos.pages",
    "pdserve.bench.chaos.records",
    "pdserve.bench.chaos.kept",
    "pdserve.bench.chaos.judge",
    "pdserve.bench.soak.drift",
    "pdserve.engine.drain",
    "pdserve.engine.reuse",
    "pdserve.bench.serving.load",
    "pdserve.bench.serving.words",
    "pdserve.bench.serving.records",
    "pdserve.bench.serving.figures",
    "pdserve.bench.serving.summary",
    "pdserve.bench.serving.goals",
    "pdserve.bench.serving.contenders",
    "pdserve.bench.serving.parts",
    "pdserve.router.plan",
    "pdserve.router.policies*",
    "pdserve.router.sessions",
    "pdserve.router.fleet",
    "pdserve.router.changes",
    "pdserve.router.workers",
    "pdserve.router.trail",
    "pdserve.router.budget",
    "pdserve.router.schema",
    "pdserve.router.models",
    "pdserve.router.cost",
    "pdserve.router.facts",
    "pdserve.router.placer",
    "pdserve.router.placement_config",
    "pdserve.router.prefixes",
    "pdserve.router.session_keys",
    "pdserve.router.tenants",
    "pdserve.router.admission",
    "pdserve.router.isolation",
    "pdserve.router.usage",
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
SGLANG_ADAPTER = ("pdserve.kvpool.hicache*",)


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
            "pdserve.config",
            "pdserve.command",
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
        ("pdserve.kvpool.node*", "pdserve.kvpool.client", "pdserve.kvpool.aclient", *SGLANG_ADAPTER),
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
        ("pdserve.kvpool.ring", "import time", "pdserve.kvpool.ring:1 imports time: a pure module"),
        (
            "pdserve.kvpool.policies.lru",
            "from os import path",
            "pdserve.kvpool.policies.lru:1 imports os: a pure",
        ),
        (
            "pdserve.kvpool.state",
            "def f():\n    import torch",
            "pdserve.kvpool.state:2 imports torch: a pure",
        ),
        ("pdserve.router.app", "from pdserve.engine import x", "imports pdserve.engine: the router"),
        ("pdserve.router.app", "import sglang.srt", "imports sglang.srt: the router"),
        (
            "pdserve.kvpool.node",
            "from pdserve.kvpool.hicache import B",
            "only the engine uses the HiCache adapter",
        ),
        (
            "pdserve.kvpool.transports.shm",
            "from pdserve.kvpool import client",
            "transports and tiers are below",
        ),
        ("pdserve.kvpool.client", "from pdserve import decode", "the pool knows no engine"),
        ("pdserve.engine.start", "import pdserve.prefill.worker", "the engine is below the workers"),
        ("pdserve.bench.cli", "import sglang", "SGLang is imported in the engine"),
        ("pdserve.pages", "from pdserve.kvpool import messages", "the foundation imports no part"),
        ("pdserve.config", "from . import cli", "the command is on top"),
    ],
)
def test_the_check_finds_a_broken_rule(module: str, source: str, expected: str) -> None:
    found = violations({module: source})
    assert found
    assert any(expected in line for line in found)


def test_the_check_accepts_what_is_allowed() -> None:
    allowed = {
        "pdserve.kvpool.hicache": "import sglang, torch\nfrom pdserve.kvpool.client import C",
        "pdserve.engine.start": "import sglang\nfrom pdserve.kvpool.hicache import B",
        "pdserve.decode.worker": "from pdserve.engine.start import run\nimport asyncio",
        "pdserve.router.app": "from pdserve.kvpool.client import C\nimport asyncio, time",
        "pdserve.kvpool.state": "from pdserve.kvpool.index import I\nimport dataclasses",
    }
    assert violations(allowed) == []

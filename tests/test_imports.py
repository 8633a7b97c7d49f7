"""The import rules of the design, which stand in pyproject.toml under `[tool.importlinter]`: imports run down
only, no two modules or folders import each other, pure folders do no input or output, SGLang stays behind the
engine's door. Imports within functions and under TYPE_CHECKING count too.
"""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import grimp
import pytest
from importlinter.api import read_configuration
from importlinter.configuration import configure
from importlinter.contracts.acyclic_siblings import AcyclicSiblingsContract
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.layers import LayersContract

ROOT = Path(__file__).parents[1]
CONTRACTS = {
    "layers": LayersContract,
    "forbidden": ForbiddenContract,
    "acyclic_siblings": AcyclicSiblingsContract,
}

configure()
CONFIGURED = read_configuration(str(ROOT / "pyproject.toml"))
BY_NAME = {options["name"]: options for options in CONFIGURED["contracts_options"]}


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("pdserve", include_external_packages=True, cache_dir=None)


def holds(name: str, graph: grimp.ImportGraph) -> bool:
    options: dict[str, Any] = BY_NAME[name]
    contract = CONTRACTS[options["type"]](
        name=name, session_options=CONFIGURED["session_options"], contract_options=options
    )
    return contract.check(deepcopy(graph), verbose=False).kept


@pytest.mark.parametrize("name", BY_NAME)
def test_imports_follow_the_rules(graph: grimp.ImportGraph, name: str) -> None:
    assert holds(name, graph), "`lint-imports` names the imports"


@pytest.mark.parametrize(
    ("name", "importer", "imported"),
    [
        ("parts import down", "pdserve.errors", "pdserve.pages"),
        ("parts import down", "pdserve.settings.config_file", "pdserve.kvpool.protocol.messages"),
        ("parts import down", "pdserve.kvpool.client.client", "pdserve.engine.config"),
        ("parts import down", "pdserve.engine.worker", "pdserve.prefill.worker"),
        ("parts import down", "pdserve.router.app.router", "pdserve.engine.config"),
        ("kvpool: folders import down", "pdserve.kvpool.protocol.messages", "pdserve.kvpool.policies.orders"),
        ("kvpool: folders import down", "pdserve.kvpool.transports.shm", "pdserve.kvpool.client.client"),
        ("kvpool: folders import down", "pdserve.kvpool.client.client", "pdserve.kvpool.core.state"),
        (
            "kvpool: node and clients share the protocol only",
            "pdserve.kvpool.node.node",
            "pdserve.kvpool.client.client",
        ),
        ("router: folders import down", "pdserve.router.placement.planner", "pdserve.router.proxy.decode"),
        (
            "no two modules or folders import each other",
            "pdserve.kvpool.policies.base",
            "pdserve.kvpool.policies.orders",
        ),
        (
            "no two modules or folders import each other",
            "pdserve.kvpool.cluster.ring",
            "pdserve.kvpool.core.state",
        ),
        ("pure folders do no input or output and read no clock", "pdserve.kvpool.cluster.ring", "time"),
        ("pure folders do no input or output and read no clock", "pdserve.kvpool.core.state", "torch"),
        ("SGLang is imported behind the engine's door only", "pdserve.engine.worker", "sglang"),
        ("SGLang is imported behind the engine's door only", "pdserve.router.app.router", "sglang"),
        (
            "the supervisor knows none of the processes that it runs",
            "pdserve.up.plan",
            "pdserve.kvpool.protocol.base",
        ),
    ],
)
def test_a_broken_rule_is_found(graph: grimp.ImportGraph, name: str, importer: str, imported: str) -> None:
    broken = deepcopy(graph)
    if imported not in broken.modules:
        broken.add_module(imported, is_squashed=True)
    assert importer in broken.modules
    broken.add_import(importer=importer, imported=imported, line_number=1, line_contents="import it")
    assert not holds(name, broken)


def test_every_folder_of_the_engine_but_the_door_is_kept_from_sglang() -> None:
    """The rule lists the modules it is for, so a new one must not be forgotten."""
    listed = BY_NAME["SGLang is imported behind the engine's door only"]["source_modules"]
    parts = [
        path
        for folder in ("pdserve", "pdserve/engine", "pdserve/kvpool")
        for path in (ROOT / folder).iterdir()
        if (path / "__init__.py").exists() or (path.suffix == ".py" and path.stem[0] != "_")
    ]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in parts}
    door = {"pdserve.engine.sglang", "pdserve.kvpool.hicache"}
    assert names - set(listed) == door | {"pdserve.engine", "pdserve.kvpool"}


def test_no_relative_imports() -> None:
    sources = {path: path.read_text() for path in (ROOT / "pdserve").rglob("*.py")}
    assert [
        str(path) for path, text in sources.items() if re.search(r"^\s*from \.", text, re.MULTILINE)
    ] == []

"""Which tests a run takes.

The default run leaves out the tests that are marked `extended`. They run under `launch/test.sh --all`, when
the command line names their file, and when a file changed that RISKS names: then those of the paths that
stand beside it.

A file has changed where it differs from the commit at which this branch left `main`, committed or not.
Continuous integration tests `main` itself, from which nothing differs: it runs the default selection.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_MODELS = ("tests/e2e", "tests/engine")
_NODES = ("tests/contracts", "tests/hostile", "tests/kvpool")
RISKS: dict[str, tuple[str, ...]] = {
    "pdserve/engine/page_names.py": _MODELS,
    "pdserve/engine/model_dir.py": _MODELS,
    "pdserve/engine/sglang": _MODELS,
    "pdserve/engine/turns": _MODELS,
    "pdserve/integrations": ("tests/integrations", "tests/e2e"),
    "pdserve/kvpool/core/sharding": ("tests/kvpool/core/sharding", "tests/kvpool/node/peers"),
    "pdserve/kvpool/hicache": (*_MODELS, "tests/kvpool/hicache"),
    "pdserve/kvpool/native": (*_MODELS, *_NODES),
    "pdserve/kvpool/node/peers": ("tests/kvpool/node/peers", "tests/netns"),
    "pdserve/kvpool/node/tcp": (*_NODES, "tests/netns"),
    "pdserve/kvpool/node/ucx": (*_NODES, "tests/netns"),
    "pdserve/kvpool/node/upgrade": ("tests/kvpool/node/upgrade",),
    "pdserve/kvpool/protocol": (*_NODES, "tests/e2e"),
    "pdserve/kvpool/transports": (*_NODES, "tests/netns"),
    "pdserve/kvpool/weights": ("tests/kvpool/weights",),
    "pdserve/pages.py": (*_MODELS, *_NODES),
    "pdserve/router/api": ("tests/router/api",),
    "pdserve/router/proxy": ("tests/router/proxy",),
    "pdserve/router/sharing": ("tests/router/sharing",),
    "pdserve/up/launchers": ("tests/contracts", "tests/up"),
    "Containerfile": ("tests/up/test_image.py",),
    "launch/constraints.txt": ("tests/up/test_constraints.py",),
    "pyproject.toml": ("tests/up/test_constraints.py",),
}
"""A changed file or folder, and the paths whose extended tests run then."""


def is_within(path: str, folder: str) -> bool:
    """Whether a path is this folder or file, or lies in it."""
    return path == folder or path.startswith(f"{folder}/")


def at_risk(changed: Iterable[str]) -> dict[str, str]:
    """Paths whose extended tests run, and a changed file that is why. Paths are relative to the checkout."""
    return dict(sorted(_at_risk(changed)))


def _at_risk(changed: Iterable[str]) -> Iterator[tuple[str, str]]:
    for path in sorted(changed, reverse=True):
        for risk, tests in RISKS.items():
            if is_within(path, risk):
                yield from ((test, path) for test in tests)


def is_taken(path: str, wanted: Iterable[str]) -> bool:
    """Whether an extended test in the file `path` runs where those of the paths `wanted` do."""
    return any(is_within(path, folder) for folder in wanted)

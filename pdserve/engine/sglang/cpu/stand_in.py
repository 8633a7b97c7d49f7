"""What is in place before SGLang is imported: a stand-in for `sgl_kernel`, whose names can be imported, while
calling one says that it has no CPU version; and imports of transformers without a step that costs a worker
0.7 s of a core.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import re
import sys
import types
from collections.abc import Callable
from typing import Final, NoReturn

NAME = "sgl_kernel"
_NAME: Final = re.compile(r"^Name:\s*(.+?)\s*$", re.MULTILINE)
_MODULE: Final = re.compile(r"^([^/,\n]+)(?:/[^,\n]*)?\.py,", re.MULTILINE)  # of RECORD


def install() -> None:
    """Put the stand-in into `sys.modules`, and quicken imports; again is a no-op.

    Raises RuntimeError when the real `sgl_kernel` or any of SGLang's runtime was imported before: too late to
    matter.
    """
    importlib.metadata.packages_distributions = packages_distributions
    present = sys.modules.get(NAME)
    if isinstance(present, _StandIn):
        return
    if present is not None or "sglang.srt" in sys.modules:
        raise RuntimeError("the sgl_kernel stand-in must be installed before sglang.srt is imported")
    sys.modules[NAME] = _StandIn(NAME)


class _StandIn(types.ModuleType):
    """Not a package on purpose: `import sgl_kernel.part` fails as on a machine without it, which SGLang
    handles.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, "Stand-in for sgl_kernel on a machine without an accelerator.")
        self.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def no_cpu_version(*_args: object, **_kwargs: object) -> NoReturn:
            raise NotImplementedError(f"{NAME}.{name} has no CPU version")

        no_cpu_version.__name__ = name
        return no_cpu_version


def packages_distributions() -> dict[str, list[str]]:
    """What Python's own function says, for installed wheels. transformers asks it to which distribution each
    installed package belongs, and Python parses the long description of every distribution for that, though
    its name and its list of files answer it.
    """
    found: dict[str, list[str]] = {}
    for one in importlib.metadata.distributions():
        name = _NAME.search(one.read_text("METADATA") or one.read_text("PKG-INFO") or "")
        packages = {*(one.read_text("top_level.txt") or "").split()}
        for package in packages or {*_MODULE.findall(one.read_text("RECORD") or "")}:
            found.setdefault(package, []).append(name[1] if name else "")
    return found

"""A stand-in for `sgl_kernel`: names can be imported, calling one says that it has no CPU version."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import NoReturn

NAME = "sgl_kernel"


def install() -> None:
    """Put the stand-in into `sys.modules`; again is a no-op.

    Raises RuntimeError when the real `sgl_kernel` or any of SGLang's runtime was imported before: too late to
    matter.
    """
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

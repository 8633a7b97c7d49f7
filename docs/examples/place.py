"""A place of your own: processes run on this host under a command, `nice -n 5` unless you name another."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace

from pdserve.up.console import Console
from pdserve.up.places.local import LocalPlace
from pdserve.up.places.process import Child
from pdserve.up.plan import ProcessSpec


class UnderPlace(LocalPlace):
    """`pdserve up FILE --on under`, with `UNDER="numactl --cpunodebind=0"` for example.

    The command must become the process (exec), or hand on signals, output and exit status.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__(environ)
        self._words = shlex.split(environ.get("UNDER", "nice -n 5"))

    async def start(self, spec: ProcessSpec, console: Console, *, again: bool) -> Child:
        """Start it under the command."""
        under = replace(spec, argv=(*self._words, *spec.argv))
        return await super().start(under, console, again=again)

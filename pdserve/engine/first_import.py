"""The first import of what runs on this machine, at set-up: Python compiles it, once.

    python -m pdserve.engine.first_import

Two workers that start at once would both compile SGLang. To compile all that is installed takes several times
as long: a worker imports a quarter of it.
"""

from __future__ import annotations

import importlib
import sys
from typing import Final

from pdserve.extras import is_installed

CORE: Final = (
    *("pdserve.up.cli", "pdserve.router.cli", "pdserve.router.sharing.prefork", "pdserve.kvpool.node.cli"),
    *("pdserve.kvpool.node.node", "uvicorn.loops.auto", "uvicorn.lifespan.on"),
)
ENGINE: Final = (
    *("sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler", "sglang.srt.managers.tp_worker"),
    *("sglang.srt.managers.detokenizer_manager", "sglang.srt.models.llama", "sglang.srt.models.qwen3"),
    *("pdserve.engine.launch", "pdserve.decode.settle", "pdserve.prefill.routes"),
    *("pdserve.engine.sglang.storage", "pdserve.engine.sglang.geometry", "pdserve.kvpool.hicache.backend"),
)


def main() -> None:
    """Import what there is, as the processes do."""
    for name in CORE:
        importlib.import_module(name)
    if not is_installed("sglang"):
        return
    print("setup: importing SGLang once, which compiles it", file=sys.stderr, flush=True)
    from pdserve.engine.device import detect_device
    from pdserve.engine.sglang import prepare

    prepare.choose(detect_device())
    with prepare.without_gc():
        for name in ENGINE:
            importlib.import_module(name)
    prepare.load_plugins()


if __name__ == "__main__":
    main()

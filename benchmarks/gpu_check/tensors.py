"""Pages on the GPU: to host memory, to a pool node, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu_check.place import Place, Skipped
from benchmarks.node_processes import client_of, pool_of

_NODE: Final = {"capacity_bytes": "256MiB", "slab_bytes": "4MiB", "keep": False}
_COPIES: Final = {
    "copies by kernel": ("page_first", "kernel"),
    "copies direct": ("page_first_direct", "direct"),
    "copies by layer": ("layer_first", "kernel"),
}


def steps(place: Place) -> Iterator[tuple[str, Callable[[], str]]]:
    """See `checks.GROUPS`."""
    from pdserve.engine.sglang import prepare

    prepare.choose(place.device)
    with prepare.without_gc():
        prepare.load_plugins()
    for name, (layout, io_backend) in _COPIES.items():
        yield name, partial(_copies, place, layout, io_backend)
    yield "pool", lambda: _pool(place)


def _device_pages(place: Place, layout: str, io_backend: str) -> Any:
    from pdserve.engine.sglang.trials.device_pages import DevicePages

    if place.device == "cpu" and io_backend == "kernel":
        raise Skipped("a CPU has no kernel that copies")
    return DevicePages(place.device, layout, io_backend)


def _copies(place: Place, layout: str, io_backend: str) -> str:
    pages = _device_pages(place, layout, io_backend)
    pages.to_host()
    pages.forget_device()
    pages.from_host()
    return f"{pages.check()} bytes are the same"


def _pool(place: Place) -> str:
    on_cpu = place.device == "cpu"
    pages = _device_pages(place, *(("page_first_direct", "direct") if on_cpu else ("page_first", "kernel")))
    directory = Path(place.directory) / "pool"
    directory.mkdir(exist_ok=True)
    with pool_of(1, directory, _NODE) as nodes, pages.in_pool(client_of(nodes)) as moved:
        pages.to_host()
        written = moved.put()
        pages.forget_device()
        pages.forget_host()
        read = moved.get()
        pages.from_host()
        return f"{written} pages written and {read} read by {moved.how}; {pages.check()} bytes are the same"

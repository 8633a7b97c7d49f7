"""TLS and bounds of a worker's HTTP server, which SGLang runs by uvicorn.

SGLang (0.5.23) reads certificates once and asks no client for one. A context of our own asks for one where it
should, and follows the files. SGLang gets the files as arguments too, so that it asks itself by https for a
first generation. It does so at an address that no certificate needs to name. So these requests verify
nothing; they hold no secret, and show the worker's own certificate.
"""

from __future__ import annotations

import contextlib
import functools
import math
import ssl
import warnings
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, Final

from pdserve.crowd import Crowd
from pdserve.engine.http.bounded_heads import BoundedHeads
from pdserve.open_files import raise_open_files
from pdserve.sglang_places import places
from pdserve.tls.contexts import Certificates, TlsConfig

PLACES: Final = places(
    "sglang.srt.entrypoints.http_server",
    "_setup_and_run_http_server uses uvicorn, Server, Config",
    "_execute_server_warmup uses requests",
    "_freeze_gc_after_server_warmup uses requests",
)


@contextlib.contextmanager
def serving(http_server: ModuleType, tls: TlsConfig, certificates: Certificates) -> Iterator[None]:
    """While the block runs, SGLang's server (`http_server`, its module) has bounded heads, and speaks TLS
    where `tls` says so.
    """
    context = certificates.lasting_server_context()
    names = vars(http_server)
    before = {"uvicorn": names["uvicorn"], "requests": names["requests"]}
    names["uvicorn"] = _configured(before["uvicorn"], context)
    if context is not None:
        # of SGLang's requests to itself, see above; each would be told of
        warnings.filterwarnings("ignore", message="Unverified HTTPS request")
        names["requests"] = _showing(before["requests"], tls)
    try:
        yield
    finally:
        names.update(before)


def _configured(uvicorn: ModuleType, context: ssl.SSLContext | None) -> SimpleNamespace:
    """The module, whose servers have bounded heads, and use `context` if there is one."""
    files = raise_open_files()  # half of them for SGLang and the pool
    crowd: Crowd[BoundedHeads] = Crowd(math.inf if files is None else files // 2)
    more: dict[str, Any] = {"http": functools.partial(BoundedHeads, crowd=crowd)}
    if context is not None:
        more["ssl_context_factory"] = lambda _config, _default: context
    config = functools.partial(uvicorn.Config, **more)
    return SimpleNamespace(**{**vars(uvicorn), "Config": config})


def _showing(requests: ModuleType, tls: TlsConfig) -> SimpleNamespace:
    """The module, whose requests show the worker's certificate, to itself."""
    more: dict[str, Any] = {"verify": False, "cert": (str(tls.certificate), str(tls.key))}

    def asking(ask: Any) -> Any:
        return lambda *words, **options: ask(*words, **{**options, **more})

    own = {"get": asking(requests.get), "post": asking(requests.post)}
    return SimpleNamespace(**{**vars(requests), **own})

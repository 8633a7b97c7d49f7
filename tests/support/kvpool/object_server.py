"""A small S3 server in this process, in memory, that misbehaves when it is told to.

It knows what the object store tier needs: put, get (with ranges), delete, list. Signatures are not checked.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

Mode: TypeAlias = Literal[
    "well",
    "away",  # connections are closed without an answer
    "hanging",  # no answer comes
    "overloaded",  # 503 to everything
    "full",  # 503 to what would write
    "wrong",  # a bit is wrong in all that is read
    "others",  # other bytes of the object than those that were asked for, of the same length
    "cut",  # half of what was announced comes
    "whole",  # ranges are answered with the whole object
    "longer",  # more bytes than were asked for
    "empty",  # listings show no object
]
LIST_PAGE: Final = 1000
HANG_S: Final = 60.0  # longer than the deadlines of all clients
_RANGE: Final = re.compile(r"bytes=(\d+)-(\d+)")
_DATE: Final = "Wed, 25 Nov 2026 00:00:00 GMT"


class ObjectServer:
    """`objects`: by name in any bucket. Set `mode` at any time. `requests`: how many came."""

    def __init__(self, port: int = 0) -> None:
        self.objects: dict[str, bytes] = {}
        self.mode: Mode = "well"
        self.requests = 0
        self.released = threading.Event()  # ends those that hang
        handler = type("Handler", (_Handler,), {"store": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._server.daemon_threads = True
        serve = self._server.serve_forever
        self._thread = threading.Thread(target=serve, args=(0.01,), name="object-server", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def behave(self) -> None:
        """From now on; whoever hangs gets no answer."""
        self.mode = "well"
        self.released.set()
        self.released = threading.Event()

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def object_server() -> Iterator[ObjectServer]:
    server = ObjectServer()
    try:
        yield server
    finally:
        server.close()


class _Handler(BaseHTTPRequestHandler):
    store: ObjectServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        if self._misbehaves(writes=False):
            return
        if "list-type" in query:
            self._list(query)
            return
        content = self.store.objects.get(self._name)
        if content is None:
            self._error(404, "NoSuchKey")
            return
        self._send(content)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self._misbehaves(writes=True):
            return
        self.store.objects[self._name] = body
        self._answer(200, b"", {"ETag": '"1"'})

    def do_DELETE(self) -> None:
        if self._misbehaves(writes=True):
            return
        self.store.objects.pop(self._name, None)
        self._answer(204, b"")

    def do_POST(self) -> None:
        """Several objects are deleted."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        if self._misbehaves(writes=True):
            return
        bucket = self._name.partition("/")[0]
        keys = re.findall(r"<Key>(.*?)</Key>", body)
        for key in keys:
            self.store.objects.pop(f"{bucket}/{key}", None)
        deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    @property
    def _name(self) -> str:
        return unquote(urlsplit(self.path).path).strip("/")

    def _misbehaves(self, *, writes: bool) -> bool:
        """Whether that is all that the client gets."""
        mode = self.store.mode
        self.store.requests += 1
        if mode == "away":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        elif mode == "hanging":
            self.store.released.wait(HANG_S)  # of this time
            self.close_connection = True
        elif mode == "overloaded" or (mode == "full" and writes):
            self._error(503, "SlowDown")
        else:
            return False
        return True

    def _list(self, query: dict[str, list[str]]) -> None:
        bucket, prefix = self._name, query.get("prefix", [""])[0]
        after = query.get("continuation-token", [""])[0]
        names = sorted(name.removeprefix(f"{bucket}/") for name in list(self.store.objects))
        found = [name for name in names if name.startswith(prefix) and name > after]
        found = [] if self.store.mode == "empty" else found
        some, more = found[:LIST_PAGE], len(found) > LIST_PAGE
        entries = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>2026-11-25T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;1&quot;</ETag><Size>{len(self.store.objects.get(f'{bucket}/{name}', b''))}</Size>"
            "</Contents>"
            for name in some
        )
        token = f"<NextContinuationToken>{escape(some[-1])}</NextContinuationToken>" if more else ""
        text = (
            f"<ListBucketResult><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix>"
            f"<KeyCount>{len(some)}</KeyCount><MaxKeys>{LIST_PAGE}</MaxKeys>"
            f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>{entries}{token}</ListBucketResult>"
        )
        self._answer(200, text.encode())

    def _send(self, content: bytes) -> None:
        mode, total = self.store.mode, len(content)
        wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
        if wanted is None or mode == "whole":
            self._answer(200, content, {"ETag": '"1"', "Last-Modified": _DATE})
            return
        first, end = int(wanted[1]), min(int(wanted[2]) + 1, total)
        body = content[first:end]
        if mode == "wrong":
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 4]) + body[middle + 1 :]
        elif mode == "others":
            start = (first + 4096) % max(1, total - len(body) + 1)
            body = content[start : start + len(body)]
        elif mode == "longer":
            body += bytes(64)
        headers = {"ETag": '"1"', "Last-Modified": _DATE, "Content-Range": f"bytes {first}-{end - 1}/{total}"}
        self._answer(206, body, headers, cut=mode == "cut")

    def _error(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def _answer(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, *, cut: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if cut:
            body, self.close_connection = body[: len(body) // 2], True
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

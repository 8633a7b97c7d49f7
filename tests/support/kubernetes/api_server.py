"""A stand-in for the API server of Kubernetes: lists in pages and watches of pods, as its API concepts say
(resource versions, `continue`, bookmarks, 410 Gone), and every way to break them.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pdserve.discovery.config import KubernetesConfig

NAMESPACE = "serving"
TOKEN = "token-of-a-service-account"


def pod(
    name: str,
    role: str = "decode",
    *,
    ip: str = "127.0.0.1",
    port: int = 30000,
    phase: str = "Running",
    instance: str = "demo",
    **metadata: Any,
) -> dict[str, Any]:
    """A pod as the API shows it, with fields that nobody here reads."""
    labels = {"app.kubernetes.io/instance": instance, "app.kubernetes.io/component": role}
    return {
        "metadata": {"name": name, "namespace": NAMESPACE, "uid": f"uid-{name}", "labels": labels} | metadata,
        "spec": {
            "containers": [
                {"name": "sidecar", "image": "x"},
                {"name": role, "image": "x", "ports": [{"name": "http", "containerPort": port}]},
            ],
            "hostname": name,
            "subdomain": role,
            "nodeName": "node-1",
        },
        "status": {"phase": phase, "podIP": ip, "podIPs": [{"ip": ip}], "conditions": []},
    }


class ApiServer:
    """Holds pods, and every change since `floor`."""

    def __init__(self) -> None:
        self.token = TOKEN
        self.pods: dict[str, dict[str, Any]] = {}
        self.version = 100
        self.floor = 0
        """Watches from an older version are answered 410."""
        self.lists = 0
        self.watched_from: list[int] = []
        self.refusal: tuple[int, str] | None = None
        """Status and text that answer everything."""
        self.is_silent = False
        """Requests are read and not answered."""
        self._history: list[tuple[int, str, dict[str, Any]]] = []
        self._watches: dict[asyncio.StreamWriter, str] = {}
        self._connections: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> None:
        self._server = await asyncio.start_server(self._serve, host, self.port, ssl=tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Its host is gone; what it holds stays."""
        assert self._server is not None
        self._server.close()
        for writer in tuple(self._connections):
            writer.transport.abort()
        self._watches.clear()

    # --- what happens in the cluster

    def put(self, one: dict[str, Any]) -> None:
        name = one["metadata"]["name"]
        self._note("MODIFIED" if name in self.pods else "ADDED", one)
        self.pods[name] = one

    def delete(self, name: str) -> None:
        self._note("DELETED", self.pods.pop(name))

    def other_change(self) -> None:
        """Something changed that no selector here matches."""
        self.version += 1

    def bookmark(self) -> None:
        about = {"kind": "Pod", "metadata": {"resourceVersion": str(self.version)}}
        self.say(json.dumps({"type": "BOOKMARK", "object": about}).encode() + b"\n")

    def forget(self) -> None:
        """Compaction: what changed until now is forgotten."""
        self.floor = self.version
        self._history.clear()

    # --- faults

    def say(self, data: bytes) -> None:
        """To all watches, as it stands."""
        for writer in self._watches:
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    def expire_watches(self) -> None:
        """As the API server does when a watch falls behind."""
        about = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
        self.say(json.dumps({"type": "ERROR", "object": about}).encode() + b"\n")
        self.end_watches()

    def break_watches(self) -> None:
        for writer in tuple(self._watches):
            writer.transport.abort()
        self._watches.clear()

    @property
    def watches(self) -> int:
        return len(self._watches)

    def end_watches(self) -> None:
        """As it does when their time is up."""
        for writer in tuple(self._watches):
            writer.write(b"0\r\n\r\n")
        self._watches.clear()

    def _note(self, kind: str, one: dict[str, Any]) -> None:
        self.version += 1
        one["metadata"]["resourceVersion"] = str(self.version)
        self._history.append((self.version, kind, one))
        for writer, selector in self._watches.items():
            if _matches(one, selector):
                self._tell(writer, kind, one)

    def _tell(self, writer: asyncio.StreamWriter, kind: str, one: dict[str, Any]) -> None:
        line = json.dumps({"type": kind, "object": one}).encode() + b"\n"
        writer.write(b"%x\r\n%b\r\n" % (len(line), line))

    # --- HTTP

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await self._answer(head.decode(), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._connections.discard(writer)
            self._watches.pop(writer, None)
            writer.close()

    async def _answer(self, head: str, writer: asyncio.StreamWriter) -> None:
        lines = head.split("\r\n")
        target = urlsplit(lines[0].split()[1])
        asked = {name: values[0] for name, values in parse_qs(target.query).items()}
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        if self.is_silent:
            return
        if self.refusal is not None:
            await self._status(writer, *self.refusal)
            return
        if headers.get("authorization") != f"Bearer {self.token}":
            await self._status(writer, 401, "Unauthorized")
            return
        if target.path != f"/api/v1/namespaces/{NAMESPACE}/pods":
            await self._status(writer, 404, "the server could not find the requested resource")
        elif asked.get("watch") == "1":
            await self._watch(writer, asked)
        else:
            await self._list(writer, asked)

    async def _list(self, writer: asyncio.StreamWriter, asked: dict[str, str]) -> None:
        start, limit = int(asked.get("continue", 0)), int(asked["limit"])
        self.lists += start == 0
        found = [one for one in self.pods.values() if _matches(one, asked["labelSelector"])]
        more = str(start + limit) if len(found) > start + limit else ""
        meta = {"resourceVersion": str(self.version), "continue": more}
        body = {"kind": "PodList", "metadata": meta, "items": found[start : start + limit]}
        await self._body(writer, 200, json.dumps(body).encode())

    async def _watch(self, writer: asyncio.StreamWriter, asked: dict[str, str]) -> None:
        version = int(asked["resourceVersion"])
        assert asked["allowWatchBookmarks"] == "true"
        assert int(asked["timeoutSeconds"]) > 0
        if version < self.floor:
            await self._status(writer, 410, "too old resource version")
            return
        self.watched_from.append(version)
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for at, kind, one in self._history:
            if at > version and _matches(one, asked["labelSelector"]):
                self._tell(writer, kind, one)
        self._watches[writer] = asked["labelSelector"]
        asyncio.get_running_loop().call_later(int(asked["timeoutSeconds"]), self._time_is_up, writer)

    def _time_is_up(self, writer: asyncio.StreamWriter) -> None:
        if self._watches.pop(writer, None) is not None:
            writer.write(b"0\r\n\r\n")

    async def _status(self, writer: asyncio.StreamWriter, code: int, message: str) -> None:
        body = {"kind": "Status", "status": "Failure", "code": code, "message": message}
        await self._body(writer, code, json.dumps(body).encode())

    async def _body(self, writer: asyncio.StreamWriter, code: int, body: bytes) -> None:
        head = f"HTTP/1.1 {code} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()


def _matches(one: dict[str, Any], selector: str) -> bool:
    """Of selectors, `a=b` and `a in (b,c)`, with commas between them."""
    labels = one["metadata"]["labels"]
    wanted = re.findall(r"([^,=\s]+)(?:=([^,]*)| in \(([^)]*)\))(?:,|$)", selector)
    return all(
        labels.get(name) in (several.split(",") if several else [value]) for name, value, several in wanted
    )


@asynccontextmanager
async def api_server() -> AsyncIterator[ApiServer]:
    server = ApiServer()
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def settings(server: ApiServer, directory: Path, **more: Any) -> KubernetesConfig:
    """A client's configuration, with its token in `directory`."""
    token_file = directory / "token"
    token_file.write_text(TOKEN + "\n")
    (directory / "namespace").write_text(NAMESPACE)
    given: dict[str, Any] = {"timeout_s": 5.0, "retry_s": 0.01, "watch_s": 600} | more
    return KubernetesConfig(
        selector="app.kubernetes.io/instance=demo", api=server.url, token_file=token_file, **given
    )

"""Workers found by the labels of their pods, over the API server's own protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from pdserve.discovery import kubernetes
from pdserve.discovery.config import KubernetesConfig
from pdserve.discovery.kubernetes import PodWatch
from pdserve.discovery.pods import FoundPod
from pdserve.errors import ConfigError, DiscoveryError
from tests.support.kubernetes.api_server import ApiServer, api_server, pod, settings

WAIT_S = 20.0


class Seen:
    """What a watch said last, and how often."""

    def __init__(self) -> None:
        self.pods: dict[str, FoundPod] = {}
        self.times = 0

    def __call__(self, pods: list[FoundPod]) -> None:
        self.pods = {one.name: one for one in pods}
        self.times += 1

    @property
    def names(self) -> set[str]:
        return set(self.pods)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - others change it
            await asyncio.sleep(0.005)


@asynccontextmanager
async def watching(server: ApiServer, directory: Path, **more: Any) -> AsyncIterator[Seen]:
    seen = Seen()
    watch = PodWatch(settings(server, directory, **more), seen, {})
    task = asyncio.create_task(watch.run())
    try:
        await until(lambda: server.watches == 1)
        yield seen
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await watch.close()


async def test_pods_join_when_they_run_and_leave_when_they_are_asked_to_end(tmp_path: Path) -> None:
    async with api_server() as server:
        server.put(pod("decode-0", port=1234))
        server.put(pod("other", instance="another"))
        async with watching(server, tmp_path) as seen:
            assert seen.pods == {"decode-0": FoundPod("decode-0", "decode", "http://127.0.0.1:1234")}
            server.put(pod("prefill-0", "prefill", phase="Pending", ip=""))
            server.put(pod("prefill-0", "prefill", ip="fd00::1"))
            await until(lambda: "prefill-0" in seen.names)
            assert seen.pods["prefill-0"].url == "http://[fd00::1]:30000"
            server.put(pod("decode-0", port=1234, deletionTimestamp="2026-11-25T10:00:00Z"))
            await until(lambda: seen.names == {"prefill-0"})
            server.delete("decode-0")
            server.delete("prefill-0")
            await until(lambda: not seen.names)
        assert server.lists == 1


async def test_a_list_comes_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "PAGE_PODS", 2)
    async with api_server() as server:
        for number in range(5):
            server.put(pod(f"decode-{number}"))
        async with watching(server, tmp_path) as seen:
            assert len(seen.pods) == 5
            assert seen.times == 1


async def test_a_broken_watch_goes_on_from_the_last_change_without_a_new_list(tmp_path: Path) -> None:
    async with api_server() as server, watching(server, tmp_path) as seen:
        server.put(pod("decode-0"))
        await until(lambda: seen.names == {"decode-0"})
        at = server.version
        server.break_watches()
        server.put(pod("decode-1"))
        server.delete("decode-0")
        await until(lambda: seen.names == {"decode-1"})
        assert (server.lists, server.watched_from[-1]) == (1, at)


async def test_a_watch_that_ends_as_agreed_goes_on_at_once(tmp_path: Path) -> None:
    async with api_server() as server, watching(server, tmp_path, watch_s=1) as seen:
        await until(lambda: len(server.watched_from) >= 2)
        server.put(pod("decode-0"))
        await until(lambda: seen.names == {"decode-0"})
        assert server.lists == 1


async def test_a_bookmark_moves_the_version_on(tmp_path: Path) -> None:
    async with api_server() as server, watching(server, tmp_path) as seen:
        server.put(pod("decode-0"))
        for _ in range(5):
            server.other_change()
        server.bookmark()
        server.forget()
        server.end_watches()
        await until(lambda: server.watched_from[-1] == server.version)
        assert seen.names == {"decode-0"}
        assert server.lists == 1


@pytest.mark.parametrize("how", ["status", "event"])
async def test_a_version_that_is_too_old_makes_a_new_list_and_who_went_meanwhile_leaves(
    tmp_path: Path, how: str
) -> None:
    async with api_server() as server, watching(server, tmp_path) as seen:
        server.put(pod("decode-0"))
        server.put(pod("decode-1"))
        await until(lambda: len(seen.names) == 2)
        if how == "event":
            server.expire_watches()
        else:
            server.break_watches()
        server.delete("decode-0")
        server.forget()
        await until(lambda: seen.names == {"decode-1"})
        assert server.lists == 2


async def test_workers_stay_while_the_api_server_is_away(tmp_path: Path) -> None:
    async with api_server() as server, watching(server, tmp_path) as seen:
        server.put(pod("decode-0"))
        await until(lambda: seen.names == {"decode-0"})
        times = seen.times
        await server.stop()
        server.put(pod("decode-1"))
        server.refusal = (500, "etcdserver: leader changed")
        await server.start()
        await asyncio.sleep(0)
        assert (seen.names, seen.times) == ({"decode-0"}, times)
        server.refusal = None
        await until(lambda: seen.names == {"decode-0", "decode-1"})
        assert server.lists == 1


NONSENSE = {
    "no JSON": b"{]\n",
    "another form": b'{"type": "ADDED", "object": 7}\n',
    "no object": b'{"type": "ADDED"}\n',
    "depth": b'{"type": "ADDED", "object": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
    "bytes": b"\xff\xfe\x00\n",
}


@pytest.mark.parametrize("line", NONSENSE.values(), ids=NONSENSE)
async def test_a_line_that_cannot_be_read_makes_a_new_list(tmp_path: Path, line: bytes) -> None:
    async with api_server() as server, watching(server, tmp_path) as seen:
        server.say(line)
        await until(lambda: server.lists == 2 and server.watches >= 1)
        server.put(pod("decode-0"))
        await until(lambda: seen.names == {"decode-0"})


async def test_a_line_without_end_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "MAX_LINE_BYTES", 1000)
    async with api_server() as server, watching(server, tmp_path):
        server.say(b"x" * 1001)
        await until(lambda: server.lists == 2)


async def test_one_bad_pod_hides_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with api_server() as server, watching(server, tmp_path) as seen:
        bad = pod("evil\nline", ip="no-address")
        portless = pod("portless")
        portless["spec"]["containers"] = [{"name": "x"}]
        wrong = pod("wrong")
        wrong["status"] = "Running"
        for one in (bad, portless, wrong, pod("decode-0")):
            server.put(one)
        await until(lambda: seen.names == {"decode-0"})
        server.expire_watches()
        await until(lambda: server.lists == 2 and server.watches == 1)
        assert seen.names == {"decode-0"}
    assert "no container has a port named 'http'" in caplog.text
    assert "evil\\nline" in caplog.text
    assert not any("\n" in record.getMessage() for record in caplog.records)


async def test_an_unknown_kind_of_change_is_passed_over(tmp_path: Path) -> None:
    async with api_server() as server, watching(server, tmp_path) as seen:
        server.say(json.dumps({"type": "LATER", "object": pod("decode-9")}).encode() + b"\n")
        server.put(pod("decode-0"))
        await until(lambda: seen.names == {"decode-0"})
        assert server.lists == 1


async def test_an_api_server_that_answers_nothing_is_given_up_in_time(tmp_path: Path) -> None:
    async with api_server() as server:
        server.is_silent = True
        watch = PodWatch(settings(server, tmp_path, timeout_s=0.05), Seen(), {})
        with pytest.raises(DiscoveryError, match=r"ReadTimeout|did not come in time"):
            await watch.list()
        await watch.close()


async def test_a_watch_that_hangs_beyond_its_end_is_left(tmp_path: Path) -> None:
    async with api_server() as server, watching(server, tmp_path, watch_s=1, timeout_s=0.2) as seen:
        server._time_is_up = lambda writer: None  # type: ignore[method-assign]  # the server's host vanished
        await until(lambda: len(server.watched_from) >= 2)
        server.put(pod("decode-0"))
        await until(lambda: seen.names == {"decode-0"})
        assert server.lists == 1


async def test_a_token_that_was_renewed_is_used(tmp_path: Path) -> None:
    async with api_server() as server, watching(server, tmp_path) as seen:
        server.token = "another-token"
        server.break_watches()
        server.put(pod("decode-0"))
        (tmp_path / "token").write_text("another-token")
        await until(lambda: seen.names == {"decode-0"})


async def test_a_refusal_says_why(tmp_path: Path) -> None:
    async with api_server() as server:
        server.refusal = (403, 'pods is forbidden: User "x" cannot list\nresource "pods"')
        watch = PodWatch(settings(server, tmp_path), Seen(), {})
        with pytest.raises(DiscoveryError, match=r"status 403: pods is forbidden.*cannot list\\nresource"):
            await watch.list()
        await watch.close()


@pytest.mark.parametrize(
    ("given", "environ", "message"),
    [
        ({}, {}, "outside of Kubernetes"),
        ({"api": "http://10.0.0.1:6443"}, {}, "has no TLS: who is on the wire"),
        ({"api": "ftp://x"}, {}, "not of the form"),
        ({"api": "http://127.0.0.1:1", "namespace": ""}, {}, "kubernetes.namespace is needed"),
        ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "holds no certificates"),
    ],
)
def test_what_cannot_work_is_refused(
    given: dict[str, str], environ: dict[str, str], message: str, tmp_path: Path
) -> None:
    values: dict[str, Any] = {"namespace": "serving", **given}
    config = KubernetesConfig(
        selector="a=b", token_file=tmp_path / "token", ca_file=tmp_path / "ca.crt", **values
    )
    with pytest.raises(ConfigError, match=message):
        PodWatch(config, Seen(), environ)


async def test_pods_are_reached_by_name_where_certificates_name_them(tmp_path: Path) -> None:
    async with api_server() as server:
        server.put(pod("decode-0"))
        seen = Seen()
        config = settings(server, tmp_path, address="name")
        watch = PodWatch(config, seen, {}, "https")
        await watch.list()
        await watch.close()
        assert seen.pods["decode-0"].url == "https://decode-0.decode.serving.svc:30000"

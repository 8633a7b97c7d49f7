"""A router and workers of the same host speak by Unix sockets, which change nothing but their cost."""

from __future__ import annotations

import json

import msgspec
import pytest

from pdserve.discovery.host_socket import new_name
from pdserve.router.config.tenants import Access
from pdserve.router.fleet.worker import Worker, WorkerInfo
from pdserve.security.tokens import Secret
from tests.support.router.harness import CHAT, before, chat_body
from tests.support.router.mock_worker import EVENTS, MockWorker

TOKEN = "the-clusters-token-of-this-test"


def beside(role: str) -> MockWorker:
    worker = MockWorker(role)
    worker.has_host_socket = True
    return worker


async def test_requests_and_streams_go_by_the_sockets_that_workers_tell_of() -> None:
    prefill, decode = beside("prefill"), beside("decode")
    async with before(prefill, decode) as harness:
        assert (await harness.chat()).status == 200
        streamed = await harness.chat(stream=True)
        assert streamed.body == b"".join(EVENTS)
        assert (prefill.by_unix, decode.by_unix) == (1, 1)
        snapshot = harness.router.own_metrics()
        assert snapshot.value("upstream_connections", "unix") == 2
        assert snapshot.value("upstream_connections", "opened") == 2


async def test_the_clusters_token_is_sent_by_a_unix_socket_too() -> None:
    worker = beside("decode")
    worker.token = TOKEN
    async with before(worker, access=Access(cluster_token=Secret(TOKEN))) as harness:
        assert (await harness.post(CHAT, chat_body())).status == 200
        assert worker.got(CHAT)[0].headers["authorization"] == f"Bearer {TOKEN}"
        assert worker.by_unix == 1


def test_a_proxy_before_a_worker_is_not_passed_over() -> None:
    info = WorkerInfo("decode", "m", host_socket=new_name(8100))
    direct, by_proxy = Worker("decode", "http://127.0.0.1:8100"), Worker("decode", "http://127.0.0.1:810")
    direct.info = by_proxy.info = info
    assert (direct.host_socket, by_proxy.host_socket) == (info.host_socket, "")


@pytest.mark.parametrize("name", ["/var/run/docker.sock", "pdserve-http-1", "\0pdserve-http-1-" + "0" * 32])
def test_a_worker_cannot_send_a_router_to_other_sockets(name: str) -> None:
    said = json.dumps({"role": "decode", "model": "m", "host_socket": name})
    with pytest.raises(msgspec.ValidationError, match="host_socket"):
        msgspec.json.decode(said, type=WorkerInfo)

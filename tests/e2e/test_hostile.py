"""A whole cluster with tokens everywhere, attacked from another host, by another user, and with tokens that
give other rights. Real SGLang, real pool nodes, a real router, in network namespaces.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.netns.guarded import (
    ADMIN,
    ALPHA,
    BETA,
    OPEN,
    POOL_PORTS,
    READERS,
    ROUTER_PORT,
    SECRETS,
    WORKER_PORT,
    GuardedCluster,
    until,
)
from tests.support.netns.lab import lab
from tests.support.netns.program import Program
from tests.support.netns.visitor import ATTACKS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
PAGES = 24
NOBODY = "65534"
MOST_GROWTH = 1.2
CONTROL_ROUTES = (
    ("GET", "/get_server_info"),
    ("GET", "/get_model_info"),
    ("POST", "/flush_cache"),
    ("POST", "/abort_request"),
    ("POST", "/generate"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/pd/prefill"),
    ("GET", "/pd/info"),
    ("POST", "/update_weights_from_disk"),
    ("POST", "/hicache/storage-backend/clear"),
    ("GET", "/openapi.json"),
    ("OPTIONS", "/v1/models"),
)


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[GuardedCluster]:
    """Its directory is one that every user can list: what stands in it must hold by itself."""
    with lab("far", "near") as network, tempfile.TemporaryDirectory(prefix="pdserve-hostile-") as directory:
        made = GuardedCluster(network, Path(directory), model)
        try:
            for namespace, token in (("alpha", ALPHA), ("beta", BETA)):
                stored = made.client.do(
                    "keep", port=POOL_PORTS[0], namespace=namespace, token=token, count=PAGES
                )
                assert stored == {"stored": PAGES}
            yield made
            assert_unharmed(made)
            logs = {path.name: path.read_text(errors="replace") for path in made.directory.glob("*.log")}
            assert not [name for name, text in logs.items() if any(one in text for one in SECRETS)]
            assert not [name for name in ("pool0.log", "pool1.log") if "Traceback" in logs[name]]
        finally:
            made.close()
            shutil.rmtree(f"/dev/shm/pdserve-hostile-{made.directory.name}", ignore_errors=True)


@pytest.fixture(scope="module")
def stranger(cluster: GuardedCluster) -> Iterator[Program]:
    """On another host."""
    visitor = Program(cluster.network, "near", cluster.directory / "stranger.log", "-m", MODULE, cluster.host)
    yield visitor
    visitor.close()


MODULE = "tests.support.netns.visitor"


def assert_unharmed(cluster: GuardedCluster) -> None:
    """All processes run, an honest client gets its answer and every page, and no page is lost count of."""
    assert cluster.alive() == ["pool0", "pool1", "worker", "router"]
    assert cluster.answers()
    for namespace, token in (("alpha", ALPHA), ("beta", BETA)):
        wanted = {"port": POOL_PORTS[1], "namespace": namespace, "token": token, "count": PAGES}
        assert cluster.client.do("check", **wanted)["read"] == PAGES
    for number in (0, 1):
        report = cluster.status(number)
        parts = report.free_bytes, report.used_bytes, report.reserved_bytes, report.quarantined_bytes
        assert sum(parts) == report.capacity_bytes


def test_other_hosts_reach_what_the_documents_say_and_nothing_else(
    cluster: GuardedCluster, stranger: Program
) -> None:
    """A port that somebody adds, and forgets to tell of, fails here."""
    listening = cluster.listening()
    assert set(OPEN) <= set(listening)
    reached = stranger.do("reach", ports=sorted(listening))["open"]
    assert {port: listening[port] for port in reached if port not in OPEN} == {}
    assert set(reached) == set(OPEN)


@pytest.mark.parametrize("kind", ATTACKS)
def test_bytes_of_strangers_to_every_port_harm_nobody(
    cluster: GuardedCluster, stranger: Program, kind: str
) -> None:
    before = cluster.memory_bytes()
    for port in OPEN:
        stranger.do("attack", port=port, kind=kind)
    try:
        assert_unharmed(cluster)
        grown = {
            name: size / before[name]
            for name, size in cluster.memory_bytes().items()
            if size > MOST_GROWTH * before[name]
        }
        assert grown == {}
    finally:
        stranger.do("let_go")
    assert_unharmed(cluster)


def test_no_token_and_wrong_tokens_open_nothing(cluster: GuardedCluster, stranger: Program) -> None:
    for port in POOL_PORTS:
        assert stranger.do("say", port=port, token="a token that nobody gave out")["refused"]
        said = stranger.do("steal", port=port, token="", victim="alpha", own="beta")["said"]
        assert set(said) <= {"Fault", "Committed", "closed"}  # greeted, and no more: it commits no page
    for key in ("", "wrong-key-of-somebody"):
        for method, path in CONTROL_ROUTES:
            answer = stranger.do("request", port=WORKER_PORT, method=method, path=path, key=key, body={})
            assert answer["status"] in (401, 403, 404, 405), (path, answer)
        body = {"model": "demo-tiny", "prompt": "x", "max_tokens": 1}
        for path in ("/v1/completions", "/metrics", "/v1/models"):
            method = "POST" if path == "/v1/completions" else "GET"
            answer = stranger.do("request", port=ROUTER_PORT, method=method, path=path, key=key, body=body)
            assert answer["status"] == 401, (path, answer)


@pytest.mark.parametrize(("token", "victim", "own"), [(BETA, "alpha", "beta"), (ALPHA, "beta", "alpha")])
def test_a_token_of_one_namespace_reaches_no_page_of_another(
    cluster: GuardedCluster, stranger: Program, token: str, victim: str, own: str
) -> None:
    for port in POOL_PORTS:
        said = stranger.do("steal", port=port, token=token, victim=victim, own=own)["said"]
        assert not [one for one in said if one.isupper()], said
        assert "opened its own" in said  # so that it is not refused for another reason
    assert_unharmed(cluster)


def test_workers_token_and_admin_token_open_what_they_are_for(
    cluster: GuardedCluster, stranger: Program
) -> None:
    """The refusals above are not those of a node that refuses all."""
    for token in (READERS, ADMIN, ALPHA):
        assert stranger.do("say", port=POOL_PORTS[0], token=token) == {"refused": ""}


def test_another_user_of_the_host_opens_no_file_and_no_socket(cluster: GuardedCluster) -> None:
    places = [str(cluster.directory), f"/dev/shm/pdserve-hostile-{cluster.directory.name}"]
    command = ("-m", MODULE, "127.0.0.1", NOBODY)
    nobody = Program(cluster.network, "far", cluster.directory / "nobody.log", *command)
    try:
        said = nobody.do("files", places=places)
        assert [path for path in said["looked_at"] if path.endswith(".sock")]
        harmless = (".log", "keys")  # logs hold no secret; keys are digests
        assert [path for path in said["opened"] if not path.endswith(harmless)] == []
        loopback = [port for port, (host, _) in cluster.listening().items() if host.startswith("127.")]
        for kind in ("noise", "silence", "half a frame"):
            for port in loopback:
                nobody.do("attack", port=port, kind=kind, connections=8)
            assert_unharmed(cluster)
            nobody.do("let_go")
    finally:
        nobody.close()
    until(cluster.answers, cluster.alive, 60.0)

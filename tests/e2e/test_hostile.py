"""A whole cluster with tokens everywhere, attacked from another host, by another user, and with tokens that
give other rights. Real SGLang, real pool nodes, a real router, in network namespaces.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.netns import attacks
from tests.support.netns.attacks import CONTROL, HOST, PAGES, ROUTER, WORKER
from tests.support.netns.guarded import (
    ADMIN,
    ALPHA,
    ALPHA_READER,
    BETA,
    DATA_PORTS,
    GAMMA,
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

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.usefixtures("site")]
STORED = 24
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
def guarded(model: Path) -> Iterator[GuardedCluster]:
    """Its directory is one that every user can list: what stands in it must hold by itself."""
    with lab("far", "near") as network, tempfile.TemporaryDirectory(prefix="pdserve-hostile-") as directory:
        made = GuardedCluster(network, Path(directory), model)
        try:
            for namespace, token in (("alpha", ALPHA), ("beta", BETA)):
                stored = made.client.do(
                    "keep", port=POOL_PORTS[0], namespace=namespace, token=token, count=STORED
                )
                assert stored == {"stored": STORED}
            yield made
            assert_unharmed(made)
            logs = {path.name: path.read_text(errors="replace") for path in made.directory.glob("*.log")}
            assert not [name for name, text in logs.items() if any(one in text for one in SECRETS)]
            assert not [name for name in ("pool0.log", "pool1.log") if "Traceback" in logs[name]]
        finally:
            made.close()
            shutil.rmtree(f"/dev/shm/pdserve-hostile-{made.directory.name}", ignore_errors=True)


@pytest.fixture(scope="module")
def stranger(guarded: GuardedCluster) -> Iterator[Program]:
    """On another host."""
    visitor = Program(guarded.network, "near", guarded.directory / "stranger.log", "-m", MODULE, guarded.host)
    yield visitor
    visitor.close()


MODULE = "tests.support.netns.intruder"
PLACES = {
    **dict.fromkeys(POOL_PORTS, CONTROL),
    **dict.fromkeys(DATA_PORTS, PAGES),
    WORKER_PORT: WORKER,
    ROUTER_PORT: ROUTER,
}


@pytest.fixture(scope="module")
def nobody(guarded: GuardedCluster) -> Iterator[Program]:
    """Another user of the cluster's host."""
    command = ("-m", MODULE, "127.0.0.1", NOBODY)
    visitor = Program(guarded.network, "far", guarded.directory / "nobody.log", *command)
    yield visitor
    visitor.close()


def assert_unharmed(guarded: GuardedCluster) -> None:
    """All processes run, an honest client gets its answer and every page, and no page is lost count of."""
    assert guarded.alive() == ["pool0", "pool1", "worker", "router"]
    assert guarded.answers()
    for namespace, token in (("alpha", ALPHA), ("beta", BETA)):
        wanted = {"port": POOL_PORTS[1], "namespace": namespace, "token": token, "count": STORED}
        assert guarded.client.do("check", **wanted)["read"] == STORED
    for number in (0, 1):
        report = guarded.status(number)
        parts = report.free_bytes, report.used_bytes, report.reserved_bytes, report.quarantined_bytes
        assert sum(parts) == report.capacity_bytes


def test_other_hosts_reach_what_the_documents_say_and_nothing_else(
    guarded: GuardedCluster, stranger: Program
) -> None:
    """A port that somebody adds, and forgets to tell of, fails here."""
    listening = guarded.listening()
    assert set(OPEN) <= set(listening)
    reached = stranger.do("reach", ports=sorted(listening))["open"]
    assert {port: listening[port] for port in reached if port not in OPEN} == {}
    assert set(reached) == set(OPEN)


@contextlib.contextmanager
def bearing_it(guarded: GuardedCluster, attacker: Program) -> Iterator[None]:
    """While the attack goes on, and after it: all is unharmed, and no process has grown."""
    before = guarded.memory_bytes()
    yield
    try:
        assert_unharmed(guarded)
        grown = {
            name: size / before[name]
            for name, size in guarded.memory_bytes().items()
            if size > MOST_GROWTH * before[name]
        }
        assert grown == {}
    finally:
        attacker.do("let_go")
    assert_unharmed(guarded)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ATTACKS)
def test_bytes_of_strangers_to_every_port_harm_nobody(
    guarded: GuardedCluster, stranger: Program, kind: str
) -> None:
    with bearing_it(guarded, stranger):
        for port in OPEN:
            stranger.do("attack", port=port, kind=kind)
            guarded.tried.add((attacks.STRANGER, kind, PLACES[port]))


@pytest.mark.extended
@pytest.mark.parametrize("at_once", [8, 2000])
def test_who_reads_no_answers_harms_nobody(guarded: GuardedCluster, stranger: Program, at_once: int) -> None:
    kinds = {CONTROL: "pool", WORKER: "worker", ROUTER: "router"}
    with bearing_it(guarded, stranger):
        for port in (*POOL_PORTS, WORKER_PORT, ROUTER_PORT):
            place = PLACES[port]
            stranger.do("be_deaf", port=port, kind=kinds[place], at_once=at_once)
            guarded.tried.add((attacks.STRANGER, attacks.DEAF, place))


@pytest.mark.extended
def test_a_tenant_that_reads_no_streams_and_a_reader_that_reads_no_pages_harm_nobody(
    guarded: GuardedCluster, stranger: Program
) -> None:
    with bearing_it(guarded, stranger):
        stranger.do("be_deaf", port=ROUTER_PORT, kind="stream", at_once=1, key=guarded.api_key, connections=6)
        guarded.tried.add((attacks.TENANT, attacks.DEAF_STREAM, ROUTER))
        for port in POOL_PORTS:
            deaf = {"namespace": "alpha", "token": ALPHA_READER, "connections": 4}
            assert stranger.do("be_deaf_to_pages", port=port, **deaf)["asked"] > 0
            guarded.tried.add((attacks.READER, attacks.DEAF_PAGES, PAGES))


def test_no_token_and_wrong_tokens_open_nothing(guarded: GuardedCluster, stranger: Program) -> None:
    for attack in (attacks.NO_TOKEN, attacks.WRONG_TOKEN):
        guarded.tried |= {(attacks.STRANGER, attack, place) for place in (CONTROL, WORKER, ROUTER)}
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
    guarded: GuardedCluster, stranger: Program, token: str, victim: str, own: str
) -> None:
    for port in POOL_PORTS:
        said = stranger.do("steal", port=port, token=token, victim=victim, own=own)["said"]
        assert not [one for one in said if one.isupper()], said
        assert "opened its own" in said  # so that it is not refused for another reason
        guarded.tried.add((attacks.WRITER, attacks.STEAL, CONTROL))
    assert_unharmed(guarded)


@pytest.mark.extended
def test_workers_token_and_admin_token_open_what_they_are_for(
    guarded: GuardedCluster, stranger: Program
) -> None:
    """The refusals above are not those of a node that refuses all."""
    for token in (READERS, ADMIN, ALPHA):
        assert stranger.do("say", port=POOL_PORTS[0], token=token) == {"refused": ""}


@pytest.mark.extended
def test_a_token_to_read_reads_and_does_nothing_else(guarded: GuardedCluster, stranger: Program) -> None:
    for port in POOL_PORTS:
        said = stranger.do("overstep", port=port, namespace="alpha", token=ALPHA_READER)
        assert said == {"done": [], "stored": 0, "read": 8}
        guarded.tried |= {(attacks.READER, attacks.WRITE, place) for place in (CONTROL, PAGES)}
        unasked = stranger.do("send_unasked", port=port, token=ALPHA_READER)["said"]
        assert set(unasked) <= {"0 bytes"}, "the connection is closed"
        guarded.tried.add((attacks.READER, attacks.UNASKED, PAGES))
    assert_unharmed(guarded)


@pytest.mark.extended
def test_what_was_heard_of_a_handshake_opens_nothing(guarded: GuardedCluster, stranger: Program) -> None:
    for port in POOL_PORTS:
        said = stranger.do("replay", port=port, token=ALPHA)["said"]
        assert said in (["Challenge", "Fault"], ["Challenge", "Fault", "0 bytes"])
        guarded.tried |= {(attacks.STRANGER, attacks.REPLAY, place) for place in (CONTROL, PAGES)}


@pytest.mark.extended
def test_nobody_passes_for_a_node_of_the_pool(guarded: GuardedCluster, stranger: Program) -> None:
    for port in POOL_PORTS:
        for token in ("", ALPHA, "a token that nobody gave out"):
            said = stranger.do("pass_for_a_node", port=port, token=token)["said"]
            assert set(said) <= {"Fault", "Challenge"}, said
        guarded.tried.add((attacks.STRANGER, attacks.FALSE_NODE, CONTROL))
    assert_unharmed(guarded)


def test_another_user_of_the_host_opens_no_file_and_no_socket(
    guarded: GuardedCluster, nobody: Program
) -> None:
    places = [str(guarded.directory), f"/dev/shm/pdserve-hostile-{guarded.directory.name}"]
    said = nobody.do("files", places=places)
    assert [path for path in said["looked_at"] if path.endswith(".sock")]
    harmless = (".log", "keys")  # logs hold no secret; keys are digests
    assert [path for path in said["opened"] if not path.endswith(harmless)] == []
    held = guarded.open_files()
    assert [path for path in held if path.startswith("/dev/shm/")]
    opened = nobody.do("open_files", paths=held)["opened"]
    assert [path for path in opened if not path.endswith(harmless)] == []
    sockets = nobody.do("unix_sockets")
    assert str(guarded.socket(0)) in sockets["looked_at"]
    assert sockets["opened"] == []
    guarded.tried.add((attacks.USER, attacks.FILES, HOST))


def test_another_user_of_the_host_finds_no_secret_in_proc(guarded: GuardedCluster, nobody: Program) -> None:
    """One is in an environment. What everybody sees is found: so the search works."""
    said = nobody.do("processes", pids=guarded.pids(), words=[*SECRETS, guarded.api_key, "pdserve"])
    assert {tuple(one) for one in said["found"]} == {("cmdline", "pdserve")}
    assert {"environ", "mem", "fd", "maps"} <= set(said["refused"])
    guarded.tried.add((attacks.USER, attacks.PROC, HOST))


@pytest.mark.extended
def test_another_user_of_the_host_harms_nobody_at_loopback(guarded: GuardedCluster, nobody: Program) -> None:
    loopback = [port for port, (host, _) in guarded.listening().items() if host.startswith("127.")]
    for kind in attacks.LOOPBACK:
        for port in loopback:
            nobody.do("attack", port=port, kind=kind, connections=8)
        assert_unharmed(guarded)
        nobody.do("let_go")
        guarded.tried.add((attacks.USER, kind, HOST))
    until(guarded.answers, guarded.alive, 60.0)


@pytest.mark.extended
def test_who_tries_many_tokens_finds_none_and_locks_nobody_out(
    guarded: GuardedCluster, stranger: Program
) -> None:
    """Late: the router bounds his address for a minute by it."""
    for port in POOL_PORTS:
        assert stranger.do("say", port=port, token=ALPHA) == {"refused": ""}
        said = stranger.do("guess", port=port, count=100)["said"]
        assert set(said) == {"bad_token"}
        assert stranger.do("say", port=port, token=ALPHA) == {"refused": ""}
        assert guarded.client.do("say", port=port, token=GAMMA) == {"refused": ""}
        guarded.tried.add((attacks.STRANGER, attacks.GUESSES, CONTROL))

    def status(key: str) -> int:
        asked = stranger.do("request", port=ROUTER_PORT, method="GET", path="/v1/models", key=key, body={})
        return int(asked["status"])

    assert status(guarded.api_key) == 200
    assert {status(f"guess-number-{number}-of-many") for number in range(100)} == {401, 429}
    assert status(guarded.api_key) == 200, "it was right from there before"
    assert guarded.answers(), "another address is not bound"
    guarded.tried.add((attacks.STRANGER, attacks.GUESSES, ROUTER))
    assert_unharmed(guarded)


@pytest.mark.extended
def test_the_table_in_the_documents_counts_what_was_tried(guarded: GuardedCluster) -> None:
    """Last. tests/docs holds that the documents show it."""
    assert guarded.tried == attacks.pairs()
    reached = Counter(PLACES[port] for port in OPEN)
    assert reached == attacks.PORTS

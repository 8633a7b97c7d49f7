"""`pdserve doctor` as a command: this machine, and a cluster of scripted workers."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.doctor import cluster, judge, live_probe
from pdserve.doctor.cli import plan_of, pool_tls
from pdserve.doctor.cluster import Member
from pdserve.engine.model_dir import chat_template_fingerprint, tokenizer_fingerprint
from pdserve.errors import ConfigError
from pdserve.router.config.router import RouterConfig
from pdserve.security.tls import Certificates
from pdserve.settings.config_file import to_toml
from tests.support.certificates import Authority, certificate
from tests.support.command import pdserve_here
from tests.support.e2e.cluster import free_port
from tests.support.kvpool.clustered import running
from tests.support.kvpool.local_node import LocalNode
from tests.support.kvpool.nodes import small_config
from tests.support.kvpool.pools import arena_dir, remove_arena
from tests.support.router import mock_worker as mock
from tests.support.router.harness import PATIENT, before, disagg, routed
from tests.support.router.mock_worker import REPORT, MockWorker, Received, Wire
from tests.support.router.vllm_worker import VllmWorker


async def doctor(*words: str, **environment: str) -> tuple[int, str]:
    """(exit status, what it said)"""
    done = await asyncio.to_thread(pdserve_here, "doctor", "--no-self-check", *words, **environment)
    return done.returncode, done.stdout


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LocalNode]:
    started = LocalNode(small_config(name="pool0"), tmp_path)
    yield started
    started.close()
    remove_arena(started.config)
    arena_dir().rmdir()


def levels(said: str) -> dict[str, str]:
    """The worst level of each check."""
    order = ["ok", "warn", "fail"]
    found: dict[str, str] = {}
    for one in json.loads(said)["findings"]:
        found[one["check"]] = max(found.get(one["check"], "ok"), one["level"], key=order.index)
    return found


def serves(worker: MockWorker) -> None:
    """Answer generations as SGLang does."""
    page = worker.info["page_size"]

    async def generate(wire: Wire, request: Received) -> None:
        tokens = len(request.json()["input_ids"])
        body = json.dumps({"output_ids": [5] * page, "meta_info": {"prompt_tokens": tokens}}).encode()
        pool = (tokens - 1) // page * page
        found = f"x-pdserve-cached: device=0, host=0, pool={pool}, computed=7\r\n"
        await wire.head(200, "application/json", len(body), found)
        await wire.raw(body)

    async def prefilled(wire: Wire, request: Received) -> None:
        tokens = len(request.json()["input_ids"])
        await wire.json(200, REPORT | {"prompt_tokens": tokens, "cached": {"pool": tokens // page * page}})

    worker.info |= {"tokenizer": "t", "chat_template": "c"}
    worker.script("/pd/prefill", *[prefilled] * 20)
    worker.script("/generate", *[generate] * 20)


async def test_a_cluster_that_is_well_a_fault_in_it_and_one_that_is_away(node: LocalNode) -> None:
    async with disagg() as (harness, [prefill], [decode]):
        for worker in (prefill, decode):
            serves(worker)
        asked = ("--json", "--router", harness.url, "--pool", node.address)
        status, said = await doctor(*asked)
        found = levels(said)
        assert {check: level for check, level in found.items() if level == "fail"} == {}, said
        assert {"pool node", "alike", "live probe", "UCX", "/dev/shm", "open files"} <= set(found)
        assert status == json.loads(said)["status"] == (1 if "warn" in found.values() else 0)

        decode.info["chat_template"] = "d"
        node.close()
        status, said = await doctor(*asked)
        assert status == 2
        failed = {c for c, level in levels(said).items() if level == "fail"}
        # no decode worker is left for the probe once the router has refused it
        assert failed - {"live probe", "worker"} == {"alike", "pool node"}
    status, said = await doctor("--router", harness.url)
    assert status >= 1
    assert "nothing answers" in said


async def test_a_hand_off_that_fails_is_found_though_every_worker_is_ready() -> None:
    async with disagg() as (harness, [prefill], [decode]):
        prefill.script("/pd/prefill", *(mock.answer(500, {}) for _ in range(2)))
        for worker in (prefill, decode):
            serves(worker)
        status, said = await doctor("--json", "--router", harness.url)
        failed = [one for one in json.loads(said)["findings"] if one["level"] == "fail"]
        assert {one["check"] for one in failed} == {"live probe"}
        assert all("stage=status-500" in one["says"] for one in failed)
        assert status == 2


async def test_each_model_that_generates_is_probed_with_pages_of_its_own_size() -> None:
    """A router of several models knows none that a prompt without a model's name could mean."""
    sizes = {"a": 16, "b": 32}
    prefills, decodes = (
        [MockWorker(role, model, namespace=model, page_size=size) for model, size in sizes.items()]
        for role in ("prefill", "decode")
    )
    vectors = MockWorker("agg", "vectors", namespace="vectors", tasks=["embed"])
    async with mock.workers(*prefills, *decodes, vectors):
        config = RouterConfig(
            prefill=tuple(worker.url for worker in prefills),
            decode=tuple(worker.url for worker in decodes),
            agg=(vectors.url,),
            deadlines=PATIENT,
        )
        async with routed(config) as harness:
            for worker in (*prefills, *decodes, vectors):
                serves(worker)
            _, said = await doctor("--json", "--router", harness.url)
    probed = [one for one in json.loads(said)["findings"] if one["check"] == "live probe"]
    assert [one["level"] for one in probed] == ["ok"] * 4, said
    assert [one["says"][:9] for one in probed] == ["a: turn 1", "a: turn 2", "b: turn 1", "b: turn 2"]
    sent = [[len(request.json()["input_ids"]) for request in one.got("/generate")] for one in decodes]
    assert sent == [[4 * 16 + 7, 5 * 16 + 14], [4 * 32 + 7, 5 * 32 + 14]]
    assert vectors.got("/generate") == []


@pytest.mark.timeout(140)
async def test_a_cluster_of_which_no_worker_is_known_is_no_cluster_that_is_well(tmp_path: Path) -> None:
    async with disagg(0, 0) as (harness, _, _):
        status, said = await doctor("--json", "--router", harness.url)
        assert status == 2
        assert levels(said)["worker"] == "fail"
        assert "no worker is known" in said


def cluster_file(directory: Path, port: int, **cluster: str) -> Path:
    """Of one aggregated worker and a router at that port."""
    tables = {"cluster": {"run_dir": str(directory / "run"), **cluster}, "router": {"port": port}}
    path = directory / "cluster.toml"
    path.write_text(to_toml(tables) + f'[[agg]]\n[agg.engine]\nmodel_path = "{directory}"\n')
    return path


async def test_workers_that_no_configuration_lists_are_asked_for_at_the_router(tmp_path: Path) -> None:
    """The configuration is not where it is looked for, or the workers are in etcd."""
    async with disagg() as (harness, [prefill], [decode]):
        for worker in (prefill, decode):
            serves(worker)
        asked = ("--json", "--config", str(cluster_file(tmp_path, harness.port)))
        status, said = await doctor(*asked)
        found = levels(said)
        assert found["cluster"] == "warn"
        assert "--run-dir" in said
        assert (status, found["alike"], found["live probe"]) == (1, "ok", "ok")

        (tmp_path / "run").mkdir()
        written = to_toml({"host": "127.0.0.1", "port": harness.port})
        (tmp_path / "run" / "router.toml").write_text(written)
        status, said = await doctor(*asked)
        found = levels(said)
        assert "cluster" not in found
        assert (found["alike"], found["live probe"]) == ("ok", "ok")


@pytest.mark.timeout(140)
async def test_a_router_of_ipv6_and_one_that_is_no_url(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "router.toml").write_text(to_toml({"host": "::1", "port": 9}))
    status, said = await doctor("--config", str(cluster_file(tmp_path, 9)))
    assert status >= 1
    assert "nothing answers at http://[::1]:9" in said
    for url in ("http://::1:8000", "http://host:port", "host:8000"):
        assert await doctor("--router", url) == (2, "")


async def test_a_worker_that_drains_or_starts_is_said_to_and_not_called_misconfigured() -> None:
    async with disagg() as (_, [starts], [drains]):
        starts.ready = False
        starts.script("/pd/info", mock.answer(500, {}))
        drains.draining = True
        drains.script("/pd/info", mock.answer(503, {}))
        found = await asyncio.to_thread(cluster.gather_workers, [Member(starts.url), Member(drains.url)], "")
    assert [(one.error, one.info, one.draining) for one in found] == [("", None, False), ("", None, True)]
    worst = {one.check: one.says for one in judge.workers(found) if one.level != "ok"}
    assert worst.keys() == {"worker", "clock"}  # the scripted ones live in the past


class Listening(VllmWorker):
    """Tells probes of the router, which a mock forgets, and the doctor's apart."""

    def __init__(self, role: str) -> None:
        super().__init__(role)
        self.asked_by_doctor: list[str] = []

    async def _default(self, wire: Wire, request: Received) -> None:
        if request.headers.get("accept-encoding") == "identity":
            self.asked_by_doctor.append(request.path)
        await super()._default(wire, request)


async def test_vllm_workers_are_asked_for_nothing_that_they_do_not_have() -> None:
    async with disagg(make=Listening) as (harness, [prefill], [decode]):
        status, said = await doctor("--json", "--router", harness.url)
    found = json.loads(said)["findings"]
    assert {one["check"]: one["level"] for one in found if one["level"] == "fail"} == {}, said
    assert status == 1  # the scripted ones live in the past
    assert "live probe" not in levels(said)  # of tokens, on a route of SGLang's
    for worker in (prefill, decode):
        assert any(f"{worker.url} is vllm's" in one["says"] for one in found)
        assert isinstance(worker, Listening)
        assert worker.asked_by_doctor == ["/health", "/v1/models"]


async def test_a_vllm_worker_that_no_router_told_of_is_known_by_what_it_lacks() -> None:
    async with mock.workers(worker := VllmWorker("decode")):
        (found,) = await asyncio.to_thread(cluster.gather_workers, [Member(worker.url)], "")
        assert found.ready
        assert found.info is not None
        assert (found.info.engine, found.info.model, found.info.context_length) == ("vllm", "m", 4096)
        assert {one.check for one in judge.workers([found]) if one.level == "fail"} == set()
        worker.ready = False
        worker.script("/v1/models", mock.answer(401, {}))
        (found,) = await asyncio.to_thread(cluster.gather_workers, [Member(worker.url)], "")
        assert (found.guarded, found.ready, found.error) == (True, False, "")


def test_fingerprints_tell_tokenizers_and_templates_apart() -> None:
    class Tokenizer:
        chat_template: str | None = None

        def __init__(self, shift: int) -> None:
            self.shift = shift

        def encode(self, text: str) -> list[int]:
            return [ord(c) + self.shift for c in text]

        def __len__(self) -> int:
            return 100

    one, same, other = Tokenizer(0), Tokenizer(0), Tokenizer(1)
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(same) != tokenizer_fingerprint(other)
    assert chat_template_fingerprint(one, None) == "none"
    one.chat_template, same.chat_template = "a", "b"
    said = {chat_template_fingerprint(one, None), chat_template_fingerprint(same, None)}
    assert len(said | {chat_template_fingerprint(one, "chatml")}) == 3


TOKEN = "cluster-token-cluster-token"


def asks_for_the_token(worker: MockWorker) -> list[str | None]:
    """What `worker` is shown at `/pd/info`, which it tells nobody without the cluster's token."""
    shown: list[str | None] = []

    async def info(wire: Wire, request: Received) -> None:
        shown.append(request.headers.get("authorization"))
        is_right = shown[-1] == f"Bearer {TOKEN}"
        await wire.json(200 if is_right else 401, worker.info if is_right else {})

    worker.script("/pd/info", *[info] * 5)
    return shown


async def test_a_worker_that_only_the_router_names_is_not_sent_the_token() -> None:
    liar, listed = MockWorker("decode"), MockWorker("decode")
    async with mock.workers(liar, listed):
        shown = asks_for_the_token(listed)
        liar.script("/ready", mock.answer(200, {"workers": [{"id": listed.id}]}))
        status, said = await doctor("--json", "--router", liar.url, PDSERVE_CLUSTER_TOKEN=TOKEN)
        assert shown == [None]
        assert listed.requests == []
        found = [one for one in json.loads(said)["findings"] if listed.url in one["says"]]
        assert [one["level"] for one in found if one["check"] == "worker"] == ["ok"]
        assert "--worker URL" in said
        assert TOKEN not in said
        assert status < 2


async def test_a_worker_that_the_operator_names_is_sent_the_token(tmp_path: Path) -> None:
    named = MockWorker("decode")
    (tmp_path / "token").write_text(TOKEN)
    async with mock.workers(named):
        shown = asks_for_the_token(named)
        _, said = await doctor("--json", "--worker", named.url, "--token-file", str(tmp_path / "token"))
        assert shown == [f"Bearer {TOKEN}"]
        assert levels(said)["alike"] == "ok"
        _, said = await doctor("--json", "--worker", named.url, PDSERVE_CLUSTER_TOKEN="another-token-here")
        assert "the cluster's token is another one there" in said


async def test_a_key_goes_to_a_router_whose_certificate_is_trusted_and_to_no_other(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    cert, key = certificate(tmp_path)
    other, _ = certificate(tmp_path / "other")
    heard = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.extend(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 503 No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(cert, key)
    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls) as server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for trust, is_trusted in (
            (None, False),
            (cluster.trust_in(other, None), False),
            (cluster.trust_in(None, other), False),
            (cluster.trust_in(cert, None), True),
            (cluster.trust_in(None, cert), True),
        ):
            heard.clear()
            found = await asyncio.to_thread(live_probe.probe, url, "m", 16, TOKEN, random.Random(1), trust)
            assert found.error
            assert (TOKEN.encode() in heard) is is_trusted
    with pytest.raises(ConfigError, match="cannot be read"):
        cluster.trust_in(None, key)


async def test_workers_are_asked_by_https_with_the_routers_certificates(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    worker = mock.MockWorker("decode")
    worker.tls = Certificates(authority.host(mutual=True)).server_context
    async with mock.workers(worker):
        found = [
            (await asyncio.to_thread(cluster.gather_workers, [Member(worker.url)], token, trust=trust))[
                0
            ].error
            for token in ("", "t" * 16)
            for trust in (
                Certificates(authority.host("router")).client_context,
                Certificates(Authority(tmp_path / f"other{token}").client()).client_context,
            )
        ]
    assert ["certificate verify failed" in error for error in found] == [False, True, False, True], found


async def test_a_router_tells_which_workers_speak_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    worker = mock.MockWorker("decode")
    worker.tls = Certificates(authority.host()).server_context
    async with before(worker, tls=authority.client()) as harness:
        members, _ = await asyncio.to_thread(cluster.members, f"http://127.0.0.1:{harness.port}")
    assert [member.url for member in members] == [worker.url]


async def test_pool_nodes_are_asked_with_the_certificates_of_their_configuration(tmp_path: Path) -> None:
    files = Authority(tmp_path / "ca").host(mutual=True)
    table = {name: str(getattr(files, name)) for name in ("certificate", "key", "ca", "client_ca")}
    file, address = tmp_path / "cluster.toml", f"tcp:127.0.0.1:{free_port()}"
    tables = {"cluster": {"name": "c"}, "pool": [{"listen": [address], "tls": table}], "agg": [{}]}
    file.write_text(to_toml(tables))
    async with running(tmp_path, "a", listen=[address], tls=files):
        tls = pool_tls(plan_of(file, tmp_path))
        [found] = await asyncio.to_thread(cluster.gather_pool, [address], tls)
        for _ in range(5):  # on a busy machine the node may be too late to refuse it
            [in_clear] = await asyncio.to_thread(cluster.gather_pool, [address])
            if "in time" not in in_clear.error:
                break
    assert (found.node, found.error) == ("a", "")
    assert "it may want TLS" in in_clear.error

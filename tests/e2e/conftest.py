"""Shared real processes: see tests/support/e2e/site.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.e2e import warm
from tests.support.e2e.cluster import Worker
from tests.support.e2e.prompts import ALL_LENGTHS, LENGTHS
from tests.support.e2e.site import NEEDS, Cluster, Direct, Reference, Site, place
from tests.support.random_model import make_random_model

HERE = Path(__file__).parent
SITE = pytest.StashKey[Site]()
CURRENT = pytest.StashKey[pytest.Item]()


def fixtures_of(item: pytest.Item) -> tuple[str, ...]:
    return tuple(getattr(item, "fixturenames", ()))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one server stand together. Any other order passes too, but starts servers more than once."""
    places = [i for i, item in enumerate(items) if HERE in item.path.parents]
    ordered = sorted((items[i] for i in places), key=lambda item: place(fixtures_of(item)))
    for i, item in zip(places, ordered, strict=True):
        items[i] = item


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before a test's fixtures its servers are ready."""
    item.session.stash[CURRENT] = item
    site = item.session.stash.get(SITE, None)
    if site is not None:
        use(site, item)


def use(site: Site, item: pytest.Item) -> None:
    following = item.session.items[item.session.items.index(item) + 1 :]
    site.use(fixtures_of(item), [fixtures_of(one) for one in following if HERE in one.path.parents])


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny demo model, made here."""
    directory = tmp_path_factory.mktemp("model") / "demo-tiny"
    make_random_model("tiny", directory, seed=0)
    return directory


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small demo model, made here, for other stacks."""
    directory = tmp_path_factory.mktemp("model") / "demo-small"
    make_random_model("small", directory, seed=0)
    return directory


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configurations, logs, sockets; short, because a Unix socket's path holds 107 bytes."""
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="session")
def site(request: pytest.FixtureRequest, model: Path, run_dir: Path) -> Iterator[Site]:
    """Pool nodes, etcd, and the servers of the first test that needs some. While a test runs that asks for
    this alone, servers of later tests start.
    """
    warm.begin()
    lengths = ALL_LENGTHS if request.config.getoption("--all", False) else LENGTHS
    fixtures = {name for item in request.session.items for name in fixtures_of(item)}
    site = Site.of(run_dir, model, lengths, fixtures)
    try:
        site.start()
        use(site, request.session.stash[CURRENT])
        request.session.stash[SITE] = site
        yield site
    finally:
        site.stop()


@pytest.fixture(scope="session")
def warm_server(site: Site) -> None:
    """Is up: what a test starts by itself starts at once."""
    warm.server()


@pytest.fixture(scope="session")
def agg_worker(site: Site) -> Worker:
    """Pages of float32 in the pool, over mapped memory, page_first_direct."""
    return site.servers.workers["agg"]


@pytest.fixture(scope="session")
def plain_worker(site: Site) -> Worker:
    """Plain SGLang: no HiCache, no pool, prompts encoded from their text."""
    return site.servers.workers["plain"]


@pytest.fixture(scope="session")
def elastic_workers(site: Site) -> list[Worker]:
    """Two, on the pool node of the disaggregated ones."""
    return [site.servers.workers[name] for name in NEEDS["elastic_workers"]]


@pytest.fixture(scope="session")
def ucx_worker(site: Site) -> Worker:
    """Pages of bfloat16 on two pool nodes, over UCX, layer_first."""
    return site.servers.workers["ucx"]


@pytest.fixture(scope="session")
def reference(site: Site) -> Reference:
    """What SGLang without HiCache and pool answers."""
    assert site.reference is not None
    return site.reference


@pytest.fixture(scope="session")
def cluster(site: Site, run_dir: Path) -> Iterator[Cluster]:
    """Its routers are started once for all tests; a test that kills the pool node starts it again."""
    cluster = Cluster.of(run_dir, site.servers, site.pools["pool0"])
    routers = [*cluster.pairs, cluster.router]
    try:
        for router in routers:
            router.start()
        site.routers["cluster"] = routers
        yield cluster
    finally:
        site.routers.pop("cluster", None)
        for router in routers:
            router.stop()


@pytest.fixture(scope="session")
def direct(site: Site, run_dir: Path) -> Iterator[Direct]:
    """Its router is started once; a test that kills a worker leaves it dead for the next test to start."""
    direct = Direct.of(run_dir, site.servers)
    try:
        direct.router.start()
        site.routers["direct"] = [direct.router]
        yield direct
    finally:
        site.routers.pop("direct", None)
        direct.router.stop()

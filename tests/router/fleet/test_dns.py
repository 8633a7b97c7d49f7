"""Workers that a router finds by DNS names."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from pdserve.discovery import dns
from pdserve.errors import ConfigError
from pdserve.router.app import lifespan
from pdserve.router.config.limits import Probe
from pdserve.router.config.router import RouterConfig
from pdserve.router.fleet.discovery import discovered
from pdserve.settings.config_file import build_config
from tests.support.router.harness import PATIENT, routed
from tests.support.router.mock_worker import ANSWER, MockWorker, workers


class Names:
    """A resolver of a router's names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: dict[str, list[str]] = {}
        monkeypatch.setattr(lifespan, "discovered", partial(discovered, resolve=self.resolve))
        monkeypatch.setattr(dns, "LOOKUP_S", 0.1)

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        if host not in self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.addresses[host]


@pytest.mark.timeout(120)
async def test_workers_are_used_while_their_name_has_their_address(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch)
    prefill, decode = MockWorker("prefill"), MockWorker("decode")
    async with workers(prefill, decode):
        names.addresses["decode.test"] = ["127.0.0.1"]
        config = RouterConfig(
            prefill=(f"dns+http://prefill.test:{prefill.id.rpartition(':')[2]}",),
            decode=(f"dns+http://decode.test:{decode.id.rpartition(':')[2]}",),
            probe=Probe(interval_s=0.1),
            min_prefill_tokens=0,
            deadlines=PATIENT,
        )
        async with routed(config) as harness:
            fleet = harness.router.fleet
            assert (await harness.chat()).headers["x-pdserve-decode"] == decode.id  # known from the start
            names.addresses["prefill.test"] = ["127.0.0.1"]
            await harness.until(lambda: prefill.id in fleet.by_id and fleet.by_id[prefill.id].ready)
            assert (await harness.chat()).headers["x-pdserve-prefill"] == prefill.id
            del names.addresses["prefill.test"]
            await harness.until(lambda: set(fleet.by_id) == {decode.id})
            assert (await harness.chat()).body == ANSWER


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"etcd": {"endpoints": ["http://127.0.0.1:1"]}, "agg": ["dns+http://a:1"]}, "both name workers"),
        ({"tls": {"ca": "/ca"}, "agg": ["dns+http://a:1"]}, "certificates name hosts"),
        ({"decode": ["dns+http://a:1"], "agg": ["dns+http://a:1"]}, "listed twice"),
        ({"agg": ["dns+https://a:1"]}, "is not of the form"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(tables: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_config(RouterConfig, tables, source="x")


def test_names_alone_are_workers_enough() -> None:
    config = build_config(RouterConfig, {"prefill": ["dns+http://a:1"]}, source="x")
    config.check_workers()
    assert config.has_discovery

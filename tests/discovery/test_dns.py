"""Names with many addresses, from a scripted resolver in virtual time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import pytest

from pdserve.discovery.dns import LOOKUP_S, TIMEOUT_S, DnsName, DnsWatch, parse_dns_name, resolve_by_system
from tests.support.virtual_time import virtually

WORKERS = DnsName("http", "workers", 8001)
GONE = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
FAILED = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
Answer = Sequence[str] | Exception | float
"""Addresses, an error, or seconds after which `LATE` comes."""
LATE = ("10.0.0.9",)


class Script:
    """A resolver that gives these answers, one for each lookup; the last one again and again."""

    def __init__(self, *answers: Answer) -> None:
        self._answers: Iterator[Answer] = iter(answers)
        self._last: Answer = ()
        self.lookups = 0
        self.running = 0

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        assert (host, port) == WORKERS[1:]
        self.lookups += 1
        self._last = next(self._answers, self._last)
        if isinstance(self._last, Exception):
            raise self._last
        if not isinstance(self._last, float):
            return self._last
        self.running += 1
        try:
            await asyncio.sleep(self._last)
        finally:
            self.running -= 1
        return LATE


async def told(script: Script, lookups: int) -> list[list[str]]:
    """What the watch told of in its first look and `lookups` - 1 further ones."""
    heard: list[list[str]] = []

    def changed(found: Mapping[DnsName, Sequence[str]]) -> None:
        heard.append(list(found[WORKERS]))

    watch = DnsWatch([WORKERS], changed, script)
    await watch.look()
    with suppress(TimeoutError):
        async with asyncio.timeout((lookups - 1) * (LOOKUP_S + TIMEOUT_S) + 0.1):
            await watch.run()
    watch.close()
    await asyncio.sleep(0)
    return heard


@virtually
async def test_all_addresses_of_a_name_are_told_and_every_change_of_them() -> None:
    heard = await told(Script(["10.0.0.2", "10.0.0.1", "10.0.0.2"], ["10.0.0.1", "fd00::1", "10.0.0.2"]), 3)
    assert heard == [["10.0.0.1", "10.0.0.2"], ["10.0.0.1", "10.0.0.2", "fd00::1"]]


@virtually
async def test_an_address_goes_with_the_second_answer_in_a_row_that_lacks_it() -> None:
    both, one = ["10.0.0.1", "10.0.0.2"], ["10.0.0.1"]
    assert await told(Script(both, one, both, one, both), 4) == [both]
    assert await told(Script(both, one, one), 4) == [both, one]


@virtually
async def test_a_name_that_is_gone_loses_its_addresses_and_a_resolver_that_fails_takes_none_away() -> None:
    one = ["10.0.0.1"]
    assert await told(Script(one, FAILED, OSError("no route"), UnicodeError("label too long")), 6) == [one]
    assert await told(Script(one, GONE), 4) == [one, []]
    assert await told(Script(one, GONE, FAILED, one), 6) == [one]


@virtually
async def test_at_the_start_a_name_without_addresses_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    assert await told(Script(GONE, GONE, GONE, ["10.0.0.1"]), 5) == [[], ["10.0.0.1"]]
    assert caplog.text.count("it has no address") == 1


@virtually
async def test_a_resolver_that_hangs_delays_nobody_and_has_one_lookup_at_a_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = asyncio.get_running_loop()
    script, heard = Script(3.5 * TIMEOUT_S), list[Mapping[DnsName, Sequence[str]]]()
    began_s = loop.time()
    watch = DnsWatch([WORKERS], heard.append, script)
    await watch.look()
    assert loop.time() - began_s == TIMEOUT_S
    await watch.look()
    await watch.look()
    assert (script.lookups, script.running, heard) == (1, 1, [{WORKERS: []}])
    await watch.look()
    assert heard[1:] == [{WORKERS: list(LATE)}]  # the answer that came late counts
    assert caplog.text.count("no answer within 5 s") == 1
    watch.close()


async def test_the_system_knows_localhost_and_not_an_invalid_name() -> None:
    assert "127.0.0.1" in await resolve_by_system("localhost", 80)
    with pytest.raises((OSError, UnicodeError)):
        await resolve_by_system("a..b", 80)


@pytest.mark.parametrize(
    ("address", "scheme", "name"),
    [
        ("dns+http://workers:8001", "http", WORKERS),
        ("dns+http://workers.space.svc:8001/", "http", DnsName("http", "workers.space.svc", 8001)),
        ("dns+tcp:pool:7700", "tcp", DnsName("tcp", "pool", 7700)),
        *((f"dns+http://{rest}", "http", None) for rest in ("", "w", "w:0", "w:x", "w:1/path", "u@w:1")),
        *(
            ("dns+https://w:8001", "http", None),
            ("dns+http://pool:1", "tcp", None),
            ("dns+tcp:pool", "tcp", None),
        ),
    ],
)
def test_a_name_is_read_and_what_is_none_refused(address: str, scheme: str, name: DnsName | None) -> None:
    if name is not None:
        assert parse_dns_name(address, scheme) == name
    else:
        with pytest.raises(ValueError, match="is not of the form dns"):
            parse_dns_name(address, scheme)

"""Priorities of requests: who may ask for which, and what they do in the queue and at the workers."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import RequestError
from pdserve.router.config.tenants import Access, Admission, Tenant
from pdserve.router.tenants.rights import NO_PRIORITY, Priority, priority_of
from tests.support.router.harness import CHAT, Harness, before
from tests.support.router.mock_worker import Gate, MockWorker, held
from tests.support.router.tenants import ALICE, BOB, by, keyed

HEADER = "x-pdserve-priority"
INTEGERS = st.integers(-(2**63), 2**63 - 1)


def asked(
    said: bytes = b"", header: bytes | None = None, signs: tuple[int, ...] = (), at_most: int | None = 5
) -> Priority:
    return priority_of(msgspec.Raw(said), header, signs, at_most)


@given(INTEGERS, st.integers(0, 100), st.sampled_from([(), (1,), (-1,), (1, -1)]))
def test_nobody_is_more_urgent_than_allowed_however_workers_read_the_number(
    number: int, at_most: int, signs: tuple[int, ...]
) -> None:
    readings = [sign * number for sign in signs or (1,)]
    if max(readings) > at_most:
        with pytest.raises(RequestError) as error:
            asked(str(number).encode(), None, signs, at_most)
        assert (error.value.status, error.value.param) == (400, "priority")
    else:
        assert asked(str(number).encode(), None, signs, at_most) == Priority(max(readings), None)


def test_what_is_no_integer_is_refused_from_bound_tenants_and_else_left_to_the_worker() -> None:
    for said in (b'"5"', b"true", b"5.5", b"[5]", b"{}", b"1e400", b"9" * 40, b"NaN"):
        with pytest.raises(RequestError, match="must be an integer"):
            asked(said)
        assert asked(said, at_most=None) == NO_PRIORITY
    for header in (b"", b"high", b"1.5", b"9" * 30, b"0x5", b" 5", "٥".encode()):
        with pytest.raises(RequestError, match="x-pdserve-priority"):
            asked(b"null", header, at_most=None)
    assert asked(b"3", b"4") == Priority(3, None)
    assert asked(b"null", b"4") == Priority(4, 4)
    assert asked(b"", b"-4", (-1,)) == Priority(4, -4)
    assert asked() == NO_PRIORITY


def test_the_head_start_is_a_quarter_of_the_longest_wait_at_most() -> None:
    admission = Admission(queue_s=20.0)
    starts = [admission.head_start_s(urgency) for urgency in (-(2**63), -1, 0, 1, 5, 6, 2**63)]
    assert starts == [-5.0, -1.0, 0.0, 1.0, 5.0, 5.0, 5.0]


# --- through a router


@pytest.fixture
def access(tmp_path: Path) -> Access:
    return keyed(tmp_path)


def sent(worker: MockWorker) -> list[object]:
    return [json.loads(request.body).get("priority") for request in worker.got(CHAT)]


@pytest.mark.parametrize(
    ("priorities", "sign", "said"), [("high_first", 1, "at most 0"), ("low_first", -1, "at least 0")]
)
async def test_a_tenant_may_be_as_urgent_as_its_maximum_says(
    access: Access, priorities: str, sign: int, said: str
) -> None:
    worker = MockWorker("decode", priorities=priorities)
    async with before(worker, access=access, tenants=(Tenant(name="alice", max_priority=3),)) as harness:
        for key, urgency, status in ((ALICE, 3, 200), (ALICE, 4, 400), (BOB, 1, 400), (BOB, -50, 200)):
            number = sign * urgency
            assert (await harness.chat(by(key), priority=number)).status == status
            assert (await harness.chat(by(key) | {HEADER: str(number)})).status == status
        refused = await harness.chat(by(BOB), priority=sign)
        assert refused.error["message"] == f"You may set 'priority' to {said}."
        assert sent(worker) == [3 * sign, 3 * sign, -50 * sign, -50 * sign]


async def test_the_header_is_not_sent_to_workers_that_do_not_look_at_priorities() -> None:
    worker = MockWorker("decode")
    async with before(worker) as harness:
        assert (await harness.chat({HEADER: "7"})).status == 200
        assert (await harness.chat(priority="later")).status == 200  # without keys the worker judges
        assert sent(worker) == [None, "later"]


async def queued(harness: Harness, count: int) -> None:
    await harness.until(lambda: harness.router.gate.queue.waiting == count)


async def test_urgent_requests_of_a_tenant_run_before_those_that_came_earlier(access: Access) -> None:
    worker, gate = MockWorker("decode"), Gate()
    tenants = (Tenant(name="alice", max_priority=9),)
    admission = Admission(running_per_worker=1, queue_s=20.0)
    async with before(worker, access=access, tenants=tenants, admission=admission) as harness:
        worker.script(CHAT, held(gate))
        clients = [await harness.asking(by(ALICE), user="first")]
        await gate.reached.wait()
        for number, user in enumerate(("second", "third", "urgent"), start=1):
            given = {HEADER: "9"} if user == "urgent" else {}
            clients.append(await harness.asking(by(ALICE) | given, user=user))
            await queued(harness, number)
        clients.append(await harness.asking(by(BOB), user="bob"))
        await queued(harness, 4)
        gate.open.set()
        for client in clients:
            assert (await client.response()).status == 200
        order = [json.loads(request.body)["user"] for request in worker.got(CHAT)]
        assert order == ["first", "bob", "urgent", "second", "third"]  # bob's turn is his own

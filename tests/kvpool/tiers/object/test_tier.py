"""The object store tier beyond the contract: nodes that share a bucket, and a bucket that misbehaves."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from pdserve.errors import ConfigError
from pdserve.kvpool.tiers.base import CORRUPT, GONE, LOADED, READ_FAILED, STORED, WRITE_FAILED
from pdserve.kvpool.tiers.object.inventory import SegmentObject
from pdserve.kvpool.tiers.object.sync import load_segment
from tests.support.kvpool.object_server import Mode, ObjectServer
from tests.support.kvpool.object_tiers import (
    CREDENTIALS,
    LENGTH,
    SEGMENT,
    MakeNode,
    Node,
    shared_facts,
)
from tests.support.kvpool.tier_tools import name

MISBEHAVING = [mode for mode in get_args(Mode) if mode not in ("well", "full", "empty")]


# --- several nodes; a real S3 server: test_bucket.py


def test_a_segment_that_another_node_removed_is_a_miss_and_its_pages_are_reported_as_lost(
    store: ObjectServer, nodes: MakeNode
) -> None:
    one, two = nodes("one", store.endpoint), nodes("two", store.endpoint, refresh_s=1000.0)
    one.open()
    one.put(*range(5))
    one.until_uploaded()
    two.open()
    one.tier.forget_space(1)
    one.until(lambda: not one.tier._inventory.to_remove(1))
    assert two.read(*range(5)) == [GONE] * 5
    two.tier._sync.wake(refresh=True)
    two.until(lambda: two.tier._sync._refresh_at_s > 0)
    two.tier._sync.wake(refresh=True)
    two.until(lambda: len(two.lost) == 5)


def test_two_nodes_that_make_room_keep_the_bucket_within_its_capacity(
    store: ObjectServer, nodes: MakeNode
) -> None:
    """They remove the same segments; each notices what the other did."""
    one, two = nodes("one", store.endpoint), nodes("two", store.endpoint)
    for node in (one, two):
        node.open(capacity=8 * SEGMENT)
    for first in range(0, 300, 20):
        node = (one, two)[first // 20 % 2]
        assert node.put(*range(first, first + 20)) == [STORED] * 20
        node.until_uploaded()
        seen = one.tier._inventory.used_bytes
        for other in (one, two):
            other.tier._sync.wake(refresh=True)
            other.until(lambda other=other: other.tier.used_bytes <= 8 * SEGMENT)  # type: ignore[misc]
        assert seen <= 10 * SEGMENT
    last = range(280, 300)
    one.until(lambda: one.read(*last) == [LOADED] * 20)
    two.until(lambda: two.read(*last) == [LOADED] * 20)
    assert set(one.read(*range(300))) == {LOADED, GONE}
    assert one.left or two.left


def test_a_dropped_namespace_leaves_the_bucket_also_where_others_wrote_it(
    store: ObjectServer, nodes: MakeNode
) -> None:
    one, two = nodes("one", store.endpoint), nodes("two", store.endpoint)
    for node in (one, two):
        node.open(known=(1, 2))
    one.put(1, 2, 3)
    two.put(4, 5, 6)
    two.put(7, space=2)
    for node in (one, two):
        node.until_uploaded()
    one.until_found(4, 5, 6)
    one.tier.forget_space(1)
    one.until(lambda: not one.tier._inventory.to_remove(1))
    three = nodes("three", store.endpoint)
    assert {found.space for found in three.open(known=(1, 2))} == {2}
    assert one.put(8) == [STORED], "on its way while the namespace was dropped"
    one.until_uploaded()
    assert one.read(8) == [GONE]


@pytest.mark.parametrize("checks", range(3))
def test_a_namespace_cleared_while_a_segment_of_it_is_taken_in_has_no_page_of_it_afterwards(
    store: ObjectServer, nodes: MakeNode, monkeypatch: pytest.MonkeyPatch, checks: int
) -> None:
    """It is cleared after so many of the checks that it was not."""
    one, two = nodes("one", store.endpoint), nodes("two", store.endpoint, refresh_s=1000.0)
    one.open()
    one.put(1)
    one.until_uploaded()
    two.open(known=(), facts=lambda space: shared_facts(1))
    tier = two.tier
    tier._spaces.open(1)
    [found] = tier._inventory.objects(tier._spaces.namespaces())
    segment = load_segment(tier._bucket, found)
    assert segment is not None
    monkeypatch.setattr(tier._sync, "wake", lambda refresh=False: None)  # no listing meanwhile
    is_wanted, done = tier._sync._is_wanted, 0

    def clear_when_due() -> None:
        if done == checks:
            tier.forget_space(1)
            tier.open_space(2)

    def check(one: SegmentObject) -> bool:
        nonlocal done
        clear_when_due()
        wanted, done = is_wanted(one), done + 1
        if done == 2:
            clear_when_due()
        return wanted

    monkeypatch.setattr(tier._sync, "_is_wanted", check)
    assert [page for page in tier._sync._take_in(found, segment) if page.space != 1] == []
    assert not tier.has(name(1, LENGTH, space=2))


# --- a bucket that misbehaves


@pytest.mark.parametrize("mode", MISBEHAVING)
def test_whatever_the_store_answers_a_page_is_right_or_a_miss_and_found_again_later(
    store: ObjectServer, nodes: MakeNode, mode: Mode
) -> None:
    one, two = nodes("one", store.endpoint), nodes("two", store.endpoint, refresh_s=0.2)
    one.open()
    one.put(*range(20))
    one.until_uploaded()
    two.open()
    store.mode = mode
    statuses = set(two.read(*range(0, 20, 3)))
    right = {LOADED} if mode == "wrong" else set()  # one bit of what one request gave is wrong
    assert statuses <= {CORRUPT, READ_FAILED, GONE} | right
    assert statuses != {LOADED}
    failed = READ_FAILED in statuses
    two.tier.forget(list(two.tier._unread))  # as a node does then
    store.mode = "well"
    store.released.set()
    if failed:
        two.until_found(0, 3)
    two.until(lambda: two.read(1) == [LOADED])


@pytest.mark.parametrize("mode", ["away", "full", "overloaded"])
def test_a_store_that_takes_nothing_fills_the_spool_and_gets_it_later(
    store: ObjectServer, nodes: MakeNode, mode: Mode
) -> None:
    one = nodes("one", store.endpoint, timeout_s=0.3)
    one.open()
    store.mode = mode
    statuses: list[int] = []
    first = 0
    while WRITE_FAILED not in statuses:
        statuses = one.put(*range(first, first + 10))
        one.tier.maintain()
        first += 10
        assert one.tier._inventory.spool_bytes <= 4 * SEGMENT
    kept = range(first - 10)
    assert one.read(*kept) == [LOADED] * len(kept), "from the spool"
    one.tier.close()
    store.mode = "well"
    assert len(one.open()) >= len(kept)
    one.until_uploaded()
    assert one.read(*kept) == [LOADED] * len(kept)
    assert one.put(1000) == [STORED]


def test_a_namespace_dropped_while_the_store_is_away_stays_dropped(
    store: ObjectServer, nodes: MakeNode
) -> None:
    one = nodes("one", store.endpoint, timeout_s=0.3)
    one.open()
    one.put(1, 2)
    one.until_uploaded()
    store.mode = "away"
    one.tier.forget_space(1)
    one.tier.close()
    store.mode = "well"
    assert one.open() == []
    one.until(lambda: not store.objects)


def test_a_listing_without_objects_once_removes_no_page(store: ObjectServer, nodes: MakeNode) -> None:
    """Stores exist whose listings are behind."""
    one = nodes("one", store.endpoint, refresh_s=1000.0)
    one.open()
    one.put(1, 2)
    one.until_uploaded()
    store.mode = "empty"
    one.tier._sync.wake(refresh=True)
    one.until(lambda: one.tier._sync._refresh_at_s > 0)
    store.mode = "well"
    assert one.read(1, 2) == [LOADED, LOADED]
    assert one.lost == []


def test_an_upload_that_was_done_before_a_kill_is_not_done_twice(
    store: ObjectServer, nodes: MakeNode
) -> None:
    one = nodes("one", store.endpoint)
    one.open()
    one.put(*range(5))
    store.mode = "full"
    one.tier._spool.end_all()
    [file] = one.path.glob("*.seg")
    content = file.read_bytes()
    store.mode = "well"
    one.until_uploaded()
    one.tier.close()
    file.write_bytes(content)
    file.chmod(0o600)
    assert len(one.open()) >= 5
    one.until_uploaded()
    assert len(store.objects) == 1
    assert one.read(*range(5)) == [LOADED] * 5
    assert one.tier.used_bytes == len(content)


# --- configuration


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"url": "ftp://bucket"}, "must begin with one of"),
        ({"spool_bytes": "1KiB"}, "spool_bytes must be between"),
        ({"spool_bytes": "much"}, "spool_bytes"),
        ({"compression": "none-such"}, "Invalid enum value 'none-such'"),
        ({"keys": "/nowhere/keys.toml"}, "cannot read the keys"),
        ({"secret_access_key": "mine"}, "secret_access_key"),
    ],
)
def test_a_wrong_option_is_an_error_in_one_line(tmp_path: Path, options: dict[str, str], says: str) -> None:
    given = {"url": f"file://{tmp_path}/bucket", **options}
    node = Node(tmp_path / "one", given.pop("url"), **given)
    with pytest.raises(ConfigError, match=says) as error:
        node.open()
    assert "\n" not in str(error.value)


def test_credentials_come_from_the_shared_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: ObjectServer, nodes: MakeNode
) -> None:
    node = nodes("one", store.endpoint)
    for variable in CREDENTIALS:
        monkeypatch.delenv(variable)
    file = tmp_path / "credentials"
    file.write_text("[pool]\naws_access_key_id = FROMFILE\naws_secret_access_key = x\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "pool")
    node.open()
    node.put(1)
    node.until_uploaded()
    assert node.read(1) == [LOADED]


def test_a_start_does_not_wait_for_a_store_that_hangs(
    store: ObjectServer, nodes: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = nodes("one", store.endpoint, timeout_s=1000.0)
    one.open()
    one.put(1)
    one.tier.close()
    one.until_uploaded()
    monkeypatch.setattr("pdserve.kvpool.tiers.object.tier.SCAN_TIMEOUT_S", 0.2)
    store.mode = "hanging"
    assert one.open() == [], "it would never end"
    assert one.put(2) == [STORED]
    assert one.read(2) == [LOADED]
    store.behave()
    one.until_found(1)

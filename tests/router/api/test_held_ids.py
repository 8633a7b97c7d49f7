"""Ids that name the worker and the tenant of what they stand for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.router.api.endpoints import find_holder, new_id

WORKERS = tuple(f"10.0.0.{i}:8000" for i in range(50))


def test_an_id_leads_to_its_worker_at_every_router() -> None:
    for worker in WORKERS:
        assert find_holder(new_id(worker, "acme"), WORKERS, "acme") == worker


def test_nobody_finds_what_another_tenant_holds_or_what_left_with_its_worker() -> None:
    id_ = new_id(WORKERS[3], "acme")
    assert find_holder(id_, WORKERS, "beta") is None
    assert find_holder(id_, WORKERS[4:], "acme") is None


def test_two_ids_of_one_worker_differ_and_none_is_the_beginning_of_another() -> None:
    """SGLang ends every request whose id begins with the one that it is told."""
    ids = [new_id(WORKERS[0], "acme") for _ in range(100)]
    assert len(set(ids)) == 100
    assert {len(one) for one in ids} == {len(ids[0])}


@given(st.text())
def test_any_text_may_be_asked_for(text: str) -> None:
    for given_id in (text, "resp_" + text):
        assert find_holder(given_id, WORKERS, "acme") is None

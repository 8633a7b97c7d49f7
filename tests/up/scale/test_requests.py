"""Requests and answers in a run directory: whole, once, one at a time."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from pdserve.errors import ConfigError, StartupError
from pdserve.up.scale.cli import read_counts
from pdserve.up.scale.requests import Answer, Mailbox, Request, asking, read_answer, withdraw, write_request

TWO = Request("a", {"decode": 2})


def test_a_request_is_taken_once_and_answered_until_it_is_done(tmp_path: Path) -> None:
    mailbox = Mailbox(tmp_path)
    assert mailbox.take() is None
    write_request(tmp_path, TWO)
    assert mailbox.take() == TWO
    assert mailbox.take() is None
    assert read_answer(tmp_path, "a") == Answer("a", "taken")
    assert read_answer(tmp_path, "b") is None
    mailbox.answer("done")
    mailbox.close()
    assert read_answer(tmp_path, "a") == Answer("a", "done")
    assert (tmp_path / "scaled.json").stat().st_mode & 0o077 == 0


def test_what_an_earlier_cluster_was_asked_is_not_taken(tmp_path: Path) -> None:
    write_request(tmp_path, TWO)
    assert Mailbox(tmp_path).take() is None


def test_what_is_withdrawn_or_no_request_is_not_taken(tmp_path: Path) -> None:
    mailbox = Mailbox(tmp_path)
    write_request(tmp_path, TWO)
    withdraw(tmp_path)
    assert mailbox.take() is None
    for text in ("", "{", '{"id":"a"}', '{"id":"a","counts":{"pool":2}}', '{"id":"a","counts":{"agg":-1}}'):
        (tmp_path / "scale.json").write_text(text)
        assert mailbox.take() is None


def test_who_waits_when_the_cluster_stops_hears_it(tmp_path: Path) -> None:
    mailbox = Mailbox(tmp_path)
    write_request(tmp_path, TWO)
    mailbox.take()
    mailbox.close()
    assert read_answer(tmp_path, "a") == Answer("a", "failed", "the cluster has stopped")


def test_only_one_may_ask_and_only_where_a_cluster_runs(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no cluster runs from here"), asking(tmp_path):
        pass
    (tmp_path / "lock").touch()
    with pytest.raises(StartupError, match="has stopped"), asking(tmp_path):
        pass
    (tmp_path / "lock").write_text("7\n")
    with (tmp_path / "scale.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(StartupError, match="is under way"), asking(tmp_path):
            pass
    with asking(tmp_path):
        pass


def test_numbers_are_read_by_role() -> None:
    assert read_counts(["decode=2", "prefill=0"]) == {"decode": 2, "prefill": 0}


@pytest.mark.parametrize("words", [["decode"], ["decode=two"], ["decode=-1"], ["pool=2"], ["agg=1", "agg=2"]])
def test_what_is_no_number_of_workers_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="is not ROLE=N"):
        read_counts(words)

"""What one thread gives to another that sleeps at descriptors."""

from __future__ import annotations

import os
import select
import threading

import pytest

from pdserve.kvpool.node.inbox import Inbox


def is_readable(inbox: Inbox[int]) -> bool:
    return bool(select.select([inbox], [], [], 0)[0])


def test_what_is_given_wakes_the_thread_once_and_is_taken_in_order() -> None:
    inbox = Inbox[int]()
    assert not is_readable(inbox)
    assert inbox.take() == []
    assert inbox.give(1)
    assert inbox.give(2)
    assert is_readable(inbox)
    assert inbox.take() == [1, 2]
    assert not is_readable(inbox)
    inbox.stop()
    assert inbox.stopping
    assert is_readable(inbox)
    inbox.end()


def test_an_ended_inbox_refuses_and_says_what_nobody_took() -> None:
    inbox = Inbox[int]()
    inbox.give(1)
    descriptor = inbox.fileno()
    assert inbox.end() == [1]
    assert inbox.ended
    assert not inbox.give(2)
    assert inbox.end() == []
    inbox.stop()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.eventfd_write(descriptor, 1)


def test_nothing_given_by_many_threads_is_lost_or_taken_twice() -> None:
    inbox, taken = Inbox[int](), list[int]()
    threads = [
        threading.Thread(target=lambda start=start: [inbox.give(start + i) for i in range(500)])
        for start in (0, 500, 1000)
    ]
    for thread in threads:
        thread.start()
    while len(taken) < 1500:
        assert select.select([inbox], [], [], 10.0)[0]
        taken += inbox.take()
    assert sorted(taken) == list(range(1500))
    for thread in threads:
        thread.join()
    inbox.end()

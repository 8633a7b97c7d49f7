"""The choice of a connection's data path."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import pytest

from pdserve.kvpool.protocol.messages import DataPathChoice, Hello
from pdserve.kvpool.transports import data_path
from pdserve.kvpool.transports.control import make_hello


class Node:
    """It chooses UCX for who leaves it the choice."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.closed = 0

    def connect(self, address: str, hello: Hello, deadline_s: float, *_: object) -> Any:
        self.asked.append(hello.data_path)
        path = "ucx" if hello.data_path == "auto" else hello.data_path
        return SimpleNamespace(welcome=SimpleNamespace(data_path=path), close=self.close)

    def close(self) -> None:
        self.closed += 1


def asked(
    monkeypatch: pytest.MonkeyPatch, choice: DataPathChoice, *, has_ucx: bool, takes_ucx: bool = True
) -> tuple[list[str], int]:
    """What the node is asked for, one connection after the other, and how many of them are closed."""
    node = Node()
    monkeypatch.setattr(data_path, "ControlChannel", node)
    monkeypatch.setattr(data_path, "is_installed", lambda extra: has_ucx)
    hello = make_hello("client", "host", choice)
    data_path.connect_channel("tcp:node:1", hello, 1.0, takes_ucx=takes_ucx)
    return node.asked, node.closed


def test_a_client_without_ucx_asks_for_tcp_where_the_node_chose_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, "auto", has_ucx=False) == (["auto", "tcp"], 1)
    assert asked(monkeypatch, "auto", has_ucx=True, takes_ucx=False) == (["auto", "tcp"], 1)
    assert asked(monkeypatch, "auto", has_ucx=True) == (["auto"], 0)


@pytest.mark.parametrize("choice", [one for one in get_args(DataPathChoice) if one != "auto"])
def test_a_choice_of_the_clients_own_stays(choice: DataPathChoice, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, choice, has_ucx=False) == ([choice], 0)

"""Ranks of a worker on several hosts: only in a network that somebody trusts, and not on loopback."""

from __future__ import annotations

import os

import pytest

from pdserve.engine.config import EngineConfig
from pdserve.engine.device import ONE_HOST_ENV, SEVERAL_HOSTS_ENV
from pdserve.engine.launch import prepare_process
from pdserve.engine.sglang import prepare
from pdserve.errors import ConfigError
from pdserve.resources.gpus import node_count


def test_ranks_on_several_hosts_are_refused_where_nobody_trusts_the_network() -> None:
    with pytest.raises(ConfigError, match=r"engine.trusted_network = true"):
        prepare_process(EngineConfig(model_path="/no/such/model", extra_args=["--tp-size=2", "--nnodes=2"]))


@pytest.mark.parametrize("several_hosts", [False, True])
def test_ranks_of_one_host_alone_are_told_to_talk_over_loopback(
    several_hosts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(prepare, "before_sglang", lambda: None)
    prepare.choose("cpu", several_hosts=several_hosts)
    assert prepare.has_several_hosts() is several_hosts
    assert (os.environ.items() >= ONE_HOST_ENV.items()) is not several_hosts
    assert (SEVERAL_HOSTS_ENV in os.environ) is several_hosts


@pytest.mark.parametrize(
    ("ranks", "several_hosts", "told"), [(1, False, False), (2, False, True), (2, True, False)]
)
def test_a_single_rank_can_join_the_nccl_group_of_a_trainer_on_another_host(
    ranks: int, several_hosts: bool, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(prepare, "before_sglang", lambda: None)
    prepare.choose("cuda", several_hosts=several_hosts)
    prepare.prepare_ranks(ranks)
    assert (os.environ.get("NCCL_SOCKET_IFNAME") == "lo") is told
    os.environ["NCCL_SOCKET_IFNAME"] = "eth1"
    prepare.prepare_ranks(2)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth1"


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        ([], 1),
        (["--nnodes", "2"], 2),
        (["--nnodes=4", "--tp-size", "8"], 4),
        (["--nnodes", "2", "--nnodes", "3"], 3),
    ],
)
def test_hosts_are_counted_by_sglangs_words(words: list[str], nodes: int) -> None:
    assert node_count(words) == nodes


@pytest.mark.parametrize("words", [["--nnodes"], ["--nnodes", "two"], ["--nnodes=0"], ["--nnodes=-1"]])
def test_what_is_no_number_of_hosts_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="--nnodes must be a number"):
        node_count(words)

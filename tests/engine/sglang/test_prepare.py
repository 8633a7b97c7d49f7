"""Around the imports of SGLang: what a start says, and where ranks listen. No SGLang is imported."""

from __future__ import annotations

import gc
import importlib.util
import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.engine.config import EngineConfig
from pdserve.engine.device import ONE_HOST_ENV
from pdserve.engine.launch import prepare_process
from pdserve.engine.sglang import prepare
from pdserve.engine.sglang.prepare import NO_NEWS, START, leave_out_no_news, show_start
from pdserve.errors import ConfigError
from pdserve.resources.gpus import node_count


def test_garbage_is_collected_again_after_the_imports_however_they_end() -> None:
    with prepare.without_gc():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), prepare.without_gc():
        raise ImportError
    assert gc.isenabled()
    gc.unfreeze()


def test_a_worker_imports_nothing_too_early() -> None:
    """SGLang and torch wait for the choice of a device, prometheus_client for SGLang's multi-process mode."""
    code = """
import sys
import pdserve.engine.launch, pdserve.engine.sglang.children.entry
print([name for name in ("sglang", "torch", "prometheus_client") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.fixture
def written(logs_as_before: None) -> Iterator[io.StringIO]:
    """What this process logs at the level of warnings, as SGLang configures it."""
    text = io.StringIO()
    logging.basicConfig(level="WARNING", stream=text, force=True)
    yield text
    for name in NO_NEWS:
        logging.getLogger(name).filters.clear()


def test_the_steps_of_a_start_are_shown_whatever_level_sglang_sets(written: io.StringIO) -> None:
    show_start()
    START.info("warming up")
    logging.getLogger("pdserve.engine.launch").info("details")
    assert written.getvalue() == "INFO:pdserve.start:warming up\n"


@pytest.mark.parametrize("level", ["WARNING", "DEBUG"])
def test_sglangs_warnings_of_no_use_are_for_the_debug_level(written: io.StringIO, level: str) -> None:
    leave_out_no_news()
    logging.root.setLevel(level)
    for name, beginnings in NO_NEWS.items():
        for beginning in beginnings:
            logging.getLogger(name).warning("%s, since it is so", beginning)
        logging.getLogger(name).warning("something else of %s", name)
    assert written.getvalue().count("since it is so") == (len(NO_NEWS) if level == "DEBUG" else 0)
    assert written.getvalue().count("something else") == len(NO_NEWS)


def test_the_warnings_that_are_left_out_are_sglangs() -> None:
    """A next release may word them otherwise."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    for name, beginnings in NO_NEWS.items():
        source = Path(spec.origin).parents[1].joinpath(*name.split(".")).with_suffix(".py").read_text()
        assert all(beginning in source for beginning in beginnings), name


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty, and nothing is prepared but it."""
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(prepare, "before_sglang", lambda: None)


@pytest.mark.usefixtures("environ")
@pytest.mark.parametrize(
    ("ranks", "several_hosts", "is_told_nccl"), [(1, False, False), (2, False, True), (2, True, False)]
)
def test_ranks_of_one_host_alone_are_told_to_talk_over_loopback(
    ranks: int, several_hosts: bool, is_told_nccl: bool
) -> None:
    """And a single rank can join the NCCL group of a trainer on another host."""
    prepare.choose("cuda", several_hosts=several_hosts)
    prepare.prepare_ranks(ranks)
    assert prepare.has_several_hosts() is several_hosts
    assert (os.environ.items() >= ONE_HOST_ENV.items()) is not several_hosts
    assert (os.environ.get("NCCL_SOCKET_IFNAME") == "lo") is is_told_nccl
    os.environ["NCCL_SOCKET_IFNAME"] = "eth1"  # what a user sets stays
    prepare.prepare_ranks(2)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth1"


def test_ranks_on_several_hosts_are_refused_where_nobody_trusts_the_network() -> None:
    with pytest.raises(ConfigError, match=r"engine.trusted_network = true"):
        prepare_process(EngineConfig(model_path="/no/such/model", extra_args=["--tp-size=2", "--nnodes=2"]))


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        ([], 1),
        (["--nnodes", "2"], 2),
        (["--nnodes=4", "--tp-size", "8"], 4),
        (["--nnodes", "2", "--nnodes", "3"], 3),
        *((words, None) for words in (["--nnodes"], ["--nnodes", "two"], ["--nnodes=0"], ["--nnodes=-1"])),
    ],
)
def test_hosts_are_counted_by_sglangs_words(words: list[str], nodes: int | None) -> None:
    if nodes is not None:
        assert node_count(words) == nodes
        return
    with pytest.raises(ConfigError, match="--nnodes must be a number"):
        node_count(words)

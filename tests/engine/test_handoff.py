"""What a worker needs for the direct hand-off, and what refuses it."""

from __future__ import annotations

import os
from typing import Any

import pytest

from pdserve.engine import handoff
from pdserve.engine.handoff import DirectConfig, check_direct, direct_argv, prepare_direct
from pdserve.errors import ConfigError, StartupError

TRUSTED = DirectConfig(trusted_network=True, bootstrap_port=9001)


def test_a_decode_worker_keeps_pages_and_a_prefill_worker_has_the_port() -> None:
    assert direct_argv(TRUSTED, "prefill") == [
        *("--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "mooncake"),
        *("--disaggregation-bootstrap-port", "9001"),
    ]
    decode = direct_argv(TRUSTED, "decode")
    assert decode[:2] == ["--disaggregation-mode", "decode"]
    assert decode[-1] == "--disaggregation-decode-enable-radix-cache"


@pytest.mark.parametrize(
    ("config", "role", "memory", "says"),
    [
        (DirectConfig(), "prefill", "cache", "set direct.trusted_network = true"),
        (TRUSTED, "agg", "cache", "and an aggregated worker serves both"),
        (TRUSTED, "elastic", "cache", "and an elastic worker serves both"),
        (TRUSTED, "decode", "buffer_only", 'take "cache"'),
        (DirectConfig(trusted_network=True, transfer="nixl"), "decode", "cache", "on CPU use mooncake"),
    ],
)
def test_what_cannot_be_is_refused(config: DirectConfig, role: Any, memory: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_direct(config, role, "cpu", host_memory=memory)


def test_a_prefill_worker_may_stage_pages() -> None:
    check_direct(TRUSTED, "prefill", "cpu", host_memory="buffer_only")


def test_a_missing_library_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr(handoff.importlib, "import_module", missing)
    with pytest.raises(StartupError, match=r"libibverbs\.so\.1.*mooncake-transfer-engine-non-cuda"):
        check_direct(TRUSTED, "prefill", "cpu", host_memory="cache")
    with pytest.raises(StartupError, match="pip install mooncake-transfer-engine;"):
        check_direct(TRUSTED, "prefill", "cuda", host_memory="cache")


@pytest.mark.parametrize(
    ("host", "told"), [("127.0.0.1", "127.0.0.1"), ("10.0.0.5", "10.0.0.5"), ("0.0.0.0", None)]
)
def test_ranks_listen_where_the_worker_does(
    monkeypatch: pytest.MonkeyPatch, host: str, told: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {})
    prepare_direct(host, "cuda")
    assert os.environ.get("SGLANG_HOST_IP") == told


def test_on_a_cpu_mooncake_takes_tcp_and_what_a_user_sets_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"SGLANG_HOST_IP": "10.0.0.9"})
    prepare_direct("127.0.0.1", "cpu")
    assert os.environ["MC_FORCE_TCP"] == "1"
    assert os.environ["SGLANG_HOST_IP"] == "10.0.0.9"

"""What a worker says of itself before SGLang starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.engine.config import EngineConfig
from pdserve.engine.launch import advertised, run_worker
from pdserve.engine.worker import WorkerConfig
from pdserve.errors import ConfigError
from pdserve.security.tls import TlsConfig

TLS = TlsConfig(certificate=Path("/none.pem"), key=Path("/none.key"))


def config(**fields: Any) -> WorkerConfig:
    return WorkerConfig(engine=EngineConfig(model_path="/m", host="::1"), storage="none", **fields)


def test_routers_are_told_the_scheme_that_the_worker_serves() -> None:
    assert advertised(config()) == "http://[::1]:30000"
    assert advertised(config(tls=TLS)) == "https://[::1]:30000"
    assert advertised(config(tls=TLS, advertise="https://w:1")) == "https://w:1"
    for wrong in (config(tls=TLS, advertise="http://w:1"), config(advertise="https://w:1")):
        with pytest.raises(ConfigError, match="advertise: this worker serves with"):
            advertised(wrong)


def test_certificates_that_cannot_be_used_end_the_start_at_once() -> None:
    with pytest.raises(ConfigError, match=r"tls.certificate /none.pem and tls.key /none.key cannot be used"):
        run_worker(config(tls=TLS, insecure=True), "agg", lambda _: pytest.fail("it went on"))


def test_host_memory_that_keeps_no_pages_needs_the_pool() -> None:
    engine = EngineConfig(model_path="/m", hicache_host_memory_mode="buffer_only")
    for storage in ("none", "file", "mooncake"):
        with pytest.raises(ConfigError, match='"buffer_only" needs storage = "pool"'):
            run_worker(
                WorkerConfig(engine=engine, storage=storage), "agg", lambda _: pytest.fail("it went on")
            )

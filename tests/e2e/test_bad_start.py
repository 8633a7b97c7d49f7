"""What cannot start says why in one line, and exits non-zero, by the real commands but for one. No test here
loads a model.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from pdserve.kvpool.client.client import PoolClient
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.pages import KvGeometry, model_fingerprint
from pdserve.settings.config_file import to_toml
from tests.support.e2e.cluster import START_TIMEOUT_S, PoolNode, Worker, free_port, pdserve
from tests.support.e2e.site import engine_settings

pytestmark = pytest.mark.timeout(300)
STEPS = (
    f"importing SGLang {metadata.version('sglang')}",
    "float32, since this processor computes no bfloat16",
    "] pool node pool0 cannot be used, its pages are recomputed",
)
OPEN: dict[str, Any] = {"storage": "none", "insecure": True}


def run(tmp_path: Path, command: list[str], config: dict[str, Any]) -> tuple[int, str]:
    """Exit status and the error, which must be one line, behind the steps of a worker's start and warnings of
    the pool's client.
    """
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    done = subprocess.run(
        pdserve(*command, "--config", str(path)), capture_output=True, text=True, timeout=280, check=False
    )
    return done.returncode, the_line(done.returncode, done.stdout + done.stderr)


def the_line(status: int, printed: str) -> str:
    """What a failed start says, beside its steps."""
    said = "\n".join(line for line in printed.strip().splitlines() if not any(step in line for step in STEPS))
    assert status != 0, said
    assert len(said.splitlines()) == 1, said
    assert "Traceback" not in said
    return said


def test_a_model_path_that_does_not_exist(tmp_path: Path) -> None:
    _, said = run(tmp_path, ["agg"], {**OPEN, "engine": {"model_path": "/nowhere/model"}})
    assert "/nowhere/model does not exist" in said


def test_a_port_in_use(tmp_path: Path, model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        _, said = run(tmp_path, ["agg"], {**OPEN, "engine": {"model_path": model, "port": port}})
        assert f"port {port}" in said
        assert "in use" in said
        _, said = run(tmp_path, ["router"], {"port": port, "agg": ["http://127.0.0.1:1"]})
        assert str(port) in said
        _, said = run(
            tmp_path, ["pool", "serve"], {"listen": [f"tcp:127.0.0.1:{port}"], "arena_dir": tmp_path}
        )
        assert str(port) in said


def test_too_little_memory_for_the_arena(tmp_path: Path) -> None:
    arena_dir = Path(f"/dev/shm/{tmp_path.name}")  # in memory, where arenas lie
    try:
        config = {"listen": [f"unix:{tmp_path}/s"], "arena_dir": arena_dir, "capacity_bytes": "900TiB"}
        _, said = run(tmp_path, ["pool", "serve"], config)
        assert "does not fit" in said
        assert "capacity_bytes" in said
        assert [path for path in arena_dir.rglob("*") if path.is_file() and path.stat().st_size] == []
    finally:
        shutil.rmtree(arena_dir, ignore_errors=True)


@pytest.mark.e2e
@pytest.mark.usefixtures("warm_server")
def test_workers_that_differ_in_page_size_cannot_share_a_namespace(tmp_path: Path, model: Path) -> None:
    with PoolNode(tmp_path) as pool:
        shared = {"nodes": [pool.ref], "namespace": "shared"}
        worker = Worker("decode", "differs", tmp_path, engine_settings(model), shared)
        # the first worker opens the namespace, as its start-up check does
        nodes = [PoolNodeRef(node=pool.name, address=pool.address)]
        other = {**geometry_of(model), "page_size": "32"}
        with contextlib.closing(PoolClient(PoolClientConfig(nodes=nodes), "shared", other)) as client:
            assert client.check() == {pool.name: None}
        status = worker.start().popen.wait(START_TIMEOUT_S)
        said = the_line(status, (tmp_path / "differs.log").read_text())
        assert all(word in said for word in ("page_size", "32", "64", "shared"))


def geometry_of(model: Path) -> dict[str, str]:
    sizes = {"page_size": "64", "layout": "page_first_direct", "tp_size": "1", "pp_size": "1"}
    made = KvGeometry(model=model_fingerprint(model), dtype="float32", kv_dtype="float32", **sizes)
    return made.as_dict()


def test_a_worker_without_pool_nodes_says_how_to_do_without(tmp_path: Path, model: Path) -> None:
    status, said = run(tmp_path, ["decode"], {"engine": engine_settings(model, port=free_port())})
    assert status == 2
    assert "pool.nodes" in said

"""What identifies a worker's pages: everything that changes their bytes, and nothing else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.engine import geometry
from pdserve.errors import StartupError
from pdserve.pages import KvGeometry

DEFAULTS: dict[str, Any] = {
    "kv_cache_dtype": "auto",
    "page_size": 64,
    "hicache_mem_layout": "page_first",
    "tp_size": 1,
    "pp_size": 1,
    "dp_size": 1,
    "attn_dp_size": 1,
    "attn_cp_size": 1,
    "dcp_size": 1,
    "enable_dp_attention": False,
    "load_format": "auto",
    "lora_paths": None,
    "json_model_override_args": "{}",
    **dict.fromkeys(geometry._VALUE_OPTIONS),
}


@pytest.fixture
def identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The identity under arguments that differ from the defaults in these."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.bin").write_bytes(b"weights")
    config = SimpleNamespace(dtype="torch.bfloat16", attention_arch=geometry.AttentionArch.MHA)
    monkeypatch.setattr(geometry, "ModelConfig", SimpleNamespace(from_server_args=lambda _: config))
    return lambda **changed: geometry.kv_identity(
        SimpleNamespace(**{**DEFAULTS, "model_path": str(tmp_path), **changed})
    )


def adapter(directory: Path, weights: bytes) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.bin").write_bytes(weights)
    return directory


@pytest.mark.parametrize(
    "changed",
    [
        {"quantization": "fp8"},
        {"quantization_param_path": "/scales.json"},
        {"json_model_override_args": '{"rope_theta": 5}'},
        {"load_format": "dummy"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"page_size": 32},
        {"hicache_mem_layout": "layer_first"},
        {"tp_size": 2},
        {"pp_size": 2},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_changes_a_pages_bytes_changes_the_geometry(identity: Any, changed: dict[str, Any]) -> None:
    plain: KvGeometry = identity().geometry
    assert plain.options == ""
    assert identity(**changed).geometry.namespace("m") != plain.namespace("m")


def test_the_order_of_overrides_does_not_matter(identity: Any) -> None:
    one = identity(json_model_override_args='{"a": 1, "b": 2}').geometry
    assert identity(json_model_override_args='{"b": 2, "a": 1}').geometry == one


@pytest.mark.parametrize("form", ["{}", "name={}", {"lora_path": "{}"}], ids=["path", "named", "mapping"])
def test_an_adapter_trained_on_in_place_is_another(identity: Any, tmp_path: Path, form: Any) -> None:
    path = adapter(tmp_path / "adapter", b"one")
    entry = {"lora_path": str(path)} if isinstance(form, dict) else form.format(path)
    before = identity(lora_paths=[entry]).geometry
    assert identity(lora_paths=[entry]).geometry == before
    adapter(path, b"two")
    assert identity(lora_paths=[entry]).geometry != before


@pytest.mark.parametrize(
    "data_parallel", [{"attn_dp_size": 2}, {"dp_size": 2, "enable_dp_attention": True}], ids=["new", "old"]
)
def test_data_parallel_attention_divides_heads_by_what_is_left(
    identity: Any, data_parallel: dict[str, Any]
) -> None:
    found = identity(tp_size=4, **data_parallel)
    assert found.geometry.tp_size == "2"
    assert found.rank_suffixes == [b"tp0/2", b"tp1/2"]


def test_pages_that_cannot_be_named_are_refused(identity: Any) -> None:
    with pytest.raises(StartupError, match="dcp"):
        identity(dcp_size=2)

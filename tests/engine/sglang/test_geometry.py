"""What identifies a worker's pages: everything that changes their bytes, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.lora.lora_registry import LoRARef

from pdserve.engine import model_dir
from pdserve.engine.sglang import geometry
from pdserve.engine.sglang.server_args import parse_args, resolved
from pdserve.errors import StartupError
from pdserve.pages import KvGeometry, PagePart, part_suffix
from tests.support.e2e.hybrid_model import LAYERS, SLIDING, make_hybrid_model
from tests.support.random_model import make_random_model

ONE = ("tp_size", "pp_size", "dp_size", "attn_dp_size", "attn_cp_size", "dcp_size")
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(ONE, 1),
    **dict.fromkeys((*geometry._VALUE_OPTIONS, "lora_paths", "speculative_algorithm")),
    "kv_cache_dtype": "auto",
    "load_format": "auto",
    "json_model_override_args": "{}",
    "page_size": 64,
    "hicache_mem_layout": "page_first",
    "enable_dp_attention": False,
}


@pytest.fixture
def identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The identity under arguments that differ from the defaults in these."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.bin").write_bytes(b"weights")

    def model_config(server_args: Any) -> Any:
        hf_config = json.loads((tmp_path / "config.json").read_text())
        return SimpleNamespace(
            dtype="torch.bfloat16",
            attention_arch=geometry.AttentionArch[hf_config.get("attention", "MHA")],
            quantization=server_args.quantization,
            hf_config=hf_config,
            is_hybrid_swa=False,
            sliding_window_size=None,
            attention_chunk_size=None,
            get_total_num_kv_heads=lambda: 4,
        )

    monkeypatch.setattr(geometry, "ModelConfig", SimpleNamespace(from_server_args=model_config))
    monkeypatch.setattr(geometry, "mambaish_config", lambda config: None)
    return lambda pieces=0, **changed: geometry.kv_identity(
        SimpleNamespace(**{**DEFAULTS, "model_path": str(tmp_path), **changed}), pieces=pieces
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
    orders = [identity(json_model_override_args=said) for said in ('{"a": 1, "b": 2}', '{"b": 2, "a": 1}')]
    assert orders[0] == orders[1]


@pytest.mark.parametrize("form", ["{}", "name={}", {"lora_name": "name"}], ids=["path", "named", "mapping"])
def test_an_adapter_trained_on_in_place_is_another(identity: Any, tmp_path: Path, form: Any) -> None:
    path = adapter(tmp_path / "adapter", b"one")
    entry = {**form, "lora_path": str(path)} if isinstance(form, dict) else form.format(path)
    before = identity(lora_paths=[entry]).geometry
    assert identity(lora_paths=[entry]).geometry == before
    adapter(path, b"two")
    assert identity(lora_paths=[entry]).geometry != before


def test_an_adapter_that_sglang_gives_another_id_is_another(identity: Any, tmp_path: Path) -> None:
    """Its id is part of its pages' keys; without this workers would share none and nobody would say why."""
    one, two = adapter(tmp_path / "one", b"weights"), adapter(tmp_path / "two", b"weights")
    geometry = identity(lora_paths=[f"a={one}"]).geometry
    assert identity(lora_paths={"a": str(one)}).geometry == geometry
    assert identity(lora_paths=[LoRARef(lora_name="a", lora_path=str(one))]).geometry == geometry
    for entry, told in ((f"a={two}", f"a={two}@"), (f"b={one}", f"b={one}@")):
        other = identity(lora_paths=[entry]).geometry
        assert other != geometry
        assert told in other.options


@pytest.mark.model_support("multi-head attention", "DP attention")
@pytest.mark.parametrize(
    "data_parallel", [{"attn_dp_size": 2}, {"dp_size": 2, "enable_dp_attention": True}], ids=["new", "old"]
)
def test_data_parallel_attention_divides_heads_by_what_is_left(
    identity: Any, data_parallel: dict[str, Any]
) -> None:
    found = identity(tp_size=4, **data_parallel)
    assert found.geometry.tp_size == "2"
    assert found.rank_suffixes == [b"tp0/2", b"tp1/2"]


def test_workers_of_unequal_tp_sizes_share_pages_in_pieces(identity: Any) -> None:
    by_head = {"hicache_mem_layout": "page_head"}
    found = [identity(2, tp_size=size, **by_head) for size in (1, 2)]
    assert found[0] == found[1]
    assert found[0].rank_suffixes == [b"tp0/2", b"tp1/2"]
    assert identity(4, tp_size=8, **by_head) == identity(4, tp_size=1, **by_head)
    assert identity(4, **by_head).geometry != found[0].geometry


BY_HEAD = {"hicache_mem_layout": "page_head"}


@pytest.mark.parametrize(
    ("pieces", "changed", "said"),
    [
        (2, {}, "page_pieces = 2 needs the layout page_head, and not page_"),
        (3, BY_HEAD, "it must divide the model's 4 KV heads"),
        (2, {**BY_HEAD, "tp_size": 4}, "a rank of --tp-size 4 holds no whole pieces"),
        (0, {"dcp_size": 2}, "--dcp-size"),
        (0, {"attn_cp_size": 2}, "--attn-cp-size"),
    ],
)
def test_pages_that_ranks_do_not_hold_whole_or_that_have_no_names_are_refused(
    identity: Any, pieces: int, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(StartupError, match=said):
        identity(pieces, **changed)


def test_pages_that_all_ranks_hold_or_that_have_parts_are_not_cut_in_pieces(
    identity: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(geometry, "is_deepseek_dsa", lambda config: False)
    (tmp_path / "config.json").write_text('{"attention": "MLA"}')
    assert identity(tp_size=2) == identity()
    with pytest.raises(StartupError, match="all ranks of this model hold the same pages"):
        identity(2, hicache_mem_layout="page_head")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(geometry, "_parts", lambda config, page_size: {"swa": 2})
    with pytest.raises(StartupError, match="keeps swa state beside its KV pages, which has no pieces"):
        identity(2, hicache_mem_layout="page_head")


@pytest.mark.model_support("multi-head attention", "FP8 KV")
def test_the_two_kinds_of_fp8_do_not_share_pages(identity: Any) -> None:
    kinds = [identity(kv_cache_dtype=f"fp8_{kind}").geometry for kind in ("e4m3", "e5m2")]
    assert [one.kv_dtype for one in kinds] == ["float8_e4m3fn", "float8_e5m2"]


FLOAT, INT = ({"type": kind, "num_bits": 8} for kind in ("float", "int"))
FP8 = "float8_e4m3fn"


@pytest.mark.parametrize(
    ("quantization", "said", "kv_dtype"),
    [
        ("modelopt_fp8", {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, FP8),
        ("modelopt_fp4", {"quant_algo": "NVFP4", "kv_cache_scheme": FLOAT}, FP8),
        ("modelopt_fp4", {"quant_algo": "NVFP4", "kv_cache_scheme": INT}, "bfloat16"),
        ("modelopt_fp8", {"quant_algo": "FP8"}, "bfloat16"),
        ("fp8", {"quant_method": "fp8", "kv_cache_quant_algo": "fp8"}, FP8),
        ("compressed-tensors", {"kv_cache_scheme": FLOAT}, "bfloat16"),
    ],
)
@pytest.mark.parametrize("place", ["config.json", "hf_quant_config.json"])
def test_a_checkpoint_quantized_for_fp8_pages_has_them_without_being_told(
    identity: Any, tmp_path: Path, quantization: str, said: dict[str, Any], kv_dtype: str, place: str
) -> None:
    """As SGLang's `configure_kv_cache_dtype` takes it from its quantization configuration."""
    key = "quantization_config" if place == "config.json" else "quantization"
    (tmp_path / place).write_text(json.dumps({key: said}))
    assert identity(quantization=quantization).geometry.kv_dtype == kv_dtype


def test_weights_are_read_once_from_start_to_start(
    identity: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_dir, "SETTLED_S", -10.0)  # the files were just written
    before = identity()

    def model_fingerprint(path: Path) -> str:
        raise AssertionError("it is kept")

    monkeypatch.setattr(model_dir, "model_fingerprint", model_fingerprint)
    assert identity() == before


@pytest.fixture(scope="module")
def window_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Resolved arguments for a model whose layers are of these kinds, and what they are checked with."""
    directory = tmp_path_factory.mktemp("models")
    make_random_model("tiny", directory / "demo", seed=0)

    def resolve(name: str, layers: tuple[str, ...], *words: str) -> Any:
        if not (directory / name).exists():
            make_hybrid_model(directory / "demo", directory / name, layers)
        argv = ["--model-path", str(directory / name), "--page-size", "64", "--device", "cpu", *words]
        return resolved(parse_args([*argv, "--attention-backend", "torch_native"]))

    return resolve


def test_layers_with_a_window_are_a_part_with_names_of_its_own(window_config: Any) -> None:
    found = geometry.kv_identity(window_config("mixed", LAYERS))
    assert found.geometry.parts == "swa:2"  # 128 tokens
    assert found.parts == [PagePart("swa", 2, [part_suffix(b"", "swa", {"kv": 0, "swa": 2})])]
    pages_of_48 = geometry.kv_identity(window_config("mixed", LAYERS, "--page-size", "48"))
    assert pages_of_48.geometry.parts == "swa:3"
    geometry.check_cached(window_config("mixed", LAYERS))


def test_the_index_of_sparse_attention_is_a_part_that_all_pages_have(
    identity: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(geometry, "is_deepseek_dsa", lambda config: "index_topk" in config)
    (tmp_path / "config.json").write_text('{"index_topk": 2048}')
    assert identity().parts == []  # of attention of another kind
    (tmp_path / "config.json").write_text('{"index_topk": 2048, "attention": "MLA"}')
    found = identity(tp_size=2)
    assert found.geometry.parts == "indexer:0"
    suffix = part_suffix(b"", "indexer", {"kv": 0, "indexer": 0})
    assert found.parts == [PagePart("indexer", 0, [suffix])]  # one for all ranks


def test_the_state_of_a_prefix_is_a_part_that_each_rank_has(
    identity: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(geometry, "mambaish_config", lambda config: config.hf_config.get("mamba"))
    (tmp_path / "config.json").write_text('{"mamba": 1, "attention": "MLA"}')
    found = identity(tp_size=2)
    assert found.geometry.parts == "mamba:1"
    windows = {"kv": 0, "mamba": 1}
    assert found.rank_suffixes == [part_suffix(b"", "kv", windows)]
    ranks = [part_suffix(rank, "mamba", windows) for rank in (b"tp0/2", b"tp1/2")]
    assert found.parts == [PagePart("mamba", 1, ranks)]
    geometry.check_cached(SimpleNamespace(page_size=64, quantization=None))
    assert "storage of mamba pages was never tried" in caplog.text


def test_layers_with_a_window_lie_in_the_main_pool_if_one_wants_it(window_config: Any) -> None:
    """Its pages are larger then: workers with and without the flag must not share a namespace."""
    found = geometry.kv_identity(window_config("mixed", LAYERS, "--disable-hybrid-swa-memory"))
    assert found.parts == []
    assert found.geometry != geometry.kv_identity(window_config("mixed", LAYERS)).geometry
    assert "parts" not in found.geometry.as_dict()


def test_a_model_of_windows_alone_is_refused_in_one_line(window_config: Any) -> None:
    """SGLang would start without host memory, and share nothing."""
    with pytest.raises(StartupError, match="--disable-hybrid-swa-memory") as refused:
        geometry.check_cached(window_config("pure", (SLIDING,) * 4))
    assert "\n" not in str(refused.value)
    geometry.check_cached(window_config("pure", (SLIDING,) * 4, "--disable-hybrid-swa-memory"))

"""SGLang's command line for a worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from pdserve.engine.args import cpu_total_tokens, served_model_name, server_argv
from pdserve.engine.config import EngineConfig
from pdserve.errors import ConfigError
from pdserve.security.tls import TlsConfig

POOL = {"backend_name": "pdserve", "module_path": "m", "class_name": "C", "interface_v1": 1}


def value(argv: list[str], flag: str) -> str:
    """What SGLang takes for `flag`: the last of its repetitions."""
    return argv[len(argv) - argv[::-1].index(flag)]


def config(**fields: object) -> EngineConfig:
    return EngineConfig(**{"model_path": "/models/qwen", **fields})  # type: ignore[arg-type]


def test_pool_storage_is_written_through_and_waited_for() -> None:
    argv = server_argv(config(page_size=32), "decode", "cpu", POOL)
    assert value(argv, "--hicache-write-policy") == "write_through"
    assert value(argv, "--hicache-storage-prefetch-policy") == "wait_complete"
    assert value(argv, "--hicache-storage-backend") == "dynamic"
    assert json.loads(value(argv, "--hicache-storage-backend-extra-config")) == {
        **POOL,
        "prefetch_threshold": 32,
    }


@pytest.mark.parametrize("name", ["file", "mooncake"])
def test_storage_of_sglangs_own_has_the_same_threshold(name: Literal["file", "mooncake"]) -> None:
    argv = server_argv(config(), "agg", "cpu", name)
    assert value(argv, "--hicache-storage-backend") == name
    assert json.loads(value(argv, "--hicache-storage-backend-extra-config")) == {"prefetch_threshold": 64}


def test_without_storage_there_is_no_hicache() -> None:
    assert not [
        word for word in server_argv(config(), "agg", "cpu", None) if "hicache" in word or "hier" in word
    ]


def test_cpu_bounds_what_sglang_would_size_by_gpu() -> None:
    argv = server_argv(config(), "prefill", "cpu", None)
    assert value(argv, "--device") == "cpu"
    assert value(argv, "--attention-backend") == "torch_native"
    assert value(argv, "--max-total-tokens") == "40000"
    assert "--sleep-on-idle" in argv


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
"""A token's keys and values have 11,520 numbers."""


@pytest.mark.parametrize(
    ("fields", "model", "tokens"),
    [
        ({}, LLAMA, 23_296),
        ({"dtype": "float32"}, LLAMA, 11_648),  # 512 MiB / 46,080 bytes in whole pages
        ({}, LLAMA | {"dtype": "float32"}, 11_648),
        ({"dtype": "bfloat16"}, {"text_config": LLAMA | {"dtype": "float32"}}, 23_296),
        ({}, LLAMA | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 15_488),  # 30 x 576 x 2 bytes
        ({}, LLAMA | {"num_hidden_layers": "many"}, 40_000),
        ({}, LLAMA | {"num_hidden_layers": 10**6}, 64),
        ({}, {"architectures": ["Unknown"]}, 40_000),
    ],
)
def test_on_a_cpu_the_kv_cache_takes_half_a_gigabyte_at_most(
    fields: dict[str, Any], model: dict[str, Any], tokens: int
) -> None:
    assert cpu_total_tokens(config(**fields), model) == tokens


def test_gpu_is_left_to_sglang() -> None:
    argv = server_argv(config(), "prefill", "cuda", None)
    for flag in ("--attention-backend", "--max-total-tokens", "--mem-fraction-static", "--sleep-on-idle"):
        assert flag not in argv


def test_host_cache_is_sized_by_ratio_or_gigabytes() -> None:
    assert value(server_argv(config(hicache_ratio=3.0), "agg", "cpu", POOL), "--hicache-ratio") == "3.0"
    sized = server_argv(config(hicache_size_gb=4), "agg", "cpu", POOL)
    assert value(sized, "--hicache-size") == "4"
    assert "--hicache-ratio" not in sized


def test_host_memory_that_only_stages_pages_is_smaller() -> None:
    cache = server_argv(config(), "agg", "cpu", POOL)
    assert value(cache, "--hicache-host-memory-mode") == "cache"
    assert value(cache, "--hicache-ratio") == "2.0"
    staged = server_argv(config(hicache_host_memory_mode="buffer_only"), "agg", "cpu", POOL)
    assert value(staged, "--hicache-host-memory-mode") == "buffer_only"
    assert value(staged, "--hicache-ratio") == "1.2"


def test_users_flags_come_last_and_win() -> None:
    argv = server_argv(config(dtype="float32", extra_args=["--dtype", "bfloat16"]), "agg", "cpu", POOL)
    assert value(argv, "--dtype") == "bfloat16"


@pytest.mark.parametrize(
    ("fields", "device"),
    [
        ({"layout": "page_first"}, "cpu"),
        ({"layout": "page_head"}, "cuda"),
        ({"page_pieces": 2, "layout": "page_first"}, "cuda"),
    ],
)
def test_layout_must_fit(fields: dict[str, Any], device: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.(layout|page_pieces)"):
        server_argv(config(**fields), "agg", device, POOL)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "device", "layout", "io_backend"),
    [
        ({}, "cuda", "page_first", "kernel"),
        ({}, "cpu", "page_first_direct", "direct"),
        ({"layout": "layer_first"}, "cuda", "layer_first", "kernel"),
        ({"layout": "layer_first"}, "cpu", "layer_first", "direct"),
        ({"layout": "page_first_direct"}, "cuda", "page_first_direct", "direct"),
        ({"page_pieces": 4}, "cuda", "page_head", "kernel"),
        ({"page_pieces": 2}, "cpu", "page_head", "kernel"),
    ],
)
def test_copies_suit_the_device(
    fields: dict[str, Any], device: Literal["cpu", "cuda"], layout: str, io_backend: str
) -> None:
    argv = server_argv(config(**fields), "agg", device, POOL)
    assert value(argv, "--hicache-mem-layout") == layout
    assert value(argv, "--hicache-io-backend") == io_backend


def test_on_a_gpu_sglang_sizes_host_memory_unless_it_is_told() -> None:
    argv = server_argv(config(), "decode", "cuda", POOL)
    assert "--hicache-ratio" not in argv
    assert "--hicache-size" not in argv
    assert value(server_argv(config(hicache_ratio=3.0), "decode", "cuda", POOL), "--hicache-ratio") == "3.0"


@pytest.mark.parametrize(
    ("role", "device", "is_off"),
    [("prefill", "cuda", True), ("decode", "cuda", False), ("agg", "cuda", False), ("prefill", "cpu", False)],
)
def test_a_prefill_worker_on_a_gpu_captures_no_graphs_of_decoding(
    role: Literal["prefill", "decode", "agg"], device: Literal["cpu", "cuda"], is_off: bool
) -> None:
    assert ("--disable-decode-cuda-graph" in server_argv(config(), role, device, POOL)) == is_off


def test_served_name_defaults_to_the_directory() -> None:
    assert served_model_name(config()) == "qwen"
    assert served_model_name(config(served_model_name="chat")) == "chat"


def test_sglang_is_told_of_a_certificate_so_that_it_asks_itself_by_https() -> None:
    tls = TlsConfig(certificate=Path("/c"), key=Path("/k"))
    argv = server_argv(config(), "agg", "cpu", None, tls)
    assert (value(argv, "--ssl-certfile"), value(argv, "--ssl-keyfile")) == ("/c", "/k")
    assert value(argv, "--ssl-ca-certs") == "/c"
    assert "--ssl-certfile" not in server_argv(config(), "agg", "cpu", None, TlsConfig(ca=Path("/a")))


def test_requests_without_a_priority_have_priority_0_where_the_scheduler_looks_at_it() -> None:
    flag = "--default-priority-value"
    assert flag not in server_argv(config(), "agg", "cpu", None)
    argv = server_argv(config(extra_args=["--enable-priority-scheduling"]), "agg", "cpu", None)
    assert value(argv, flag) == "0"
    own = ["--enable-priority-scheduling", flag, "3"]
    assert value(server_argv(config(extra_args=own), "agg", "cpu", None), flag) == "3"

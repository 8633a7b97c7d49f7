"""SGLang's command line for a worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.engine.args import cpu_total_tokens, served_model_name, server_argv
from pdserve.engine.config import EngineConfig
from pdserve.errors import ConfigError
from pdserve.security.tls import TlsConfig

POOL = {"backend_name": "pdserve", "module_path": "m", "class_name": "C", "interface_v1": 1}
TLS = TlsConfig(certificate=Path("/c"), key=Path("/k"))
BUFFER = {"hicache_host_memory_mode": "buffer_only"}
QUEUE = "--enable-priority-scheduling"
OWN = {"extra_args": [QUEUE, "--default-priority-value", "3"]}


def config(**fields: object) -> EngineConfig:
    return EngineConfig(**{"model_path": "/models/qwen", **fields})  # type: ignore[arg-type]


def taken(argv: list[str]) -> dict[str, str]:
    """What SGLang takes for each flag: the last of its repetitions."""
    return {word: after for word, after in zip(argv, [*argv[1:], ""], strict=True) if word.startswith("--")}


@pytest.mark.parametrize(
    ("fields", "role", "device", "storage", "flags"),
    [
        # computed pages go to the pool, and those of a hand-off are waited for
        ({}, "decode", "cpu", POOL, "hicache-storage-backend=dynamic hicache-write-policy=write_through"),
        ({}, "decode", "cpu", POOL, "hicache-storage-prefetch-policy=wait_complete"),
        ({}, "agg", "cpu", None, "hicache-storage-backend enable-hierarchical-cache hicache-ratio"),
        # a CPU bounds what SGLang would size by its GPU, and a GPU is left to SGLang
        ({}, "prefill", "cpu", None, "device=cpu attention-backend=torch_native max-total-tokens=40000"),
        ({}, "prefill", "cuda", None, "attention-backend max-total-tokens mem-fraction-static sleep-on-idle"),
        # host memory, which SGLang sizes on a GPU unless it is told
        ({"hicache_ratio": 3.0}, "agg", "cpu", POOL, "hicache-ratio=3.0"),
        ({"hicache_size_gb": 4}, "agg", "cpu", POOL, "hicache-size=4 hicache-ratio"),
        ({}, "agg", "cpu", POOL, "hicache-ratio=2.0 hicache-host-memory-mode=cache"),
        (BUFFER, "agg", "cpu", POOL, "hicache-ratio=1.2 hicache-host-memory-mode=buffer_only"),
        ({}, "decode", "cuda", POOL, "hicache-ratio hicache-size"),
        ({"hicache_ratio": 3.0}, "decode", "cuda", POOL, "hicache-ratio=3.0"),
        # a user's own flags come last and win
        ({"dtype": "float32", "extra_args": ["--dtype", "half"]}, "agg", "cpu", POOL, "dtype=half"),
        # a prefill worker on a GPU captures no graphs of decoding
        ({}, "prefill", "cuda", POOL, "disable-decode-cuda-graph=--enable-hierarchical-cache"),
        ({}, "decode", "cuda", POOL, "disable-decode-cuda-graph"),
        ({}, "agg", "cuda", POOL, "disable-decode-cuda-graph"),
        ({}, "prefill", "cpu", POOL, "disable-decode-cuda-graph"),
        # requests without a priority have priority 0 where the scheduler looks at it
        ({}, "agg", "cpu", None, "default-priority-value"),
        ({"extra_args": [QUEUE]}, "agg", "cpu", None, "default-priority-value=0"),
        (
            {"extra_args": [QUEUE, "--default-priority-value", "3"]},
            "agg",
            "cpu",
            None,
            "default-priority-value=3",
        ),
    ],
)
def test_a_workers_flags(fields: dict[str, Any], role: Any, device: Any, storage: Any, flags: str) -> None:
    """`flags`: with their values; those without one are not there."""
    found = taken(server_argv(config(**fields), role, device, storage))
    for flag in flags.split():
        name, _, value = flag.partition("=")
        assert found.get(f"--{name}", "") == value, name


@pytest.mark.parametrize(("storage", "told"), [(POOL, POOL), ("file", {}), ("mooncake", {})])
def test_one_page_is_worth_fetching_from_any_storage(storage: Any, told: dict[str, Any]) -> None:
    found = taken(server_argv(config(page_size=32), "agg", "cpu", storage))
    assert found["--hicache-storage-backend"] == (storage if isinstance(storage, str) else "dynamic")
    assert json.loads(found["--hicache-storage-backend-extra-config"]) == {"prefetch_threshold": 32, **told}


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


@pytest.mark.parametrize(
    ("fields", "device", "copies"),
    [
        ({}, "cuda", ("page_first", "kernel")),
        ({}, "cpu", ("page_first_direct", "direct")),
        ({"layout": "layer_first"}, "cuda", ("layer_first", "kernel")),
        ({"layout": "layer_first"}, "cpu", ("layer_first", "direct")),
        ({"layout": "page_first_direct"}, "cuda", ("page_first_direct", "direct")),
        ({"page_pieces": 4}, "cuda", ("page_head", "kernel")),
        ({"page_pieces": 2}, "cpu", ("page_head", "kernel")),
        ({"layout": "page_first"}, "cpu", None),
        ({"layout": "page_head"}, "cuda", None),
        ({"page_pieces": 2, "layout": "page_first"}, "cuda", None),
    ],
)
def test_layout_and_copies_suit_the_device_or_are_refused(
    fields: dict[str, Any], device: Any, copies: tuple[str, str] | None
) -> None:
    if copies is not None:
        found = taken(server_argv(config(**fields), "agg", device, POOL))
        assert (found["--hicache-mem-layout"], found["--hicache-io-backend"]) == copies
        return
    with pytest.raises(ConfigError, match=r"engine\.(layout|page_pieces)"):
        server_argv(config(**fields), "agg", device, POOL)


def test_served_name_defaults_to_the_directory() -> None:
    assert served_model_name(config()) == "qwen"
    assert served_model_name(config(served_model_name="chat")) == "chat"


def test_sglang_is_told_of_a_certificate_that_the_worker_serves_with() -> None:
    found = taken(server_argv(config(), "agg", "cpu", None, TLS))
    assert [found[f"--ssl-{name}"] for name in ("certfile", "keyfile", "ca-certs")] == ["/c", "/k", "/c"]
    assert "--ssl-certfile" not in server_argv(config(), "agg", "cpu", None, TlsConfig(ca=Path("/a")))

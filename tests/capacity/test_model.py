"""Facts of models from public config.json files, and what a token takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.capacity.facts import Gpu, Model, WorkerNeed
from pdserve.capacity.gather import read_model
from pdserve.capacity.model import model_facts, page_sizes, token_bytes
from pdserve.errors import ConfigError
from tests.support.capacity.models import make_model

MODELS = Path(__file__).parent / "models"
H100 = Gpu(index=0, memory_bytes=80 << 30, name="H100", compute="9.0")
B200 = Gpu(index=0, memory_bytes=180 << 30, name="B200", compute="10.0")


def model(name: str, **changed: Any) -> Model:
    facts = json.loads((MODELS / f"{name}.json").read_text())
    return model_facts(name, facts["config"] | changed, facts["weight_bytes"])


def per_token(name: str, **fields: Any) -> int:
    return token_bytes(model(name), WorkerNeed(name="w", role="agg", **fields))


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("llama-3.1-8b", {}, 32 * 8 * 2 * 128 * 2),
        ("llama-3.1-8b", {"tp": 4}, 32 * 2 * 2 * 128 * 2),
        ("llama-3.1-8b", {"tp": 16}, 32 * 1 * 2 * 128 * 2),
        ("llama-3.1-8b", {"tp": 8, "attention_dp": 8}, 32 * 8 * 2 * 128 * 2),
        ("llama-3.1-8b", {"pp": 3}, 11 * 8 * 2 * 128 * 2),
        ("llama-3.1-8b", {"kv_cache_dtype": "fp8_e4m3"}, 32 * 8 * 2 * 128),
        ("deepseek-v3", {"tp": 8}, 61 * 576 * 2),
        ("gpt-oss-120b", {}, int(1.8 * 18 * 8 * 2 * 64 * 2)),  # windows have 0.8 of the tokens
        ("gpt-oss-120b", {"one_pool": True}, 36 * 8 * 2 * 64 * 2),
        ("gemma-3-27b", {}, 62 * 16 * 2 * 128 * 2),
        ("qwen3-next-80b-a3b", {}, 12 * 2 * 2 * 256 * 2),
    ],
)
def test_bytes_of_a_token_on_a_rank(name: str, fields: dict[str, Any], expected: int) -> None:
    assert per_token(name, **fields) == expected


def test_a_checkpoint_quantized_for_fp8_kv_says_so() -> None:
    quantized = model(
        "llama-3.1-8b", quantization_config={"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}
    )
    assert quantized.dtype_bytes == 1
    assert model("deepseek-v3").dtype_bytes == 2


def test_context_is_stretched_where_it_counts_from_the_original() -> None:
    assert model("llama-3.1-8b").context_tokens == 131072
    assert model("llama-3.1-8b", rope_scaling={"rope_type": "linear", "factor": 2.0}).context_tokens == 262144


@pytest.mark.parametrize(
    ("name", "gpu", "backends", "expected"),
    [
        ("qwen3-32b", H100, (), ()),
        ("qwen3-32b", H100, ("fa4",), ()),
        ("qwen3-32b", B200, ("fa4",), (128,)),
        ("deepseek-v3", B200, ("fa4",), ()),
        ("deepseek-v3", H100, ("flashmla",), (64,)),
        ("deepseek-v3.2", H100, (), (64,)),
        ("qwen3-32b", B200, (), (64, 16, 32, 128)),
    ],
)
def test_forced_page_sizes_are_known(
    name: str, gpu: Gpu, backends: tuple[str, ...], expected: tuple[int, ...]
) -> None:
    assert page_sizes(model(name), gpu, backends)[0] == expected


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [("MiniMaxM3SparseForCausalLM", (128,)), ("DeepseekV4ForCausalLM", (256,))],
)
def test_models_that_force_their_page_size(architecture: str, expected: tuple[int, ...]) -> None:
    forced = model("qwen3-32b", architectures=[architecture])
    assert page_sizes(forced, H100, ())[0] == expected


def test_a_model_directory_is_read_with_its_weights_of_one_format(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((MODELS / "qwen3-32b.json").read_text())["config"])
    )
    (tmp_path / "a.safetensors").write_bytes(bytes(10))
    (tmp_path / "b.safetensors").write_bytes(bytes(5))
    (tmp_path / "a.bin").write_bytes(bytes(100))
    assert read_model(tmp_path).weight_bytes == 15


def test_without_weights_the_index_says_their_size(tmp_path: Path) -> None:
    assert read_model(make_model(tmp_path, "qwen3-32b")).weight_bytes == 65_500_000_000


@pytest.mark.parametrize("text", [None, "{", "[]", '{"hidden_size": 3}'])
def test_what_is_no_model_is_refused_with_its_place(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=tmp_path.name):
        read_model(tmp_path)

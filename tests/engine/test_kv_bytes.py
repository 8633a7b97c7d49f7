"""What a token takes in the cache, by public config.json files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.engine.kv_bytes import token_bytes
from pdserve.errors import ConfigError

MODELS = Path(__file__).parent / "kv_models"


def config(name: str, **changed: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MODELS / f"{name}.json").read_text())["config"]
    return found | changed


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("llama-3.1-8b", {}, 32 * 8 * 2 * 128 * 2),
        ("llama-3.1-8b", {"dtype": "float32"}, 32 * 8 * 2 * 128 * 4),
        ("llama-3.1-8b", {"kv_cache_dtype": "fp8_e4m3"}, 32 * 8 * 2 * 128),
        ("deepseek-v3", {}, 61 * 576 * 2),
        ("gpt-oss-120b", {}, int(1.8 * 18 * 8 * 2 * 64 * 2)),  # windows have 0.8 of the tokens
        ("gemma-3-27b", {}, 62 * 16 * 2 * 128 * 2),
        ("qwen3-next-80b-a3b", {}, 12 * 2 * 2 * 256 * 2),
    ],
)
def test_bytes_of_a_token(name: str, fields: dict[str, Any], expected: int) -> None:
    assert token_bytes(config(name), **fields) == expected


def test_a_checkpoint_quantized_for_fp8_kv_says_so() -> None:
    quantized = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}
    assert token_bytes(config("llama-3.1-8b", quantization_config=quantized)) == 32 * 8 * 2 * 128


@pytest.mark.parametrize("wrong", [{}, {"hidden_size": 3}, {"num_hidden_layers": "many"}])
def test_what_is_no_language_model_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="does not describe a language model"):
        token_bytes(wrong)

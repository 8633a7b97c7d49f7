"""The one model that a worker imports."""

from __future__ import annotations

import os

import pytest

from pdserve.engine.sglang import models

CHECKED = {
    "Qwen3ForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama",
    "DeepseekV3ForCausalLM": "deepseek_v2",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "LlamaForCausalLMEagle3": "llama_eagle3",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (models.CLASSES_ENV, models.PACKAGE_ENV):
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)


def chosen() -> dict[str, str]:
    """What the environment says of it."""
    names = (models.CLASSES_ENV, models.PACKAGE_ENV)
    return {name: os.environ[name] for name in names if name in os.environ}


@pytest.mark.parametrize("name", CHECKED)
def test_a_models_module_is_found(name: str) -> None:
    models.choose([name])
    assert chosen() == {
        models.CLASSES_ENV: f"sglang.srt.models.{CHECKED[name]}:{name}",
        models.PACKAGE_ENV: models.__name__,
    }


@pytest.mark.parametrize("names", [["NobodysForCausalLM"], ["Qwen3ForCausalLM", "NobodysForCausalLM"], []])
def test_sglang_imports_all_where_one_is_not_found(names: list[str]) -> None:
    models.choose(names)
    assert chosen() == {}


def test_a_package_of_models_that_the_user_names_stays() -> None:
    os.environ[models.PACKAGE_ENV] = "mine"
    models.choose(["Qwen3ForCausalLM"])
    assert os.environ[models.PACKAGE_ENV] == "mine"

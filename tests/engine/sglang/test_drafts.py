"""What speculative decoding adds to the identity of a worker's pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.engine.args import server_argv
from pdserve.engine.config import EngineConfig
from pdserve.engine.sglang import geometry
from pdserve.engine.sglang.geometry import AttentionArch, Drafts, KvIdentity, drafts, kv_identity
from pdserve.engine.sglang.server_args import parse_args, resolved
from pdserve.errors import StartupError
from pdserve.pages import PagePart, part_suffix
from tests.support.e2e.draft_model import make_mtp_model
from tests.support.random_model import make_random_model

CHAIN = [
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "4"),
]
PLAIN = {"attention_arch": AttentionArch.MHA, "is_hybrid_swa": False, "num_nextn_predict_layers": None}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The demo model, and one with a layer that drafts."""
    directory = tmp_path_factory.mktemp("models")
    make_random_model("tiny", directory / "demo", seed=0)
    return directory / "demo", make_mtp_model(directory / "demo", directory / "mtp")


def identity(model: Path, algorithm: str, draft: Path | None, **more: Any) -> KvIdentity:
    words = ["--speculative-algorithm", algorithm] if algorithm else []
    words += ["--speculative-ngram-max-bfs-breadth", "1"] if algorithm == "NGRAM" else []
    words += ["--speculative-draft-model-path", str(draft)] if draft else []
    config = EngineConfig(model_path=str(model), extra_args=[*words, *(CHAIN if draft else [])], **more)
    return kv_identity(resolved(parse_args(server_argv(config, "agg", "cpu", {}))), pieces=config.page_pieces)


def test_another_model_that_drafts_has_a_part_of_each_page(models: tuple[Path, Path]) -> None:
    demo, mtp = models
    plain, drafted = identity(demo, "", None), identity(demo, "STANDALONE", demo)
    assert drafted.parts == [PagePart("draft", 0, [part_suffix(b"", "draft", {"kv": 0, "draft": 0})])]
    assert not drafted.pairs
    assert (drafted.geometry.parts, drafted.geometry.options) == ("draft:0", "draft=STANDALONE")
    assert drafted.geometry.namespace("m") != plain.geometry.namespace("m")
    other = identity(demo, "STANDALONE", mtp).geometry.options
    assert other.startswith("draft=STANDALONE:")


def test_a_layer_that_drafts_is_in_the_kv_page_which_is_named_by_the_next_token_too(
    models: tuple[Path, Path],
) -> None:
    _, mtp = models
    for name in ("EAGLE", "NEXTN"):
        found = identity(mtp, name, mtp)
        assert (found.parts, found.pairs) == ([], True)
        assert (found.geometry.parts, found.geometry.options) == ("", "draft=EAGLE")


def test_ngrams_change_no_page(models: tuple[Path, Path]) -> None:
    demo, _ = models
    assert identity(demo, "NGRAM", None) == identity(demo, "", None)


@pytest.fixture
def asked(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Drafts]:
    """`drafts` of a model and a draft model that differ from the demo model in these."""
    demo, _ = models

    def ask(*, has_parts: bool = False, pieces: int = 0, own: Any = None, **changed: Any) -> Drafts:
        config = SimpleNamespace(**{**PLAIN, **(own or {})})
        made = SimpleNamespace(from_server_args=lambda _args, **_more: config)
        monkeypatch.setattr(geometry, "ModelConfig", made)
        args = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(demo), "tp_size": 2}
        args |= {"enable_hierarchical_cache": True, "model_path": str(demo)}
        args |= {"speculative_draft_kv_cache_dtype": None, **changed}
        target = SimpleNamespace(attention_arch=changed.get("target", AttentionArch.MHA))
        return drafts(SimpleNamespace(**args), target, has_parts=has_parts, pieces=pieces)

    return ask


def test_types_of_a_drafts_keys_and_values_are_kept_apart(asked: Callable[..., Drafts]) -> None:
    assert asked() == Drafts(is_part=True, pairs=True, option="EAGLE3")
    assert asked(speculative_draft_kv_cache_dtype="fp8_e4m3").option == "EAGLE3:fp8_e4m3"
    without_storage = {"enable_hierarchical_cache": False, "speculative_draft_model_path": None}
    assert asked(**without_storage, has_parts=True) == Drafts()


@pytest.mark.model_support(
    "latent attention", "speculative decoding", refused="SGLang then stores the draft of one rank alone"
)
def test_a_draft_that_sglang_stores_of_one_rank_alone_is_refused(asked: Callable[..., Drafts]) -> None:
    """SGLang 0.5.23 makes an exception for Mooncake's storage alone (`should_backup`)."""
    latent = {"attention_arch": AttentionArch.MLA}
    with pytest.raises(StartupError, match=r"SGLang then stores the draft of one rank alone"):
        asked(target=AttentionArch.MLA)
    assert asked(target=AttentionArch.MLA, tp_size=1).is_part
    assert asked(target=AttentionArch.MLA, own=latent).is_part
    packed = {**latent, "num_nextn_predict_layers": 1}
    assert not asked(target=AttentionArch.MLA, own=packed, speculative_algorithm="EAGLE").is_part


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"speculative_draft_model_path": None}, "draft model None is no local directory"),
        ({"speculative_draft_model_path": "org/name"}, "draft model 'org/name' is no local directory"),
        ({"has_parts": True}, "this model keeps state beside its KV pages"),
        ({"pieces": 2}, "engine.page_pieces is set, and pdserve has not seen SGLang store both"),
        ({"own": {"is_hybrid_swa": True}}, "the draft has sliding windows"),
    ],
)
def test_a_draft_that_cannot_be_stored_is_refused_in_one_line(
    asked: Callable[..., Drafts], changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(StartupError) as refused:
        asked(**changed)
    assert str(refused.value).startswith("--speculative-algorithm EAGLE3: ")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)

"""What a worker needs of SGLang's arguments, against SGLang's own parser and resolution."""

from __future__ import annotations

import logging
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from pdserve.engine.args import NEEDED, NEEDED_ON_CPU, needed, server_argv
from pdserve.engine.config import EngineConfig
from pdserve.engine.sglang.geometry import kv_identity, longest_tokens
from pdserve.engine.sglang.server_args import (
    STORED_DRAFTS,
    check_needs,
    check_supported,
    parse_args,
    resolved,
)
from pdserve.errors import ConfigError
from tests.support.random_model import make_random_model


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    directory = tmp_path_factory.mktemp("model") / "demo-tiny"
    make_random_model("tiny", directory, seed=0)
    return EngineConfig(model_path=str(directory))


def resolve(engine: EngineConfig, *words: str) -> Any:
    return resolved(parse_args(server_argv(replace(engine, extra_args=[*words]), "agg", "cpu", {})))


def test_what_a_worker_needs_are_arguments_that_sglang_has(engine: EngineConfig) -> None:
    """A name that SGLang no longer has would never disagree."""
    found = resolve(engine)
    assert [name for name in needed("cpu") if not hasattr(found, name)] == []
    assert set(NEEDED_ON_CPU) & set(NEEDED) == set()
    check_needs(found, resolve(engine), needed("cpu"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--disable-radix-cache", "disable-radix-cache are mutually exclusive"),
        ("--hicache-write-policy write_back", "--hicache-write-policy would be write_back"),
        ("--hicache-write-policy=write_back", "a worker needs write_through: pages would no longer reach"),
        ("--hicache-storage-prefetch-p timeout", "--hicache-storage-prefetch-policy would be timeout"),
        ("--hicache-storage-backend file", "the pool is the storage backend"),
        ("--tokenizer-worker-num 4", "--tokenizer-worker-num would be 4"),
        ("--strip-thinking-cache", "--strip-thinking-cache"),
        ("--port 1", "--port would be 1, but a worker needs 30000: set engine.port"),
        ("--api-key secret", "--api-key would be set, but a worker needs none: set cluster_token"),
        ("--tp-size 2 --attn-dp-size 2", "--attn-dp-size would be 2, but a worker needs 1: SGLang's"),
        ("--tp-size 2 --dp-size 2 --enable-dp-attention", "--attn-dp-size would be 2, but a"),
        ("--served-model-name x", "set engine.served_model_name"),
        ("--hicache-host-memory-mode buffer_only", "set engine.hicache_host_memory_mode"),
        ("--enable-flexkv", "--enable-flexkv would be True, but a worker needs False: pages would no"),
        ("--elastic-ep-backend mooncake", "--elastic-ep-backend would be mooncake"),
        ("--prefill-only-disable-kv-cache", "--prefill-only-disable-kv-cache currently requires"),
        # what SGLang refuses is said in its own words
        ("--no-such-flag", "SGLang does not accept these flags: "),
        ("--page-size many", "SGLang does not accept these flags: "),
        ("--tp-size 3 --dp-size 2 --enable-dp-attention", "SGLang does not accept these flags: "),
    ],
)
def test_an_argument_that_breaks_the_hand_off_is_named_in_one_line(
    engine: EngineConfig, words: str, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_needs(resolve(engine, *words.split()), resolve(engine), needed("cpu"))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "secret" not in str(refused.value)


def test_an_argument_that_another_sglang_does_not_have_is_named_in_one_line() -> None:
    found = SimpleNamespace(page_size=64)
    with pytest.raises(ConfigError) as refused:
        check_needs(
            found, found, {"page_size": "x", "hicache_write_policy": "pages would not reach the pool"}
        )
    assert str(refused.value) == (
        "SGLang has no --hicache-write-policy, by which a worker sees that pages would not reach the pool: "
        "install the SGLang that this pdserve is made for (launch/setup.sh)"
    )


def test_the_longest_request_is_as_the_worker_was_told_or_the_models_own(engine: EngineConfig) -> None:
    assert longest_tokens(resolve(engine)) == 8192
    assert longest_tokens(resolve(engine, "--context-length", "512")) == 512


STORED = {
    "enable_hierarchical_cache": True,
    "hicache_host_memory_mode": "cache",
    "kv_cache_dtype": "fp8_e4m3",
    "enable_streaming_session": False,
    "speculative_algorithm": None,
    "disaggregation_mode": "null",
    "device": "cuda",
    "pp_size": 1,
}
"""What pages are stored of."""
STAGED = {"hicache_host_memory_mode": "buffer_only"}
DRAFTS = "pdserve has not seen SGLang store its pages"
SCALES = "SGLang keeps scales beside its values, and stores no such pages"


@pytest.mark.model_support(
    "multi-head attention",
    "MX and FP4 KV",
    refused="SGLang keeps scales beside its values, and stores no such pages",
)
@pytest.mark.model_support(
    "multi-head attention", "speculative decoding", refused="pdserve has not seen SGLang store its pages"
)
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({**STAGED, "pp_size": 2}, '"buffer_only" and --pp-size over 1 exclude each other: take engine.hic'),
        ({"enable_streaming_session": True}, "--enable-streaming-session: with HiCache"),
        *(
            ({"kv_cache_dtype": dtype}, f"--kv-cache-dtype {dtype}: {SCALES}: take fp8_e4m3")
            for dtype in ("mxfp8", "nvfp4", "fp4_mx_block16")
        ),
        *(
            ({"speculative_algorithm": algorithm}, f"--speculative-algorithm {algorithm}: {DRAFTS}: take one")
            for algorithm in ("DFLASH", "DSPARK", "FROZEN_KV_MTP", "UNO", "ANOTHER")
        ),
        *(
            case
            for algorithm in STORED_DRAFTS
            for case in (
                (
                    {"speculative_algorithm": algorithm, "disaggregation_mode": "decode"},
                    'drafts handed over directly: take handoff = "pool"',
                ),
                ({"speculative_algorithm": algorithm, **STAGED}, 'hicache_host_memory_mode = "cache"'),
            )
        ),
    ],
)
def test_what_sglang_does_not_store_or_nobody_saw_stored_is_refused_in_one_line(
    changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_supported(SimpleNamespace(**STORED | changed))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    check_supported(SimpleNamespace(**STORED | changed | {"enable_hierarchical_cache": False}))


@pytest.mark.parametrize(
    "changed", [{}, STAGED, {"pp_size": 2}, *({"speculative_algorithm": one} for one in STORED_DRAFTS)]
)
def test_what_sglang_stores_is_taken(changed: dict[str, Any]) -> None:
    check_supported(SimpleNamespace(**STORED | changed))


def test_the_resolved_arguments_are_those_that_are_checked(engine: EngineConfig) -> None:
    check_supported(resolve(engine))
    with pytest.raises(ConfigError, match="--enable-streaming-session"):
        check_supported(resolve(engine, "--enable-streaming-session"))
    staged = replace(engine, hicache_host_memory_mode="buffer_only")
    found = resolve(staged)
    assert (found.hicache_host_memory_mode, found.hicache_ratio) == ("buffer_only", 1.2)
    assert found.hicache_write_policy == "write_through"
    with pytest.raises(ConfigError, match="--pp-size"):
        check_supported(resolve(staged, "--pp-size", "2"))


def test_ngrams_are_refused_on_cpu_only() -> None:
    for is_stored in (True, False):
        found = STORED | {"speculative_algorithm": "NGRAM", "enable_hierarchical_cache": is_stored}
        check_supported(SimpleNamespace(**found))
        with pytest.raises(ConfigError, match="NGRAM: SGLang has it on a CPU with its own kernels only"):
            check_supported(SimpleNamespace(**found | {"device": "cpu"}))
    assert ("attn_dp_size" in needed("cpu"), "attn_dp_size" in needed("cuda")) == (True, False)


def test_other_arguments_are_the_users(engine: EngineConfig) -> None:
    found = resolve(engine, "--chunked-prefill-size", "512", "--port", "30000", "--dtype", "float32")
    assert found.chunked_prefill_size == 512
    check_needs(found, resolve(engine), needed("cpu"))


@pytest.mark.parametrize("field", ["disable_radix_cache", "prefill_only_disable_kv_cache"])
def test_a_value_that_sglang_itself_changes_is_compared_too(engine: EngineConfig, field: str) -> None:
    class Changed:
        """What SGLang may make of the same words: its next version, or on another GPU."""

        def __getattr__(self, name: str) -> Any:
            return True if name == field else getattr(own, name)

    own = resolve(engine)
    with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')} would be True"):
        check_needs(Changed(), own, needed("cuda"))


def test_the_arguments_and_the_environment_stay_as_they_are(engine: EngineConfig) -> None:
    raw = parse_args(server_argv(engine, "agg", "cpu", {}))
    before = dict(os.environ)
    found = resolved(raw)
    assert (raw.chunked_prefill_size, found.chunked_prefill_size is None) == (None, False)
    assert dict(os.environ) == before


def test_geometry_is_of_what_the_arguments_come_to(engine: EngineConfig) -> None:
    """SGLang turns the old flag for data parallel attention into its new argument when it resolves."""
    found = resolve(engine, "--tp-size", "4", "--dp-size", "2", "--enable-dp-attention")
    assert (found.attn_dp_size, found.enable_dp_attention) == (2, False)
    identity = kv_identity(found)
    assert identity.geometry.tp_size == "2"
    assert identity.rank_suffixes == [b"tp0/2", b"tp1/2"]
    assert (identity.geometry.layout, identity.geometry.page_size) == ("page_first_direct", "64")


def test_what_is_logged_after_parsing_reaches_the_log(
    logs_as_before: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """SGLang configures logging while it parses, with a handler that writes where nobody reads."""
    logging.basicConfig(level="WARNING", stream=sys.stderr, force=True)
    parse_args(["--model-path", "/none", "--log-level", "error"])
    logging.getLogger("pdserve.engine.launch").warning("insecure, no cluster_token")
    assert "insecure, no cluster_token" in capsys.readouterr().err

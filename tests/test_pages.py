"""Page keys, namespaces and model fingerprints."""

from __future__ import annotations

import hashlib
import json
import struct
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import StartupError
from pdserve.pages import (
    KIN_BYTES,
    KvGeometry,
    adapter_fingerprint,
    all_rank_suffixes,
    model_fingerprint,
    namespace_seed,
    page_hashes,
    part_suffix,
    piece_suffixes,
    pool_key,
    rank_suffix,
    restorable_lengths,
)

GEOMETRY = KvGeometry(
    model="abc",
    dtype="float32",
    kv_dtype="float32",
    page_size="64",
    layout="page_first",
    tp_size="1",
    pp_size="1",
)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 8))
def test_page_hashes_are_the_chain_of_sha256_over_full_pages(tokens: list[int], page_size: int) -> None:
    prior = b""
    expected = []
    for start in range(0, len(tokens) // page_size * page_size, page_size):
        words = struct.pack(f"<{page_size}I", *tokens[start : start + page_size])
        prior = hashlib.sha256(prior + words).digest()
        expected.append(prior)
    assert page_hashes(tokens, page_size) == expected


def test_a_seed_changes_every_page_and_parts_cannot_be_shifted_between_fields() -> None:
    tokens = list(range(8))
    plain = page_hashes(tokens, 4)
    assert not set(plain) & set(page_hashes(tokens, 4, namespace_seed("a", None)))
    seeds = {
        namespace_seed(*pair) for pair in [("ab", ""), ("a", "b"), ("", "ab"), ("ab", None), (None, "ab")]
    }
    assert len(seeds) == 5
    assert namespace_seed(None, None) is None


def test_pages_of_pairs_are_named_by_each_two_neighbours_and_need_a_token_after_them() -> None:
    tokens = [5, 6, 7, 8, 9]
    first = hashlib.sha256(array("I", [5, 6, 6, 7]).tobytes()).digest()
    second = hashlib.sha256(first + array("I", [7, 8, 8, 9]).tobytes()).digest()
    assert page_hashes(tokens, 2, pairs=True) == [first, second]
    assert [len(page_hashes(tokens[:n], 2, pairs=True)) for n in range(6)] == [0, 0, 0, 1, 1, 2]
    image = 2**40
    wide = hashlib.sha256(first + b"\xff" + array("Q", [7, 8, 8, image]).tobytes()).digest()
    assert page_hashes([*tokens[:4], image], 2, pairs=True) == [first, wide]


def test_a_different_geometry_is_a_different_namespace_in_every_field() -> None:
    names = {GEOMETRY.namespace("m")}
    for field in GEOMETRY.as_dict():
        changed = KvGeometry(**{**GEOMETRY.as_dict(), field: "other"})
        names.add(changed.namespace("m"))
    assert len(names) == 1 + len(GEOMETRY.as_dict())


@pytest.mark.model_support("multi-head attention", "TP")
@pytest.mark.model_support("multi-head attention", "PP")
@pytest.mark.model_support("latent attention", "TP")
def test_ranks_of_an_mha_model_have_different_keys_and_of_an_mla_model_the_same() -> None:
    page = b"\x01" * 32
    mha = {pool_key(page, suffix) for suffix in all_rank_suffixes(replicated=False, tp_size=4, pp_size=2)}
    mla = {pool_key(page, suffix) for suffix in all_rank_suffixes(replicated=True, tp_size=4, pp_size=1)}
    assert len(mha) == 8
    assert mla == {page}
    assert rank_suffix(replicated=False, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1) == b""


PARTS = {"kv": 0, "swa": 2, "mamba": 1, "draft": 0}


def test_parts_of_a_page_have_keys_of_their_own_on_each_rank() -> None:
    ranks = [*all_rank_suffixes(replicated=False, tp_size=2, pp_size=2), b""]
    suffixes = [part_suffix(rank, name, PARTS) for rank in ranks for name in PARTS]
    assert len({pool_key(b"\x01" * 32, suffix) for suffix in suffixes}) == 20
    assert [part_suffix(rank, "kv", {"kv": 0}) for rank in ranks] == ranks


def test_keys_of_a_pages_parts_begin_alike_and_then_say_what_goes_together() -> None:
    hashes = page_hashes(range(8), 4)
    keys = {
        (page, rank, name): pool_key(page, part_suffix(rank, name, PARTS))
        for page in hashes
        for rank in (b"tp0/2", b"tp1/2")
        for name in PARTS
    }
    assert len(set(keys.values())) == len(keys)
    assert all(len(key) == 32 and key[:KIN_BYTES] == page[:KIN_BYTES] for (page, _, _), key in keys.items())
    groups = {name: {key[KIN_BYTES] for (_, _, part), key in keys.items() if part == name} for name in PARTS}
    assert groups == {"kv": {0}, "draft": {0}, "mamba": {1}, "swa": {2}}


def test_without_parts_a_geometry_is_what_older_versions_said() -> None:
    assert "parts" not in GEOMETRY.as_dict()
    assert GEOMETRY.window_pages == {"kv": 0}
    text = KvGeometry.parts_text({"swa": 2, "indexer": 0})
    with_parts = KvGeometry(**{**GEOMETRY.as_dict(), "parts": text})
    assert with_parts.window_pages == {"kv": 0, "swa": 2, "indexer": 0}
    assert with_parts.namespace("m") != GEOMETRY.namespace("m")


@pytest.mark.parametrize(
    ("window", "present", "lengths"),
    [
        (0, "110111", [1, 2]),
        (1, "110101", [1, 2, 4, 6]),
        (2, "110111", [1, 2, 5, 6]),
        (2, "011", [3]),
        (9, "11101", [1, 2, 3]),
        (3, "", []),
    ],
)
def test_a_prefix_can_be_restored_where_its_window_is_whole(
    window: int, present: str, lengths: list[int]
) -> None:
    there = [page == "1" for page in present]
    assert restorable_lengths([(window, there)]) == lengths
    assert restorable_lengths([(0, [True] * len(there)), (window, there)]) == lengths


def pieces_of(tp_size: int, pieces: int, **more: int | bool) -> list[list[bytes]]:
    """Of each rank."""
    fixed: dict[str, Any] = {"replicated": False, "pp_rank": 0, "pp_size": 1, **more}
    return [piece_suffixes(tp_rank=rank, tp_size=tp_size, pieces=pieces, **fixed) for rank in range(tp_size)]


def test_workers_of_unequal_numbers_of_ranks_store_the_same_pieces() -> None:
    four = all_rank_suffixes(replicated=False, tp_size=4, pp_size=1)
    assert pieces_of(1, 4) == [four]
    assert pieces_of(2, 4) == [four[:2], four[2:]]
    assert pieces_of(4, 4) == [[one] for one in four]
    assert pieces_of(8, 4) == [[one] for one in four for _ in range(2)]  # two ranks with the same heads
    assert pieces_of(1, 1) == [[b""]]
    with pytest.raises(ValueError, match="2 pieces cannot be divided between 3 ranks"):
        pieces_of(3, 2)


def test_pages_that_all_ranks_hold_are_in_one_piece() -> None:
    assert pieces_of(4, 1, replicated=True) == [[b""]] * 4


def write_safetensors(path: Path, values: bytes) -> None:
    header = json.dumps(
        {"w": {"dtype": "U8", "shape": [len(values)], "data_offsets": [0, len(values)]}}
    ).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + values)


def make_model(directory: Path, values: bytes, **config: object) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"hidden_size": 8, **config}))
    write_safetensors(directory / "model.safetensors", values)
    return directory


def test_equal_weights_have_equal_fingerprints_wherever_they_lie(tmp_path: Path) -> None:
    one = make_model(tmp_path / "one", bytes(range(256)) * 40, _name_or_path="/somewhere")
    two = make_model(tmp_path / "two", bytes(range(256)) * 40, _name_or_path="/elsewhere")
    assert model_fingerprint(one) == model_fingerprint(two)


def test_changed_weights_or_configuration_change_the_fingerprint(tmp_path: Path) -> None:
    weights = bytes(range(256)) * 40
    fingerprints = {
        model_fingerprint(make_model(tmp_path / "base", weights)),
        model_fingerprint(make_model(tmp_path / "first", b"\xff" + weights[1:])),
        model_fingerprint(make_model(tmp_path / "last", weights[:-1] + b"\x00")),
        model_fingerprint(make_model(tmp_path / "config", weights, rope_theta=2)),
    }
    assert len(fingerprints) == 4


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda d: None, "config.json is missing"),
        (lambda d: (d / "config.json").write_text("{}"), "holds no weights"),
        (
            lambda d: ((d / "config.json").write_text("{}"), (d / "m.safetensors").write_bytes(b"\xff" * 20)),
            "no safetensors file",
        ),
    ],
)
def test_what_is_no_model_directory_is_refused_in_one_line(tmp_path: Path, prepare, says: str) -> None:  # type: ignore[no-untyped-def]
    prepare(tmp_path)
    with pytest.raises(StartupError, match=says):
        model_fingerprint(tmp_path)


def test_an_adapter_is_known_by_its_weights_not_its_path(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    write_safetensors(tmp_path / "adapter_model.safetensors", b"\x01" * 100)
    before = adapter_fingerprint(tmp_path)
    assert adapter_fingerprint(tmp_path) == before
    write_safetensors(tmp_path / "adapter_model.safetensors", b"\x02" * 100)  # trained on, in place
    assert adapter_fingerprint(tmp_path) != before


def test_quantization_files_beside_the_configuration_count(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", bytes(1000))
    before = model_fingerprint(model)
    (model / "hf_quant_config.json").write_text('{"kv_cache_quant_algo": "FP8"}')
    assert model_fingerprint(model) != before

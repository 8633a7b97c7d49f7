"""Pages that are stored compressed or encrypted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import ConfigError
from pdserve.kvpool.protocol.page_bytes import checksum_bytes
from pdserve.kvpool.tiers.base import CORRUPT, LOADED, PageMemory, SpaceFacts, TierPage
from pdserve.kvpool.tiers.encryption import OVERHEAD_BYTES, PageCipher, SecretEntry, read_keys
from pdserve.kvpool.tiers.page_codec import AS_IT_IS, PageCodec, StoredPage, compress, decompress
from tests.support.kvpool.tier_tools import KIB, key, memory, page

LENGTH = 16 * KIB
CHAT = SpaceFacts("chat@1", "0" * 32, 2)
BATCH = SpaceFacts("batch", "1" * 32, 2)
NEW, OLD = "aa" * 32, "bb" * 32


def cipher(*secrets: str, namespaces: str = "*") -> PageCipher:
    return PageCipher([SecretEntry(secret, (namespaces,)) for secret in secrets])


def kv_page(n: int = 1) -> tuple[TierPage, PageMemory]:
    """Numbers as KV has them, in 16 bits: exponents repeat."""
    one, data = page(n, LENGTH)
    numbers = np.random.default_rng(n).standard_normal(LENGTH // 2).astype(np.float32)
    data[:LENGTH] = (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return TierPage(one.space, one.key, LENGTH, 0, 1), data


def decoded(codec: PageCodec, stored: StoredPage, facts: SpaceFacts = CHAT) -> PageMemory | None:
    into = memory(LENGTH)
    result = codec.decode(stored, into, facts)
    assert result.status in (LOADED, CORRUPT)
    return into[:LENGTH] if result.status == LOADED else None


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("keys", [None, cipher(NEW)])
def test_a_page_comes_back_as_it_was(compressed: bool, keys: PageCipher | None) -> None:
    codec = PageCodec(compressed=compressed, cipher=keys)
    one, data = kv_page()
    stored = codec.encode(one, data, CHAT)
    found = decoded(codec, stored) if stored.coding[0] else stored.data[:LENGTH]
    assert found is not None
    assert np.array_equal(found, data[:LENGTH])


def test_kv_of_16_bits_gets_smaller_and_noise_is_stored_as_it_is() -> None:
    codec = PageCodec(compressed=True)
    one, data = kv_page()
    assert codec.encode(one, data, CHAT).size_bytes < 0.8 * LENGTH
    noise, noisy = page(3, LENGTH)
    stored = codec.encode(noise, noisy, CHAT)
    assert (stored.coding, stored.size_bytes) == (AS_IT_IS, LENGTH)


@given(st.binary(min_size=1, max_size=700), st.integers(0, 16))
def test_any_page_comes_back_and_no_byte_beyond_it_is_written(data: bytes, item_bytes: int) -> None:
    into = bytearray(len(data) + 8)
    decompress(memoryview(compress(memoryview(data), item_bytes)), memoryview(into)[: len(data)])
    assert bytes(into) == data + bytes(8)


@given(st.binary(max_size=200))
def test_what_is_no_compressed_page_is_refused(stored: bytes) -> None:
    with pytest.raises(ValueError):
        decompress(memoryview(stored), memoryview(bytearray(64)))


def test_a_small_frame_that_claims_a_huge_page_takes_no_memory() -> None:
    bomb = bytes([1]) + zstandard.ZstdCompressor().compress(bytes(64 << 20))
    assert len(bomb) < 10 * KIB
    with pytest.raises(ValueError, match="another length"):
        decompress(memoryview(bomb), memoryview(bytearray(LENGTH)))


# --- encryption


def test_a_page_is_stored_without_a_trace_of_its_bytes() -> None:
    one, data = page(1, LENGTH)
    stored = PageCodec(cipher=cipher(NEW)).encode(one, data, CHAT)
    assert stored.size_bytes == LENGTH + OVERHEAD_BYTES
    assert data[100:132].tobytes() not in stored.data.tobytes()


def test_the_same_page_is_never_encrypted_in_the_same_way() -> None:
    """A second start, or a copy of the machine, has the same keys."""
    one, data = page(1, LENGTH)
    stored = [PageCodec(cipher=cipher(NEW)).encode(one, data, CHAT).data.tobytes() for _ in range(50)]
    randoms = {found[8:32] for found in stored}
    assert len(randoms) == len({found[32:] for found in stored}) == 50


Change = Callable[[StoredPage], StoredPage]


def flipped(at: int) -> Change:
    """A changed byte, with a right digest."""

    def change(stored: StoredPage) -> StoredPage:
        stored.data[at] ^= 1
        return msgspec.structs.replace(stored, digest=checksum_bytes(stored.data[: stored.size_bytes].data))

    return change


def renamed(**changes: object) -> Change:
    return lambda stored: msgspec.structs.replace(
        stored, page=msgspec.structs.replace(stored.page, **changes)
    )


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        *((flipped(at), CHAT) for at in (0, 9, 31, 40, LENGTH // 2, LENGTH + OVERHEAD_BYTES - 1)),
        *((renamed(**{name: 5}), CHAT) for name in ("space", "checksum")),
        (renamed(key=key(2)), CHAT),
        (renamed(length_bytes=LENGTH - 2), CHAT),
        (lambda stored: stored, BATCH),
        # that somebody stored plain, or compressed only
        (lambda stored: PageCodec().encode(*page(1, LENGTH), CHAT), CHAT),
        (lambda stored: PageCodec(compressed=True).encode(*kv_page(), CHAT), CHAT),
    ],
)
def test_an_encrypted_page_that_is_not_what_was_stored_under_its_name_is_a_miss(
    change: Change, facts: SpaceFacts
) -> None:
    codec = PageCodec(cipher=cipher(NEW))
    stored = codec.encode(*page(1, LENGTH), CHAT)
    assert decoded(codec, stored) is not None
    assert decoded(codec, change(stored), facts) is None


def test_a_namespace_that_no_pattern_matches_is_stored_plain() -> None:
    codec = PageCodec(cipher=cipher(NEW, namespaces="chat@*"))
    assert codec.encode(*page(1, LENGTH), BATCH).coding == AS_IT_IS
    assert codec.encode(*page(1, LENGTH), CHAT).coding[2] == 1


def test_after_a_rotation_old_pages_are_read_and_new_ones_use_the_new_key() -> None:
    before = PageCodec(cipher=cipher(OLD)).encode(*page(1, LENGTH), CHAT)
    rotated = PageCodec(cipher=cipher(NEW, OLD))
    assert decoded(rotated, before) is not None
    after = rotated.encode(*page(1, LENGTH), CHAT)
    assert decoded(PageCodec(cipher=cipher(NEW)), after) is not None
    assert decoded(PageCodec(cipher=cipher(NEW)), before) is None, "the old key is gone"


@given(st.binary(max_size=100))
def test_short_stored_bytes_are_a_miss(stored: bytes) -> None:
    assert cipher(NEW).open("chat@1", page(1)[0], 0, memoryview(stored)) is None


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ('[[keys]]\nsecret = "abc"', 0o600, "64 hexadecimal digits"),
        ("keys = []", 0o600, "1 to 64 keys"),
        ("colour = 1", 0o600, "unknown field"),
        (f'[[keys]]\nsecret = "{NEW}"', 0o640, "can be read by other users"),
    ],
)
def test_a_bad_key_file_is_refused_in_one_line_that_shows_no_secret(
    tmp_path: Path, text: str, mode: int, says: str
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=says) as error:
        read_keys(file)
    assert "\n" not in str(error.value)
    assert NEW not in str(error.value)

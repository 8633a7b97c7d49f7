"""What makes a KV page's bytes what they are: page keys, namespaces, the identity of a model. Pure, but for
reading a model's files.

**Page hash.** SGLang names a page by the chain `sha256(previous digest || the page's token ids as little-
endian u32)` (`mem_cache/utils.py: get_hash_str`; larger ids: see `token_bytes`); the chain starts from
nothing, or from a seed made of the request's `extra_key` and `cache_salt` (`storage_namespace_seed`).
`page_hashes` computes the same chain without SGLang, so that a worker's HTTP process can name the pages of a
prompt it has tokenised; tests/engine compare the two. Where an EAGLE model drafts, SGLang hashes each token
together with the one after it (`pairs`): the draft's keys and values depend on that one too.

**Namespace.** The chain says nothing of the model. Everything else that decides a page's bytes (weights,
dtype, KV dtype, page size, layout, parallel sizes) is the `KvGeometry`; a namespace belongs to exactly one
geometry, and its default name contains the geometry's hash. Two workers that differ in any of it never meet.

**Rank.** With tensor parallelism an MHA rank holds its own heads: its pages are other bytes under the same
chain, so the rank becomes part of the key (`pool_key`). MLA ranks hold the same bytes and share them. Workers
of unequal numbers of ranks share pages where all store them in the same pieces (`piece_suffixes`), each of
some heads. SGLang's layout `page_head` keeps the bytes of a head together.

**Parts.** Of some models SGLang keeps more of a page than the keys and values of full attention: those of
layers with a sliding window, for example. Each part has a host pool of its own, and a key of its own: the
part's name is in it too. Keys of all parts of a page begin alike (`KIN_BYTES`): so a pool can evict together
what is of no use apart. Such a part may be needed at the end of a prefix only (`PagePart.window_pages`), so
a prefix can be restored where its window is whole (`restorable_lengths`).
"""

from __future__ import annotations

import hashlib
import json
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final, Literal

import msgspec

from pdserve.errors import StartupError

GEOMETRY_VERSION = "1"  # raise it when the meaning of a page's bytes changes in our own code
KV: Final = "kv"  # SGLang's name of the part that every page has
DRAFT: Final = "draft"  # SGLang's name of the part that a draft model has
STATES: Final = frozenset({"mamba"})
"""Parts that are one state of a whole prefix. Ranks divide it, also where they share KV pages (MLA)."""
KIN_BYTES: Final = 16  # of the start of keys; the byte after them is the part's group
_AKIN: Final = b"\0"  # at the start of a suffix


class KvGeometry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything but the tokens that decides the bytes of a KV page. All strings, so that it travels and
    prints plainly.
    """

    model: str  # fingerprint of configuration and weights, see `model_fingerprint`
    dtype: str
    kv_dtype: str
    page_size: str  # tokens
    layout: str  # SGLang's hicache_mem_layout
    tp_size: str  # pieces that heads are divided into; "replicated" for MLA: every rank holds the same bytes
    pp_size: str
    options: str = ""  # what else changes keys and values: quantization, overridden configuration, adapters
    version: str = GEOMETRY_VERSION
    parts: str = ""  # beside KV, with their windows in pages, as in "swa:2"

    @classmethod
    def parts_text(cls, window_pages: Mapping[str, int]) -> str:
        """The field `parts` for parts of these names and windows."""
        return ",".join(f"{name}:{pages}" for name, pages in sorted(window_pages.items()))

    @property
    def window_pages(self) -> dict[str, int]:
        """The windows of all parts, KV's (0) among them."""
        named = (part.split(":") for part in self.parts.split(",") if part)
        return {KV: 0, **{name: int(pages) for name, pages in named}}

    def as_dict(self) -> dict[str, str]:
        """The geometry as the pool protocol carries it. Without parts it is what older versions said."""
        said: dict[str, str] = msgspec.structs.asdict(self)
        return said if self.parts else {name: text for name, text in said.items() if name != "parts"}

    def namespace(self, label: str) -> str:
        """Default namespace name: a readable label and the geometry's hash."""
        text = json.dumps(self.as_dict(), sort_keys=True).encode()
        return f"{label}@{hashlib.sha256(text).hexdigest()[:12]}"


def namespace_seed(extra_key: str | None, cache_salt: str | None) -> bytes | None:
    """First digest of the chain for a request with these fields; SGLang's `storage_namespace_seed`."""
    if extra_key is None and cache_salt is None:
        return None
    digest = hashlib.sha256(b"sglang-cache-namespace-v1")
    for part in (extra_key, cache_salt):
        if part is None:
            digest.update(b"\x00")
        else:
            encoded = part.encode()
            digest.update(b"\x01" + len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def page_hashes(
    token_ids: Sequence[int], page_size: int, seed: bytes | None = None, *, pairs: bool = False
) -> list[bytes]:
    """32-byte digest of every full page of `token_ids`, in order; the last partial page has none.

    `pairs`: each page is named by one token more than it has, so the last page needs a token after it.
    """
    more = int(pairs)
    full_tokens = max(0, len(token_ids) - more) // page_size * page_size
    page_bytes = page_size * 4 * (1 + more)
    try:
        data = memoryview(_words("I", token_ids[: full_tokens + more], pairs=pairs))
        pages = [data[start : start + page_bytes] for start in range(0, len(data), page_bytes)]
    except OverflowError:
        pages = [
            memoryview(token_bytes(token_ids[start : start + page_size + more], pairs=pairs))
            for start in range(0, full_tokens, page_size)
        ]
    digests: list[bytes] = []
    prior = seed or b""
    for page in pages:
        digest = hashlib.sha256(prior)
        digest.update(page)
        prior = digest.digest()
        digests.append(prior)
    return digests


def token_bytes(token_ids: Sequence[int], *, pairs: bool = False) -> bytes:
    """What SGLang hashes of these tokens: little-endian u32 each. If one needs more, as those that stand for
    images do, a byte of ones and then u64 each. `pairs`: of each two neighbours, so the inner ones twice.
    """
    try:
        return _words("I", token_ids, pairs=pairs)
    except OverflowError:
        return b"\xff" + _words("Q", token_ids, pairs=pairs)


_LITTLE = struct.pack("=I", 1) == struct.pack("<I", 1)


def _words(code: Literal["I", "Q"], token_ids: Sequence[int], *, pairs: bool) -> bytes:
    words = array(code, token_ids)
    if pairs:
        single, words = words, array(code, bytes(2 * words.itemsize * max(0, len(words) - 1)))
        words[::2], words[1::2] = single[:-1], single[1:]
    if words.itemsize != (4 if code == "I" else 8):
        raise StartupError("this platform's integers are not as wide as page hashes need them")
    if not _LITTLE:
        words.byteswap()
    return words.tobytes()


class PagePart(msgspec.Struct, frozen=True):
    """One part of the pages of a worker."""

    name: str  # SGLang's name of the host pool
    window_pages: int
    """At the end of a prefix that is restored, this many pages have this part. 0: all of them."""
    suffixes: Sequence[bytes]  # of its keys, at all ranks


def part_suffix(rank: bytes, name: str, windows: Mapping[str, int]) -> bytes:
    """What distinguishes a part's bytes under one page hash. `rank`: as of `rank_suffix`. `windows`: of all
    parts, as in `KvGeometry.window_pages`. Where there are several, the suffix says which go together:
    group 0 is needed of all pages of a prefix, each other one at its end.
    """
    suffix = rank if name == KV else rank + b"." + name.encode()
    if len(windows) == 1:
        return suffix
    at_end = sorted(part for part, pages in windows.items() if pages)
    return _AKIN + bytes([1 + at_end.index(name) if name in at_end else 0]) + suffix


def restorable_lengths(parts: Sequence[tuple[int, Sequence[bool]]]) -> list[int]:
    """The lengths in pages of the prefixes that can be restored, ascending.

    `parts`: for each its window and whether it is there, of every page from the start of the chain. A prefix
    that is shorter than a window needs the part of all of its pages.
    """
    lengths = range(1, min(len(present) for _, present in parts) + 1)
    whole = [True] * len(lengths)
    for window, present in parts:
        counts = [0, *accumulate(present)]
        for length in lengths:
            needed = min(window or length, length)
            whole[length - 1] &= counts[length] - counts[length - needed] == needed
    return [length for length in lengths if whole[length - 1]]


def rank_suffix(*, replicated: bool, tp_rank: int, tp_size: int, pp_rank: int, pp_size: int) -> bytes:
    """What distinguishes this rank's bytes under one page hash; empty when nothing does."""
    parts = []
    if not replicated and tp_size > 1:
        parts.append(f"tp{tp_rank}/{tp_size}")
    if pp_size > 1:
        parts.append(f"pp{pp_rank}/{pp_size}")
    return ",".join(parts).encode()


def piece_suffixes(
    *, replicated: bool, tp_rank: int, tp_size: int, pp_rank: int, pp_size: int, pieces: int
) -> list[bytes]:
    """What distinguishes the pieces of this rank's pages: as many as a worker of `pieces` ranks has pages.

    A rank holds `pieces // tp_size` of them. Where there are more ranks than pieces, as many neighbours hold
    the same heads. Raises ValueError: neither divides the other.
    """
    if replicated:
        pieces = tp_size
    if max(pieces, tp_size) % min(pieces, tp_size):
        raise ValueError(f"pages in {pieces} pieces cannot be divided between {tp_size} ranks")
    first, count = tp_rank * pieces // tp_size, max(1, pieces // tp_size)
    return [
        rank_suffix(replicated=replicated, tp_rank=i, tp_size=pieces, pp_rank=pp_rank, pp_size=pp_size)
        for i in range(first, first + count)
    ]


def all_rank_suffixes(*, replicated: bool, tp_size: int, pp_size: int) -> list[bytes]:
    """The suffixes under which the pages of one prompt are stored by all ranks of a worker."""
    return [
        rank_suffix(replicated=replicated, tp_rank=tp, tp_size=tp_size, pp_rank=pp, pp_size=pp_size)
        for tp in range(1 if replicated else tp_size)
        for pp in range(pp_size)
    ]


def pool_key(page_hash: bytes, suffix: bytes) -> bytes:
    """The pool's 32-byte key of a page: its hash, and the rank's suffix hashed in where there is one. Where
    pages have several parts, their keys begin with KIN_BYTES of the hash and the part's group.
    """
    if suffix.startswith(_AKIN):
        own = hashlib.sha256(page_hash + suffix).digest()
        return page_hash[:KIN_BYTES] + suffix[1:2] + own[: len(own) - KIN_BYTES - 1]
    return hashlib.sha256(page_hash + suffix).digest() if suffix else page_hash


# Per tensor this many bytes are read at its start, middle and end: every tensor that a fine-tune touches
# shows, and a 100 GB model takes seconds instead of minutes.
_SAMPLE_BYTES = 1024
_QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")


def model_fingerprint(model_path: Path) -> str:
    """16 hex digits that identify a local Hugging Face model directory by configuration and weights, wherever
    it lies.

    Hashes config.json (without the path it was loaded from) and, of every safetensors file, the header and a
    sample of every tensor; other weight files (*.bin, *.pt, *.gguf) by 16 samples each. Equal weights on two
    machines give equal fingerprints.

    Raises StartupError when the directory has no config.json or no weights.
    """
    return _fingerprint(model_path, "Hugging Face model", "config.json")


def adapter_fingerprint(adapter_path: Path) -> str:
    """The same of a LoRA adapter's directory. SGLang names one by name and path, not by its weights."""
    return _fingerprint(adapter_path, "LoRA adapter", "adapter_config.json")


def _fingerprint(model_path: Path, kind: str, config_name: str) -> str:
    config_path = model_path / config_name
    if not config_path.is_file():
        raise StartupError(f"{model_path} is no {kind} directory: {config_name} is missing")
    config = json.loads(config_path.read_text(encoding="utf-8"))
    for volatile in ("_name_or_path", "transformers_version"):
        config.pop(volatile, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name in _QUANTIZATION_FILES:
        if (model_path / name).is_file():
            digest.update(name.encode() + (model_path / name).read_bytes())
    weights = sorted(
        path for pattern in ("*.safetensors", "*.bin", "*.pt", "*.gguf") for path in model_path.glob(pattern)
    )
    if not weights:
        raise StartupError(f"{model_path} holds no weights (*.safetensors, *.bin, *.pt, *.gguf)")
    for path in weights:
        digest.update(path.name.encode())
        for sample in _safetensors_samples(path) if path.suffix == ".safetensors" else _even_samples(path):
            digest.update(sample)
    return digest.hexdigest()[:16]


def _safetensors_samples(path: Path) -> Iterable[bytes]:
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 2 <= header_bytes <= path.stat().st_size:
            raise StartupError(f"{path} is no safetensors file: its header length is {header_bytes}")
        header = file.read(header_bytes)
        yield header
        base = 8 + header_bytes
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        for name in sorted(tensors):
            start, end = tensors[name]["data_offsets"]
            for at in (start, (start + end - _SAMPLE_BYTES) // 2, end - _SAMPLE_BYTES):
                file.seek(base + max(start, at))
                yield file.read(min(_SAMPLE_BYTES, end - start))


def _even_samples(path: Path, samples: int = 16) -> Iterable[bytes]:
    size = path.stat().st_size
    yield size.to_bytes(8, "little")
    with path.open("rb") as file:
        for i in range(samples):
            file.seek(size * i // samples)
            yield file.read(_SAMPLE_BYTES)

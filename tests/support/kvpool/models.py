"""Small models as files, and pools to push them to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.weights.names import ModelName
from pdserve.kvpool.weights.store import PageReader, WeightStore
from pdserve.kvpool.weights.streaming import Filled, stream, weight_files
from tests.support.kvpool.local_node import LocalNode
from tests.support.kvpool.pools import ProcessPool

MIB = 1 << 20
ROOMY: dict[str, Any] = {"capacity_bytes": 96 << 20, "page_bytes": 4 << 20}
"""A node for models."""


def tensor_bytes(count: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(count)


def write_safetensors(path: Path, tensors: Mapping[str, bytes], **metadata: str) -> None:
    """Tensors of bytes (U8, one dimension), in this order."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


def tensors_of(*large: int, small: int = 3, seed: int = 0) -> dict[str, bytes]:
    """Large tensors of these sizes, after each of them `small` small ones."""
    made: dict[str, bytes] = {}
    for i, size in enumerate(large):
        made[f"layer.{i}.large"] = tensor_bytes(size, seed + i)
        made |= {f"layer.{i}.small.{j}": tensor_bytes(1000, seed + 100 * i + j) for j in range(small)}
    return made


def write_model(directory: Path, tensors: Mapping[str, bytes], **metadata: str) -> Path:
    """A model's directory; its files fit each other, SGLang could not run it."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"architectures": ["X"], "model_type": "x"}))
    (directory / "tokenizer.json").write_text("{}" * 200_000)
    (directory / "empty.txt").touch()
    (directory / "code").mkdir()
    (directory / "code" / "modeling.py").write_text("raise SystemExit")
    write_safetensors(directory / "model.safetensors", tensors, **metadata)
    return directory


def pool_config(*nodes: LocalNode | ProcessPool, **options: Any) -> PoolClientConfig:
    refs = [PoolNodeRef(node=node.config.name, address=node.address) for node in nodes]
    return PoolClientConfig(nodes=refs, **options)


def store_of(*nodes: LocalNode | ProcessPool, **options: Any) -> WeightStore:
    return WeightStore(pool_config(*nodes, **options))


def files_in(directory: Path) -> dict[str, bytes]:
    """By relative path."""
    found = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in found}


def held_bytes(node: LocalNode) -> int:
    """Of all pages and reservations on the node."""
    store = node.node.state.store
    return store.slots.capacity_bytes - store.free_bytes


def tensors_in(filled: Filled) -> dict[str, bytes]:
    """The bytes of the span's tensors, as they are now."""
    found = {}
    for place in filled.span.tensors:
        at = filled.offset(place)
        found[place.name] = filled.data[at : at + place.end - place.start].tobytes()
    return found


def read_tensors(store: WeightStore, model: ModelName, reader: PageReader | None = None) -> dict[str, bytes]:
    """The bytes of all tensors, by `reader` or by one of the store's."""
    manifest, reader = store.manifest(model), reader or store.reader(model)
    found = {}
    for filled in stream(reader, manifest, weight_files(reader, manifest)):
        found |= tensors_in(filled)
    return found

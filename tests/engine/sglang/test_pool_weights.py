"""SGLang's own functions on a model path of a pool: configuration, tokenizer, tensors; what is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pdserve.engine.args import served_model_name
from pdserve.engine.config import EngineConfig
from pdserve.engine.model_dir import check_model_dir
from pdserve.engine.sglang import pool_weights
from pdserve.errors import ConfigError, StartupError
from pdserve.kvpool.weights import catalog
from pdserve.kvpool.weights.files import FILES_VARIABLE
from pdserve.kvpool.weights.manifest import TensorPlace
from pdserve.kvpool.weights.model import open_model
from pdserve.kvpool.weights.names import ModelName
from pdserve.kvpool.weights.place import POOL_VARIABLE, tell_children
from pdserve.kvpool.weights.push import push
from tests.support.kvpool.local_node import LocalNode
from tests.support.kvpool.models import ROOMY, files_in, pool_config, store_of
from tests.support.kvpool.nodes import small_config
from tests.support.kvpool.pools import remove_arena, remove_arena_dir
from tests.support.random_model import make_random_model

MODEL = ModelName("demo", "1")
URL = f"pdserve://pool/{MODEL}"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_random_model("tiny", directory, seed=0)
    return directory


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, demo: Path) -> Iterator[LocalNode]:
    node = LocalNode(small_config(**ROOMY), tmp_path_factory.mktemp("n"))
    with store_of(node) as store:
        push(store, demo, MODEL)
    yield node
    node.close()
    remove_arena(node.config)
    remove_arena_dir()


@pytest.fixture
def told(node: LocalNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This process has been told of the pool, and has a directory for small files."""
    for name, value in _environment(node).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(FILES_VARIABLE, str(tmp_path / "small"))
    pool_weights.install()


def _environment(node: LocalNode) -> dict[str, str]:
    environ: dict[str, str] = {}
    tell_children(pool_config(node), environ)
    return environ


def connector(url: str = URL) -> Any:
    from sglang.srt.model_loader import loader

    return loader.create_remote_connector(url, device="cpu")


def test_tensors_equal_those_of_the_files(told: None, demo: Path) -> None:
    from sglang.srt.connector import ConnectorType, get_connector_type

    with connector() as client:
        assert get_connector_type(client) == ConnectorType.FS
        found = dict(client.weight_iterator())
    expected = load_file(demo / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)


def test_configuration_and_tokenizer_are_those_of_the_files(told: None, demo: Path) -> None:
    from sglang.srt.utils.hf_transformers_utils import get_config, get_tokenizer

    ours, theirs = (get_config(path, trust_remote_code=False).to_dict() for path in (URL, str(demo)))
    for config in (ours, theirs):
        config.pop("_name_or_path", None)
    assert ours == theirs
    text = "a text of some words"
    assert get_tokenizer(URL).encode(text) == get_tokenizer(str(demo)).encode(text)


def test_small_files_are_written_once_and_stay_when_a_connector_is_closed(told: None, demo: Path) -> None:
    directory = open_model(URL).directory
    before = {path: (directory / path).stat().st_mtime_ns for path in files_in(directory)}
    connector().close()
    connector().pull_files(allow_pattern=["*config.json"])
    assert {path: (directory / path).stat().st_mtime_ns for path in files_in(directory)} == before
    small = {path: data for path, data in files_in(demo).items() if not path.endswith(".safetensors")}
    assert small.items() <= files_in(directory).items()
    assert not any(path.endswith(".safetensors") for path in before)


def test_a_process_keeps_its_revision_whatever_becomes_of_the_name(
    told: None, node: LocalNode, demo: Path
) -> None:
    other = ModelName("short-lived", "1")
    url = f"pdserve://pool/{other}"
    with store_of(node) as store:
        push(store, demo, other)
        known = open_model(url)
        catalog.remove(store, other)
    assert open_model(url) == known
    with connector(url) as client:  # all content is the other model's too
        assert len(dict(client.weight_iterator())) > 10


def test_other_urls_go_where_they_went(told: None) -> None:
    with pytest.raises(ValueError, match="Invalid connector type"):
        connector("nothing://x/y")


def test_a_worker_says_in_a_line_what_is_wrong_with_its_model(
    told: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_model_dir(URL)
    with pytest.raises(StartupError, match=r"the pool has no model demo@2: push it; there are: demo@1"):
        check_model_dir("pdserve://pool/demo@2")
    with pytest.raises(ConfigError, match=r"pool 'other' is not known: here it is 'pool'"):
        check_model_dir("pdserve://other/demo@1")
    with pytest.raises(ConfigError, match="no NAME or NAME@REV"):
        check_model_dir("pdserve://pool/demo@..")
    monkeypatch.delenv(POOL_VARIABLE)
    with pytest.raises(ConfigError, match=r"pool 'pool' is not known: no worker's settings say where it is"):
        check_model_dir("pdserve://pool/other")


def test_a_node_s_address_is_enough(node: LocalNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(FILES_VARIABLE, str(tmp_path / "small"))
    check_model_dir(f"pdserve://{node.address}/{MODEL}")


def test_clients_call_all_revisions_by_the_name_of_the_model() -> None:
    assert served_model_name(EngineConfig(model_path=URL)) == "demo"
    assert served_model_name(EngineConfig(model_path=URL, served_model_name="x")) == "x"


def test_tensors_lie_in_the_memory_that_was_read_unless_they_are_unaligned() -> None:
    memory = torch.arange(64, dtype=torch.uint8)
    place = TensorPlace("t", "F32", (2, 2), 0, 16)
    aligned = pool_weights.tensor_in(memory, 16, place)
    assert aligned.data_ptr() == memory.data_ptr() + 16
    unaligned = pool_weights.tensor_in(memory, 17, place)
    assert unaligned.view(torch.uint8).flatten().tolist() == list(range(17, 33))
    empty = pool_weights.tensor_in(memory, 64, TensorPlace("e", "BF16", (0, 5), 0, 0))
    assert (empty.shape, empty.dtype) == ((0, 5), torch.bfloat16)
    assert FILES_VARIABLE not in os.environ

"""Weights that are replaced in running workers: a prefill and a decode worker answer as plain SGLang with the
new weights, from no page of the old ones, whose space is free afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdserve.engine.demo.model import make_demo_model
from pdserve.kvpool.client.config import PoolClientConfig, PoolNodeRef
from pdserve.kvpool.weights.names import ModelName
from pdserve.kvpool.weights.push import push
from pdserve.kvpool.weights.store import WeightStore
from tests.support.e2e.cluster import PoolNode, Router, Worker, eventually, free_port, http
from tests.support.e2e.prompts import Answer, differences, token_ids
from tests.support.e2e.routed import all_computed, found, generate, say, wanted_hits
from tests.support.e2e.site import ask_cold, engine_settings

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(1200)]

KEY = "administrators-key-of-these-tests"
LENGTHS = (65, 200, 640, 1001)
LONG_ANSWER = 300


@dataclass
class Trained:
    """A disaggregated pair with the first weights, and a directory with the next ones. The decode worker has
    two ranks.
    """

    pool: PoolNode
    prefill: Worker
    decode: Worker
    router: Router
    admin_port: int
    new_model: Path
    prompts: list[list[int]]
    new: list[Answer]
    """What plain SGLang answers with the next weights."""

    def update(self, path: Path | str) -> Any:
        url = f"http://127.0.0.1:{self.admin_port}/models/demo-tiny/update_weights_from_disk"
        headers = {"authorization": f"Bearer {KEY}"}
        return http.post(
            url, json={"model_path": str(path), "weight_version": "2"}, headers=headers, timeout=120.0
        )

    def ask(self) -> list[Any]:
        answers = [generate(self.router, prompt) for prompt in self.prompts]
        assert [one.status_code for one in answers] == [200] * len(answers)
        return answers

    def pages(self) -> dict[str, int]:
        """By namespace."""
        return {one.name: one.pages for one in self.pool.status().namespaces}

    def namespaces(self) -> set[str]:
        """Those that the workers are in now."""
        return {http.get(f"{one.url}/pd/info").json()["namespace"] for one in (self.prefill, self.decode)}

    def is_served(self) -> bool:
        return http.get(f"{self.router.url}/ready").status_code == 200 and not self.router.lacks


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Trained]:
    run_dir = tmp_path_factory.mktemp("weights")
    new_model = run_dir / "next"
    make_demo_model("tiny", new_model, seed=1)
    pool = PoolNode(run_dir)
    plain = Worker("agg", "plain", run_dir, engine_settings(new_model), settings={"storage": "none"})
    prefill, decode = (
        Worker(role, role, run_dir, engine_settings(model, page_pieces=2, **ranks), {"nodes": [pool.ref]})
        for role, ranks in (("prefill", {}), ("decode", {"extra_args": ["--tp-size", "2"]}))
    )
    admin_port = free_port()
    extra = {"admin": {"port": admin_port, "key": KEY}, "probe": {"interval_s": 0.2}}
    router = Router(run_dir, [prefill], [decode], name="router-weights", extra=extra)
    prompts = [token_ids(700 + length, length) for length in LENGTHS]
    try:
        pool.start()
        plain.start().wait_ready()
        new = ask_cold(plain, prompts)
        plain.end()
        for worker in (prefill, decode):
            worker.start()
        for worker in (prefill, decode):
            worker.wait_ready()
        router.start()
        yield Trained(pool, prefill, decode, router, admin_port, new_model, prompts, new)
    finally:
        router.stop()
        for worker in (plain, prefill, decode):
            worker.end()
        pool.stop()


@pytest.mark.model_support("multi-head attention", "new weights")
def test_new_weights_answer_as_plain_sglang_and_find_nothing_of_the_old_ones(trained: Trained) -> None:
    old = [Answer.of(one.json()) for one in trained.ask()]
    assert differences(old, [Answer.of(one.json()) for one in trained.ask()], say(trained.prompts)) == []
    assert len(differences(trained.new, old, say(trained.prompts))) == len(trained.prompts)
    [old_namespace] = trained.namespaces()
    assert trained.pages()[old_namespace] > sum(map(wanted_hits, trained.prompts)) // 64

    long: list[Any] = []
    asking = threading.Thread(
        target=lambda: long.append(generate(trained.router, trained.prompts[0], LONG_ANSWER))
    )
    asking.start()
    state = f"{trained.decode.url}/pd/ready"
    eventually(lambda: (http.get(state).json()["load"] or {}).get("running_requests") == 1, "it runs", 60.0)
    done = trained.update(trained.new_model)  # waits for it
    assert done.status_code == 200, done.text
    asking.join(60.0)
    tokens = Answer.of(long[0].json()).tokens
    assert len(tokens) == LONG_ANSWER
    assert tokens[: len(old[0].tokens)] == old[0].tokens

    [namespace] = trained.namespaces()
    assert namespace != old_namespace
    assert done.json()["dropped_pages"] > 0
    assert trained.pages()[old_namespace] == 0
    eventually(trained.is_served, "both workers are used again", 30.0)
    assert [one["id"] for one in http.get(f"{trained.router.url}/v1/models").json()["data"]] == ["demo-tiny"]

    first = trained.ask()
    assert differences(trained.new, [Answer.of(one.json()) for one in first], say(trained.prompts)) == []
    prefilled = [one.headers["x-pdserve-prefill-cached"] for one in first]
    assert prefilled == list(map(all_computed, trained.prompts))
    assert [sum(found(one).values()) for one in first] == [wanted_hits(prompt) for prompt in trained.prompts]
    for worker in (trained.prefill, trained.decode):
        worker.flush()
    second = trained.ask()
    assert differences(trained.new, [Answer.of(one.json()) for one in second], say(trained.prompts)) == []
    assert [found(one).get("pool", 0) for one in second] == [
        wanted_hits(prompt) for prompt in trained.prompts
    ]
    assert trained.pages()[namespace] > 0
    assert trained.pages()[old_namespace] == 0


def test_what_is_asked_while_weights_are_replaced_is_answered_by_one_of_them_whole(
    trained: Trained, model: Path
) -> None:
    before = [Answer.of(one.json()) for one in trained.ask()]
    answers: list[tuple[int, Any]] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            for i, prompt in enumerate(trained.prompts):
                answers.append((i, generate(trained.router, prompt)))

    asking = [threading.Thread(target=ask) for _ in range(3)]
    for thread in asking:
        thread.start()
    try:
        eventually(lambda: len(answers) > 8, "answers", 60.0)
        done = trained.update(model)
        assert done.status_code == 200, done.text
        eventually(trained.is_served, "both workers are used again", 30.0)
        count = len(answers)
        eventually(lambda: len(answers) > count + 12, "answers", 60.0)
    finally:
        over.set()
        for thread in asking:
            thread.join(60.0)
    after = [Answer.of(one.json()) for one in trained.ask()]
    assert {one.status_code for _, one in answers} <= {200, 503}
    mixed = [
        i
        for i, one in answers
        if one.status_code == 200 and Answer.of(one.json()).tokens not in (before[i].tokens, after[i].tokens)
    ]
    assert mixed == []
    assert len(differences(before, after, say(trained.prompts))) == len(before)


def test_a_directory_that_holds_no_model_changes_nothing(trained: Trained, tmp_path: Path) -> None:
    before, namespaces = [Answer.of(one.json()) for one in trained.ask()], trained.namespaces()
    refused = trained.update(tmp_path)
    assert refused.status_code == 502
    assert "no local directory of a model" in refused.text
    eventually(trained.is_served, "both workers are used again", 30.0)
    assert trained.namespaces() == namespaces
    assert differences(before, [Answer.of(one.json()) for one in trained.ask()], say(trained.prompts)) == []


def test_weights_come_from_the_pool_by_a_url(trained: Trained, model: Path) -> None:
    """To those of a revision of the pool and back, and the namespace is that of the same files on a disk."""
    config = PoolClientConfig(nodes=[PoolNodeRef(**trained.pool.ref)])
    with WeightStore(config) as store:
        push(store, trained.new_model, ModelName("demo-tiny", "2"))
        push(store, model, ModelName("demo-tiny", "1"))
    done = trained.update(Path(trained.new_model))
    assert done.status_code == 200, done.text
    [of_files] = trained.namespaces()
    for url in ("pdserve://pool/demo-tiny@1", "pdserve://pool/demo-tiny@2"):
        done = trained.update(url)
        assert done.status_code == 200, done.text
        eventually(trained.is_served, "both workers are used again", 30.0)
    assert trained.namespaces() == {of_files}
    answers = [Answer.of(one.json()) for one in trained.ask()]
    assert differences(trained.new, answers, say(trained.prompts)) == []
    refused = trained.update("pdserve://pool/demo-tiny@3")
    assert (refused.status_code, "no model demo-tiny@3" in refused.text) == (502, True)
    eventually(trained.is_served, "both workers are used again", 30.0)
    assert trained.namespaces() == {of_files}
    assert trained.update("pdserve://pool/demo-tiny@1").status_code == 200
    eventually(trained.is_served, "both workers are used again", 30.0)


def test_weights_of_a_trainer_are_taken_in_steps_and_begin_a_namespace(
    trained: Trained, request: pytest.FixtureRequest
) -> None:
    """By handles of tensors in this process's shared memory, as a trainer on the same host sends them."""
    import torch
    from safetensors.torch import load_file
    from sglang.srt.utils import MultiprocessingSerializer

    before, old = [Answer.of(one.json()) for one in trained.ask()], trained.namespaces()
    strategy = torch.multiprocessing.get_sharing_strategy()
    request.addfinalizer(lambda: torch.multiprocessing.set_sharing_strategy(strategy))
    torch.multiprocessing.set_sharing_strategy("file_system")  # each worker opens it by name
    tensors = [
        (name, tensor.share_memory_())
        for file in sorted(trained.new_model.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    ]

    def handles(ranks: int) -> dict[str, Any]:
        made = [MultiprocessingSerializer.serialize(tensors, output_str=True) for _ in range(ranks)]
        return {"serialized_named_tensors": made, "weight_version": "3", "flush_cache": False}

    def step(name: str, body: Any) -> Any:
        url = f"http://127.0.0.1:{trained.admin_port}/models/demo-tiny/{name}"
        return http.post(url, json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=120.0)

    each = {f"127.0.0.1:{one.port}": handles(n) for one, n in ((trained.prefill, 1), (trained.decode, 2))}
    for name, body in (
        ("weights/hold", {}),
        ("begin_weight_update", {}),
        ("update_weights_from_tensor", {"workers": each}),
        ("end_weight_update", {}),
        ("weights/release", {}),
    ):
        done = step(name, body)
        assert done.status_code == 200, f"{name}: {done.text}"
    eventually(trained.is_served, "both workers are used again", 30.0)
    [namespace] = trained.namespaces()
    assert {namespace} != old
    first = trained.ask()
    assert differences(trained.new, [Answer.of(one.json()) for one in first], say(trained.prompts)) == []
    assert len(differences(before, trained.new, say(trained.prompts))) == len(before)
    assert [sum(found(one).values()) for one in first] == [wanted_hits(prompt) for prompt in trained.prompts]
    assert sum(trained.pages().get(name, 0) for name in old) == 0

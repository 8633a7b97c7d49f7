"""What stands in for CUDA pieces, against simple references. No SGLang is imported."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdserve.engine.sglang.cpu import attention, hooks, replacements
from pdserve.pages import page_hashes


def slots(pages: list[int], page_size: int) -> torch.Tensor:
    return torch.tensor([page * page_size + i for page in pages for i in range(page_size)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_page_first_copy_puts_each_layer_of_a_page_side_by_side_and_back(dtype: torch.dtype) -> None:
    layers, page = 3, 8
    device = [torch.randn(5 * page, 2, 4).to(dtype) for _ in range(2 * layers)]
    host = [torch.zeros(6, layers, page, 2, 4, dtype=dtype) for _ in range(2)]
    replacements.transfer_kv_all_layer_direct_lf_pf(
        device, host, slots([4, 1], page), slots([5, 2], page), page
    )
    back = [torch.zeros_like(tensor) for tensor in device]
    for layer in range(layers):
        assert torch.equal(host[0][5, layer], device[layer][4 * page :])
        assert torch.equal(host[1][2, layer], device[layers + layer][page : 2 * page])
        pair = [back[layer], back[layers + layer]]
        replacements.transfer_kv_per_layer_direct_pf_lf(
            host, pair, slots([2], page), slots([1], page), layer, page
        )
    assert not host[0][[0, 1, 3, 4]].any()
    for before, after in zip(device, back, strict=True):
        assert torch.equal(after[page : 2 * page], before[page : 2 * page])
        assert not after[2 * page :].any()


@pytest.mark.parametrize(
    ("taken", "given"), [([], []), ([0, 1, 2], [1, 2, 3]), ([0, 1, 4, 3, 2], [2, 3, 4, 5, 0])], ids=len
)
def test_pages_are_copied_to_their_places_whether_they_follow_each_other_or_not(
    taken: list[int], given: list[int]
) -> None:
    page = 4
    device = [torch.randn(5 * page, 2, 3) for _ in range(2)]
    host, wanted = ([torch.zeros(6, 1, page, 2, 3) for _ in range(2)] for _ in range(2))
    replacements.transfer_kv_all_layer_direct_lf_pf(
        device, host, slots(taken, page), slots(given, page), page
    )
    for source, target, copied in zip(device, wanted, host, strict=True):
        target[given, 0] = source.view(5, page, 2, 3)[taken]
        assert torch.equal(copied, target)


def test_layer_first_copy_moves_only_the_named_slots() -> None:
    page = 4
    source, target = [torch.randn(3 * page, 2, 3)], [torch.zeros(3 * page, 2, 3)]
    replacements.transfer_kv_direct(source, target, slots([2], page), slots([0], page), page)
    assert torch.equal(target[0][:page], source[0][2 * page :])
    assert not target[0][page:].any()


def test_page_head_copy_puts_each_head_of_a_page_side_by_side_and_back() -> None:
    layers, page, heads, dim = 2, 4, 3, 5
    keys, values = ([torch.randn(3 * page, heads, dim) for _ in range(layers)] for _ in range(2))
    host_k, host_v = (torch.zeros(4, heads, page, layers, dim) for _ in range(2))
    row = heads * dim * 4
    replacements.transfer_kv_all_layer_lf_ph(
        *(torch.tensor([one.data_ptr() for one in keys], dtype=torch.uint64), host_k),
        *(torch.tensor([one.data_ptr() for one in values], dtype=torch.uint64), host_v),
        *(slots([2, 0], page), slots([1, 3], page), row, 0, layers, page, heads),
    )
    for layer in range(layers):
        assert torch.equal(host_k[1, :, :, layer], keys[layer][2 * page :].transpose(0, 1))
        assert torch.equal(host_v[3, :, :, layer], values[layer][:page].transpose(0, 1))
    assert not host_k[[0, 2]].any()
    back_k, back_v = torch.zeros_like(keys[1]), torch.zeros_like(values[1])
    replacements.transfer_kv_per_layer_ph_lf(
        *(host_k, back_k, host_v, back_v, slots([3], page), slots([1], page), 1, row, 0, page, heads)
    )
    assert torch.equal(back_k[page : 2 * page], keys[1][:page])
    assert torch.equal(back_v[page : 2 * page], values[1][:page])


@pytest.mark.parametrize(("prefix", "window"), [(0, None), (3, None), (3, -1), (0, 2), (3, 2)])
def test_mask_is_causal_from_the_lower_right(prefix: int, window: int | None) -> None:
    total = 6
    mask = attention.extend_mask(prefix, total, window)
    if mask is None:
        assert prefix == 0
        return
    for row, query in enumerate(range(prefix, total)):
        first = 0 if window is None or window < 0 else max(0, query - window)
        assert mask[row].tolist() == [first <= key <= query for key in range(total)]


def left_to_sglang(*_args: Any, **_options: Any) -> torch.Tensor:
    raise AssertionError("SGLang's own attention was asked")


extend = attention.extend_new_queries_only(left_to_sglang)
decode = attention.decode_in_groups(left_to_sglang)


def test_extend_with_cached_prefix_equals_extend_of_everything() -> None:
    heads, kv_heads, dim, total, cached = 4, 2, 8, 12, 9
    keys, values = torch.randn(20, kv_heads, dim), torch.randn(20, kv_heads, dim)
    table = torch.randperm(20)[None, :total]
    query = torch.randn(total, heads, dim)

    def extended(prefix: int) -> torch.Tensor:
        lengths = (torch.tensor([total]), torch.tensor([prefix]), torch.tensor([total - prefix]))
        rows = query[prefix:]
        shared = (keys, values, table, torch.tensor([0]), *lengths)
        return extend(None, rows, torch.empty_like(rows), *shared, enable_gqa=True, causal=True)

    assert torch.allclose(extended(cached), extended(0)[cached:], atol=1e-6)


def test_attention_that_is_not_causal_is_left_to_sglang() -> None:
    def original(*_args: object, **kwargs: object) -> torch.Tensor:
        return torch.tensor([float(bool(kwargs["is_cross_attn"]))])

    nothing = torch.empty(0)
    for attend, tensors in ((attention.extend_new_queries_only, 9), (attention.decode_in_groups, 7)):
        assert attend(original)(None, *[nothing] * tensors, is_cross_attn=True).item() == 1.0


@pytest.mark.parametrize("window", [None, -1, 0, 3, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("value_dim", [8, 6])
def test_a_decoded_token_equals_the_last_of_an_extended_prompt(
    window: int | None, kv_heads: int, value_dim: int
) -> None:
    heads, dim, totals = 4, 8, [1, 12, 7]
    keys, values = torch.randn(40, kv_heads, dim), torch.randn(40, kv_heads, value_dim)
    table = torch.stack([torch.randperm(40)[:12] for _ in range(5)])
    query, requests = torch.randn(len(totals), heads, dim), torch.tensor([4, 0, 2])
    lengths = torch.tensor(totals)
    options = {"scaling": 0.3, "enable_gqa": True, "sliding_window_size": window}
    shared = (keys, values, table, requests, lengths)
    decoded, extended = (torch.empty(len(totals), heads, value_dim) for _ in range(2))
    one = torch.ones_like(lengths)
    decode(None, query, decoded, *shared, **options)
    extend(None, query, extended, *shared, lengths - one, one, causal=True, **options)
    assert torch.allclose(decoded, extended, atol=1e-6)


def test_layers_with_a_window_read_the_slots_of_their_own_pool() -> None:
    heads, kv_heads, dim, window, totals = 4, 2, 8, 3, torch.tensor([6, 9])
    keys, values = torch.randn(2, 40, kv_heads, dim)
    query = torch.randn(2, heads, dim)
    own_slots, table = torch.randperm(40), torch.stack([torch.randperm(40)[:9] for _ in totals])
    pool = SimpleNamespace(translate_loc_from_full_to_swa=lambda slots: own_slots[slots])
    backend = SimpleNamespace(use_sliding_window_kv_pool=True, token_to_kv_pool=pool)
    one = torch.ones_like(totals)
    options = {"enable_gqa": True, "sliding_window_size": window, "causal": True}

    def run(backend: Any, table: torch.Tensor) -> list[torch.Tensor]:
        shared = (keys, values, table, torch.arange(2), totals)
        return [
            extend(backend, query, torch.empty_like(query), *shared, totals - one, one, **options),
            decode(backend, query, torch.empty_like(query), *shared, **options),
        ]

    for found, wanted in zip(run(backend, table), run(None, own_slots[table]), strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)


class KeyOf:
    """As SGLang's RadixKey: length may be shorter than its buffer."""

    def __init__(self, tokens: list[int], limit: int, is_bigram: bool = False) -> None:
        self.token_ids = array("q", tokens)
        self.is_bigram = is_bigram
        self._limit = limit

    def __len__(self) -> int:
        return self._limit


@pytest.mark.parametrize("pairs", [False, True])
def test_hashes_are_the_page_chain_with_a_partial_last_page(pairs: bool) -> None:
    tokens = list(range(100, 140 + pairs))
    chain = page_hashes(tokens, 16, pairs=pairs)
    rest = [one for pair in itertools.pairwise(tokens[32:]) for one in pair] if pairs else tokens[32:]
    partial = hashlib.sha256(chain[-1] + array("I", rest).tobytes()).digest()
    expected = [digest.hex() for digest in [*chain, partial]]
    assert replacements.get_native_hash(KeyOf([*tokens, 1, 2], 40, pairs), None, 16) == expected
    assert replacements.get_native_hash(KeyOf(tokens, 32, pairs), None, 16) == expected[:2]


def test_hashes_of_lists_go_on_from_others_or_are_one() -> None:
    tokens = list(range(100, 132))
    chain = page_hashes(tokens, 16)
    assert replacements.get_native_hash(tokens[16:], chain[0], 16) == [chain[1].hex()]
    assert replacements.get_native_hash(tokens[:16], None) == chain[0].hex()


def test_hashes_of_image_tokens_are_sglangs() -> None:
    """What SGLang's native extension (0.5.23) gives for these. Ids of 62 bits stand for images."""
    image = 1_000_000 + (1 << 62) - 1
    tokens = [1, 2, 3, 4, 5, image, image, 6, 7, 2**32 - 1, 2**32, 8, 9, 10]
    chain = [
        "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72",
        "58782f7269cc4d445a13a8a06506dae6136f2487335f6094806b402e3a76d851",
        "81165be5b2565666468c08a5953f82e24fa5e87d246e849b54fc12aa61ee7a1c",
        "c3bfd03cb4b972549546146b63125b5762bb1d6cca0097b6a29d3bb841c50c6a",
    ]
    assert replacements.get_native_hash(KeyOf(tokens, len(tokens)), None, 4) == chain
    assert [digest.hex() for digest in page_hashes(tokens, 4)] == chain[:3]
    of_all = "b9fb57a0232c4cdf58aaa6cc503d106013730900f3ded7c4a32fdf307cb26ede"
    assert replacements.get_native_hash(array("q", tokens), None) == of_all


def test_operators_can_be_looked_up_and_not_called() -> None:
    replacements.declare_operators()
    replacements.declare_operators()
    for name in replacements.OPERATORS:
        with pytest.raises(RuntimeError, match=name):
            getattr(torch.ops.sgl_kernel, name)(torch.zeros(1))


def test_streams_and_events_have_cudas_interface() -> None:
    begin, end = replacements.Event(enable_timing=True), replacements.Event(enable_timing=True)
    stream = replacements.Stream()
    with torch.cpu.stream(stream):
        begin.record()
        end.record(stream)
        stream.wait_event(begin)
        stream.wait_stream(replacements.Stream())
    stream.synchronize()
    assert end.query()
    assert begin.elapsed_time(end) == 0.0


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_stand_in_names_what_has_no_cpu_version_and_comes_too_late_after_sglang() -> None:
    code = """
import importlib.metadata, sys, types
theirs = importlib.metadata.packages_distributions()
from pdserve.engine.sglang.cpu import stand_in
stand_in.install(); stand_in.install()
from sgl_kernel import rmsnorm
try:
    import sgl_kernel.kvcacheio
except ImportError:
    print("no parts")
try:
    rmsnorm(1)
except NotImplementedError as error:
    print(error)
# transformers' question of which distribution a package is
ours = stand_in.packages_distributions()
print(len(theirs) > 50, {name: of for name, of in theirs.items() if sorted(of) != sorted(ours.get(name, []))})
del sys.modules["sgl_kernel"]
sys.modules["sglang.srt"] = types.ModuleType("sglang.srt")
stand_in.install()
"""
    result = run_python(code)
    said = ["no parts", "sgl_kernel.rmsnorm has no CPU version", "True {}"]
    assert result.stdout.splitlines() == said, result.stderr
    assert "must be installed before sglang.srt" in result.stderr


@pytest.mark.extended
@pytest.mark.parametrize("environment", [{}, {"PDSERVE_ENGINE_DEVICE": "cuda"}], ids=["no worker", "a GPU"])
def test_plugin_replaces_nothing_of_a_cpu_outside_a_worker_on_one(environment: dict[str, str]) -> None:
    code = """
import sys
from pdserve.engine.sglang.plugin import register
register()
ours = ("sgl_kernel", "pdserve.engine.sglang.cpu.stand_in", "pdserve.engine.sglang.cpu.hooks")
print([name for name in ours if name in sys.modules])
"""
    assert run_python(code, **environment).stdout.strip() == "[]"


@pytest.mark.parametrize(("moving", "rests"), [(True, 1), (False, 0)])
def test_a_scheduler_that_waits_for_pages_leaves_its_processor_to_those_who_move_them(
    moving: bool, rests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(hooks.time, "sleep", slept.append)
    seen: list[str] = []

    class Scheduler:
        def on_idle(self) -> None:
            seen.append("idle")

        def is_fully_idle(self) -> bool:
            return not moving

    hooks._resting(Scheduler.on_idle)(Scheduler())
    assert seen == ["idle"]
    assert len(slept) == rests
    assert all(0 < rest_s <= 0.001 for rest_s in slept)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here memory can be pinned")
def test_loras_batches_are_made_without_pinning_and_the_rest_is_torchs_own() -> None:
    with pytest.raises(RuntimeError):
        torch.tensor([1], pin_memory=True)
    unpinned: Any = replacements.UnpinnedTorch(torch)
    assert unpinned.zeros((3,), dtype=torch.int32, pin_memory=True).tolist() == [0, 0, 0]
    assert unpinned.tensor([1, 2], dtype=torch.int32, pin_memory=True, device="cpu").tolist() == [1, 2]
    assert (unpinned.cumsum, unpinned.int32) == (torch.cumsum, torch.int32)
    tensor = torch.ones(2)
    assert replacements.pin_memory(tensor) is tensor

"""Traces of what was served: anonymous, replayable, and never in a request's way."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lib.load import trace_lines
from pdserve.errors import ConfigError
from pdserve.router.config.limits import Trace
from pdserve.router.request import traces
from pdserve.router.request.traces import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    Line,
    Secret,
    Served,
    TraceFile,
    Tracer,
    block_ids,
)
from tests.support.router.harness import CHAT, disagg

KEY = b"k" * 32


def served(prompt: bytes = b'[{"role":"user","content":"Paris"}]', **fields: Any) -> Served:
    made = Served(1000.0, "model", msgspec.Raw(prompt), len(prompt), input_tokens=700, output_tokens=40)
    return msgspec.structs.replace(made, **fields)


def lines_of(path: Path) -> list[Line]:
    return [msgspec.json.decode(line, type=Line) for line in path.read_bytes().splitlines()]


@given(st.integers(1, 20 * BLOCK_TOKENS), st.binary(max_size=30 * BLOCK_BYTES))
def test_a_prompt_has_one_number_for_each_block_of_tokens(tokens: int, prompt: bytes) -> None:
    ids = block_ids(KEY, "model", prompt, tokens)
    assert len(ids) == -(-tokens // BLOCK_TOKENS)
    assert len(set(ids)) == len(ids)
    assert all(0 <= number < 1 << 53 for number in ids)


@given(st.integers(1, 9 * BLOCK_TOKENS), st.integers(1, 9 * BLOCK_TOKENS))
def test_a_number_always_stands_for_as_many_tokens(tokens: int, others: int) -> None:
    lengths: dict[int, int] = {}
    for count in (tokens, others):
        for block, number in enumerate(block_ids(KEY, "model", b"a" * 12 * BLOCK_BYTES, count)):
            length = min(BLOCK_TOKENS, count - block * BLOCK_TOKENS)
            assert lengths.setdefault(number, length) == length


@given(
    st.integers(0, 8 * BLOCK_BYTES), st.binary(min_size=1, max_size=99), st.binary(min_size=1, max_size=99)
)
def test_prompts_share_numbers_exactly_as_far_as_their_blocks_are_alike(
    common: int, one_end: bytes, other_end: bytes
) -> None:
    text = (b"%d," * 9000 % tuple(range(9000)))[:common]
    one, other = text + one_end, text + other_end
    alike = next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(map(len, (one, other)))
    )
    expected = alike // BLOCK_BYTES if one != other else 12
    found = [
        a == b
        for a, b in zip(*(block_ids(KEY, "m", x, 12 * BLOCK_TOKENS) for x in (one, other)), strict=True)
    ]
    assert found == [True] * expected + [False] * (12 - expected)


@pytest.mark.parametrize("other", [(b"x" * 32, "model"), (KEY, "another model")])
def test_another_secret_or_model_has_other_numbers(other: tuple[bytes, str]) -> None:
    prompt = b"a" * 5000
    assert not set(block_ids(KEY, "model", prompt, 2000)) & set(block_ids(*other, prompt, 2000))


def test_the_next_turn_tells_which_blocks_the_last_answer_made() -> None:
    tracer = Tracer(Secret(KEY, 1000.0))
    text = b'"%b"' % (b"t" * 20 * BLOCK_BYTES)
    tracer.line(served(text, session="s", input_tokens=3 * BLOCK_TOKENS, output_tokens=2 * BLOCK_TOKENS))
    second = tracer.line(served(text, session="s", input_tokens=6 * BLOCK_TOKENS, output_tokens=1))
    assert second.answered_hash_ids == second.hash_ids[3:5]
    assert tracer.line(served(text, input_tokens=6 * BLOCK_TOKENS)).answered_hash_ids == []


def test_nothing_of_the_prompt_or_of_names_is_in_the_file(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace")
    file.record(served(session="alice@example.org", parent="root-session"))
    file.close()
    text = (tmp_path / "trace").read_text()
    assert not any(word in text for word in ("Paris", "alice", "root", "model"))
    [line] = lines_of(tmp_path / "trace")
    assert (line.input_length, line.output_length) == (700, 40)
    assert line.session_id
    assert line.parent_id
    assert trace_lines(tmp_path / "trace")[0].hash_ids == line.hash_ids


def test_file_and_secret_are_the_owners_alone_and_outlive_the_router(tmp_path: Path) -> None:
    for _ in range(2):
        file = TraceFile(tmp_path / "trace")
        file.record(served(session="s"))
        file.close()
    first, second = lines_of(tmp_path / "trace")
    assert (first.hash_ids, first.session_id) == (second.hash_ids, second.session_id)
    assert {stat.S_IMODE(found.stat().st_mode) for found in tmp_path.iterdir()} == {0o600}
    assert sorted(found.name for found in tmp_path.iterdir()) == ["trace", "trace.secret"]


def test_several_processes_at_once_agree_on_one_secret(tmp_path: Path) -> None:
    found = []
    ready = threading.Barrier(8)

    def open_one(number: int) -> None:
        ready.wait()
        if (pid := os.fork()) == 0:
            TraceFile(tmp_path / "trace").close()
            os._exit(0)
        found.append(os.waitpid(pid, 0)[1])

    threads = [threading.Thread(target=open_one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [0] * 8
    assert sorted(one.name for one in tmp_path.iterdir()) == ["trace", "trace.secret"]


def test_the_bound_ends_the_trace_and_what_comes_later_is_counted(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace", 600)
    for _ in range(20):
        file.record(served())
    file.close()
    assert (tmp_path / "trace").stat().st_size <= 600
    assert not file.record(served())


def test_what_waits_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()

    def line(*_: object) -> Line:
        held.wait(10)
        return Line(0, 1, 1, [1], "", "", [])

    monkeypatch.setattr(Tracer, "line", line)
    file = TraceFile(tmp_path / "trace")
    written = sum(file.record(served()) for _ in range(traces.QUEUED + 10))
    assert 0 <= written - traces.QUEUED <= 1
    held.set()
    file.close()
    assert len(lines_of(tmp_path / "trace")) == written


def test_the_bytes_of_bodies_that_wait_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, half = threading.Event(), traces.QUEUED_BYTES // 2
    monkeypatch.setattr(traces.time, "sleep", lambda _: held.wait(10))  # a batch ends when it may
    file = TraceFile(tmp_path / "trace")
    assert [file.record(served(body_bytes=half)) for _ in range(4)] == [True, True, False, False]
    held.set()
    file.close()
    assert len(lines_of(tmp_path / "trace")) == 2


def test_a_full_disk_ends_the_trace_and_nothing_else() -> None:
    with pytest.raises(ConfigError, match="secret"):
        TraceFile(Path("/dev/full/trace"))


@pytest.mark.parametrize("content", [b"", b"{}", b'{"key":1,"began_s":"x"}'])
def test_a_secret_that_is_none_is_said(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "trace.secret").write_bytes(content)
    with pytest.raises(ConfigError, match=r"trace\.secret"):
        TraceFile(tmp_path / "trace")


def test_each_line_is_one_that_mooncakes_readers_take(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace")
    file.record(served())
    file.record(served(input_tokens=0))
    file.close()
    [text] = (tmp_path / "trace").read_text().splitlines()
    line = json.loads(text)
    assert len(line["hash_ids"]) == 2
    assert 0 < line["input_length"] - (len(line["hash_ids"]) - 1) * BLOCK_TOKENS <= BLOCK_TOKENS


@pytest.mark.parametrize("stream", [False, True])
async def test_each_answer_of_a_router_is_a_line_of_its_trace(tmp_path: Path, stream: bool) -> None:
    trace = Trace(file=str(tmp_path / "trace"))
    async with disagg(trace=trace) as (harness, _, _):
        for turn in (1, 3):
            messages = [{"role": "user", "content": f"turn {number}"} for number in range(turn)]
            body = {"model": "m", "messages": messages, "stream": stream}
            assert (await harness.post(CHAT, body, {"x-session-id": "mine"})).status == 200
        assert (await harness.post(CHAT, {"model": "none", "messages": messages})).status == 404
        await harness.settle()
    first, second = lines_of(tmp_path / "trace")
    assert first.input_length > 0
    assert first.session_id == second.session_id != ""
    assert "turn" not in (tmp_path / "trace").read_text()

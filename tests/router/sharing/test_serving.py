"""The process: `pdserve router`, its start, its refusals, its graceful stop."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.support.command import pdserve_here
from tests.support.router.harness import chat_body
from tests.support.router.mock_worker import ANSWER, EVENTS, Gate, MockWorker, stream, workers
from tests.support.router.process import CHAT, RouterProcess, until
from tests.support.suite.extended import extended


def lingering(seconds: float) -> str:
    """A program, `pdserve`, that keeps idle connections for so long while it stops: a test that is given no
    time by its machine has its requests there before.
    """
    patched = f"from pdserve.router.server import connection; connection.LINGER_S = {seconds}"
    return f"{patched}; from pdserve.cli import main; main()"


@pytest.mark.timeout(60)
async def test_a_router_that_stops_ends_its_streams_and_answers_once_more_on_each_connection() -> None:
    decode = MockWorker("decode")
    async with workers(decode):
        router = await RouterProcess.start("--decode", decode.url, program=lingering(8.0))
        await router.listening()
        gate = Gate()
        decode.script(CHAT, stream(EVENTS, gate, gate_after=1))
        streaming = await router.start_streaming()
        idle, new, busy = [await router.connect() for _ in range(3)]
        body = json.dumps(chat_body()).encode()
        for client in (idle, busy):
            await client.send(CHAT, body)
            assert "connection" not in (await client.response()).headers
        router.process.send_signal(signal.SIGTERM)
        await router.refuses()
        for client in (busy, new):
            await client.send(CHAT, body)
        gate.open.set()
        rest = b""
        while data := await streaming.chunk():
            rest += data
        assert rest == b"".join(EVENTS[1:])
        await streaming.send(CHAT, body)
        for client in (busy, new, streaming):
            last = await client.response()
            assert (last.body, last.headers["connection"]) == (ANSWER, "close")
            assert await client.reader.read() == b""
        assert await idle.reader.read() == b""
        assert (await router.ended())[0] == 0


@pytest.mark.timeout(60)
async def test_a_stream_that_outlasts_the_grace_ends_in_an_error_event() -> None:
    decode = MockWorker("decode")
    async with workers(decode):
        decode.script(CHAT, stream(EVENTS, Gate(), gate_after=1))
        router = await RouterProcess.start("--decode", decode.url, "--stop-grace-s", "0.2")
        await router.listening()
        client = await router.start_streaming()
        router.process.send_signal(signal.SIGTERM)
        last = await client.chunk()
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "router_stopping"
        assert await client.chunk() == b""
        assert (await router.ended())[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--decode", "nonsense"], "http://HOST:PORT"),
        (["--decode", "http://127.0.0.1:1", "--session.sources", "kooky:x"], "kooky:x"),
        (["--config", "missing.toml"], "missing.toml"),
        (["--decode", "http://127.0.0.1:1", "--host", "0.0.0.0"], "insecure = true"),
        (["--decode", "http://127.0.0.1:1", "--host", "::", "--processes", "2"], "insecure = true"),
    ],
)
def test_what_cannot_be_configured_is_said_in_one_line(arguments: list[str], said: str) -> None:
    done = pdserve_here("router", *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr


@pytest.mark.timeout(60)
async def test_a_router_that_is_told_to_serves_others_without_keys_and_warns() -> None:
    decode = MockWorker("decode")
    async with workers(decode):
        router = await RouterProcess.start("--decode", decode.url, "--host", "0.0.0.0", "--insecure")
        await router.said(rb"insecure, no API keys: everyone who reaches 0.0.0.0")
        await router.listening()
        router.process.send_signal(signal.SIGTERM)
        assert (await router.ended())[0] == 0


async def test_a_router_without_workers_says_so_in_one_line() -> None:
    status, said = await (await RouterProcess.start()).ended()
    assert (status, said.count("\n")) == (2, 1)
    assert "no workers" in said


@pytest.mark.extended
@pytest.mark.timeout(60)
async def test_a_child_whose_workers_do_not_fit_ends_the_router() -> None:
    prefill, decode = MockWorker("prefill"), MockWorker("decode", page_size=64)
    async with workers(prefill, decode):
        urls = ("--prefill", prefill.url, "--decode", decode.url)
        status, said = await (await RouterProcess.start("--processes", "2", *urls)).ended()
        assert status == 1
        # named in the order in which their probes were answered
        assert "page_size (64 and 16)" in said or "page_size (16 and 64)" in said
        assert "Traceback" not in said


@pytest.mark.timeout(60)
async def test_a_router_raises_its_limit_of_open_files_to_what_it_may_have() -> None:
    lowered = (
        "import resource; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard)); "
        "from pdserve.cli import main; main()"
    )
    decode = MockWorker("decode")
    async with workers(decode):
        router = await RouterProcess.start("--decode", decode.url, program=lowered)
        await router.listening()
        [child] = router.children
        lines = Path(f"/proc/{child}/limits").read_text().splitlines()  # noqa: ASYNC240
        [limit] = [line.split() for line in lines if line.startswith("Max open files")]
        assert limit[3] == limit[4]
        router.process.terminate()
        await router.ended()


@pytest.mark.parametrize("processes", [1, extended(2)])
@pytest.mark.timeout(60)
async def test_a_router_says_that_it_stops_before_it_refuses_connections(processes: int) -> None:
    decode = MockWorker("decode")
    async with workers(decode):
        options = ("--processes", str(processes), "--stop-notice-s", "3600")
        router = await RouterProcess.start("--decode", decode.url, *options)
        await router.listening()
        assert (await router.ask("/ready")).status == 200
        router.process.send_signal(signal.SIGTERM)

        async def says_so() -> bool:
            answers = [await router.ask("/ready") for _ in range(8)]
            return all(answer.status == 503 for answer in answers)

        await until(says_so)
        assert "the router is stopping" in (await router.ask("/ready")).json()["degraded"]
        assert (await router.ask()).body == ANSWER
        router.process.send_signal(signal.SIGTERM)  # a second one is obeyed at once
        assert (await router.ended())[0] == 0

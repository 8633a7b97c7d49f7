"""Several router processes behind one port: sharing, replacing, stopping, and what they tell each other."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.router.processes.test_serving import RouterProcess, start_streaming
from tests.support.router.harness import Response, chat_body, run
from tests.support.router.mock_worker import ANSWER, EVENTS, Gate, MockWorker, Received, Wire, stream, workers

CHAT = "/v1/chat/completions"


def counted(text: str, name: str) -> float:
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return sum(s.value for s in samples if s.name == name)


async def ask(router: RouterProcess, path: str = CHAT) -> Response:
    """One request on a connection of its own."""
    client = await router.connect()
    try:
        method = "POST" if path == CHAT else "GET"
        await client.send(path, json.dumps(chat_body()).encode() if path == CHAT else b"", method=method)
        return await client.response()
    finally:
        client.leave()


def pids_of(router: RouterProcess) -> set[int]:
    path = Path(f"/proc/{router.process.pid}/task/{router.process.pid}/children")
    return {int(pid) for pid in path.read_text().split() if is_router(int(pid))}


def is_router(pid: int) -> bool:
    try:
        return b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return False


async def children(router: RouterProcess) -> set[int]:
    return pids_of(router)


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def until(condition) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(100):
        while not await condition():  # noqa: ASYNC110 - other processes have no event for it
            await asyncio.sleep(0.05)


def test_processes_share_the_port_and_add_up_their_metrics_and_are_replaced_without_a_failure(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        decode, other = MockWorker("decode"), MockWorker("decode")
        async with workers(decode, other):
            file = tmp_path / "router.toml"
            file.write_text(f'decode = ["{decode.url}"]\nprocesses = 2\n')
            router = await RouterProcess.start("--config", str(file))
            await router.listening()
            answers = await asyncio.gather(*(ask(router) for _ in range(20)))
            assert {answer.body for answer in answers} == {ANSWER}

            async def added_up() -> (
                bool
            ):  # a process counts a request a moment after its answer, and has 2 s to tell
                text = (await ask(router, "/metrics")).body.decode()
                assert counted(text, "pdserve_router_requests_total") <= 20
                assert counted(text, "pdserve_router_worker_healthy") <= 1
                return (
                    counted(text, "pdserve_router_requests_total") == 20
                    and counted(text, "pdserve_router_worker_healthy") == 1
                )

            await until(added_up)
            before = await children(router)
            assert len(before) == 2
            gate = Gate()
            decode.script(CHAT, stream(EVENTS, gate, gate_after=1))
            client = await start_streaming(router)
            file.write_text(f'decode = ["{other.url}"]\nprocesses = 2\n')
            router.process.send_signal(signal.SIGHUP)
            count, stop = 0, asyncio.Event()

            async def load() -> None:
                nonlocal count
                while not stop.is_set():
                    assert (await ask(router)).body == ANSWER
                    count += 1

            loading = asyncio.create_task(load())

            async def replaced() -> bool:
                there = await children(router)
                return len(there - before) == 2 and len(there) <= 3  # one old child still has a stream

            await until(replaced)
            gate.open.set()
            rest = b""
            while data := await client.chunk():
                rest += data
            assert rest == b"".join(EVENTS[1:])

            async def alone() -> bool:
                return not (await children(router) & before)

            await until(alone)
            seen = count

            async def served_by_the_new() -> bool:
                return count > seen or loading.done()

            await until(served_by_the_new)
            stop.set()
            await loading
            assert len(other.got(CHAT)) > 0

            victim = min(await children(router))
            os.kill(victim, signal.SIGKILL)

            async def again() -> bool:
                there = await children(router)
                return victim not in there and len(there) == 2

            await until(again)
            router.process.send_signal(signal.SIGTERM)
            assert (await router.ended())[0] == 0

    run(main(), timeout_s=300)


def test_children_end_with_their_parent() -> None:
    async def main() -> None:
        decode = MockWorker("decode")
        async with workers(decode):
            router = await RouterProcess.start("--decode", decode.url, "--processes", "2")
            await router.listening()
            pids = await children(router)
            router.process.kill()

            async def gone() -> bool:
                return not any(exists(pid) for pid in pids)

            await until(gone)
            await router.ended()

    run(main(), timeout_s=150)


def test_a_tenants_limits_hold_over_all_processes(tmp_path: Path) -> None:
    async def main() -> None:
        decode = MockWorker("decode")
        running = most = done = 0
        enough = asyncio.Event()

        async def count(wire: Wire, request: Received) -> None:
            nonlocal running, most, done
            running += 1
            most = max(most, running)
            if running == 3:
                enough.set()
            await enough.wait()
            await wire.body(200, ANSWER)
            running -= 1
            done += 1

        decode.script(CHAT, *[count] * 24)
        async with workers(decode):
            file = tmp_path / "router.toml"
            file.write_text(f'decode = ["{decode.url}"]\nprocesses = 2\n[tenant_defaults]\nconcurrency = 3\n')
            router = await RouterProcess.start("--config", str(file))
            await router.listening()
            answers = await asyncio.gather(*(ask(router) for _ in range(24)))
            assert {answer.status for answer in answers} == {200}
            assert (most, done) == (3, 24)

            file.write_text(f'decode = ["{decode.url}"]\nprocesses = 2\n[tenant_defaults]\nrequests_s = 20\n')
            before = await children(router)
            router.process.send_signal(signal.SIGHUP)

            async def replaced() -> bool:
                there = await children(router)
                return len(there) == 2 and not there & before

            await until(replaced)
            loop = asyncio.get_running_loop()
            begun_s, let_in = loop.time(), 0
            while loop.time() < begun_s + 3:
                statuses = [
                    answer.status for answer in await asyncio.gather(*(ask(router) for _ in range(4)))
                ]
                assert set(statuses) <= {200, 429}
                let_in += statuses.count(200)
            took_s = loop.time() - begun_s
            # a second's worth at once, what was let in before the other process heard of it, and the rate
            assert 20 <= let_in <= 20 + 16 + 20 * took_s
            router.process.terminate()
            await router.ended()

    run(main(), timeout_s=150)


def test_a_reload_takes_over_the_lists_of_workers(tmp_path: Path) -> None:
    async def main() -> None:
        first, second = MockWorker("decode"), MockWorker("decode")
        async with workers(first, second):
            file = tmp_path / "router.toml"
            file.write_text(f'decode = ["{first.url}"]\nwatch_config_s = 0.05\nprobe.interval_s = 0.1\n')
            router = await RouterProcess.start("--config", str(file))
            await router.listening()
            file.write_text(f'decode = ["{second.url}"\n')  # no TOML: nothing changes
            assert (await ask(router)).body == ANSWER
            router.process.send_signal(signal.SIGHUP)
            assert (await ask(router)).body == ANSWER
            file.write_text(f'decode = ["{second.url}"]\nwatch_config_s = 0.05\nclient_keepalive_s = 5.0\n')

            async def moved() -> bool:
                response = await ask(router)
                assert response.status in (200, 503)  # the second is used once it was probed
                return response.headers.get("x-pdserve-decode") == second.id

            await until(moved)
            router.process.send_signal(signal.SIGTERM)
            status, said = await router.ended()
            assert status == 0
            assert "not changed" in said
            assert f"joined: decode {second.id}; left: decode {first.id}" in said
            assert "taken over at the next start only: client_keepalive_s, probe" in said

    run(main(), timeout_s=150)


def test_a_child_that_cannot_start_ends_the_router() -> None:
    async def main() -> None:
        router = await RouterProcess.start(
            "--decode", "http://127.0.0.1:1", "--processes", "2", "--decode-policy", "x"
        )
        status, said = await router.ended()
        assert status == 1
        assert "unknown policy 'x'" in said

    run(main(), timeout_s=150)

"""Router processes that die, are replaced or cannot be started, at any moment."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pdserve.router.tenants.api_keys import key_line
from tests.router.processes.test_parent import ask, children, counted, until
from tests.router.processes.test_serving import RouterProcess
from tests.support.router.harness import run
from tests.support.router.mock_worker import ANSWER, Gate, MockWorker, hang, workers

NEVER = "probe.interval_s = 1000.0\nprobe.timeout_s = 60.0\n"
"""No probe but that of a process that starts: a test can hold it."""


def written(file: Path, text: str) -> str:
    file.write_text(text)
    return str(file)


@asynccontextmanager
async def routing(file: Path, text: str) -> AsyncIterator[RouterProcess]:
    """A router with this configuration."""
    router = await RouterProcess.start("--config", written(file, text))
    try:
        await router.listening()
        yield router
    finally:
        if router.process.returncode is None:
            router.process.terminate()
            await router.ended()


async def reload_held(router: RouterProcess, decode: MockWorker) -> Gate:
    """The configuration is read again, and the first successor's probe has no answer until the gate opens."""
    gate = Gate()
    decode.script("/pd/ready", hang(gate))
    router.process.send_signal(signal.SIGHUP)
    await gate.reached.wait()
    return gate


async def said(router: RouterProcess, words: bytes) -> None:
    """Until the log has the words."""
    assert router.process.stderr is not None
    async with asyncio.timeout(60):
        while words not in await router.process.stderr.readline():
            assert not router.process.stderr.at_eof()


async def answers(router: RouterProcess) -> None:
    """Every process does: the kernel gives each of two some of so many connections."""
    async with asyncio.timeout(60):
        assert {(await ask(router)).body for _ in range(10)} == {ANSWER}


def test_a_worker_that_came_back_as_another_keeps_no_process_from_being_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        good, odd = MockWorker("decode"), MockWorker("decode")
        async with workers(good, odd):
            text = f'decode = ["{odd.url}", "{good.url}"]\nprocesses = 2\nprobe.interval_s = 0.05\n'
            async with routing(tmp_path / "router.toml", text) as router:
                odd.info["page_size"] = 32

                async def metric(name: str) -> float:
                    text = (await ask(router, "/metrics")).body.decode()
                    return counted(text, f"pdserve_router_worker_{name}")

                async def down() -> bool:
                    return await metric("healthy") == 1

                async def refused() -> bool:
                    return await metric("refused") == 1

                odd.ready = False
                await until(down)
                odd.ready = True
                await until(refused)
                before = await children(router)
                os.kill(min(before), signal.SIGKILL)
                router.process.send_signal(signal.SIGHUP)

                async def replaced() -> bool:
                    there = await children(router)
                    return len(there) == 2 and not there & before

                await until(replaced)
                await answers(router)
                assert not odd.got("/v1/chat/completions")

    run(main(), timeout_s=200)


def test_a_process_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    async def main() -> None:
        decode = MockWorker("decode")
        async with workers(decode):
            text = f'decode = ["{decode.url}"]\nprocesses = 2\n'
            async with routing(tmp_path / "router.toml", text) as router:
                pid = router.process.pid
                before = await children(router)
                limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
                os.kill(min(before), signal.SIGKILL)
                await said(router, b"it is tried again")
                router.process.send_signal(signal.SIGHUP)
                await said(router, b"the configuration is not changed")
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)

                async def again() -> bool:
                    return len(await children(router)) == 2

                await until(again)
                await answers(router)

    run(main(), timeout_s=200)


def test_a_process_that_dies_while_it_is_replaced_leaves_nobody_behind(tmp_path: Path) -> None:
    async def main() -> None:
        decode = MockWorker("decode")
        async with workers(decode):
            text = f'decode = ["{decode.url}"]\nprocesses = 2\n{NEVER}'
            async with routing(tmp_path / "router.toml", text) as router:
                before = await children(router)
                gate = await reload_held(router, decode)
                for victim in before:  # whichever is the first
                    os.kill(victim, signal.SIGKILL)

                async def restarted() -> bool:
                    there = await children(router)
                    return len(there) == 3 and not there & before

                await until(restarted)
                gate.open.set()
                await said(router, b"all router processes have the new configuration")

                async def two() -> bool:
                    return len(await children(router)) == 2

                await until(two)

    run(main(), timeout_s=200)


def test_a_reload_that_fails_half_way_changes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        decode = MockWorker("decode")
        keys = tmp_path / "keys"
        keys.write_text(key_line("alice", "alice-" + "a" * 20))
        async with workers(decode):
            text = f'decode = ["{decode.url}"]\nprocesses = 2\naccess.keys_file = "{keys}"\n{NEVER}'
            async with routing(tmp_path / "router.toml", text) as router:
                before = await children(router)
                gate = await reload_held(router, decode)  # the first successor has read the keys
                keys.write_text("nonsense")
                gate.open.set()
                await said(router, b"the configuration is not changed")

                async def as_before() -> bool:
                    return await children(router) == before

                await until(as_before)

    run(main(), timeout_s=200)


def test_a_router_that_is_stopped_while_it_reloads_ends(tmp_path: Path) -> None:
    async def main() -> None:
        decode = MockWorker("decode")
        async with workers(decode):
            text = f'decode = ["{decode.url}"]\nprocesses = 2\n{NEVER}'
            async with routing(tmp_path / "router.toml", text) as router:
                gate = await reload_held(router, decode)
                router.process.terminate()
                async with asyncio.timeout(30):
                    assert (await router.ended())[0] == 0
                gate.open.set()

    run(main(), timeout_s=100)


def test_counters_do_not_fall_when_processes_die_or_are_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        decode = MockWorker("decode")
        async with workers(decode):
            text = f'decode = ["{decode.url}"]\nprocesses = 2\n'
            async with routing(tmp_path / "router.toml", text) as router:
                assert {(await ask(router)).body for _ in range(20)} == {ANSWER}

                async def requests() -> float:
                    text = (await ask(router, "/metrics")).body.decode()
                    return counted(text, "pdserve_router_requests_total")

                async def all_counted() -> bool:
                    return await requests() == 20

                await until(all_counted)
                before = await children(router)
                router.process.send_signal(signal.SIGHUP)

                async def replaced() -> bool:
                    assert await requests() == 20
                    there = await children(router)
                    return len(there) == 2 and not there & before

                await until(replaced)
                assert {(await ask(router)).body for _ in range(10)} == {ANSWER}

                async def more_counted() -> bool:
                    return await requests() == 30

                await until(more_counted)
                victim = min(await children(router))
                os.kill(victim, signal.SIGKILL)

                async def restarted() -> bool:
                    try:
                        assert await requests() == 30
                    except (OSError, asyncio.IncompleteReadError):  # asked who has just been killed
                        return False
                    there = await children(router)
                    return len(there) == 2 and victim not in there

                await until(restarted)
                assert {await requests() for _ in range(10)} == {30}

    run(main(), timeout_s=200)


def test_a_change_of_the_file_while_the_router_starts_is_seen(tmp_path: Path) -> None:
    async def main() -> None:
        first, second = MockWorker("decode"), MockWorker("decode")
        async with workers(first, second):
            file = tmp_path / "router.toml"
            file.write_text(f'decode = ["{first.url}"]\nwatch_config_s = 0.05\n{NEVER}')
            gate = Gate()
            first.script("/pd/ready", hang(gate))
            router = await RouterProcess.start("--config", str(file))
            await gate.reached.wait()
            file.write_text(f'decode = ["{second.url}"]\nwatch_config_s = 0.05\n{NEVER}')
            gate.open.set()
            await router.listening()
            await said(router, f"joined: decode {second.id}; left: decode {first.id}".encode())
            router.process.terminate()
            await router.ended()

    run(main(), timeout_s=120)

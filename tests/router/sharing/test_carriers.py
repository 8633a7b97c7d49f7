"""Carriers against real sockets and a real Redis: what one publishes the others hear, and nobody waits."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.router.config.limits import RedisSettings
from pdserve.router.sharing.carriers import MAX_UNSENT, RedisCarrier, UnixCarrier, connect
from pdserve.router.sharing.gossip import MAX_MESSAGE_BYTES
from pdserve.security.tokens import SecretFile
from tests.support.router.redis_server import redis_server

Made = tuple[UnixCarrier | RedisCarrier, list[bytes]]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - sockets, and Redis that may still be starting
            await asyncio.sleep(0.01)


@asynccontextmanager
async def made(kind: str, directory: Path, names: str) -> AsyncIterator[list[Made]]:
    """Carriers of some processes, and what each of them has heard."""
    async with AsyncExitStack() as stack:
        found: list[Made] = []
        url = stack.enter_context(redis_server(directory)).url if kind == "redis" else ""
        for name in names:
            heard: list[bytes] = []
            carrier: UnixCarrier | RedisCarrier
            if url:
                carrier = RedisCarrier(RedisSettings(url=url), heard.append)
            else:
                carrier = UnixCarrier(directory, name, heard.append)
            stack.push_async_callback(carrier.close)
            found.append((carrier, heard))
        while url and not all(b"up" in heard for _, heard in found):
            found[0][0].publish(b"up")
            await asyncio.sleep(0.01)
        for _, heard in found:
            heard.clear()
        yield found


def of(sender: str, heard: list[bytes]) -> list[bytes]:
    return [data for data in heard if data.startswith(sender.encode())]


@pytest.mark.parametrize("kind", ["unix", "redis"])
async def test_all_hear_what_one_publishes_in_its_order_however_large_and_many_also_before_its_end(
    kind: str, tmp_path: Path
) -> None:
    async with made(kind, tmp_path, "abc") as carriers:
        count = 200  # far more than the kernel keeps for a socket
        sent = {name: [name.encode() + b"%d" % n + bytes(8000) for n in range(count)] for name in "abc"}
        sent["a"].append(b"a" + bytes(MAX_MESSAGE_BYTES - 1))
        for name, (carrier, _) in zip("abc", carriers, strict=True):
            for data in sent[name]:
                carrier.publish(data)
        for name, (_, heard) in zip("abc", carriers, strict=True):
            for sender in "abc":
                if sender != name or kind == "redis":  # there a process hears itself
                    await until(
                        lambda heard=heard, sender=sender: len(of(sender, heard)) == len(sent[sender])
                    )  # type: ignore[misc]
                    assert of(sender, heard) == sent[sender]
        (here, _), (_, there), (_, other) = carriers
        here.publish(b"a alone", "b")
        for n in range(50):
            here.publish(b"a last %d" % n)
        await here.close()
        for heard in (there, other):
            await until(lambda heard=heard: len(of("a last", heard)) == 50)  # type: ignore[misc]
        for_all = kind == "redis"  # what is for one sibling is not sent there
        assert (b"a alone" in there, b"a alone" in other) == (not for_all, False)


async def test_siblings_that_hang_or_have_died_cost_a_bounded_number_of_messages(tmp_path: Path) -> None:
    async with made("unix", tmp_path, "ab") as ((here, _), (_, there)):
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as dead:
            dead.bind(str(tmp_path / "dead.sock"))
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as hangs:
            hangs.bind(str(tmp_path / "hangs.sock"))
            (tmp_path / "no.sock").write_bytes(b"")
            for n in range(2 * MAX_UNSENT):
                here.publish(b"a%d" % n)
                if n % 100 == 0:
                    await asyncio.sleep(0)
            await until(lambda: there[-1:] == [b"a%d" % (2 * MAX_UNSENT - 1)])
            hangs.setblocking(False)
            kept: list[bytes] = []

            def takes() -> bool:
                try:
                    while True:
                        kept.append(hangs.recv(100))
                except BlockingIOError:
                    return len(kept) > MAX_UNSENT // 2

            await until(takes)
            assert len(kept) <= MAX_UNSENT + 600  # and what the kernel keeps
        for file in tmp_path.iterdir():  # noqa: ASYNC240
            file.unlink()
        tmp_path.rmdir()  # noqa: ASYNC240
        here.publish(b"a")  # fails nobody


async def test_a_redis_that_hangs_or_dies_costs_messages_only_and_is_found_again(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        server = stack.enter_context(redis_server(tmp_path))
        heard: list[bytes] = []
        carrier = RedisCarrier(RedisSettings(url=server.url), heard.append)
        stack.push_async_callback(carrier.close)

        async def says(data: bytes) -> None:
            while data not in heard:
                carrier.publish(data)
                await asyncio.sleep(0.05)

        async with asyncio.timeout(60):
            await says(b"before")
            os.kill(server.process.pid, signal.SIGSTOP)
            for n in range(10_000):
                carrier.publish(b"lost%d" % n)
            await asyncio.sleep(0)
            os.kill(server.process.pid, signal.SIGCONT)
            await says(b"after a while")
            server.process.kill()
            server.process.wait()
            carrier.publish(b"lost")
            stack.enter_context(redis_server(tmp_path))
            await says(b"after its end")


@pytest.mark.parametrize("said", [b"*3\r\n:1\r\n:2\r\n:3\r\n", b"HTTP/1.1 400 Bad\r\n\r\n", b"\x00" * 999])
async def test_a_server_that_is_no_redis_is_asked_again_and_makes_nothing_heard(
    tmp_path: Path, said: bytes
) -> None:
    asked = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        while await reader.read(1000):
            writer.write(said)
        writer.close()

    path = str(tmp_path / "no-redis")
    server = await asyncio.start_unix_server(answer, path)
    heard: list[bytes] = []
    carrier = RedisCarrier(RedisSettings(url=f"unix://{path}"), heard.append)
    carrier.publish(b"a")
    await until(lambda: asked > 2)
    await carrier.close()
    server.close()
    assert heard in ([], [b""])


WITH_PASSWORD = [
    "redis://user:a-secret-of-redis@127.0.0.1:1/0",
    "redis://:a-secret-of-redis@127.0.0.1:1/0",
    "unix://user:a-secret-of-redis@/run/redis.sock",
    "redis://127.0.0.1:1/0?db=0&p%61ssword=a-secret-of-redis",
    "rediss://127.0.0.1:1?ssl_password=a-secret-of-redis",
    "redis://127.0.0.1:1?Password=a-secret-of-redis",
]
NOT_TAKEN = [
    "http://x",
    "redis://user:a-secret#of-redis@127.0.0.1:1",  # what stands before # is taken for a port
    "redis://[user:a-secret-of-redis@127.0.0.1:1",
    "redis+sentinel://:a-secret-of-redis@127.0.0.1:1/service/0",
    "redis://127.0.0.1:1?db=a-secret-of-redis",
    "redis://127.0.0.1:1?credentials=a-secret-of-redis",
]


@pytest.mark.parametrize("url", [*WITH_PASSWORD, *NOT_TAKEN])
def test_a_url_that_redis_does_not_take_or_that_has_a_password_is_refused_without_telling_it(
    url: str,
) -> None:
    """URLs are shown in logs and errors. And an option that no connection takes would fail each try."""
    said = "password_file" if url in WITH_PASSWORD else r"^redis\.url .* redis://HOST:PORT/DB"
    with pytest.raises(ConfigError, match=said) as refused:
        connect(RedisSettings(url=url), 1.0)
    assert "secret" not in str(refused.value).replace("password_file", "")


def test_a_users_name_in_the_url_goes_with_the_password_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of-the-file")
    settings = RedisSettings(
        url="redis://user@127.0.0.1:1/0?protocol=3", password=SecretFile(tmp_path / "secret")
    )
    redis, _ = connect(settings, 1.0)
    given = redis.connection_pool.connection_kwargs
    assert (given["username"], given["password"]) == ("user", "of-the-file")

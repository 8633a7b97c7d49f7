"""The blocking control channel against a scripted peer."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pdserve.errors import (
    ConfigError,
    FrameError,
    PoolError,
    PoolRefused,
    PoolRestarting,
    PoolTimeout,
    PoolUnavailable,
)
from pdserve.kvpool.protocol import messages as m
from pdserve.kvpool.protocol.address import TcpAddress, UnixAddress, parse_address
from pdserve.kvpool.protocol.frames import FrameBuffer, decode_request, encode_frame
from pdserve.kvpool.transports.control import ControlChannel, make_hello
from pdserve.kvpool.transports.dial import Resolver
from tests.support.kvpool.connectors import connect
from tests.support.waiting import soon

WELCOME = m.Welcome(m.PROTOCOL_VERSION, "node", 1, "host", "shm", 30.0)
HELLO = make_hello("test", "host", "auto")


class Peer:
    """Accepts one connection and runs a script on it; `hold` keeps it open until `release`."""

    def __init__(self, address: str, script: Callable[[Peer], None]) -> None:
        parsed = parse_address(address)
        if isinstance(parsed, UnixAddress):
            self.listener = socket.socket(socket.AF_UNIX)
            self.listener.bind(parsed.path)
            self.address = address
        else:
            self.listener = socket.create_server((parsed.host, 0))
            self.address = f"tcp:127.0.0.1:{self.listener.getsockname()[1]}"
        self.listener.listen()
        self._release = threading.Event()
        self._frames = FrameBuffer()
        self._script = script
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.socket, _ = self.listener.accept()
        with self.socket:
            self._script(self)

    def request(self) -> m.Request:
        while True:
            for body in self._frames.feed(b""):
                return decode_request(body)
            for body in self._frames.feed(self.socket.recv(65536)):
                return decode_request(body)

    def send(self, *replies: m.Reply) -> None:
        self.socket.sendall(b"".join(encode_frame(reply) for reply in replies))

    def hold(self) -> None:
        self._release.wait(30)

    def joined(self) -> None:
        """The script has ended, the connection is closed."""
        self._thread.join(5)

    def stop(self) -> None:
        self._release.set()
        self.listener.close()
        self._thread.join(5)


@pytest.fixture(params=["unix", "tcp"])
def peer_for(request: pytest.FixtureRequest, tmp_path: Path) -> object:
    made: list[Peer] = []

    def make(script: Callable[[Peer], None]) -> Peer:
        address = f"unix:{tmp_path}/s" if request.param == "unix" else "tcp:127.0.0.1:0"
        made.append(Peer(address, script))
        return made[-1]

    yield make
    for peer in made:
        peer.stop()


def greet(peer: Peer) -> None:
    assert isinstance(peer.request(), m.Hello)
    peer.send(WELCOME)


def test_addresses_are_read_and_malformed_ones_named() -> None:
    assert parse_address("unix:/run/pool.sock") == UnixAddress("/run/pool.sock")
    assert parse_address("tcp:[::1]:7700") == TcpAddress("::1", 7700)
    for address in ("", "unix:", "tcp:host", "tcp::1", "tcp:h:99999", "http://h:1", "/run/x"):
        with pytest.raises(ConfigError, match="is not"):
            parse_address(address)


class NameService:
    """In place of the system's: it knows one name, and answers when told to, or not."""

    def __init__(self, name: str) -> None:
        self.asked = 0
        self.answers = threading.Event()
        self._name = name
        self._real = socket.getaddrinfo

    def look_up(self, host: str, *rest: Any, **options: Any) -> Any:
        if host != self._name:
            return self._real(host, *rest, **options)
        self.asked += 1
        assert self.answers.wait(30)
        # nobody listens at the first
        return [self._real(one, *rest, **options)[0] for one in ("127.0.0.77", "127.0.0.1")]


@pytest.fixture
def name_service(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameService]:
    service = NameService("pool-a")
    monkeypatch.setattr(socket, "getaddrinfo", service.look_up)
    monkeypatch.setattr("pdserve.kvpool.transports.dial._resolver", Resolver())
    yield service
    service.answers.set()


def test_a_name_service_that_does_not_answer_costs_no_more_than_the_time_there_is(
    name_service: NameService,
) -> None:
    for _ in range(3):
        with pytest.raises(PoolTimeout):
            ControlChannel.connect("tcp:pool-a:7700", HELLO, soon(0.2))
    assert name_service.asked == 1, "one look-up at a time"


@pytest.mark.parametrize("peer_for", ["tcp"], indirect=True)
def test_while_the_name_service_is_away_the_last_addresses_are_used(
    name_service: NameService, peer_for: Callable[..., Peer]
) -> None:
    def greet_two(peer: Peer) -> None:
        greet(peer)
        peer.socket.close()
        peer.socket, _ = peer.listener.accept()
        greet(peer)

    address = f"tcp:pool-a:{peer_for(greet_two).listener.getsockname()[1]}"
    name_service.answers.set()
    ControlChannel.connect(address, HELLO, soon(30.0)).close()
    name_service.answers.clear()
    channel = ControlChannel.connect(address, HELLO, soon(30.0))
    assert (channel.peer_host, name_service.asked) == ("127.0.0.1", 2)
    channel.close()


def test_late_reply_is_never_taken_for_the_next(peer_for: Callable[..., Peer]) -> None:
    def script(peer: Peer) -> None:
        greet(peer)
        peer.hold()

    channel = ControlChannel.connect(peer_for(script).address, HELLO, soon())
    with pytest.raises(PoolTimeout, match="did not answer"):
        channel.call(m.Ping(1), soon(0.05))
    with pytest.raises(PoolUnavailable, match="broken"):
        channel.call(m.Ping(2), soon())


@pytest.mark.parametrize(
    ("answers", "error", "words"),
    [
        ([encode_frame(m.Fault(0, "protocol_version", "speaks version 9"))], PoolRefused, "speaks version 9"),
        ([encode_frame(m.Fault(0, "upgrading", "wait"))], PoolRestarting, "wait"),
        ([encode_frame(m.Done(0))], FrameError, "answered Hello with Done"),
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n"], FrameError, ""),
        ([encode_frame(WELCOME), encode_frame(m.Done(99))], FrameError, ""),
        ([encode_frame(WELCOME), b""], PoolUnavailable, "closed the connection|went away"),
    ],
    ids=["refused", "upgrading", "no welcome", "no pool node", "never sent", "gone"],
)
def test_what_ends_the_session_is_raised_by_the_call_that_meets_it(
    peer_for: Callable[..., Peer], answers: list[bytes], error: type[PoolError], words: str
) -> None:
    def script(peer: Peer) -> None:
        for answer in answers:
            peer.request()
            peer.socket.sendall(answer)

    def use(address: str) -> None:
        with contextlib.closing(ControlChannel.connect(address, HELLO, soon())) as channel:
            channel.call(m.Ping(1), soon())

    with pytest.raises(error, match=words) as caught:
        use(peer_for(script).address)
    assert type(caught.value) is error


@pytest.mark.parametrize("code", ["upgrading", "stopping"])
def test_a_node_that_hangs_up_for_a_moment_says_so_on_every_use(
    peer_for: Callable[..., Peer], code: str
) -> None:
    def script(peer: Peer) -> None:
        greet(peer)
        peer.send(m.Fault(0, code, "wait"))

    for use in (
        lambda channel: channel.call(m.Ping(1), soon()),
        lambda channel: channel.take_pushed(),
        lambda channel: [channel.post(m.Release([0], [n])) for n in range(1, 100)],
    ):
        peer = peer_for(script)
        channel = ControlChannel.connect(peer.address, HELLO, soon())
        peer.joined()
        with pytest.raises(PoolRestarting, match="wait"):
            use(channel)
        peer.stop()
        if peer.address.startswith("unix"):
            Path(peer.address.removeprefix("unix:")).unlink()


def test_a_node_that_lets_its_memory_go_before_it_is_mapped_says_so(peer_for: Callable[..., Peer]) -> None:
    arena = m.ArenaInfo("/nowhere/readers", 1, 1)

    def script(peer: Peer) -> None:
        peer.request()
        peer.send(replace(WELCOME, arena=arena), m.Fault(0, "upgrading", "wait"))

    peer = peer_for(script)
    with pytest.raises(PoolRestarting):
        connect(peer.address, soon())


def test_nobody_there_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(PoolUnavailable, match="cannot be reached"):
        ControlChannel.connect(f"unix:{tmp_path}/none", HELLO, soon())
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(PoolUnavailable, match="cannot be reached"):
        ControlChannel.connect(f"tcp:127.0.0.1:{port}", HELLO, soon())


def test_a_full_queue_of_new_connections_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(f"{tmp_path}/s")
        listener.listen(0)
        first.connect(f"{tmp_path}/s")  # fills it
        with pytest.raises(PoolTimeout, match="does not accept"):
            ControlChannel.connect(address, HELLO, soon(0.1))

        def answer() -> None:
            listener.accept()[0].close()
            sock, _ = listener.accept()
            sock.recv(4096)
            sock.sendall(encode_frame(WELCOME))
            sock.close()

        node = threading.Timer(0.05, answer)
        node.start()
        assert ControlChannel.connect(address, HELLO, soon()).welcome == WELCOME
        node.join(5)

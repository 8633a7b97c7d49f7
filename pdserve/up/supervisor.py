"""Carries out a plan: starts processes, watches them, stops them. lifecycle.py decides all of it.

Each process has one task, which probes it until it is ready and waits for its end. The tasks and the signal
handlers put events into one queue; `run` takes them out, asks the `Lifecycle`, and carries out its actions.
Whatever ends `run` (a signal, a death, a bug), no process is left when it returns.

Whether a process is ready is asked by one bounded attempt at a time; a refusal of any kind means "not yet".
Of a cluster that is ready its user is told the URL, a request to try and the live page, and Prometheus where
the metrics are (`file_sd_configs`)."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, assert_never
from urllib.parse import urlsplit

import httpx

from pdserve.errors import PdserveError, StartupError
from pdserve.security.private_directory import write_private
from pdserve.settings.config_file import to_toml
from pdserve.up import events
from pdserve.up.config import WorkerRole
from pdserve.up.console import Console
from pdserve.up.control import Answer, Request, served
from pdserve.up.launchers.launcher import Launcher
from pdserve.up.launchers.running import Running
from pdserve.up.lifecycle import Lifecycle
from pdserve.up.spec import ConnectReady, HttpReady, Plan, ProcessSpec
from pdserve.up.upgrade import problem_of

PROBE_INTERVAL_S: Final = 0.2
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """Runs one plan, once, and what it is scaled to."""

    def __init__(
        self,
        plan: Plan,
        console: Console,
        launcher: Launcher,
        scaled: Callable[[Mapping[WorkerRole, int]], Plan],
    ) -> None:
        """`scaled`: the plan with other numbers of workers; it may wait for the launcher, in a thread."""
        self._plan = plan
        self._scaled = scaled
        self._specs = {spec.name: spec for spec in plan.processes}
        self._console = console
        self._launcher = launcher
        self._lifecycle = Lifecycle(plan, os.cpu_count() or 1)
        self._events: asyncio.Queue[events.Event] = asyncio.Queue()
        """Short: a few events for each process."""
        self._children: dict[str, Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changing = asyncio.Lock()
        """Held while workers are added or removed, or all is restarted: one request after the other."""
        self._changed: asyncio.Future[str]
        """The end of what was asked last, and what went wrong."""

    async def run(self) -> int:
        """Start, supervise until a signal or a failure, stop. Gives the exit status. Owns the signal handlers
        meanwhile. Raises StartupError: a file in the run directory cannot be written.
        """
        for spec in self._plan.processes:
            write_private(spec.config_path, to_toml(spec.config))
        self._write_targets()
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores it
                stop = events.StopAsked(number.name)
                loop.add_signal_handler(number, self._events.put_nowait, stop)
        try:
            async with served(self._plan.run_dir, self._answer):
                return await self._supervise()
        finally:
            for child in list(self._children.values()):  # none, unless this code has failed
                await child.kill()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for number in STOP_SIGNALS:
                loop.remove_signal_handler(number)

    def _write_targets(self) -> None:
        write_private(self._plan.run_dir / TARGETS_FILE, json.dumps(targets(self._plan), indent=1))

    async def _supervise(self) -> int:
        actions = self._lifecycle.begin(time.monotonic())
        while True:
            for action in actions:
                if isinstance(action, events.Exit):
                    return action.status
                await self._carry_out(action)
            for done in [task for task in self._tasks if task.done()]:
                self._tasks.discard(done)
                done.result()  # raises on a bug of ours, which ends the cluster
            event = await self._next_event()
            actions = self._lifecycle.handle(event, time.monotonic())

    async def _next_event(self) -> events.Event:
        wake_at_s = self._lifecycle.wake_at_s
        timeout_s = None if wake_at_s is None else max(0.0, wake_at_s - time.monotonic())
        try:
            async with asyncio.timeout(timeout_s):
                return await self._events.get()
        except TimeoutError:
            return events.Tick()

    async def _carry_out(self, action: events.Action) -> None:
        match action:
            case events.Start(name, again):
                await self._start(name, again=again)
            case events.Terminate(name):
                self._signal(name, signal.SIGTERM)
            case events.Reload(name):
                self._signal(name, signal.SIGHUP)
            case events.Upgrade(name):
                self._spawn(self._upgrade(name))
            case events.Kill(name):
                if name in self._children:  # else its end is in the queue already
                    self._spawn(self._children[name].kill())
            case events.Rewire(name):
                self._rewire(name)
            case events.Scaled(problem) | events.Restarted(problem):
                self._changed.set_result(problem)
            case events.Say(text):
                self._console.say(text)
            case events.Announce():
                self._spawn(self._announce())
            case events.Exit():
                raise AssertionError("the caller's")
            case _:
                assert_never(action)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._events.put_nowait(events.Tick()))

    def _signal(self, name: str, number: signal.Signals) -> None:
        if name in self._children:
            self._children[name].signal(number)

    async def _start(self, name: str, *, again: bool) -> None:
        try:
            child = await self._launcher.start(self._specs[name], self._console, again=again)
        except StartupError as error:
            self._events.put_nowait(events.Ended(name, status=1, problem=str(error)))
            return
        self._children[name] = child
        self._spawn(self._follow(child))

    async def _follow(self, child: Running) -> None:
        """From a process's start to its end."""
        name = child.spec.name
        ended = asyncio.create_task(child.wait())
        try:
            while not ended.done():
                if await is_ready(child.spec.ready):
                    self._events.put_nowait(events.BecameReady(name))
                    break
                await asyncio.wait({ended}, timeout=PROBE_INTERVAL_S)
            status = await child.finish()
        finally:
            ended.cancel()
        del self._children[name]
        self._events.put_nowait(events.Ended(name, status, child.last_lines()))

    async def _upgrade(self, name: str) -> None:
        command = self._specs[name].upgrade
        assert command is not None
        self._events.put_nowait(events.Upgraded(name, await problem_of(command)))

    def _rewire(self, name: str) -> None:
        """Write what has changed; the process may still have the old file open."""
        config = to_toml(self._specs[name].config)
        try:
            write_private(self._specs[name].config_path, config)
            self._write_targets()
        except StartupError as error:
            self._console.say(f"error: {error}")
        if name in self._children:
            self._children[name].configure(config)

    async def _answer(self, request: Request) -> Answer:
        """To who asks by the control socket, once what is wanted is so."""
        if request.command == "status":
            return Answer(processes=self._lifecycle.status())
        async with self._changing:
            if request.command == "restart":
                return Answer(problem=await self._change(events.RestartAsked()))
            wanted = " ".join(f"{role}={count}" for role, count in request.counts.items())
            self._console.say(f"scale {wanted}")
            problem = await self._scale(request.counts)
            failed = f"error: scale {wanted}: {problem}"
            self._console.say(failed if problem else f"scale {wanted}: done")
            return Answer(problem=problem)

    async def _scale(self, counts: Mapping[WorkerRole, int]) -> str:
        """Gives what is wrong; empty: it is so."""
        try:
            plan = await asyncio.to_thread(self._scaled, counts)
            for spec in plan.processes:
                if spec.name not in self._children:
                    write_private(spec.config_path, to_toml(spec.config))
        except PdserveError as error:
            return str(error)
        self._plan = plan
        self._specs.update({spec.name: spec for spec in plan.processes})
        return await self._change(events.ScaleAsked(plan))

    async def _change(self, event: events.ScaleAsked | events.RestartAsked) -> str:
        """Have the lifecycle do this; gives what is wrong once it has ended, empty: it is so."""
        self._changed = asyncio.get_running_loop().create_future()
        self._events.put_nowait(event)
        return await self._changed

    async def _announce(self) -> None:
        model = await served_model(self._plan.router_url)
        for line in announcement(self._plan, model or "MODEL", os.environ):
            self._console.say(line)


ATTEMPT_TIMEOUT_S: Final = 5.0


async def is_ready(probe: HttpReady | ConnectReady) -> bool:
    """One attempt of at most `ATTEMPT_TIMEOUT_S`."""
    try:
        async with asyncio.timeout(ATTEMPT_TIMEOUT_S):
            if isinstance(probe, HttpReady):
                return (await _get(probe.url, probe.certificate)).status_code == httpx.codes.OK
            return await _accepts(probe.address)
    except (OSError, TimeoutError, ValueError, httpx.HTTPError):
        return False


async def served_model(router_url: str) -> str | None:
    """The name of the first model that the router lists, or None."""
    try:
        async with asyncio.timeout(ATTEMPT_TIMEOUT_S):
            answer = await _get(f"{router_url}/v1/models")
        listed: Any = answer.json()
        return str(listed["data"][0]["id"]) if answer.status_code == httpx.codes.OK else None
    except (OSError, TimeoutError, ValueError, LookupError, TypeError, httpx.HTTPError):
        return None


async def _get(url: str, certificate: tuple[str, str] | None = None) -> httpx.Response:
    """A GET to a process of our own on this host, whose certificate names another one."""
    verify: ssl.SSLContext | bool = False
    if certificate is not None:
        verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        verify.check_hostname, verify.verify_mode = False, ssl.CERT_NONE
        verify.load_cert_chain(*certificate)
    async with httpx.AsyncClient(verify=verify, trust_env=False, timeout=ATTEMPT_TIMEOUT_S) as client:
        return await client.get(url)


async def _accepts(address: str) -> bool:
    scheme, _, rest = address.partition(":")
    if scheme == "unix":
        _, writer = await asyncio.open_unix_connection(rest)
    else:
        host, _, port = rest.rpartition(":")
        _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    writer.close()
    return True


TARGETS_FILE: Final = "prometheus-targets.json"
"""In the run directory."""
API_KEYS: Final = "PDSERVE_API_KEYS"
"""In the router's environment: API keys that clients must show."""


def announcement(plan: Plan, model: str, environment: Mapping[str, str]) -> list[str]:
    """Lines for the console. `environment` is the supervisor's, which the router inherits."""
    url = plan.router_url
    router = plan.routers[0] if plan.routers else None
    access = router.config.get("access", {}) if router else {}
    keys = access.get("keys_file") or {**environment, **(router.env if router else {})}.get(API_KEYS)
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": model, "messages": [question], "max_tokens": 32}
    words = [
        "curl",
        *(["-k"] if url.startswith("https:") else []),  # the certificate names another host
        *(["-H", "'Authorization: Bearer YOUR_KEY'"] if keys else []),
        f"{url}/v1/chat/completions",
        *("-H", "'Content-Type: application/json'", "-d", shlex.quote(json.dumps(body))),
    ]
    lines = [f"{plan.settings.name} is ready at {url} (Ctrl-C stops it). Try:", f"  {' '.join(words)}"]
    if router is not None and plan.live_page:
        lines.append(f"live page: {plan.live_page}, its password is [admin] key in {router.config_path}")
    return lines


def targets(plan: Plan) -> list[dict[str, object]]:
    """One entry for each process that has metrics; labels `job` (router, worker, pool, command) and
    `process`.
    """
    found: list[dict[str, object]] = []
    for spec in plan.processes:
        place = _place(spec)
        if place is not None:
            scheme, address = place
            job = spec.role if spec.role in ("pool", "router", "command") else "worker"
            labels = {"job": job, "process": spec.name}
            if scheme != "http":
                labels["__scheme__"] = scheme
            found.append({"targets": [address], "labels": labels})
    return found


def _place(spec: ProcessSpec) -> tuple[str, str] | None:
    """(scheme, host:port)"""
    if isinstance(spec.ready, HttpReady):
        parts = urlsplit(spec.ready.url)
        return parts.scheme, parts.netloc
    metrics = spec.config.get("metrics")
    if not isinstance(metrics, str) or not metrics:
        return None
    host, _, port = metrics.rpartition(":")
    return "http", f"{ {'0.0.0.0': '127.0.0.1', '[::]': '[::1]'}.get(host, host) }:{port}"

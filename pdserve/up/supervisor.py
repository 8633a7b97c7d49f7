"""Carries out a plan: starts processes, watches them, stops them. lifecycle.py decides all of it.

Each process has one task, which probes it until it is ready and waits for its end. The tasks and the signal
handlers put events into one queue; `run` takes them out, asks the `Lifecycle`, and carries out its actions.
Whatever ends `run` (a signal, a death, a bug), no process is left when it returns.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Coroutine
from typing import Final, assert_never

from pdserve.errors import StartupError
from pdserve.settings.toml_text import to_toml
from pdserve.up import lifecycle as lc
from pdserve.up.announcement import announcement
from pdserve.up.console import Console
from pdserve.up.places.base import Place, Running
from pdserve.up.places.process import write_private
from pdserve.up.plan import Plan
from pdserve.up.readiness import is_ready, served_model
from pdserve.up.scraping import TARGETS_FILE, targets

PROBE_INTERVAL_S: Final = 0.2
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """Runs one plan, once."""

    def __init__(self, plan: Plan, console: Console, place: Place) -> None:
        self._plan = plan
        self._specs = {spec.name: spec for spec in plan.processes}
        self._console = console
        self._place = place
        self._lifecycle = lc.Lifecycle(plan)
        self._events: asyncio.Queue[lc.Event] = asyncio.Queue()
        """Short: a few events for each process."""
        self._children: dict[str, Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Start, supervise until a signal or a failure, stop. Gives the exit status. Owns the signal handlers
        meanwhile. Raises StartupError: a file in the run directory cannot be written.
        """
        for spec in self._plan.processes:
            write_private(spec.config_path, to_toml(spec.config))
        run_dir = self._plan.processes[0].config_path.parent
        write_private(run_dir / TARGETS_FILE, json.dumps(targets(self._plan), indent=1))
        loop = asyncio.get_running_loop()
        stop_signals = (*STOP_SIGNALS, *self._place.stop_signals)
        for number in stop_signals:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores it
                loop.add_signal_handler(number, self._events.put_nowait, lc.StopAsked(number.name))
        loop.add_signal_handler(signal.SIGUSR1, self._events.put_nowait, lc.RenewAsked())
        try:
            return await self._supervise()
        finally:
            for child in self._children.values():  # none, unless this code has failed
                await child.kill()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._place.close()
            for number in stop_signals:
                loop.remove_signal_handler(number)

    async def _supervise(self) -> int:
        actions = self._lifecycle.begin(time.monotonic())
        while True:
            for action in actions:
                if isinstance(action, lc.Exit):
                    return action.status
                await self._carry_out(action)
            for done in [task for task in self._tasks if task.done()]:
                self._tasks.discard(done)
                done.result()  # raises on a bug of ours, which ends the cluster
            event = await self._next_event()
            actions = self._lifecycle.handle(event, time.monotonic())

    async def _next_event(self) -> lc.Event:
        wake_at_s = self._lifecycle.wake_at_s
        timeout_s = None if wake_at_s is None else max(0.0, wake_at_s - time.monotonic())
        try:
            async with asyncio.timeout(timeout_s):
                return await self._events.get()
        except TimeoutError:
            return lc.Tick()

    async def _carry_out(self, action: lc.Action) -> None:
        match action:
            case lc.Start(name, again):
                await self._start(name, again=again)
            case lc.Terminate(name):
                self._signal(name, signal.SIGTERM)
            case lc.Reload(name):
                self._signal(name, signal.SIGHUP)
            case lc.Kill(name):
                if name in self._children:  # else its end is in the queue already
                    self._spawn(self._children[name].kill())
            case lc.Say(text):
                self._console.say(text)
            case lc.Announce():
                self._spawn(self._announce())
            case lc.Exit():
                raise AssertionError("the caller's")
            case _:
                assert_never(action)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._events.put_nowait(lc.Tick()))

    def _signal(self, name: str, number: signal.Signals) -> None:
        if name in self._children:
            self._children[name].signal(number)

    async def _start(self, name: str, *, again: bool) -> None:
        try:
            child = await self._place.start(self._specs[name], self._console, again=again)
        except StartupError as error:
            self._events.put_nowait(lc.Ended(name, status=1, problem=str(error)))
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
                    self._events.put_nowait(lc.BecameReady(name))
                    break
                await asyncio.wait({ended}, timeout=PROBE_INTERVAL_S)
            status = await child.finish()
        finally:
            ended.cancel()
        del self._children[name]
        self._events.put_nowait(lc.Ended(name, status, child.last_lines()))

    async def _announce(self) -> None:
        model = await served_model(self._plan.router_url)
        for line in announcement(self._plan, model or "MODEL", os.environ):
            self._console.say(line)

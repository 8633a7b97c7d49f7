"""Runs a plan: starts its stages in order, watches, restarts what may be restarted, stops all of it.

One task keeps one process (`_keep`). It ends by an error that the cluster cannot go on from: the process was
never ready, or is the router, or `stop_on_loss` is set; or because the process has ended and the others can
do without it. Whatever ends `run` (a signal, a death, a
time-out, a bug), every process is stopped in reverse order before it returns. SIGUSR1 restarts all processes
in the order of their start, each once the one before is ready again.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.errors import PdserveError, StartupError
from pdserve.settings.toml_text import to_toml
from pdserve.up.console import Console
from pdserve.up.orphan_reaper import Warden
from pdserve.up.plan import STOP_SLACK_S, Plan, ProcessSpec
from pdserve.up.process import Child, describe_status, write_private
from pdserve.up.readiness import is_ready, served_model
from pdserve.up.restart import restart_delay_s
from pdserve.up.scraping import TARGETS_FILE, targets

API_KEYS: Final = "PDSERVE_API_KEYS"
PROBE_INTERVAL_S: Final = 0.2
PROGRESS_INTERVAL_S: Final = 5.0
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ProcessDeathError(PdserveError):
    """A process ended, or was not ready in time; `lines` are its last ones."""

    def __init__(self, message: str, lines: Sequence[str] = (), status: int = 1) -> None:
        super().__init__(message)
        self.lines = lines
        self.status = status


@dataclass(frozen=True)
class Renewal:
    """The restart of one process that SIGUSR1 asked for."""

    asked: Child
    """Asked to end; its end is no failure, and its successor's is."""
    done: asyncio.Future[None]
    """Set once a successor is ready, or has ended without a failure."""


class Supervisor:
    """Runs one plan, once."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self._plan = plan
        self._settings = plan.settings
        self._console = console
        self._children: dict[str, Child] = {}
        self._starting_since_s: dict[str, float] = {}
        self._starts = asyncio.Semaphore(plan.settings.start_parallelism)
        self._renew = asyncio.Event()
        self._renewal: Renewal | None = None
        """Of the process that SIGUSR1 restarts now."""
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        """Start, supervise until a signal or a failure, stop. Gives the exit status. Owns the signal
        handlers.
        """
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores it
                loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGUSR1, self._renew.set)
        for spec in self._plan.processes:
            write_private(spec.config_path, to_toml(spec.config))
        run_dir = self._plan.processes[0].config_path.parent
        write_private(run_dir / TARGETS_FILE, json.dumps(targets(self._plan), indent=1))
        warden = Warden()
        work = asyncio.create_task(self._supervise(warden))
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():
                return 0
            self._report(work.exception())
            return 1
        finally:
            work.cancel()
            stop.cancel()
            await asyncio.gather(work, stop, return_exceptions=True)
            await self._stop_all()
            warden.close()
            for number in STOP_SIGNALS:
                loop.remove_signal_handler(number)

    # --- starting and keeping

    async def _supervise(self, warden: Warden) -> None:
        """Start the stages one after the other and keep every process; ends only by an exception."""
        async with asyncio.TaskGroup() as group:
            progress = group.create_task(self._show_progress())
            for stage in self._plan.stages:
                ready = [asyncio.get_running_loop().create_future() for _ in stage]
                for spec, future in zip(stage, ready, strict=True):
                    group.create_task(self._keep(spec, warden, future))
                await asyncio.gather(*ready)
            progress.cancel()
            await self._announce()
            group.create_task(self._renewing())

    async def _keep(self, spec: ProcessSpec, warden: Warden, ready: asyncio.Future[None]) -> None:
        """Start a process, say when it is ready, and start it again when it dies and may be. Returns when it
        has ended for good and the others go on.
        """
        restarts_s: list[float] = []
        while True:
            died = await self._run_once(spec, warden, ready)
            if died is None:
                continue
            whole = f"its whole log: {spec.log_path}"
            if not ready.done():
                raise ProcessDeathError(f"{died}; {whole}", died.lines)
            now_s = time.monotonic()
            delay_s = restart_delay_s(spec.restart, died.status, restarts_s, now_s, self._settings)
            if delay_s is None and (spec.role == "router" or self._settings.stop_on_loss):
                raise ProcessDeathError(f"{died} and is not restarted; {whole}", died.lines)
            if delay_s is None:
                if died.status != 0:
                    self._show_death(died)
                self._console.say(f"{died} and stays ended; the others go on; {whole}")
                self._end_renewal(spec)
                return
            self._show_death(died)
            self._console.say(f"restarting {spec.name} in {delay_s:.1f} s")
            await asyncio.sleep(delay_s)
            restarts_s.append(now_s)

    async def _run_once(
        self, spec: ProcessSpec, warden: Warden, ready: asyncio.Future[None]
    ) -> ProcessDeathError | None:
        """From a process's start to its end; None: an end that SIGUSR1 asked for."""
        async with self._starts:
            try:
                child = await Child.start(spec, warden, self._console, again=ready.done())
            except StartupError as error:
                return ProcessDeathError(str(error))
            self._children[spec.name] = child
            problem = await self._until_ready(child)
        if not problem:
            if not ready.done():
                ready.set_result(None)
            if self._renewal is None or self._renewal.asked is not child:
                self._end_renewal(spec)
            await child.wait()
        status = await child.end(0.0, self._hurry)
        del self._children[spec.name]
        if self._renewal is not None and self._renewal.asked is child:
            return None
        problem = problem or f"{spec.name} {describe_status(status)}"
        return ProcessDeathError(problem, child.last_lines(), status)

    async def _until_ready(self, child: Child) -> str:
        """Wait for a process to be ready; what is wrong if it ended before, or is late."""
        spec, started_s = child.spec, time.monotonic()
        deadline_s = started_s + self._settings.start_timeout_s
        self._starting_since_s[spec.name] = started_s
        self._console.say(f"starting {spec.name}")
        ended = asyncio.create_task(child.wait())
        try:
            while not ended.done():
                if await is_ready(spec.ready):
                    self._console.say(f"{spec.name} is ready after {time.monotonic() - started_s:.1f} s")
                    return ""
                if time.monotonic() >= deadline_s:
                    return f"{spec.name} was not ready within {self._settings.start_timeout_s:.0f} s"
                await asyncio.wait({ended}, timeout=PROBE_INTERVAL_S)
            return f"{spec.name} {describe_status(ended.result())} before it was ready"
        finally:
            ended.cancel()
            del self._starting_since_s[spec.name]

    async def _renewing(self) -> None:
        """Restart every process, one after the other, whenever SIGUSR1 asks."""
        while True:
            await self._renew.wait()
            self._renew.clear()
            self._console.say("SIGUSR1: restarting all processes, one after the other")
            for spec in self._plan.processes:
                if (child := self._children.get(spec.name)) is None:
                    continue  # it starts anew anyway, or has ended for good
                if spec.role == "router" and spec.config.get("processes", 1) > 1:
                    child.signal(
                        signal.SIGHUP
                    )  # it replaces its processes itself, and refuses nobody meanwhile
                    continue
                self._renewal = Renewal(child, asyncio.get_running_loop().create_future())
                child.signal(signal.SIGTERM)
                await asyncio.wait({self._renewal.done}, timeout=self._grace_s(spec))
                if self._children.get(spec.name) is child:
                    await child.end(0.0, self._hurry)
                await self._renewal.done
                self._renewal = None
            self._console.say("all processes have been restarted")

    def _end_renewal(self, spec: ProcessSpec) -> None:
        """This process is ready, or has ended for good. If SIGUSR1 had it restarted, the next one's turn has
        come.
        """
        renewal = self._renewal
        if renewal is not None and renewal.asked.spec is spec and not renewal.done.done():
            renewal.done.set_result(None)

    # --- stopping

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            self._hurry.set()
        else:
            self._stop.set()
            self._console.say(f"{number.name}: stopping all processes (once more: at once)")

    async def _stop_all(self) -> None:
        """Stop what runs: router, workers, pool nodes."""
        for stage in reversed(self._plan.stages):
            running = [self._children.pop(spec.name) for spec in stage if spec.name in self._children]
            await asyncio.gather(*(child.end(self._grace_s(child.spec), self._hurry) for child in running))
            for child in running:
                self._console.say(f"{child.spec.name} has stopped")

    def _grace_s(self, spec: ProcessSpec) -> float:
        """`stop_grace_s`, and more where the process's own table gives it more."""
        own_s: float = spec.config.get("stop_grace_s", 0.0)
        slack_s = STOP_SLACK_S.get(spec.role, 0.0) if own_s else 0.0
        return max(self._settings.stop_grace_s, own_s + slack_s)

    # --- telling

    def _report(self, error: BaseException | None) -> None:
        """Say why the cluster stops. Only what is no error of ours is raised on."""
        causes = error.exceptions if isinstance(error, BaseExceptionGroup) else [error]
        for cause in causes:
            if isinstance(cause, ProcessDeathError):
                self._show_death(cause)
            elif isinstance(cause, PdserveError):
                self._console.say(f"error: {cause}")
            elif error is not None:
                raise error
        self._console.say("stopping all processes")

    def _show_death(self, died: ProcessDeathError) -> None:
        self._console.say(f"error: {died}")
        if died.lines:
            self._console.say(f"its last {len(died.lines)} lines:")
        for line in died.lines:
            self._console.say(f"    {line}")

    async def _show_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            now_s = time.monotonic()
            waits = [f"{name} ({now_s - since_s:.0f} s)" for name, since_s in self._starting_since_s.items()]
            if waits:
                self._console.say(f"waiting for {', '.join(waits)}")

    async def _announce(self) -> None:
        url = self._plan.router_url
        model = await served_model(url) or "MODEL"
        body = (
            f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}], "max_tokens": 32}}'
        )
        self._console.say(f"{self._settings.name} is ready at {url} (Ctrl-C stops it). Try:")
        self._console.say(
            f"  curl {self._curl_words()}{url}/v1/chat/completions -H 'Content-Type: application/json' "
            f"-d {shlex.quote(body)}"
        )
        if self._plan.live_page:
            keeps = self._plan.processes[-1].config_path
            self._console.say(f"live page: {self._plan.live_page}, its password is [admin] key in {keeps}")

    def _curl_words(self) -> str:
        """What curl needs on this host where the router speaks TLS or asks for keys."""
        router = self._plan.processes[-1]
        asks = router.config.get("access", {}).get("keys_file") or (os.environ | dict(router.env)).get(
            API_KEYS
        )
        unchecked = "-k " if self._plan.router_url.startswith("https:") else ""  # it is named otherwise
        return unchecked + ("-H 'Authorization: Bearer YOUR_KEY' " if asks else "")

"""The life of a cluster's processes: events in, actions out. Pure: the time is an argument.

A process goes through these phases:

    NEW ──stage begins──► QUEUED ──slot──► STARTING ──ready──► READY
                            ▲                 │                  │
                            │               ended              ended
                            │                 ▼                  ▼
                            ├──pause over── BACKOFF ◄──may be restarted──┤
                            │                                            │
                            └──a rolling restart ended it────────────────┤
                                                         ENDED ◄──may not┘

- A stage begins once every process of the stage before has been ready. At most `start_parallelism` processes
  are STARTING, or as many as their hosts have processors and GPUs for.
- A process that ends before it was ever ready stops the cluster. Later it is restarted as `restart_delay_s`
  says.
- A rolling restart takes the processes host by host, those of a host in the order of their start, each once
  the one before is ready again. Pool nodes are upgraded instead. The first that does not come back ends it.
- Scaling starts new workers and tells others to end. Routers learn first which ones leave, and of new ones
  when they are ready. A new one that fails stays ended, and the others go on.
- Stopping goes through the stages in reverse. A stage is told to end, and killed when its grace is over.

The owner calls `handle` with each event, carries out the actions in order, and calls `handle(Tick())` at
`wake_at_s`.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, assert_never

from pdserve.up.config import WORKER_ROLES, ClusterSettings, Restart
from pdserve.up.events import (
    Action,
    Announce,
    BecameReady,
    Ended,
    Event,
    Exit,
    Kill,
    ProcessStatus,
    Reload,
    RestartAsked,
    Restarted,
    Rewire,
    Say,
    ScaleAsked,
    Scaled,
    Start,
    StopAsked,
    Terminate,
    Tick,
    Upgrade,
    Upgraded,
)
from pdserve.up.spec import Plan, ProcessSpec, grace_s

PROGRESS_INTERVAL_S: Final = 5.0
RESTART_BACKOFF_S = 1.0  # before the first restart; it doubles with each further one
MAX_BACKOFF_S: Final = 30.0
RESTART_WINDOW_S: Final = 300.0  # in which restarts are counted
MAX_DOUBLINGS: Final = 30  # a power of more would some day be no float


class Phase(Enum):
    """See the module's picture."""

    NEW = auto()
    QUEUED = auto()
    STARTING = auto()
    READY = auto()
    BACKOFF = auto()
    ENDED = auto()


RUNNING: Final = frozenset({Phase.STARTING, Phase.READY})


@dataclass(eq=False)
class _Process:
    spec: ProcessSpec
    phase: Phase = Phase.NEW
    was_ready: bool = False
    since_s: float = 0.0
    """Start of the phase."""
    until_s: float | None = None
    """End of the phase at the latest: a start that is late, a pause that is over."""
    restarts_s: list[float] = field(default_factory=list)
    kill_at_s: float | None = None
    """It was asked to end, and has until then."""
    is_restarting: bool = False
    """The rolling restart asked for its end, which is no failure."""
    leaving: bool = False
    """It is not in the plan any more, and was asked to end."""
    is_behind: bool = False
    """It may have started with a configuration that has changed since."""
    problem: str = ""
    """Why it is being killed."""

    @property
    def due_s(self) -> float | None:
        """When it needs something: a kill, or the end of its phase."""
        return self.until_s if self.kill_at_s is None else self.kill_at_s


class Lifecycle:
    """Decides for all processes of one plan, once."""

    def __init__(self, plan: Plan, processors: int = 2) -> None:
        """`processors`: of a host of the cluster."""
        self._processors = processors
        self._settings = plan.settings
        self._stages = [[_Process(spec) for spec in stage] for stage in plan.stages]
        self._processes = {process.spec.name: process for stage in self._stages for process in stage}
        self._stage = -1
        """Index of the stage that is starting; the number of stages once all have been ready."""
        self._queue: deque[_Process] = deque()
        self._progress_at_s = 0.0
        self._to_restart: deque[_Process] = deque()
        self._restarting: _Process | None = None
        """The one that the rolling restart has reached."""
        self._is_rolling = False
        self._restart_asked = False
        self._scale_to: Plan | None = None
        """Asked for; begins when nothing else is under way."""
        self._awaited: set[str] | None = None
        """Workers that scaling starts or ends; None: nothing is scaled now."""
        self._scale_problem = ""
        self._exit_status: int | None = None
        """Set: the cluster is stopping."""
        self._stopping: list[_Process] = []
        """The stage that is stopping, and no process of it that had ended before."""
        self._stop_signals = 0
        self._actions: list[Action] = []

    @property
    def wake_at_s(self) -> float | None:
        """When the next `Tick` is due."""
        times = [one.due_s for one in self._processes.values() if one.due_s is not None]
        if self._is_starting:
            times.append(self._progress_at_s)
        return min(times, default=None)

    def status(self) -> tuple[ProcessStatus, ...]:
        """Of all processes, in the order of their start."""
        return tuple(
            ProcessStatus(
                name=one.spec.name,
                role=one.spec.role,
                host=one.spec.host,
                phase=one.phase.name.lower(),
                restarts=len(one.restarts_s),
            )
            for stage in self._stages
            for one in stage
        )

    def begin(self, now_s: float) -> list[Action]:
        """Start the first stage."""
        self._progress_at_s = now_s + PROGRESS_INTERVAL_S
        self._begin_stage(now_s)
        return self._taken()

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """What must be done now, in this order."""
        match event:
            case BecameReady(name):
                self._on_ready(self._processes[name], now_s)
            case Ended(name):
                self._on_ended(self._processes[name], event, now_s)
            case Tick():
                self._on_tick(now_s)
            case RestartAsked():
                self._restart_asked = True
                self._refuse_at_the_end()
            case Upgraded(name, problem):
                self._on_upgraded(self._processes[name], problem)
            case ScaleAsked(plan):
                self._scale_to = plan
                self._refuse_at_the_end()
            case StopAsked(by):
                self._on_stop_asked(by, now_s)
            case _:
                assert_never(event)
        if self._exit_status is None:
            self._scale(now_s)
            self._fill_slots(now_s)
            self._roll(now_s)
        return self._taken()

    def _taken(self) -> list[Action]:
        taken, self._actions = self._actions, []
        return taken

    def _say(self, text: str) -> None:
        self._actions.append(Say(text))

    # --- starting

    @property
    def _is_starting(self) -> bool:
        return self._exit_status is None and self._stage < len(self._stages)

    def _begin_stage(self, now_s: float) -> None:
        self._stage += 1
        if self._stage == len(self._stages):
            self._actions.append(Announce())
            return
        for process in self._stages[self._stage]:
            self._enqueue(process, now_s)
        self._fill_slots(now_s)

    def _enqueue(self, process: _Process, now_s: float) -> None:
        self._enter(process, Phase.QUEUED, now_s)
        self._queue.append(process)

    def _fill_slots(self, now_s: float) -> None:
        waiting, self._queue = self._queue, deque()
        for process in waiting:
            if not self._has_slot(process.spec):
                self._queue.append(process)
                continue
            self._enter(process, Phase.STARTING, now_s, self._start_timeout_s(process.spec))
            self._say(f"starting {process.spec.name}")
            self._actions.append(Start(process.spec.name, again=process.was_ready))

    def _has_slot(self, spec: ProcessSpec) -> bool:
        starting = [one.spec for one in self._processes.values() if one.phase is Phase.STARTING]
        if limit := self._settings.start_parallelism:
            return len(starting) < limit
        if spec.has_gpus:
            return True
        beside = sum(one.host == spec.host and not one.has_gpus for one in starting)
        return beside < self._processors

    def _start_timeout_s(self, spec: ProcessSpec) -> float:
        return spec.start_timeout_s or self._settings.start_timeout_s

    def _enter(self, process: _Process, phase: Phase, now_s: float, for_s: float | None = None) -> None:
        process.phase, process.since_s, process.problem = phase, now_s, ""
        process.until_s = None if for_s is None else now_s + for_s
        if phase is not Phase.READY:
            process.kill_at_s = None

    def _on_ready(self, process: _Process, now_s: float) -> None:
        if process.phase is not Phase.STARTING or process.problem:
            return
        self._say(f"{process.spec.name} is ready after {now_s - process.since_s:.1f} s")
        self._enter(process, Phase.READY, now_s)
        process.was_ready = True
        if self._exit_status is not None:
            return
        if process is self._restarting and not process.is_restarting:
            self._restarting = None
        if self._awaited is not None and not process.leaving:
            self._awaited.discard(process.spec.name)
        if process.is_behind:
            process.is_behind = False
            self._actions.append(Reload(process.spec.name))
        if self._is_starting and all(one.was_ready for one in self._stages[self._stage]):
            self._begin_stage(now_s)

    # --- ending, and starting again

    def _on_ended(self, process: _Process, end: Ended, now_s: float) -> None:
        words = end.problem or process.problem or f"{end.name} {describe_status(end.status)}"
        if process.phase is Phase.STARTING and not (end.problem or process.problem):
            words += " before it was ready"
        if self._exit_status is not None:
            self._enter(process, Phase.ENDED, now_s)
            self._stop_next(now_s)
        elif process.leaving:
            self._drop(process)
        elif process.is_restarting:
            process.is_restarting = False
            self._enqueue(process, now_s)
        else:
            self._on_death(process, words, end, now_s)

    def _on_death(self, process: _Process, words: str, end: Ended, now_s: float) -> None:
        spec, log = process.spec, f"its whole log: {process.spec.log_path}"
        self._enter(process, Phase.ENDED, now_s)
        is_new = not process.was_ready
        if is_new and (self._awaited is None or end.name not in self._awaited):
            self._fail(f"{words}; {log}", end.lines, now_s)
            return
        delay_s = restart_delay_s(spec.restart, end.status, process.restarts_s, now_s, self._settings)
        if delay_s is not None and not is_new:
            self._show_death(words, end.lines)
            self._say(f"restarting {spec.name} in {delay_s:.1f} s")
            self._enter(process, Phase.BACKOFF, now_s, delay_s)
            process.restarts_s.append(now_s)
        elif not is_new and (self._settings.stop_on_loss or not self._is_served):
            self._fail(f"{words} and is not restarted; {log}", end.lines, now_s)
        else:
            if end.status != 0:
                self._show_death(words, end.lines)
            self._say(f"{words} and stays ended; the others go on; {log}")
            if process is self._restarting:
                self._give_up_restarting(words)
            if self._awaited is not None and end.name in self._awaited:
                self._awaited.discard(end.name)
                self._scale_problem = f"{words}; {log}"

    @property
    def _is_served(self) -> bool:
        """A router is there, or will be; or one of the last stage where there are no routers."""
        return any(one.phase is not Phase.ENDED for one in self._stages[-1])

    def _on_tick(self, now_s: float) -> None:
        for process in self._processes.values():
            if process.due_s is None or now_s < process.due_s:
                continue
            if process.phase is Phase.BACKOFF:
                self._enqueue(process, now_s)
                continue
            if process.kill_at_s is None:
                limit_s = self._start_timeout_s(process.spec)
                process.problem = f"{process.spec.name} was not ready within {limit_s:.0f} s"
            process.kill_at_s = process.until_s = None
            self._actions.append(Kill(process.spec.name))
        if self._is_starting and now_s >= self._progress_at_s:
            self._progress_at_s = now_s + PROGRESS_INTERVAL_S
            starting = [one for one in self._processes.values() if one.phase is Phase.STARTING]
            if starting:
                waits = ", ".join(f"{one.spec.name} ({now_s - one.since_s:.0f} s)" for one in starting)
                self._say(f"waiting for {waits}")

    # --- scaling

    def _scale(self, now_s: float) -> None:
        """Begin what was asked for, if nothing else is under way; end it when all that it awaits is there."""
        if self._awaited is None and self._scale_to is not None:
            if self._is_starting or self._is_rolling:
                return
            plan, self._scale_to = self._scale_to, None
            self._begin_scaling(plan, now_s)
        if self._awaited is not None and not self._awaited:
            self._awaited = None
            self._rewire()
            self._actions.append(Scaled(self._scale_problem))

    def _refuse_at_the_end(self) -> None:
        if self._exit_status is None:
            return
        if self._scale_to is not None or self._awaited is not None:
            self._scale_to = self._awaited = None
            self._actions.append(Scaled("the cluster stops"))
        if self._restart_asked or self._is_rolling:
            self._restart_asked = self._is_rolling = False
            self._actions.append(Restarted("the cluster stops"))

    def _begin_scaling(self, plan: Plan, now_s: float) -> None:
        wanted = {spec.name for spec in plan.processes}
        leaving = [one for one in self._processes.values() if one.spec.name not in wanted]
        for number, stage in enumerate(plan.stages):
            stays = [one for one in self._stages[number] if one in leaving]
            self._stages[number] = [*(self._in_plan(spec) for spec in stage), *stays]
        joining = [
            one
            for one in self._processes.values()
            if one.spec.role in WORKER_ROLES and one.phase in (Phase.NEW, Phase.ENDED) and one not in leaving
        ]
        self._awaited = {one.spec.name for one in (*joining, *leaving)}
        self._scale_problem = ""
        for process in joining:
            self._enqueue(process, now_s)
        if leaving:
            self._rewire()
        for process in leaving:
            process.leaving = True
            if process.phase in RUNNING:
                self._terminate(process, now_s)
            else:
                self._drop(process)

    def _rewire(self) -> None:
        """Tell the routers which workers there are."""
        for router in self._stages[-1]:
            if router.spec.role != "router":
                continue
            self._actions.append(Rewire(router.spec.name))
            router.is_behind = router.phase is Phase.STARTING
            if router.phase is Phase.READY:
                self._actions.append(Reload(router.spec.name))

    def _in_plan(self, spec: ProcessSpec) -> _Process:
        """The process of this name, which may be a new one."""
        process = self._processes.setdefault(spec.name, _Process(spec))
        process.spec = spec
        return process

    def _drop(self, process: _Process) -> None:
        """It has ended, and is no part of the cluster any more."""
        name = process.spec.name
        self._say(f"{name} has stopped")
        del self._processes[name]
        for stage in self._stages:
            stage[:] = [one for one in stage if one is not process]
        if process in self._queue:
            self._queue.remove(process)
        if self._awaited is not None:
            self._awaited.discard(name)

    # --- the rolling restart

    def _roll(self, now_s: float) -> None:
        """Go on with the restart of all processes, as far as it can go now."""
        if self._is_starting or self._restarting is not None or self._awaited is not None:
            return
        if not self._is_rolling and self._restart_asked:
            self._is_rolling, self._restart_asked = True, False
            self._to_restart.extend(_by_host(self._processes.values()))
            self._say("restarting all processes, one after the other")
        while self._to_restart:
            process = self._to_restart.popleft()
            name, goes_on = process.spec.name, process.spec.upgrade is not None
            replaces_itself = _replaces_itself(process.spec)
            if process.phase not in RUNNING:
                continue  # it is started anyway, or has ended for good
            if process.phase is not Phase.READY and (goes_on or replaces_itself):
                continue  # it is the new version already
            if replaces_itself:
                self._actions.append(Reload(name))
                continue
            self._restarting = process
            if goes_on:
                self._say(f"upgrading {name}")
                self._actions.append(Upgrade(name))
                return
            process.is_restarting = True
            self._terminate(process, now_s)
            return
        if self._is_rolling:
            self._is_rolling = False
            self._say("all processes have been restarted")
            self._actions.append(Restarted())
            self._roll(now_s)

    def _on_upgraded(self, process: _Process, problem: str) -> None:
        if process is not self._restarting or self._exit_status is not None:
            return  # it died meanwhile, and was started again; or all are stopping
        if problem:
            self._say(f"error: {process.spec.name}: {problem}")
            self._give_up_restarting(f"{process.spec.name}: {problem}")
        else:
            self._say(f"{process.spec.name} has been upgraded")
            self._restarting = None

    def _give_up_restarting(self, why: str) -> None:
        """No other process shall be lost to what is installed now."""
        left = ", ".join(process.spec.name for process in self._to_restart) or "none"
        self._say(f"error: the restart of all processes ends here; not restarted: {left}")
        self._restarting, self._is_rolling = None, False
        self._to_restart.clear()
        self._actions.append(Restarted(f"{why}; not restarted: {left}"))

    def _terminate(self, process: _Process, now_s: float) -> None:
        process.kill_at_s = now_s + grace_s(process.spec, self._settings)
        self._actions.append(Terminate(process.spec.name))

    # --- stopping

    def _fail(self, message: str, lines: Sequence[str], now_s: float) -> None:
        self._show_death(message, lines)
        self._say("stopping all processes")
        self._stop(1, now_s)

    def _show_death(self, message: str, lines: Sequence[str]) -> None:
        self._say(f"error: {message}")
        if lines:
            self._say(f"its last {len(lines)} lines:")
        for line in lines:
            self._say(f"    {line}")

    def _on_stop_asked(self, by: str, now_s: float) -> None:
        self._stop_signals += 1
        if self._stop_signals > 1:
            self._actions += [Kill(one.spec.name) for one in self._stopping if one.phase in RUNNING]
            return
        self._say(f"{by}: stopping all processes (once more: at once)")
        if self._exit_status is None:
            self._stop(0, now_s)

    def _stop(self, status: int, now_s: float) -> None:
        self._exit_status = status
        self._refuse_at_the_end()
        for process in self._processes.values():
            process.until_s = None
            if process.phase not in RUNNING:
                process.phase = Phase.ENDED
        self._stage = len(self._stages)
        self._stop_next(now_s)

    def _stop_next(self, now_s: float) -> None:
        """When the stage that is stopping has ended, tell the one below it to end."""
        while all(process.phase is Phase.ENDED for process in self._stopping):
            for process in self._stopping:
                self._say(f"{process.spec.name} has stopped")
            self._stage -= 1
            if self._stage < 0:
                assert self._exit_status is not None
                self._actions.append(Exit(self._exit_status))
                self._stopping = []
                return
            self._stopping = [one for one in self._stages[self._stage] if one.phase in RUNNING]
            for process in self._stopping:
                self._terminate(process, now_s)
                if self._stop_signals > 1:
                    self._actions.append(Kill(process.spec.name))


def _replaces_itself(spec: ProcessSpec) -> bool:
    """SIGHUP makes it replace its own processes by the version that is installed now."""
    return spec.role == "router"


def _by_host(processes: Collection[_Process]) -> list[_Process]:
    """Those of a host after each other, the hosts in the order of their first process."""
    hosts = list(dict.fromkeys(one.spec.host for one in processes))
    return sorted(processes, key=lambda one: hosts.index(one.spec.host))


def describe_status(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def restart_delay_s(
    restart: Restart, status: int, restarts_s: Sequence[float], now_s: float, settings: ClusterSettings
) -> float | None:
    """Seconds to wait before starting a process again that ended with `status`, or None: give up.

    `restarts_s` holds the times of its earlier restarts. A process that ends by itself with status 0 did not
    fail, so `on-failure` leaves it ended.
    """
    if restart == "never" or status == 0:
        return None
    recent = sum(1 for at_s in restarts_s if now_s - at_s < RESTART_WINDOW_S)
    if recent >= settings.max_restarts:
        return None
    return min(RESTART_BACKOFF_S * 2.0 ** min(recent, MAX_DOUBLINGS), MAX_BACKOFF_S)

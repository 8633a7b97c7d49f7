"""`pdserve doctor`: one line for each check, and what to change."""

from __future__ import annotations

import itertools
import os
import random
import resource
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Final, NoReturn

import httpx
import msgspec
import typer

from pdserve.doctor import cluster, exposure, judge, live_probe
from pdserve.doctor.cluster import Asker, NoAnswer
from pdserve.doctor.facts import NO_UCX, Finding, Machine
from pdserve.engine.sglang.selfcheck import TESTED_SGLANG
from pdserve.errors import ConfigError, StartupError
from pdserve.extras import is_installed
from pdserve.kvpool.node.config import PoolNodeConfig
from pdserve.kvpool.transports.ucx import UcxLibrary
from pdserve.router.config.router import RouterConfig
from pdserve.security.log_text import printable
from pdserve.security.tls import Certificates
from pdserve.security.tokens import Secret, SecretFile, given_secret, reveal
from pdserve.settings.config_file import build_config, load_config
from pdserve.up.config import read_cluster_file
from pdserve.up.plan import make_plan
from pdserve.up.spec import ConnectReady, Plan

READY_TIMEOUT_S = 5.0
MARKS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where a cluster is. `router_url`: empty where not known; `workers`: those that the operator named;
    `unwritten`: where its configuration should be, and is not.
    """

    router_url: str
    workers: tuple[str, ...] = ()
    pool: tuple[str, ...] = ()
    token: str = ""
    trust: ssl.SSLContext | None = None
    """Of whom an API key may reach; None: the system's authorities."""
    worker_trust: ssl.SSLContext | None = None
    """Of workers, and a certificate for those that ask for one."""
    pool_tls: ssl.SSLContext | None = None
    unwritten: Path | None = None


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Cluster file, as for `pdserve up`.")
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="Directory of that cluster, if it is not cluster.run_dir."),
    ] = None,
    router: Annotated[
        str, typer.Option("--router", metavar="URL", help="URL of a running cluster's router.")
    ] = "",
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--key-file", help="File with an API key, if the router requires one; also from PDSERVE_API_KEY."
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="File with the cluster's token; also from PDSERVE_CLUSTER_TOKEN."),
    ] = None,
    worker: Annotated[
        list[str] | None,
        typer.Option("--worker", metavar="URL", help="A worker to ask, with the token; may be repeated."),
    ] = None,
    pool: Annotated[
        list[str] | None,
        typer.Option("--pool", metavar="ADDRESS", help="A pool node, which names the others."),
    ] = None,
    ca_file: Annotated[
        Path | None,
        typer.Option("--ca-file", help="CA certificates, to check the router's before it gets a key."),
    ] = None,
    probe: Annotated[
        bool, typer.Option(help="Send two small prompts for each model through the cluster.")
    ] = True,
    self_check: Annotated[
        bool, typer.Option(help="Check all of SGLang that pdserve leans on; 15 to 30 seconds.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="JSON for programs.")] = False,
) -> None:
    """Check this machine, and the cluster that --config or --router names; say what to change.

    Exit status: 0 nothing to change, 1 warnings, 2 something does not work.
    """
    key = given_secret(_in(key_file), "PDSERVE_API_KEY", os.environ)
    token = given_secret(_in(token_file), "PDSERVE_CLUSTER_TOKEN", os.environ)
    plan = None if config is None else plan_of(config, run_dir)
    named = tuple(_checked(url.rstrip("/"), "--worker") for url in worker or ())
    url = _checked(router.rstrip("/"), "--router")
    if plan is not None and plan.routers:
        target = _running(plan, url, ca_file)
    else:
        trust = cluster.trust_in(ca_file, None)
        target = Target(router_url=url, trust=trust, worker_trust=trust)
    target = replace(
        target,
        workers=tuple(dict.fromkeys((*named, *target.workers))),
        pool=(*(pool or ()), *target.pool),
        token=token or target.token,
    )
    _show(_findings(plan, target, key, probe, self_check), as_json)


def _in(file: Path | None) -> Secret:
    return Secret("") if file is None else SecretFile(file)


def _show(found: Iterator[Finding], as_json: bool) -> NoReturn:
    """Each as soon as it is there, and the end of the command."""
    findings: list[Finding] = []
    for finding in found:
        findings.append(finding)
        if not as_json:
            mark, colour = MARKS[finding.level]
            change = f"  -> {finding.change}" if finding.change else ""
            text = printable(f"{finding.check:15} {finding.says}{change}")
            typer.echo(f"{typer.style(mark, fg=colour)} {text}")
    status = judge.status(findings)
    if as_json:
        typer.echo(msgspec.json.encode({"status": status, "findings": findings}))
    raise typer.Exit(status)


def _findings(
    plan: Plan | None, target: Target, key: str, probe: bool, self_check: bool
) -> Iterator[Finding]:
    yield from judge.machine(gather(TESTED_SGLANG, self_check=self_check))
    processes = () if plan is None else plan.processes
    parts = [one for one in processes if one.role in exposure.KINDS]
    yield from exposure.judge(
        build_config(exposure.KINDS[one.role], one.config, source=one.table) for one in parts
    )
    where = target.router_url or ", ".join(target.workers)
    runs = bool(where) and _answers(target)
    silent = f"nothing answers at {where}" if where and not runs else ""
    if target.unwritten is not None:
        says = f"no cluster of this file has run in {target.unwritten}" + (f"; {silent}" if silent else "")
        yield Finding("cluster", "warn", says, "start it; if it runs, give --run-dir as it was given to `up`")
    elif silent:
        yield Finding("cluster", "warn", silent, "start it, then ask again")
    if runs:
        yield from _of_cluster(target, key, probe)
    if runs or target.pool:
        yield from judge.pool(cluster.gather_pool(target.pool, target.pool_tls))


def _of_cluster(target: Target, key: str, probe: bool) -> Iterator[Finding]:
    listed, why_none = cluster.members(target.router_url) if target.router_url else ((), "")
    asked, token = listed, ""  # whoever answers there may name anybody
    if target.workers:
        known = {member.url: member for member in listed}
        asked, token = tuple(known.get(url, cluster.Member(url)) for url in target.workers), target.token
    if not asked:
        change = "start one, or see the router's log; --config FILE, with --run-dir, names them too"
        yield Finding("worker", "fail", f"no worker is known: {why_none}", change)
    workers = cluster.gather_workers(asked, token, trust=target.worker_trust)
    yield from judge.workers(workers)
    for model, page_size in live_probe.page_sizes(workers).items() if probe and target.router_url else ():
        dice = random.SystemRandom()
        found = live_probe.probe(target.router_url, model, page_size, key, dice, target.trust)
        yield from judge.probe(found)


def plan_of(config: Path, run_dir: Path | None) -> Plan:
    """The plan that `pdserve up` makes of this file; automatic ports are not the real ones."""
    file = read_cluster_file(config, {}, {})
    folder = (run_dir or file.cluster.run_dir).resolve()
    return make_plan(file, program=("pdserve",), run_dir=folder, uid=os.getuid(), ports=itertools.count(1))


def pool_tls(plan: Plan) -> ssl.SSLContext | None:
    """As pool nodes have it for each other. Raises ConfigError."""
    nodes = [spec for spec in plan.processes if spec.role == "pool"]
    tables = (build_config(PoolNodeConfig, spec.config, source=spec.table).tls for spec in nodes)
    return next((context for tls in tables if (context := Certificates(tls).client_context)), None)


def _checked(given: str, option: str) -> str:
    """The URL that was given. Raises ConfigError."""
    if not given:
        return ""
    try:
        url = httpx.URL(given)
        wrong = "" if url.scheme in ("http", "https") and url.host else "no host"
    except httpx.InvalidURL as error:
        wrong = str(error)
    if wrong:
        raise ConfigError(f"{option} {given}: {wrong}; it is of the form http://HOST:PORT")
    return given


def _running(plan: Plan, router: str, ca_file: Path | None) -> Target:
    """Where the cluster is: by the configuration that `pdserve up` wrote. Raises ConfigError."""
    spec = plan.routers[0]
    if not spec.config_path.is_file():
        known = plan.router_url if spec.listening[0].chosen else ""  # else the port is not the real one
        trust = cluster.trust_in(ca_file, None)
        return Target(router_url=router or known, trust=trust, unwritten=spec.config_path.parent)
    written = load_config(RouterConfig, spec.config_path, {})
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(written.host, written.host)
    own = written.access.tls_cert_file
    url = f"{'https' if own else 'http'}://{f'[{host}]' if ':' in host else host}:{written.port}"
    return Target(
        router_url=router or url,
        workers=written.listed,
        pool=tuple(
            one.ready.address
            for one in plan.processes
            if one.role == "pool" and isinstance(one.ready, ConnectReady)
        ),
        token=reveal(written.access.cluster_token),
        trust=cluster.trust_in(ca_file, Path(own) if own and not router else None),
        worker_trust=Certificates(written.tls).client_context,
        pool_tls=pool_tls(plan),
    )


def _answers(target: Target) -> bool:
    """Anything of it."""
    health = [f"{target.router_url}/health"] if target.router_url else []
    asker = Asker("")
    for url in (*health, *(f"{worker}/pd/ready" for worker in target.workers)):
        with suppress(NoAnswer):
            asker.get(url, READY_TIMEOUT_S)
            return True
    return False


SELF_CHECK_TIMEOUT_S: Final = 180.0


def gather(sglang_tested: str, *, self_check: bool = True) -> Machine:
    """All of it; `self_check`: all of SGLang that pdserve leans on too, which takes 15 to 30 seconds."""
    shm = os.statvfs("/dev/shm")
    try:
        sglang = version("sglang")
    except PackageNotFoundError:
        sglang = ""
    infiniband = Path("/sys/class/infiniband")
    return Machine(
        open_files=_limit(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        shm_bytes=shm.f_blocks * shm.f_frsize,
        shm_free_bytes=shm.f_bavail * shm.f_frsize,
        sglang=sglang,
        sglang_tested=sglang_tested,
        sglang_misfit=_misfit() if self_check and sglang else "",
        ucx_error=_ucx_error(),
        has_infiniband=infiniband.is_dir() and any(infiniband.iterdir()),
    )


def _misfit() -> str:
    """What pdserve relies on and the installed SGLang has not, or does otherwise; empty: nothing."""
    words = [sys.executable, "-m", "pdserve.engine.sglang.selfcheck"]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=SELF_CHECK_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"its check did not end within {SELF_CHECK_TIMEOUT_S:.0f} s"
    return (done.stderr.strip().splitlines() or ["no reason given"])[-1] if done.returncode else ""


def _limit(value: int) -> int:
    return 2**31 if value == resource.RLIM_INFINITY else value


def _ucx_error() -> str:
    """Why UCX cannot be used; empty: it can."""
    if not is_installed("ucx"):
        return NO_UCX
    try:
        UcxLibrary()
    except (StartupError, OSError) as error:
        return f"UCX cannot be used: {error}"
    return ""

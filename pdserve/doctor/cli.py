"""`pdserve doctor`: one line for each check, and what to change."""

from __future__ import annotations

import itertools
import os
import random
import ssl
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import httpx
import msgspec
import typer
from rich.console import Console

from pdserve.doctor import cluster, exposure, judge, live_probe, machine
from pdserve.doctor.asking import Asker, NoAnswer
from pdserve.doctor.facts import Finding
from pdserve.engine.sglang.selfcheck import TESTED_SGLANG
from pdserve.errors import ConfigError
from pdserve.kvpool.node.config.node import PoolNodeConfig
from pdserve.security.log_text import printable
from pdserve.security.tls import Certificates, TlsConfig
from pdserve.security.tokens import given_secret
from pdserve.settings.config_file import build_config, read_toml
from pdserve.up.config import WORKER_ROLES, read_cluster_file
from pdserve.up.plan import make_plan
from pdserve.up.spec import Plan

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
    key = given_secret("--key", "", key_file, "PDSERVE_API_KEY", os.environ)
    token = given_secret("--token", "", token_file, "PDSERVE_CLUSTER_TOKEN", os.environ)
    plan = None if config is None else _plan(config, run_dir)
    named = tuple(_checked(url.rstrip("/"), "--worker") for url in worker or ())
    target = _target(plan, _checked(router.rstrip("/"), "--router"), token, named, ca_file)
    _show(_findings(_parts(plan), target, key, probe, self_check), as_json)


def _show(found: Iterator[Finding], as_json: bool) -> NoReturn:
    """Each as soon as it is there, and the end of the command."""
    console = Console(highlight=False, emoji=False, markup=False, soft_wrap=True)
    findings: list[Finding] = []
    for finding in found:
        findings.append(finding)
        if not as_json:
            mark, style = MARKS[finding.level]
            console.print(mark, style=style, end=" ")
            change = f"  -> {finding.change}" if finding.change else ""
            console.print(printable(f"{finding.check:15} {finding.says}{change}"))
    status = judge.status(findings)
    if as_json:
        typer.echo(msgspec.json.encode({"status": status, "findings": findings}))
    raise typer.Exit(status)


def _findings(
    parts: Sequence[exposure.Part],
    target: Target | None,
    key: str,
    probe: bool,
    self_check: bool,
) -> Iterator[Finding]:
    runs = target is not None and _answers(target)
    yield from judge.machine(machine.gather(TESTED_SGLANG, self_check=self_check))
    yield from exposure.judge(parts)
    if target is None:
        return
    where = target.router_url or ", ".join(target.workers)
    silent = f"nothing answers at {where}" if where and not runs else ""
    if target.unwritten is not None:
        says = f"no cluster of this file has run in {target.unwritten}" + (f"; {silent}" if silent else "")
        yield Finding("cluster", "warn", says, "start it; if it runs, give --run-dir as it was given to `up`")
    elif silent:
        yield Finding("cluster", "warn", silent, "start it, then ask again")
    if not runs:
        return
    listed, why_none = cluster.members(target.router_url) if target.router_url else ((), "")
    asked, token = listed, ""  # whoever answers there may name anybody
    if target.workers:
        known = {member.url: member for member in listed}
        asked, token = tuple(known.get(url, cluster.Member(url)) for url in target.workers), target.token
    if not asked:
        change = "start one, or see the router's log; --config FILE, with --run-dir, names them too"
        yield Finding("worker", "fail", f"no worker is known: {why_none}", change)
    workers = cluster.gather_workers(asked, token, trust=target.worker_trust)
    addresses = [*target.pool, *(address for worker in workers for address in worker.pool_nodes)]
    nodes = cluster.gather_pool(addresses, target.pool_tls)
    yield from judge.workers([cluster.with_host_tokens(worker, nodes) for worker in workers])
    yield from judge.pool(nodes)
    for model, page_size in live_probe.page_sizes(workers).items() if probe and target.router_url else ():
        dice = random.SystemRandom()
        found = live_probe.probe(target.router_url, model, page_size, key, dice, target.trust)
        yield from judge.probe(found)


def _plan(config: Path, run_dir: Path | None) -> Plan:
    """The plan that `pdserve up` makes of this file; automatic ports are not the real ones."""
    file = read_cluster_file(config, {}, {})
    folder = (run_dir or file.cluster.run_dir).resolve()
    return make_plan(file, program=("pdserve",), run_dir=folder, uid=os.getuid(), ports=itertools.count(1))


def _parts(plan: Plan | None) -> list[exposure.Part]:
    """The configurations of all parts that `pdserve up` starts."""
    processes = () if plan is None else plan.processes
    return [
        build_config(exposure.KINDS[spec.role], spec.config, source=spec.table)
        for spec in processes
        if spec.role in exposure.KINDS
    ]


def _pools(plan: Plan) -> list[PoolNodeConfig]:
    return [
        build_config(PoolNodeConfig, spec.config, source=spec.table)
        for spec in plan.processes
        if spec.role == "pool"
    ]


def _pool_tls(plan: Plan) -> ssl.SSLContext | None:
    """As pool nodes have it for each other. Raises ConfigError."""
    contexts = (Certificates(node.tls).client_context for node in _pools(plan))
    return next((context for context in contexts if context is not None), None)


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


def _target(
    plan: Plan | None, router: str, token: str, named: tuple[str, ...], ca_file: Path | None
) -> Target | None:
    """Where the cluster is: by the configuration that `pdserve up` wrote, or by what the router says."""
    if plan is not None and plan.routers:
        spec = plan.routers[0]
        if not spec.config_path.is_file():
            known = plan.router_url if spec.listening[0].chosen else ""  # else the port is not the real one
            unwritten, trust = spec.config_path.parent, cluster.trust_in(ca_file, None)
            return Target(
                router_url=router or known, workers=named, token=token, trust=trust, unwritten=unwritten
            )
        written: dict[str, Any] = read_toml(spec.config_path)
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(written["host"], written["host"])
        host = f"[{host}]" if ":" in host else host
        access = written.get("access", {})
        own = access.get("tls_cert_file")
        tls = build_config(TlsConfig, written.get("tls", {}), source=f"{spec.config_path}: tls")
        workers = tuple(url for role in WORKER_ROLES for url in written.get(role, []))
        return Target(
            router_url=router or f"{'https' if own else 'http'}://{host}:{written['port']}",
            workers=(*named, *(url for url in workers if url not in named)),
            pool=tuple(written.get("admin", {}).get("pool", [])),
            token=token or str(access.get("cluster_token", "")),
            trust=cluster.trust_in(ca_file, Path(own) if own and not router else None),
            worker_trust=Certificates(tls).client_context,
            pool_tls=_pool_tls(plan),
        )
    if not (router or named):
        return None
    trust = cluster.trust_in(ca_file, None)
    return Target(router_url=router, workers=named, token=token, trust=trust, worker_trust=trust)


def _answers(target: Target) -> bool:
    """Anything of it."""
    health = [f"{target.router_url}/health"] if target.router_url else []
    asker = Asker("")
    for url in (*health, *(f"{worker}/pd/ready" for worker in target.workers)):
        with suppress(NoAnswer):
            asker.get(url, READY_TIMEOUT_S)
            return True
    return False

"""Every command that the documents show and the demo has all for, once, against the demo."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.support.docs_commands import ROOT, Command, all_commands
from tests.support.processes import Child, free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(900)]

ADMIN_KEY = "docs-may-do-everything"
MACHINE = """
memory = "2TB"
gpus = [{ name = "H100", memory = "80GiB", count = 8, numa_nodes = [0, 0, 0, 0, 1, 1, 1, 1] }]
"""
TENANTS = """
[[router.tenants]]
name = "*"
retain_tokens = 100000
"""
WARNINGS = {"pdserve doctor": 1}
"""Commands that may end with this status: a demo is not what they recommend."""
COMMANDS = [command for command in all_commands() if not command.needs]
PAGES = sorted({command.page for command in COMMANDS})


@dataclass
class Demo:
    """What launch/disagg.sh starts, with the tiny model, and an admin API."""

    directory: Path
    port: int
    admin_port: int
    namespace: str

    @property
    def node(self) -> str:
        return "unix:logs/disagg/pool0.sock"

    def here(self, text: str) -> str:
        """A command with the names of the demo in place of those of the page."""
        body = f'{json.dumps(self.body)[:-1]}, "max_tokens": 2}}'
        for pattern, ours in (
            (r"https?://HOST:8000|localhost:8000", f"127.0.0.1:{self.port}"),
            (r"HOST:8001", f"127.0.0.1:{self.admin_port}"),
            (r"--router URL --pool ADDRESS", f"--router http://127.0.0.1:{self.port} --pool {self.node}"),
            (r"unix:/tmp/pool0.sock|tcp:[\w.-]+:7\d+|\bNODE\b", self.node),
            (r" --token-file /etc/pdserve/admin-token", ""),
            (r"/etc/pdserve", str(self.directory / "etc")),
            (r"demo-small@[0-9a-f]+|\bMODEL\b", self.namespace),
            (r"/models/qwen3-8b", "models/smollm2-135m"),
            (r"\b\d+(?:GiB|TiB)\b", "1MiB"),
            (r'"temperature": 0,', '"temperature": 0, "max_tokens": 2,'),  # a random model never ends
            (r"([^/])\bdisagg.toml", r"\1launch/disagg.toml"),
            (r'"messages": \[\.\.\.\]', f'"messages": {json.dumps(self.body["messages"])}'),
            (r"(pages/erase) \.\.\.", r'\1 -H "Authorization: Bearer $ADMIN_KEY"'),
            (r"(curl .*) \.\.\.$", rf"\1 -d '{body}'"),
        ):
            text = re.sub(pattern, ours, text)
        return text

    @property
    def body(self) -> dict[str, object]:
        return {"model": "smollm2-135m", "messages": [{"role": "user", "content": "hello"}]}

    def run(self, commands: list[Command]) -> subprocess.CompletedProcess[str]:
        """One shell for all commands of a page."""
        words = [
            "set -e",
            'curl() { command curl -sS --max-time 60 --fail-with-body -H "Content-Type: application/json" "$@"; }',
            f'pdserve() {{ {sys.executable} -m pdserve "$@"; }}',
        ]
        for command in commands:
            allowed = next((s for begin, s in WARNINGS.items() if command.text.startswith(begin)), 0)
            words.append(f"echo '== {command.page}:{command.line}'")
            words.append(f"{self.here(command.text)}\n" if not allowed else self.warned(command, allowed))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "KEY": "any", "ADMIN_KEY": ADMIN_KEY}
        return subprocess.run(
            ["bash", "-c", "\n".join(words)],
            cwd=self.directory, env=environment, capture_output=True, text=True, check=False, timeout=240,
        )  # fmt: skip

    def warned(self, command: Command, allowed: int) -> str:
        return f"status=0; {self.here(command.text.split('#')[0])} || status=$?; [ $status -le {allowed} ]"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Demo]:
    directory = tmp_path_factory.mktemp("docs")
    for name in ("launch", "models", "etc"):
        (directory / name).mkdir()
    shutil.copytree(model, directory / "models/smollm2-135m")
    (directory / "machine.toml").write_text(MACHINE)
    port, admin_port = free_ports(2)
    for file in (ROOT / "launch").iterdir():
        if file.name not in ("disagg.toml", "router.toml"):
            (directory / "launch" / file.name).symlink_to(file)
    (directory / "launch/router.toml").write_text((ROOT / "launch/router.toml").read_text())
    text = (ROOT / "launch/disagg.toml").read_text()
    admin = f'admin.port = {admin_port}\nadmin.key = "{ADMIN_KEY}"\n'
    text = text.replace("port = 8000\n", f"port = {port}\n{admin}")
    text = text.replace(
        'capacity_bytes = "auto"', f'arena_dir = "{directory}/arena"\ncapacity_bytes = "256MiB"'
    )
    (directory / "launch/disagg.toml").write_text(text + TENANTS)
    up = Child("up", [sys.executable, "-m", "pdserve", "up", "launch/disagg.toml"], directory / "up.log")
    up.spawn(cwd=directory, env={**os.environ, "PYTHONPATH": str(ROOT)})
    made = Demo(directory, port, admin_port, "")

    def ready() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/ready", trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        up.await_true(ready, 240.0, 0.2, 20)
        chat = f"http://127.0.0.1:{port}/v1/chat/completions"
        assert httpx.post(chat, json={**made.body, "max_tokens": 2}, trust_env=False, timeout=60).is_success
        listed = made.run([Command("", 0, "pdserve pool ns list NODE --json")])
        (made.namespace,) = set(re.findall(r"smollm2-135m@[0-9a-f]+", listed.stdout))
        prepared = made.run([Command("", 0, "pdserve pool ns create NODE chat@2")])
        assert prepared.returncode == 0, prepared.stderr
        yield made
    finally:
        up.stop(60.0)


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_do_what_they_say_against_the_demo(demo: Demo, page: str) -> None:
    done = demo.run([command for command in COMMANDS if command.page == page])
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "Traceback" not in done.stderr

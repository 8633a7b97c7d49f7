"""What the environment of a process does not change: proxies, the locale, how a text file is read."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = sorted((ROOT / "pdserve").iterdir())
SOURCES = [
    file for part in PARTS for file in ([part] if part.suffix == ".py" else sorted(part.rglob("*.py")))
]
HTTP_CALLS = {"Client", "AsyncClient", "get", "post", "request", "stream"}


def calls(source: str) -> Iterator[tuple[ast.Call, str]]:
    """Every call with the name that it is made by, as in `httpx.Client`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            yield node, ast.unparse(node.func)


def texts_by_locale(source: str) -> Iterator[str]:
    """Text files that are read or written in the encoding of the locale."""
    for call, name in calls(source):
        most = {"read_text": 0, "write_text": 1}.get(name.rpartition(".")[2])
        if most is not None and len(call.args) <= most and "encoding" not in _keywords(call):
            yield f"{call.lineno}: {name}"


def clients_by_environment(source: str) -> Iterator[str]:
    """HTTP clients that a proxy variable sends elsewhere: ours ask processes of the cluster."""
    for call, name in calls(source):
        module, _, what = name.rpartition(".")
        if module in ("httpx", "requests") and what in HTTP_CALLS and "trust_env" not in _keywords(call):
            yield f"{call.lineno}: {name}"


def _keywords(call: ast.Call) -> set[str | None]:
    return {keyword.arg for keyword in call.keywords}


@pytest.mark.parametrize("check", [texts_by_locale, clients_by_environment])
def test_no_module_leaves_it_to_the_environment(check) -> None:  # type: ignore[no-untyped-def]
    found = [
        f"{path.relative_to(ROOT)}:{line}" for path in SOURCES for line in check(path.read_text("utf-8"))
    ]
    assert found == []


def test_the_checks_can_fail() -> None:
    assert list(texts_by_locale("p.read_text()")) == ["1: p.read_text"]
    assert list(texts_by_locale("p.read_text(encoding='utf-8'); p.write_text(x, 'utf-8')")) == []
    assert list(clients_by_environment("httpx.Client(timeout=1)")) == ["1: httpx.Client"]
    assert list(clients_by_environment("httpx.Client(trust_env=False)")) == []


def run(code: str, **environ: str) -> str:
    """What Python says that runs this with these variables."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=120, env=os.environ | environ, check=False
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return done.stdout.decode()


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""A locale that has no letter beyond ASCII, with what Python does about it turned off."""


@pytest.mark.parametrize("environ", [{"LC_ALL": "C"}, {"LC_ALL": "POSIX"}, ASCII], ids=str)
def test_files_of_models_are_read_alike_in_every_locale(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["M"], "note": "\u00dcn\u00efcode"}', encoding="utf-8"
    )
    (tmp_path / "model.bin").write_bytes(b"")
    code = f"""
from pdserve.engine.model_dir import check_model_dir
from pdserve.pages import model_fingerprint
from pathlib import Path
print(ascii(check_model_dir({str(tmp_path)!r})), model_fingerprint(Path({str(tmp_path)!r}))[:8])
"""
    assert run(code, **environ) == run(code, LC_ALL="C.UTF-8")


def test_a_terminal_without_some_letters_shows_them_as_escapes() -> None:
    code = "import pdserve.cli; pdserve.cli.escape_what_the_terminal_lacks(); print('\\xfc \\u30e2')"
    assert run(code, **ASCII) == "\\xfc \\u30e2\n"

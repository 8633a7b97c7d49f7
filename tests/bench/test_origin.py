"""The origin that every command of `python -m benchmarks` prints before its results."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks import commands, origin
from benchmarks.cli import POOL, SERVING
from tests.support.bench.commands import bench_here, results

GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b")


def test_results_are_preceded_by_where_they_come_from(tmp_path: Path) -> None:
    words = ("tier", str(tmp_path), "--pages", "1MiB", "--size", "4MiB", "--rounds", "1", "--no-fio")
    (row,) = results(bench_here(*words, "--json"))
    assert row["page_bytes"] == 1 << 20
    first, *table = bench_here(*words).stdout.splitlines()
    assert first.startswith(f"python -m benchmarks tier {tmp_path} --pages 1MiB")
    assert "(commit " in first
    assert any("plain write" in line for line in table)


def test_no_command_prints_past_the_output_that_begins_with_the_origin() -> None:
    """`multiturn` hands its output to a function of its module, the others make it themselves. The report of
    `gpu-check` is two files, which begin with the origin too.
    """
    for command in (*SERVING, *POOL):
        if command.__name__ == "gpu_check":
            continue
        assert "as_json" in command.__annotations__, command.__name__
    for file in Path(commands.__file__).parent.glob("*.py"):
        text = file.read_text()
        if file.name != "output.py":
            assert "typer.echo" not in text, file
            assert "Console().print" not in text, file
            commanded = text.count("    as_json: ") - text.count("\n    as_json: bool,\n")
            assert text.count("Output(as_json") == commanded, file


@pytest.mark.parametrize(
    ("file", "counts"), [("docs/a.md", ""), ("README.md", ""), ("benchmarks/results/x", ""), ("a.py", "+")]
)
def test_documents_and_results_that_changed_leave_the_commit_as_it_is(
    file: str, counts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("one")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "first")):
        subprocess.run([*GIT, "-C", tmp_path, *words], check=True, capture_output=True)
    path.write_text("two")
    monkeypatch.setattr(origin, "__file__", str(tmp_path / "origin.py"))
    commit = origin.provenance(())["commit"]
    assert len(commit) >= 7
    assert commit.endswith("+") == bool(counts)


def test_an_origin_in_words_names_command_commit_and_date() -> None:
    words = origin.in_words(
        {"command": "python -m benchmarks pool", "commit": "", "date": "2026-01-02T03:04:05Z"}
    )
    assert words == "python -m benchmarks pool (commit unknown, 2026-01-02T03:04:05Z)"

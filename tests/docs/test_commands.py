"""The commands that the documents show; tests/e2e/test_docs.py runs those that the demo has all for."""

from __future__ import annotations

from pathlib import Path

from tests.support.docs_commands import NEEDS, all_commands, commands

PAGE = """
```
$ chat() { curl -d '{"model": "m",
    "temperature": 0}'; }
$ chat hello   # a comment's quote
{"answer": "$ nothing"}
```

```
launch/disagg.sh --model m \\
  --port 1
pdserve doctor
```

```toml
[pool]
```

```
pdserve/
  cli.py
```
"""


def test_commands_are_found_with_what_continues_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    found = [(one.line, one.text) for one in commands(page, tmp_path)]
    assert found == [
        (3, 'chat() { curl -d \'{"model": "m",\n    "temperature": 0}\'; }'),
        (5, "chat hello   # a comment's quote"),
        (10, "launch/disagg.sh --model m \\\n  --port 1"),
        (12, "pdserve doctor"),
    ]


def test_what_a_command_needs_is_asked_for_by_a_command() -> None:
    every = all_commands()
    assert {begin for begin in NEEDS if not any(one.text.startswith(begin) for one in every)} == set()
    run = [one for one in every if not one.needs]
    assert len(run) >= 25, "the demo runs most of them"

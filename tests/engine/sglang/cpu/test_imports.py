"""transformers' question of which distribution a package is."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import importlib.metadata
from pdserve.engine.sglang.cpu import stand_in
theirs = importlib.metadata.packages_distributions()
ours = stand_in.packages_distributions()
wrong = {name: of for name, of in theirs.items() if sorted(of) != sorted(ours.get(name, []))}
print(len(theirs) > 50, wrong)
"""


def test_the_answer_is_pythons_own_for_all_that_is_installed() -> None:
    said = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=True
    )
    assert said.stdout.strip() == "True {}"

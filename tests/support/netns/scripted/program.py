"""`pdserve` itself, but for workers, which are scripted: `python -m tests.support.netns.scripted.program
WORD...`.
"""

from __future__ import annotations

import os
import sys
from typing import get_args

from pdserve.router.fleet.worker import Role

if __name__ == "__main__":
    is_worker = sys.argv[1] in get_args(Role)
    module = "tests.support.netns.scripted.worker" if is_worker else "pdserve"
    os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])

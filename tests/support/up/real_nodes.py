"""`pdserve` itself for pool nodes, stand-ins for all others: `real_nodes.py WORD...`."""

import os
import sys
from pathlib import Path

STAND_IN = str(Path(__file__).with_name("stand_in.py"))
words = ["-m", "pdserve"] if sys.argv[1] == "pool" else ["-S", STAND_IN]
os.execv(sys.executable, [sys.executable, *words, *sys.argv[1:]])

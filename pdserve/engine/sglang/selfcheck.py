"""The installed SGLang is the version that pdserve is made for, with the torch that it was built for.

pdserve uses names of SGLang that SGLang promises to nobody. The tests know all of them
(`tests/engine/sglang/symbols.txt`) and try them with this version; another one may serve wrong answers.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, requires, version

from pdserve.errors import StartupError
from pdserve.extras import how_to_install

TESTED_SGLANG = "0.5.23"


def check() -> None:
    """Raises StartupError for another SGLang or torch. Imports neither.

    SGLang's native code reads torch's objects: with another torch it reads wrong types, and the scheduler
    dies at its first prompt.
    """
    found = sglang_version()
    if found != TESTED_SGLANG:
        raise StartupError(
            f"SGLang {found} is installed, and this pdserve is made for {TESTED_SGLANG}: "
            f"pip install sglang=={TESTED_SGLANG}"
        )
    pins = (one.removeprefix("torch==") for one in requires("sglang") or () if one.startswith("torch=="))
    pin, torch = next(pins, ""), version("torch")
    if pin and torch.partition("+")[0] != pin:
        raise StartupError(
            f"torch {torch} is installed, but SGLang {found} needs another: pip install torch=={pin}"
        )


def sglang_version() -> str:
    """Version of the installed SGLang. Raises StartupError when there is none."""
    try:
        return version("sglang")
    except PackageNotFoundError as error:
        raise StartupError(
            f"SGLang is not installed: {how_to_install('sglang')}, or launch/setup.sh in a checkout, which "
            "leaves out what needs a GPU where there is none"
        ) from error


def main() -> None:
    """A line on stderr and status 1 if the installation does not fit (`python -m` of this module)."""
    try:
        check()
    except StartupError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()

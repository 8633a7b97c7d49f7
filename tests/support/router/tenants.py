"""Two tenants with API keys, and the headers of their requests."""

from __future__ import annotations

from pathlib import Path

from pdserve.router.config.tenants import Access
from pdserve.router.tenants.api_keys import key_line

ALICE, BOB = "alice-" + "a" * 20, "bob-" + "b" * 20


def by(key: str, **headers: str) -> dict[str, str]:
    """Headers of a request with this key; `_` in a name stands for `-`."""
    return {"authorization": f"Bearer {key}"} | {
        name.replace("_", "-"): said for name, said in headers.items()
    }


def keyed(directory: Path, **more: str) -> Access:
    """A file with the keys of both, and of more tenants."""
    file = directory / "keys"
    file.write_text(
        "# tenants\n" + "".join(key_line(*one) for one in {"alice": ALICE, "bob": BOB, **more}.items())
    )
    return Access(keys_file=file)

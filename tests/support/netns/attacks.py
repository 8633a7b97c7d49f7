"""Every attack on the cluster of tests/e2e/test_hostile.py, by the ports that it goes to.

The test counts what it tries, and fails unless that is this table. docs/security.md shows the table as
`python -m tests.support.netns.attacks` prints it.
"""

from __future__ import annotations

from typing import Final

from tests.support.netns.visitor import ATTACKS

CONTROL: Final = "pool: control"
PAGES: Final = "pool: pages"
WORKER: Final = "worker"
ROUTER: Final = "router"
HOST: Final = "host"
PLACES: Final = (CONTROL, PAGES, WORKER, ROUTER, HOST)
"""Where attacks go: ports that other hosts reach; what a user of the host reaches."""
NODES: Final = 2
PORTS: Final = {CONTROL: NODES, PAGES: NODES, WORKER: 1, ROUTER: 1}

STRANGER: Final = "a stranger"
TENANT: Final = "a tenant"
READER: Final = "a read token"
WRITER: Final = "a token of another namespace"
USER: Final = "another user"

NO_TOKEN: Final = "requests without a token"
WRONG_TOKEN: Final = "requests with a wrong token"
GUESSES: Final = "one token after the other"
REPLAY: Final = "a handshake or ticket that was heard"
FALSE_NODE: Final = "passing for a node of the pool"
DEAF: Final = "requests whose answers are not read"
DEAF_STREAM: Final = "streams that are not read"
DEAF_PAGES: Final = "pages that are not read"
STEAL: Final = "reading, writing and dropping its pages"
WRITE: Final = "writing, dropping and administering"
UNASKED: Final = "pages that nobody asked for"
FILES: Final = "opening files and sockets"
PROC: Final = "looking into /proc for secrets"
LOOPBACK: Final = ("silence", "noise", "half a frame")

OTHERS: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    (STRANGER, NO_TOKEN): (CONTROL, WORKER, ROUTER),
    (STRANGER, WRONG_TOKEN): (CONTROL, WORKER, ROUTER),
    (STRANGER, FALSE_NODE): (CONTROL,),
    (STRANGER, REPLAY): (CONTROL, PAGES),
    (STRANGER, DEAF): (CONTROL, WORKER, ROUTER),
    (STRANGER, GUESSES): (CONTROL, ROUTER),
    (TENANT, DEAF_STREAM): (ROUTER,),
    (READER, WRITE): (CONTROL, PAGES),
    (READER, DEAF_PAGES): (PAGES,),
    (READER, UNASKED): (PAGES,),
    (WRITER, STEAL): (CONTROL,),
    (USER, FILES): (HOST,),
    (USER, PROC): (HOST,),
}
TABLE: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    **{(STRANGER, kind): (CONTROL, PAGES, WORKER, ROUTER) for kind in ATTACKS},
    **OTHERS,
    **{(USER, kind): (HOST,) for kind in LOOPBACK},
}
"""(Who, attack) → where."""


def pairs() -> set[tuple[str, str, str]]:
    """(Who, attack, where) of each."""
    return {(who, attack, place) for (who, attack), places in TABLE.items() for place in places}


def as_markdown() -> str:
    """The table and its sum, for docs/security.md."""
    lines = [f"| who | attack | {' | '.join(PLACES)} |", f"|---|---|{'---|' * len(PLACES)}"]
    for (who, attack), places in TABLE.items():
        cells = " | ".join("x" if place in places else "" for place in PLACES)
        lines.append(f"| {who} | {attack} | {cells} |".replace("|  |", "| |").replace("|  |", "| |"))
    tried = sum(PORTS.get(place, 1) for _, _, place in pairs())
    text = (
        f"{len(TABLE)} attacks at {sum(PORTS.values())} ports and at the host make {tried} tries. "
        "Crashes: 0. Bytes of another namespace read or written: 0."
    )
    return "\n".join([*lines, "", text])


if __name__ == "__main__":
    print(as_markdown())

"""Until when a request's answer must begin, as its client says in a header. Pure.

    x-request-deadline-ms: 1500        counted from the request's arrival; also llm-d's x-llm-d-slo-ttft-ms

The queue takes the earliest deadline first, among the requests of one tenant: a request without one has the
deadline at which the queue refuses it. One that cannot be met is refused at once. What runs is not cut short.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

from pdserve.errors import RequestError

HEADERS: Final = (b"x-request-deadline-ms", b"x-llm-d-slo-ttft-ms")
CODE: Final = "deadline_unmet"
_NUMBER: Final = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,9})?")


def start_within_s(headers: Mapping[bytes, bytes]) -> float:
    """Seconds after its arrival; infinite where the client says none. Raises RequestError (400)."""
    for name in HEADERS:
        said = headers.get(name)
        if said is not None:
            if not _NUMBER.fullmatch(said):
                raise RequestError(400, f"The header {name.decode()} must be a number of milliseconds.")
            return float(said) / 1e3
    return math.inf

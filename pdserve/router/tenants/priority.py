"""How urgent a request is: `priority` of its body, or a header. Pure.

The number is SGLang's own. Larger ones come first, unless workers run with
`--schedule-low-priority-values-first`. A tenant orders its own requests by it in the router's queue, and
workers that run with `--enable-priority-scheduling` order those of all tenants. So a tenant may be as urgent
as its `max_priority` allows, and less urgent as it likes. A request that asks for more is refused: its client
expects an effect.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, Final, NamedTuple

import msgspec

from pdserve.errors import RequestError
from pdserve.router.api.request_body import UNREADABLE

PRIORITY_HEADER: Final = b"x-pdserve-priority"
_NUMBER: Final = re.compile(rb"[+-]?\d{1,18}")
_decoder: Final = msgspec.json.Decoder(Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)])


class Priority(NamedTuple):
    """What a request asks for."""

    urgency: int
    """More is sooner; 0: it asks for nothing."""
    to_send: int | None
    """The number that workers must be sent, since it does not stand in the body."""


NO_PRIORITY: Final = Priority(0, None)


def priority_of(
    said: msgspec.Raw, header: bytes | None, signs: Collection[int], at_most: int | None
) -> Priority:
    """What the body's member `said` (empty: there is none) asks for; without it, what the header does.

    `signs`: see `Fleet.priority_signs`. Where workers do not agree, the more urgent reading counts.
    `at_most`: the highest urgency; None: there is no bound, and workers judge the body. Raises RequestError
    (400).
    """
    if said and bytes(said) != b"null":
        try:
            number, to_send = _decoder.decode(said), None
        except UNREADABLE:
            if at_most is None:
                return NO_PRIORITY
            # a worker may read a number there all the same
            message = "Invalid value for 'priority': it must be an integer of at most 64 bits."
            raise RequestError(400, message, param="priority") from None
    elif header is not None:
        if not _NUMBER.fullmatch(header):
            raise RequestError(400, f"The header {PRIORITY_HEADER.decode()} must be an integer.")
        number = to_send = int(header)
    else:
        return NO_PRIORITY
    urgency = max(sign * number for sign in signs or (1,))
    if at_most is not None and urgency > at_most:
        bound = f"at most {at_most}" if max(signs, default=1) > 0 else f"at least {-at_most}"
        raise RequestError(400, f"You may set 'priority' to {bound}.", param="priority")
    return Priority(urgency, to_send)

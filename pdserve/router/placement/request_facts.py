"""What the plan of a request is made from."""

from __future__ import annotations

import msgspec

from pdserve.router.api.endpoints import Endpoint
from pdserve.router.placement.prefix_index import Prefix
from pdserve.router.sessions.keys import SessionKey


class RequestFacts(msgspec.Struct, frozen=True, gc=False):
    """One request as planning sees it."""

    endpoint: Endpoint
    model: str | None = None
    session: SessionKey | None = None
    prompt_tokens_estimate: int = 0
    """0 where nothing computes the prompt."""
    has_several_prompts: bool = False
    turn: int = 0
    """Number of the request for its model at this router; lets equally good workers take turns."""
    draw: int = 0
    """A random number of 32 bits."""
    prefix: Prefix | None = None
    """The prompt's blocks; None where no policy asks for them, or nothing computes the prompt."""

    @property
    def is_turn(self) -> bool:
        """It is a turn of its session. What is not, like tokenizing, goes where the session is, and that is
        all: workers know nothing of it afterwards.
        """
        return self.session is not None and self.endpoint.task == "generate"

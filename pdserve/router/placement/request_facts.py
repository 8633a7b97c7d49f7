"""The facts of a request that its plan is made from."""

from __future__ import annotations

import msgspec

from pdserve.router.api.endpoints import Endpoint
from pdserve.router.placement.prefix_index import Prefix
from pdserve.router.sessions.keys import SessionKey


class RequestFacts(msgspec.Struct, frozen=True, gc=False):
    """The facts of one request for planning."""

    endpoint: Endpoint
    model: str | None = None
    session: SessionKey | None = None
    prompt_tokens_estimate: int = 0
    """0: the endpoint does not compute the prompt."""
    prompts: int = 1
    has_several_prompts: bool = False
    """The prompt is a list of prompts, also of a single one."""
    has_media: bool = False
    """Pages of images, videos and sound cannot be named yet: nobody can wait for them."""
    charged_tokens: int = 0
    """What it costs its tenant until its real use is known."""
    answers: int = 1
    """What it counts for as requests: prompts times answers of each."""
    choices: int = 1
    """Answers to each prompt that the client gets."""
    urgency: int = 0
    """What its `priority` means for the queue: more is sooner."""
    holder: str = ""
    """Id of the worker that holds what the request continues, in its own memory. Empty: any worker can."""
    can_be_direct: bool = True
    """A decode worker can answer it that computed no token of the prompt (see `request_body`)."""
    turn: int = 0
    """Number of the request for its model at this router. Equally good workers alternate by it."""
    draw: int = 0
    """A random number of 32 bits."""
    prefix: Prefix | None = None
    """The prompt's blocks. None: no policy uses them, or the endpoint does not compute the prompt."""

    @property
    def is_turn(self) -> bool:
        """The request is a turn of its session. Other requests, like tokenizing, fill no cache."""
        return self.session is not None and self.endpoint.task == "generate"

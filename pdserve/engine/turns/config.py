"""Options of exact turns."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class ExactTurnsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Earlier answers in a chat's prompt keep the tokens that they were made of."""

    enabled: Annotated[
        bool,
        Meta(
            description="Earlier answers in a chat's prompt get the tokens that they were made of. false: "
            "their text is encoded anew, as plain SGLang does."
        ),
    ] = True
    lookup_s: Annotated[
        float,
        Meta(
            gt=0,
            le=2.0,
            description="Longest wait for the pool to give the tokens of earlier answers. Then their text is "
            "encoded.",
        ),
    ] = 0.1

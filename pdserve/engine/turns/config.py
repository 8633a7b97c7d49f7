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
    memory_bytes: Annotated[
        int,
        Meta(ge=0, description="Memory of this worker for the tokens of answers; others are in the pool."),
    ] = 64 * 1024 * 1024
    lookup_s: Annotated[
        float,
        Meta(
            gt=0,
            le=2.0,
            description="Longest wait for the pool to give the tokens of earlier answers. Then their text is "
            "encoded.",
        ),
    ] = 0.1

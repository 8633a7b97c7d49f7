"""Aliases: names for clients, and the models behind them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta


class Alias(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A name that stands for one or more models, by weight."""

    name: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=256,
            description="Name for clients. It may be that of one of its models, which clients then get by "
            "weight.",
        ),
    ]
    models: Annotated[
        dict[str, float],
        Meta(
            description="Models, or BASE:ADAPTER, each with its share of the conversations. The shares "
            "need not add up to 1. 0: it gets none, also of those that it had."
        ),
    ]

    def __post_init__(self) -> None:
        """Raises ValueError."""
        for model, weight in self.models.items():
            if not model or not 0 <= weight <= 1e9 or math.isnan(weight):
                raise ValueError(
                    f"alias {self.name}: the weight of {model!r} is {weight}, and must be from 0 to 1e9"
                )
        if not any(self.models.values()):
            raise ValueError(f"alias {self.name} has no model of a weight above 0")


def base_of(model: str) -> str:
    """The model that workers serve under a name, without its adapter."""
    return model.partition(":")[0]


def check_aliases(aliases: Sequence[Alias], models: Sequence[str]) -> None:
    """Raises ValueError where aliases do not fit each other, or the expected `models` (empty: any)."""
    names = [alias.name for alias in aliases]
    for alias in aliases:
        if names.count(alias.name) > 1:
            raise ValueError(f"alias {alias.name} is listed twice in [[aliases]]")
        for model in alias.models:
            if model != alias.name and model in names:
                raise ValueError(f"alias {alias.name} stands for {model}, which is an alias itself")
            if models and not {model, base_of(model)} & set(models):
                raise ValueError(f"alias {alias.name} stands for {model}, which is none of 'models'")

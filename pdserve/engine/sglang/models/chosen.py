"""The classes that `choose` found, where SGLang looks for them."""

from __future__ import annotations

import importlib
import os

from pdserve.engine.sglang.models import CLASSES_ENV

_places = [where.partition(":") for where in os.environ.get(CLASSES_ENV, "").split()]
EntryClass = [getattr(importlib.import_module(module), name) for module, _, name in _places]

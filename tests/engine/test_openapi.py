"""The router's document says what this SGLang takes and answers."""

from __future__ import annotations

import json

from tests.support.openapi import SCHEMAS, schemas


def test_the_schemas_are_those_of_the_sglang_that_is_installed() -> None:
    written = json.loads(SCHEMAS.read_text())
    assert written == schemas(), "write them anew: python -m tests.support.openapi"

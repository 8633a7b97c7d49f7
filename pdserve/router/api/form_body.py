"""What the router reads of a form (multipart/form-data, RFC 7578): a few short fields. Pure.

The worker gets the form byte for byte. Only `model` and `stream` are read, and they decide nothing but which
model's workers are asked, and how long their answer may take. Files are stepped over, not copied.
"""

from __future__ import annotations

import re
from typing import Final

from pdserve.errors import RequestError

MAX_PARTS: Final = 64
MAX_HEAD_BYTES: Final = 4096
MAX_FIELD_BYTES: Final = 1024
_BOUNDARY: Final = re.compile(
    rb'multipart/form-data\s*;(?:[^;]*;)*?\s*boundary=(?:"([^"\r\n]{1,70})"|([^\s";,]{1,70}))', re.IGNORECASE
)
_NAME: Final = re.compile(
    rb'content-disposition\s*:\s*form-data\s*;(?:[^\r\n]*?;)?\s*name="([^"\r\n]*)"', re.IGNORECASE
)
_IS_FILE: Final = re.compile(rb"[;\s]filename\*?=", re.IGNORECASE)
TRUE: Final = frozenset(("1", "true", "t", "yes", "y", "on"))
"""What SGLang's form takes for true, in any case."""


def read_form(body: bytes, content_type: bytes) -> dict[str, str]:
    """The short text fields of a form; of a name that comes twice the last counts. Raises RequestError (400)
    for what is no form, or has too many parts.
    """
    found = _BOUNDARY.match(content_type)
    if found is None:
        raise RequestError(400, "The body must be a form: multipart/form-data with a boundary.")
    line = b"--" + (found[1] or found[2])
    if not body.startswith(line):
        raise RequestError(400, "The form does not begin with its boundary.")
    fields: dict[str, str] = {}
    at = len(line)
    for _ in range(MAX_PARTS):
        if body.startswith(b"--", at):
            return fields
        head_end = body.find(b"\r\n\r\n", at, at + MAX_HEAD_BYTES)
        end = body.find(b"\r\n" + line, max(at, head_end))
        if head_end < 0 or end < 0:
            raise RequestError(400, "The form is cut short, or the head of a part is too long.")
        head, value_at = body[at:head_end], head_end + 4
        name = _NAME.search(head)
        if name is not None and not _IS_FILE.search(head) and end - value_at <= MAX_FIELD_BYTES:
            fields[name[1].decode("utf-8", "replace")] = body[value_at:end].decode("utf-8", "replace")
        at = end + 2 + len(line)
    raise RequestError(400, f"The form has more than {MAX_PARTS} parts.")

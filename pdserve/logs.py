"""Logs of a process: lines for people, or one JSON object for each line.

JSON has `time` (UTC, RFC 3339), `level`, `logger`, `message`, the fields that every record of this process
has (a pool node's `node`), and whatever a record brought along by `extra=`; `exception` is a traceback. What
is logged while a request is served has its id as `request`, without anyone passing it along.
"""

from __future__ import annotations

import logging
import time
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final, Literal, TypeAlias

import msgspec

from pdserve.security.log_text import printable

LogFormat: TypeAlias = Literal["text", "json"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

TEXT_FORMAT: Final = "%(asctime)s %(levelname)s %(message)s"
MAX_LINE_CHARS: Final = 16_384
THROTTLE_S: Final = 1.0
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


served_request: ContextVar[bytes] = ContextVar("pdserve_served_request", default=b"")
"""Id of the request that the running task serves."""


def configure_logs(
    format: LogFormat, level: LogLevel, *, text_format: str = TEXT_FORMAT, **fields: str
) -> None:
    """Send what this process logs to its standard error, replacing what was configured before."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(fields) if format == "json" else TextFormatter(text_format))
    handler.addFilter(_name_request)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class TextFormatter(logging.Formatter):
    """A line for people; extras follow the message as `name=value`. Text of strangers writes no lines of its
    own. A traceback has more lines.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's)
        """The line."""
        extras = "".join(f" {name}={value}" for name, value in _extras(record).items())
        return printable(super().formatMessage(record) + extras, MAX_LINE_CHARS)


class JsonFormatter(logging.Formatter):
    """A line for programs. `fields` stand in every one."""

    def __init__(self, fields: dict[str, str]) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        when = datetime.fromtimestamp(record.created, UTC)
        row: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
            **_extras(record),
        }
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(row, enc_hook=str).decode()


def _name_request(record: logging.LogRecord) -> bool:
    if request := served_request.get():
        record.request = request.decode("ascii", "replace")
    return True


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _OWN}


class ThrottledLog:
    """Lines that a fault or a stranger would repeat without end: at most `most` per key and interval. The
    next one tells how many were left out. The number of keys must be bounded.
    """

    def __init__(self, logger: logging.Logger, interval_s: float = THROTTLE_S, most: int = 1) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._most = most
        self._since: dict[str, tuple[float, int, int]] = {}
        """Key → (when its interval began, lines written in it, lines left out)."""

    def warning(self, key: str, message: str, *args: object, now_s: float | None = None) -> None:
        """Write the line, or count it as left out."""
        self.log(logging.WARNING, key, message, *args, now_s=now_s)

    def log(self, level: int, key: str, message: str, *args: object, now_s: float | None = None) -> None:
        """The same at another level."""
        now_s = time.monotonic() if now_s is None else now_s
        began_s, written, left_out = self._since.get(key, (float("-inf"), 0, 0))
        if now_s - began_s >= self._interval_s:
            began_s, written = now_s, 0
        if written == self._most:
            self._since[key] = (began_s, written, left_out + 1)
            return
        self._since[key] = (began_s, written + 1, 0)
        suffix = f" ({left_out} more like it)" if left_out else ""
        self._logger.log(level, message + suffix, *args)

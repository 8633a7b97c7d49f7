"""The one error tree of pdserve.

Whose fault an error is decides what becomes of it: `ConfigError` and `StartupError` end a process with one
line for a person; `PoolError` never reaches a request (the page is recomputed); `RequestError` is answered to
the client in OpenAI's form. UCX, OS and HTTP errors are translated into these at the edge where they arise.
"""

from __future__ import annotations


class PdserveError(Exception):
    """Base of every error that pdserve raises on purpose.

    `str(error)` is one line for a person: what, where, and what to do.
    """


class ConfigError(PdserveError):
    """The configuration cannot be used: unknown key, wrong type, contradiction. Process exit status 2."""


class StartupError(PdserveError):
    """The process cannot start here: port in use, too little memory, missing model. Process exit status 1."""


class NodeFailed(PdserveError):
    """A bug was met while the process ran; it stopped rather than go on with what it left half done. Process
    exit status 1, so that a supervisor starts it again.
    """


class WeightsError(PdserveError):
    """Weights cannot be stored in the pool, or read from it, as asked. Process exit status 1."""


class RequestError(PdserveError):
    """A client's request cannot be served; carries the HTTP status and OpenAI's error type and code."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type_: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int = 1,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type_ = type_
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        """Said in `Retry-After` where the status is 429 or 503."""

    def body(self) -> dict[str, dict[str, str | None]]:
        """The answer's body, in OpenAI's form."""
        fields = {"message": str(self), "type": self.type_, "param": self.param, "code": self.code}
        return {"error": fields}


class PoolError(PdserveError):
    """A pool operation did not happen; the caller treats it as a miss."""


class PageMismatch(PoolError, ValueError):
    """The buffers given for one call are not pages of one length: a fault of the caller."""


class PoolUnavailable(PoolError):
    """The node cannot be reached, or went away while the operation ran."""


class PoolRestarting(PoolUnavailable):
    """The node said that it will be back in a moment."""


class PoolTimeout(PoolError):
    """The operation's deadline passed."""


class PoolRefused(PoolError):
    """The node answered no: unknown namespace, geometry mismatch, wrong protocol version, bad token."""


class RequestRefused(PoolRefused):
    """The node answered one request with a Fault of this code; it may serve others."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class FrameError(PoolError):
    """Bytes on a control connection are not a frame of our protocol."""

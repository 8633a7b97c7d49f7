"""Which model a request means, and which a worker may serve. Pure.

Workers say what they serve; those of one model are a group, with its own placement, sessions, prefix table
and queue. The configuration may name the models there are to be (`models`): a worker of another is refused,
and a request for one that no worker serves yet is told to come again, not that there is no such model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdserve.errors import RequestError
from pdserve.router.api.endpoints import Endpoint
from pdserve.router.api.errors import NoWorkerError

DEFAULT_MODEL = "default"
"""SGLang's own name for whatever it serves; its documentation's examples send it."""
MAX_ADAPTER_CHARS = 256
"""Any name behind a served model's leads to it, and session keys begin with what the client wrote: so what
clients can make the router remember is bounded.
"""


class Models:
    """The models of one router."""

    def __init__(self, wanted: Sequence[str] = (), default: str = "") -> None:
        """`wanted`: the models there are to be, empty: whatever workers serve. `default`: what a request
        means that names none.
        """
        self._wanted = tuple(wanted)
        self._default = default

    def refusal(self, model: str) -> str | None:
        """Why a worker of `model` is not wanted, or None."""
        if not self._wanted or model in self._wanted:
            return None
        return f"serves {model!r}, which is none of the configured models ({_names(self._wanted)})"

    def resolve(self, requested: str | None, endpoint: Endpoint, served: Mapping[str, frozenset[str]]) -> str:
        """The served model that a request to `endpoint` means. `BASE:ADAPTER` names a LoRA adapter of BASE,
        as in SGLang. `served`: what each model's workers can do.

        Raises NoWorkerError for a model that no worker serves yet; RequestError 404 for one that there is
        not, and 400 when none is named and the choice is not unique, when the model cannot do it, and for an
        adapter's name that is too long.
        """
        model = requested if requested and requested in served else self._named(requested, served)
        if endpoint.task is not None and endpoint.task not in served[model]:
            raise RequestError(
                400,
                f"The model {model!r} cannot do {endpoint.path}.",
                code="unsupported_endpoint",
                param="model",
            )
        return model

    def _named(self, requested: str | None, served: Mapping[str, frozenset[str]]) -> str:
        if requested is None or requested in ("", DEFAULT_MODEL):
            return self._unnamed(served)
        base, _, adapter = requested.partition(":")
        if base in served:
            if len(adapter) > MAX_ADAPTER_CHARS:
                raise RequestError(
                    400, f"An adapter's name has at most {MAX_ADAPTER_CHARS} characters.", param="model"
                )
            return base
        if not served or requested in self._wanted or base in self._wanted:
            raise NoWorkerError("No worker of this model has joined yet; try again shortly.")
        raise RequestError(
            404,
            f"The model {requested[:200]!r} does not exist; this server serves {_names(served)}.",
            code="model_not_found",
            param="model",
        )

    def _unnamed(self, served: Mapping[str, frozenset[str]]) -> str:
        if self._default in served:
            return self._default
        if not served or self._default:
            raise NoWorkerError("No worker has joined yet; try again shortly.")
        if len(served) > 1:
            raise RequestError(
                400, f"'model' is missing; this server serves {_names(served)}.", param="model"
            )
        return next(iter(served))


def _names(models: Sequence[str] | Mapping[str, object]) -> str:
    return ", ".join(repr(name) for name in models)

"""Which model a request means, and which models workers may serve. Pure.

Workers say which model they serve. The workers of one model are a group with its own placement, sessions,
prefix table and queue. The configuration can name the expected models (`models`): a worker of another model
is refused. A request for an expected model that no worker serves yet gets a 503 instead of a 404.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from pdserve.errors import RequestError
from pdserve.router.api.endpoints import Endpoint
from pdserve.router.api.errors import NoWorkerError

DEFAULT_MODEL = "default"
"""SGLang's name for the model that it serves, as in the examples of its documentation."""
ANY = ""
"""The name of no model: while no worker has said what it serves, a request waits for any of them."""
MAX_ADAPTER_CHARS = 256
"""Session keys begin with the name that the client wrote, adapter included. So the name is bounded."""


class Models:
    """The models of one router."""

    def __init__(self, wanted: Sequence[str] = (), default: str = "") -> None:
        """`wanted`: the expected models; empty: any. `default`: the model of requests that name none."""
        self._wanted = tuple(wanted)
        self._default = default

    def refusal(self, model: str) -> str | None:
        """Why a worker of `model` is refused, or None."""
        if not self._wanted or model in self._wanted:
            return None
        return f"serves {model!r}, which is none of the configured models ({_names(self._wanted)})"

    def resolve(self, requested: str | None, endpoint: Endpoint, served: Mapping[str, frozenset[str]]) -> str:
        """The served model that a request to `endpoint` means. `BASE:ADAPTER` names a LoRA adapter of BASE,
        as in SGLang. `served`: what each model's workers can do.

        Raises NoWorkerError for an expected model that no worker serves yet. Raises RequestError 404 for an
        unknown model, and 400 when no model is named and several are served, when the model cannot do the
        endpoint's task, and for an adapter's name that is too long.
        """
        model = self.find(requested, served)
        if endpoint.task not in (None, "any") and endpoint.task not in served[model]:
            raise RequestError(
                400,
                f"The model {model!r} cannot do {endpoint.path}.",
                code="unsupported_endpoint",
                param="model",
            )
        return model

    def find(self, requested: str | None, served: Mapping[str, frozenset[str]]) -> str:
        """The served model of this name. Raises as `resolve`."""
        return requested if requested and requested in served else self._named(requested, served)

    def awaited(
        self, requested: str | None, served: Mapping[str, frozenset[str]], known: Collection[str]
    ) -> str:
        """The model whose workers a request needs, also while it has none: a served one; one of `known`,
        which were served before or have an alias; or an expected one. ANY: no worker has said yet what it
        serves. Raises RequestError as `resolve`, and NoWorkerError for no model.
        """
        missing: RequestError | None = None
        try:
            return self.find(requested, served)
        except NoWorkerError:
            pass
        except RequestError as error:
            if error.code != "model_not_found":
                raise
            missing = error
        name = self._default if not requested or requested == DEFAULT_MODEL else requested
        if not name:
            return ANY
        for one in (name, name.partition(":")[0]):
            if one in known or one in self._wanted:
                return one
        if missing is None and name == self._default:
            return name
        if missing is None and not known:
            return ANY
        raise missing or self._unknown(name, known)

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
        raise self._unknown(requested, served)

    @staticmethod
    def _unknown(requested: str, served: Collection[str]) -> RequestError:
        return RequestError(
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


def _names(models: Collection[str]) -> str:
    return ", ".join(repr(name) for name in models)

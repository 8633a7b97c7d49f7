"""An endpoint: SGLang's classification, of models that make embeddings."""

from __future__ import annotations

from pdserve.router.api.endpoints import Endpoint

CLASSIFY = Endpoint(
    path="/v1/classify",
    summary="Classification, of models that make it",
    task="embed",  # the model must be one that computes whole inputs
    prompt_fields=("input",),
    salt="header",  # else tenants would share the KV cache of this endpoint
)

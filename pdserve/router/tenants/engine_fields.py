"""Fields of a request by which a client controls the engine, and not only its own answer. Pure.

A router with API keys refuses them (400), unless the tenant may set them (`controls_engine`). They are not
taken out quietly: a client that sends one expects an effect. A router without keys has one user, its
operator, and passes everything on. The names are those of SGLang 0.5.23 (`GenerateReqInput`, and the request
classes of its OpenAI endpoints), and two of our own lookup.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Final

import msgspec

from pdserve.errors import RequestError
from pdserve.router.api.request_body import RequestView, decode_view

_RANK: Final = "it decides which rank computes"
_CONNECTS: Final = "it makes a worker connect to an address"
_NAMES: Final = "it could name a request or a session of others"
_CACHE: Final = "it tells caches what a prompt is"
_UNCOUNTED: Final = "what it stands for is not counted"
_METRICS: Final = "it changes what the operator measures"

ENGINE_FIELDS: Final = {
    "received_time": "it decides who is served first",
    "kv_hints": "it decides what caches keep",
    "routed_dp_rank": _RANK,
    "data_parallel_rank": _RANK,
    "disagg_prefill_dp_rank": _RANK,
    "routing_key": _RANK,
    "decode_tp_size": _RANK,
    "bootstrap_host": _CONNECTS,
    "bootstrap_port": _CONNECTS,
    "bootstrap_room": _CONNECTS,
    "bootstrap_pair_key": _CONNECTS,
    "encoder_urls": _CONNECTS,
    "http_worker_ipc": _CONNECTS,
    "need_wait_for_mm_inputs": _CONNECTS,
    "num_items_assigned": _CONNECTS,
    "custom_logit_processor": "it is code that runs in the worker",
    "rid": _NAMES,
    "session_id": _NAMES,
    "session_params": _NAMES,
    "lora_id": _NAMES,
    "extra_key": _CACHE,
    "mm_hashes": _CACHE,
    "mm_content_hashes": _CACHE,
    "input_embeds": _UNCOUNTED,
    "embed_overrides": _UNCOUNTED,
    "background": "what it computes after its answer is not counted",
    "embed_override_token_id": _UNCOUNTED,
    "query_embed_overrides": _UNCOUNTED,
    "item_embed_overrides": _UNCOUNTED,
    "positional_embed_overrides": _UNCOUNTED,
    "token_indices_to_pool": _UNCOUNTED,
    "custom_params": "it is for custom_logit_processor",
    "return_hidden_states": "it shows the inside of the model",
    "no_logs": _METRICS,
    "custom_labels": _METRICS,
    "external_trace_header": _METRICS,
    "log_metrics": _METRICS,
    "hashes": "they name pages of all tenants",
    "nodes": "they are the hosts of the pool",
}
"""Each field, and why a tenant may not set it."""

_EMPTY: Final = msgspec.Raw(b"")
TenantView: Final = msgspec.defstruct(
    "TenantView",
    [(name, msgspec.Raw, _EMPTY) for name in (*ENGINE_FIELDS, "image_data", "video_data", "audio_data")],
    bases=(RequestView,),
    gc=False,
)
"""A `RequestView` with the fields that a tenant may not set, and SGLang's own fields of media."""
_decoder: Final = msgspec.json.Decoder(TenantView)
_given: Final = attrgetter(*ENGINE_FIELDS)


def parse_tenant_request(body: bytes) -> RequestView:
    """As `parse_request`, for a router with API keys."""
    view = decode_view(_decoder, body)
    assert isinstance(view, RequestView)
    return view


def empty_tenant_request() -> RequestView:
    """As `parse_tenant_request` gives it for a body without members."""
    view = TenantView()
    assert isinstance(view, RequestView)
    return view


def check_fields(view: RequestView) -> None:
    """Raises RequestError (400) if the request sets a field that controls the engine. `view`: from
    `parse_tenant_request`.
    """
    given = _given(view)
    if not any(given):
        return
    for (name, reason), said in zip(ENGINE_FIELDS.items(), given, strict=True):
        if said and bytes(said) != b"null":
            message = f"You may not set '{name}': {reason}."
            raise RequestError(400, message, param=name)

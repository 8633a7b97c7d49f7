"""Salts of requests for embeddings, on their way to SGLang's scheduler."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pdserve.engine.sglang.children.embedding_salts import salted, salting


def arrived(lora_name: str | None) -> tuple[str | None, str | None]:
    """(salt of the request, name of the adapter) in the scheduler."""
    request, seen = SimpleNamespace(cache_salt=None), []

    def record(scheduler: object, req: object, lora_name: str | None) -> None:
        seen.append((scheduler, req, lora_name))

    salting(record)("scheduler", request, lora_name)
    [(scheduler, told, name)] = seen
    assert (scheduler, told) == ("scheduler", request)
    return request.cache_salt, name


@pytest.mark.parametrize("salt", [None, "tenant/acme", "tenant/acme/\0\"'ü"])
@pytest.mark.parametrize("lora_name", [None, "adapter"])
def test_the_scheduler_gets_salt_and_adapter(salt: str | None, lora_name: str | None) -> None:
    assert arrived(salted(lora_name, salt)) == (salt, lora_name)


@pytest.mark.parametrize("salt", [None, "tenant/acme"])
def test_a_client_cannot_choose_a_salt_by_the_name_of_an_adapter(salt: str | None) -> None:
    forged = salted(None, "tenant/victim")
    assert arrived(salted(forged, salt)) == (salt, None)

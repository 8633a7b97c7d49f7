"""The published document is right: schemathesis makes requests from it, valid ones and others, and holds
the router's answers to it. Its phase of coverage takes some minutes and is run by hand. Workers are scripted;
they check bodies as SGLang does, by the same schemas.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from pdserve.router.api.endpoints import ENDPOINTS
from pdserve.router.api.openapi import complete
from tests.support.router.harness import Harness, disagg
from tests.support.router.mock_worker import ANSWER, EVENTS, REPORT, MockWorker, Received, Wire, stream

SEED = 20261121
PHASES = "examples,fuzzing,stateful"
HOOKS = '''
import schemathesis

@schemathesis.hook
def map_body(context, body):
    """Mostly the model that is there; any other is answered 404."""
    if isinstance(body, dict) and isinstance(body.get("model"), str) and len(body["model"]) % 4:
        body["model"] = "m"
    return body
'''
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
SAID: dict[str, Any] = {
    "ChatCompletionResponse": json.loads(ANSWER),
    "CompletionResponse": {
        "id": "1",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "usage": USAGE,
        "choices": [{"index": 0, "text": "a", "logprobs": None, "finish_reason": "stop"}],
    },
    "EmbeddingResponse": {
        "object": "list",
        "model": "m",
        "usage": USAGE,
        "data": [{"object": "embedding", "index": 0, "embedding": [0.5]}],
    },
    "Generated": {"text": "a", "output_ids": [1], "meta_info": {"prompt_tokens": 1, "completion_tokens": 1}},
    "TokenizeResponse": {"tokens": [1], "count": 1, "max_model_len": 9},
    "DetokenizeResponse": {"text": "a"},
    "KvFound": {
        "page_tokens": 64,
        "prompt_tokens": 1,
        "prompt_pages": 0,
        "tokens": 0,
        "memory_tokens": 0,
        "tiers": {},
    },
    "AnthropicMessagesResponse": {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "a"}],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 1, "output_tokens": 1},
    },
    "AnthropicCountTokensResponse": {"input_tokens": 1},
    "ClassifyResponse": {
        "id": "1",
        "object": "list",
        "created": 1,
        "model": "m",
        "data": [{"index": 0, "label": "a", "probs": [1.0], "num_classes": 1}],
        "usage": USAGE,
    },
    "ResponsesResponse": {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "model": "m",
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2},
    },
    "Reranked": [{"score": 0.5, "document": "a", "index": 0}],
    "TranscriptionResponse": {"text": "a", "usage": {"type": "duration", "seconds": 1}},
    "ScoringResponse": {"object": "scoring", "model": "m", "scores": [[0.5]], "usage": USAGE},
}


class CheckingWorker(MockWorker):
    """Answers what the document says, or 400 to a body that does not fit it."""

    def __init__(self, role: str) -> None:
        super().__init__(role, tasks=["generate", "embed"])
        self.answered = 0
        self.validators: dict[str, jsonschema_rs.Validator] = {}

    def learn(self, document: dict[str, Any]) -> None:
        components = {"components": document["components"]}
        for path in ENDPOINTS:
            content = document["paths"][path]["post"]["requestBody"]["content"]
            if "application/json" in content:
                schema = content["application/json"]["schema"]
                self.validators[path] = jsonschema_rs.validator_for({**components, **schema})

    async def _default(self, wire: Wire, request: Received) -> None:
        endpoint = request.target.partition("endpoint=")[2] or request.path
        if endpoint in ENDPOINTS and ENDPOINTS[endpoint].is_form:
            await wire.json(200, SAID[ENDPOINTS[endpoint].response_schema])
            return
        validator = self.validators.get(endpoint)
        if validator is None or request.method != "POST":
            await super()._default(wire, request)
            return
        kind = request.headers["content-type"].partition(";")[0].strip().lower()
        if kind != "application/json" or not validator.is_valid(request.json()):
            await wire.json(400, {"object": "error", "message": "the body does not fit", "code": 400})
        elif request.path == "/pd/prefill":
            await wire.json(200, REPORT)
        else:
            self.answered += 1
            row = ENDPOINTS[endpoint]
            if row.streams and request.json().get("stream"):
                await stream(EVENTS)(wire, request)
            else:
                await wire.json(200, SAID[row.response_schema])


async def checked(harness: Harness, hooks: Path, *words: str) -> tuple[int, str]:
    """schemathesis' exit status and report."""
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{harness.url}/openapi.json"),
        *("--checks", "all", "--seed", str(SEED), "--no-color", "--suppress-health-check", "all"),
        *("--generation-database", "none", "--request-timeout", "20", *words),
    ]
    running = await asyncio.create_subprocess_exec(
        *command,
        cwd=hooks.parent,
        env={**os.environ, "SCHEMATHESIS_HOOKS": hooks.stem, "PYTHONPATH": str(hooks.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said, _ = await running.communicate()
    return running.returncode or 0, said.decode()


async def test_every_path_of_the_document_answers_with_a_status_that_it_names() -> None:
    async with disagg(make=CheckingWorker) as (harness, prefills, decodes):
        document = (await harness.get("/openapi.json")).json()
        for worker in (*prefills, *decodes):
            assert isinstance(worker, CheckingWorker)
            worker.learn(document)
        assert set(ENDPOINTS) <= set(document["paths"])
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                target = path.replace("{model}", "m")
                if method == "post":
                    response = await harness.post(target, {"model": "m"}, {})
                else:
                    response = await harness.get(target)
                assert str(response.status) in operation["responses"], (method, path, response.body)


@pytest.mark.extended
@pytest.mark.long
@pytest.mark.timeout(280)
async def test_schemathesis_finds_nothing_wrong_with_the_document(tmp_path: Path) -> None:
    hooks = tmp_path / "api_hooks.py"
    hooks.write_text(HOOKS)
    async with disagg(make=CheckingWorker) as (harness, prefills, decodes):
        document = (await harness.get("/openapi.json")).json()
        for worker in (*prefills, *decodes):
            assert isinstance(worker, CheckingWorker)
            worker.learn(document)
        status, report = await checked(harness, hooks, "--phases", PHASES, "--max-examples", "3")
        assert status == 0, report
        assert decodes[0].answered > 10, report  # type: ignore[attr-defined]


@pytest.mark.extended
@pytest.mark.long
@pytest.mark.timeout(120)
async def test_a_document_that_is_wrong_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: here the document forgets that a model may be unknown."""

    def forgetful(document: dict[str, Any], choices: int) -> dict[str, Any]:
        made = complete(document, choices)
        del made["paths"]["/v1/models/{model}"]["get"]["responses"]["404"]
        return made

    monkeypatch.setattr("pdserve.router.app.routes.complete", forgetful)
    hooks = tmp_path / "api_hooks.py"
    hooks.write_text(HOOKS)
    async with disagg(make=CheckingWorker) as (harness, _, _):
        words = ("--phases", "fuzzing", "--max-examples", "1", "--include-path", "/v1/models/{model}")
        status, report = await checked(harness, hooks, *words)
        assert status == 1, report
        assert "404" in report

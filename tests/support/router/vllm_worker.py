"""A scripted vLLM server: OpenAI's routes, `/health`, `/v1/models`, and none under `/pd/`."""

from __future__ import annotations

from tests.support.router.mock_worker import ANSWER, EVENTS, MockWorker, Received, Wire


class VllmWorker(MockWorker):
    """Answers as vLLM 0.32.0 does. `owned_by`: what its models say."""

    owned_by = "vllm"

    async def _default(self, wire: Wire, request: Received) -> None:
        if request.path == "/health":
            await wire.body(200 if self.ready else 503, b"")
        elif request.path == "/v1/models":
            base = {
                "id": self.info["model"],
                "object": "model",
                "owned_by": self.owned_by,
                "max_model_len": 4096,
            }
            adapter = {"id": "an-adapter", "object": "model", "owned_by": "vllm", "parent": base["id"]}
            await wire.json(200, {"object": "list", "data": [adapter, base]})
        elif request.path.startswith("/pd/") or request.method != "POST":
            await wire.json(404, {"detail": "Not Found"})
        elif request.json().get("stream"):
            await wire.head(200, "text/event-stream; charset=utf-8")
            for data in EVENTS:
                await wire.chunk(data)
            await wire.end()
        else:
            await wire.body(200, ANSWER)

    def asked(self) -> list[Received]:
        """Requests for answers, without probes."""
        return [one for one in self.requests if one.method == "POST"]

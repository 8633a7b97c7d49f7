"""A whole router process at its most talkative: TLS, keys, faults; it logs no secret and no prompt."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from pathlib import Path

import pytest

from tests.support.certificates import certificate
from tests.support.router.harness import Connection, chat_body
from tests.support.router.mock_worker import MockWorker, answer, close, raw_answer, workers
from tests.support.router.process import CHAT, RouterProcess

KEY, WRONG = "canary-api-key-1234567890", "canary-wrong-key-1234567890"
ADMIN, TOKEN = "canary-admin-key-1234567890", "canary-cluster-token-1234567890"


@pytest.mark.timeout(90)
async def test_tls_is_spoken_and_nothing_secret_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate(tmp_path)

    prefill, decode = MockWorker("prefill"), MockWorker("decode")
    prefill.token = decode.token = TOKEN
    async with workers(prefill, decode):
        config = tmp_path / "router.toml"
        config.write_text(
            f'log_level = "debug"\nprefill = ["{prefill.url}"]\ndecode = ["{decode.url}"]\n'
            f'[access]\ntls_cert_file = "{cert}"\ntls_key_file = "{key}"\n[admin]\nport = 0\n'
        )
        for name, secret in (("API_KEYS", f"alice={KEY}"), ("ADMIN_KEY", ADMIN), ("CLUSTER_TOKEN", TOKEN)):
            monkeypatch.setenv(f"PDSERVE_{name}", secret)
        router = await RouterProcess.start("--config", str(config))
        assert router.process.stderr is not None
        said, ports = "", dict[str, int]()
        while len(ports) < 2:
            line = (await router.process.stderr.readline()).decode()
            assert line, said
            said += line
            if found := re.search(r"listening on https://[^:]+:(\d+)|admin API on port (\d+)", line):
                ports["public" if found[1] else "admin"] = int(found[1] or found[2])
        try:
            await ask_everything(ports, cert, prefill, decode)
        finally:
            router.process.terminate()
            status, rest = await router.ended()
    said += rest
    assert status == 0
    assert "DEBUG" in said
    assert "a request was refused" in said
    assert "another worker is tried" in said
    assert "canary" not in said
    assert "Traceback" not in said


async def ask_everything(ports: dict[str, int], cert: Path, prefill: MockWorker, decode: MockWorker) -> None:
    """Good and bad requests, each with canaries wherever a client can put one."""
    tls = ssl.create_default_context(cafile=str(cert))
    prompt = [{"role": "user", "content": "canary-prompt"}]
    body = chat_body(messages=prompt, user="canary-user", cache_salt="canary-salt")

    async def ask(
        path: str, data: bytes, key: str, port: int, secure: bool = True, method: str = "POST"
    ) -> int:
        opened = await asyncio.open_connection("127.0.0.1", port, ssl=tls if secure else None)
        connection = Connection(*opened)
        headers = {"authorization": f"Bearer {key}", "x-session-id": "canary-session", "cookie": "canary=1"}
        await connection.send(path, data, headers, method)
        response = await connection.response()
        connection.leave()
        return response.status if response.is_whole else -response.status

    public, plain = ports["public"], json.dumps(body).encode()
    streamed = json.dumps({**body, "stream": True}).encode()
    assert await ask(CHAT, plain, KEY, public) == 200
    assert await ask(CHAT, streamed, KEY, public) == 200
    assert await ask(CHAT, plain, WRONG, public) == 401
    assert await ask(CHAT, b'{"model": "canary-model"}', KEY, public) == 404
    assert await ask(CHAT, b'{"messages": "canary-prompt', KEY, public) == 400
    assert await ask(CHAT, b'{"user": ["canary-user"]}', KEY, public) == 400
    assert await ask("/v1/canary-path?canary-query", b"", KEY, public, method="GET") == 404
    prefill.script(
        "/pd/prefill", answer(200, {"prompt_tokens": "canary-report"}), close(), answer(503, "canary")
    )
    for _ in range(3):
        assert await ask(CHAT, plain, KEY, public) == 200
    decode.script(CHAT, answer(400, {"message": "canary-echo"}), raw_answer(b"canary garbage\r\n\r\n"))
    assert await ask(CHAT, plain, KEY, public) == 400
    assert await ask(CHAT, plain, KEY, public) == 502
    decode.script(CHAT, close(b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\ncanary"))
    await ask(CHAT, streamed, KEY, public)
    assert await ask("/workers", b'{"url": "canary-url"}', ADMIN, ports["admin"], secure=False) == 400
    assert await ask("/tenants", b"", WRONG, ports["admin"], secure=False, method="GET") == 401
    assert await ask("/reload", b"", ADMIN, ports["admin"], secure=False) == 200

"""Asks routers of another network for chats: `python -m tests.support.netns.ask KEY URL...`.

One conversation; each URL gets its next turn. Prints a line of JSON for each: status, headers, text.
"""

from __future__ import annotations

import json
import sys

import httpx

TIMEOUT_S = 120.0
LINES = 100  # more tokens than a prompt without a prefill stage has


def main(key: str, urls: list[str]) -> None:
    messages = []
    with httpx.Client(trust_env=False, timeout=TIMEOUT_S, headers={"authorization": f"Bearer {key}"}) as http:
        for url in urls:
            messages.append({"role": "user", "content": "Tell me more of the same. " * LINES})
            body = {"model": "", "messages": messages, "max_tokens": 16, "temperature": 0}
            body["model"] = http.get(f"{url}/v1/models").json()["data"][0]["id"]
            answer = http.post(f"{url}/v1/chat/completions", json=body, headers={"x-session-id": "one"})
            text = answer.json()["choices"][0]["message"]["content"] if answer.is_success else answer.text
            messages.append({"role": "assistant", "content": text})
            print(json.dumps({"status": answer.status_code, "headers": dict(answer.headers), "text": text}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

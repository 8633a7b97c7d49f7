"""`pdserve` itself, but for workers, which are stand-ins that ask for the cluster's token:
`real_but_workers.py WORD...`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support.router.mock_worker import ANSWER, MockWorker


def serve(config: dict[str, Any]) -> None:
    """Answer as a worker does that has the token of its configuration."""
    home = config["engine"]
    info = json.dumps(MockWorker("agg", home.get("served_model_name", "m")).info).encode()
    ready = json.dumps({"ready": True, "draining": False, "pool": "up", "load": None}).encode()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(ready if self.path == "/pd/ready" else info, is_open=self.path == "/pd/ready")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.answer(ANSWER)

        def answer(self, body: bytes, *, is_open: bool = False) -> None:
            shown = self.headers.get("authorization") == f"Bearer {config['cluster_token']}"
            self.send_response(200 if shown or is_open else 401)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in home["host"] else socket.AF_INET

    Server((home["host"], home["port"]), Handler).serve_forever()


if __name__ == "__main__":
    if sys.argv[1] == "agg":
        serve(tomllib.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text()))
    os.execv(sys.executable, [sys.executable, "-m", "pdserve", *sys.argv[1:]])

"""A process that stands in for pdserve's: `stand_in.py ROLE... --config FILE` behaves as its configuration
says.

Keys (in `[engine]` for workers): host, port; `behave` one of serve (default), die_at_start (prints 30 lines,
exits 3), die_at_restart (exits with `status` at each start but its first), stumble (only at its second),
hang_once (never listens at its second start), never_ready, stubborn (ignores SIGTERM),
graceful (exits 0 on SIGTERM), parent (has a child in its session that ignores SIGTERM), orphan (the same, and
exits 3 at its start). `GET /die` makes it exit 4, `GET /talk` print a mebibyte. Every start and every request
to be ready is one line in `journal`.
"""

import json
import os
import signal
import socketserver
import ssl
import subprocess
import sys
import time
import tomllib
from http.server import BaseHTTPRequestHandler
from pathlib import Path

role = sys.argv[1]
config = tomllib.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
home = config.get("engine", config)
behave = home.get("behave", "serve")
again = "PDSERVE_RESTARTED" in os.environ
journal = Path(home["journal"]) if "journal" in home else None


def note(what):
    if journal is not None:
        with journal.open("a") as file:
            file.write(
                json.dumps({"role": role, "what": what, "pid": os.getpid(), "config": config, "again": again})
                + "\n"
            )


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            print("asked to die", flush=True)
            os._exit(4)
        if self.path == "/talk":
            for _ in range(1024):
                print("x" * 1023, flush=True)
        if self.path == "/v1/models":
            self.answer(200, {"data": [{"id": "stand-in-model"}]})
        elif behave == "never_ready":
            self.answer(503, {})
        else:
            note("ready")
            self.answer(200, {})

    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True


signal.signal(signal.SIGHUP, lambda *_: note("reload"))
note("start")
starts = journal.read_text().count(f'"role": "{role}", "what": "start"') if journal is not None else 1
if (behave == "die_at_restart" and starts > 1) or (behave == "stumble" and starts == 2):
    sys.exit(home["status"])
if behave == "hang_once" and starts == 2:
    signal.pause()
if behave == "die_at_start":
    for i in range(30):
        print(f"line {i}", flush=True)
    sys.exit(3)
if behave == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if behave == "graceful":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
if behave in ("parent", "orphan"):
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('child up', flush=True)\n"
    )
    subprocess.Popen([sys.executable, "-c", code + "while True: time.sleep(60)"])
if behave == "orphan":
    sys.exit(3)
if role == "pool":
    address = config["listen"][0].removeprefix("unix:")
    Path(address).unlink(missing_ok=True)
    server = socketserver.ThreadingUnixStreamServer(address, socketserver.StreamRequestHandler)
else:
    server = Server((home["host"], home["port"]), Handler)
    if "tls_cert_file" in config.get("access", {}):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config["access"]["tls_cert_file"], config["access"]["tls_key_file"])
        server.socket = context.wrap_socket(server.socket, server_side=True)
print(f"{role} listens", flush=True)
server.serve_forever()
time.sleep(60)

"""A process that stands in for pdserve's: `stand_in.py ROLE... --config FILE` behaves as its configuration
says.

Keys (in `[engine]` for workers): host, port; `behave` one of serve (default), die_at_start (prints 30 lines,
exits 3), stubborn (ignores SIGTERM), graceful (notes it and exits 0 on SIGTERM), parent (has a child in its
session that ignores SIGTERM). `GET /die` makes it exit 4, `GET /talk` print a mebibyte. Every start and every
request to be ready is one line in `journal`.

`stand_in.py pool upgrade ADDRESS` asks a pool node to upgrade itself, and waits until it has done so. One
with the key `upgrades_when` does so once the file of that name is there, and says what is in it: why it
failed.
"""

import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import time
import tomllib
from http.server import BaseHTTPRequestHandler
from pathlib import Path


def connected(address):
    scheme, _, rest = address.partition(":")
    if scheme == "tcp":
        host, _, port = rest.rpartition(":")
        return socket.create_connection((host, int(port)))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(rest)
    return connection


if sys.argv[1:3] == ["pool", "upgrade"]:
    with connected(sys.argv[3]) as node, node.makefile("r") as said:
        node.sendall(b"upgrade\n")
        sys.exit(said.read().strip() or None)

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


class PoolHandler(socketserver.StreamRequestHandler):
    def handle(self):
        if self.rfile.readline() != b"upgrade\n":
            return  # only looked whether somebody is there
        note("upgrade")
        if "upgrades_when" in config:
            file = Path(config["upgrades_when"])
            while not file.exists():
                time.sleep(0.02)
            self.wfile.write(file.read_bytes())
        note("upgraded")


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True


signal.signal(signal.SIGHUP, lambda *_: note("reload"))
note("start")
if behave == "die_at_start":
    for i in range(30):
        print(f"line {i}", flush=True)
    sys.exit(3)
if behave == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if behave == "graceful":
    signal.signal(signal.SIGTERM, lambda *_: (note("drain"), os._exit(0)))
if behave == "parent":
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('child up', flush=True)\n"
    )
    subprocess.Popen([sys.executable, "-c", code + "while True: time.sleep(60)"])
if role == "pool":
    scheme, _, address = config["listen"][0].partition(":")
    if scheme == "tcp":
        at, _, port = address.rpartition(":")
        server = Server((at, int(port)), PoolHandler)
    else:
        Path(address).unlink(missing_ok=True)
        server = socketserver.ThreadingUnixStreamServer(address, PoolHandler)
else:
    server = Server((home["host"], home["port"]), Handler)
print(f"{role} listens", flush=True)
server.serve_forever()
time.sleep(60)

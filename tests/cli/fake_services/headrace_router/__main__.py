"""Stands for the router: answers health checks and completions. FAKE_ROUTER: ok, refuse (exit code 2)."""

import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if os.environ.get("FAKE_ROUTER") == "refuse":
    sys.stderr.write("headrace-router: HEADRACE_MAX_INFLIGHT: must be int >= 1, not '0'\n")
    sys.exit(2)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer({"usage": {"completion_tokens": 1}})

    def _answer(self, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


ThreadingHTTPServer((os.environ["HEADRACE_HOST"], int(os.environ["HEADRACE_PORT"])), Handler).serve_forever()

"""A web server of a folder that can refuse, wait and break off."""

from __future__ import annotations

import functools
import http.server
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Server:
    url: str
    ranges: list[str | None] = field(default_factory=list)
    """The Range header of every GET."""
    heads: int = 0
    sent: int = 0
    fail: int = 0
    """How many of the next requests end in an error of the server."""
    pause: float = 0
    """Seconds that an answer takes."""
    at_once: int = 0
    """The largest number of requests under way together."""
    now: int = 0
    broken: str = ""
    """What begins so is answered by an error, or (`how`) by a reset of the connection, or by this status."""
    how: str = "error"
    login: str = ""
    """The Authorization header that is asked for."""


def serve(root: Path, ranged: bool) -> Iterator[Server]:
    lock = threading.Lock()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            with lock:
                server.now += 1
                server.at_once = max(server.at_once, server.now)
            try:
                time.sleep(server.pause)
                self.answer()
            finally:
                with lock:
                    server.now -= 1

        def do_HEAD(self) -> None:
            server.heads += 1
            if self.may_enter():
                super().do_HEAD()

        def may_enter(self) -> bool:
            allowed = not server.login or self.headers.get("Authorization") == server.login
            if not allowed:
                self.send_error(401)
            return allowed

        def answer(self) -> None:
            asked = self.headers.get("Range")
            server.ranges.append(asked)
            if not self.may_enter():
                return
            if server.broken and self.path.startswith(server.broken):
                if server.how == "error" or server.how.isdigit():
                    self.send_error(500 if server.how == "error" else int(server.how))
                else:
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    os.close(self.connection.detach())
                return
            if server.fail:
                server.fail -= 1
                self.send_error(503)
                return
            path = Path(self.translate_path(self.path))
            if asked is None or not ranged or not path.is_file():
                server.sent += path.stat().st_size if path.is_file() else 0
                super().do_GET()
                return
            content = path.read_bytes()
            first, _, last = asked.removeprefix("bytes=").partition("-")
            part = content[int(first) : int(last) + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            server.sent += len(part)  # before the client can have it and ask
            self.wfile.write(part)

        def log_message(self, *arguments: object) -> None:
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(root)))
    server = Server(f"http://127.0.0.1:{httpd.server_address[1]}")
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield server
    httpd.shutdown()
    httpd.server_close()
    thread.join()

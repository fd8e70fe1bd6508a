"""A web server for links that are dead in every way."""

from __future__ import annotations

import base64
import http.server
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

LOGIN = "Basic " + base64.b64encode(b"user:secret").decode()


@dataclass
class LinkServer:
    """pictures: path -> bytes. asked: requests by path, without the query; queries, cookies, agents: as received. gone:
    paths that are 404 now; away: every connection is broken off; slow, at_once: slow answers under way, and the most of
    them."""

    url: str = ""
    pictures: dict[str, bytes] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    queries: set[str] = field(default_factory=set)
    cookies: set[str] = field(default_factory=set)
    agents: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    away: bool = False
    slow: int = 0
    at_once: int = 0


def serve_links() -> Iterator[LinkServer]:
    server = LinkServer()
    lock = threading.Lock()
    closing = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            with lock:
                server.asked[path] += 1
                server.queries |= {query} if query else set()
                server.cookies |= set(self.headers.get_all("Cookie", []))
                server.agents.add(self.headers["User-Agent"])
            if server.away:
                self.close_connection = True
                return
            picture = server.pictures.get(path.rpartition("!")[2], b"")
            kind = path.partition("!")[0].strip("/")
            if path in server.gone or kind == "404":
                self.send_error(404)
            elif kind == "loop":
                self.redirect(self.path)
            elif kind == "file":
                self.redirect("file:///etc/hostname")
            elif kind == "moved":
                self.redirect(path.rpartition("!")[2])
            elif kind == "slow":
                with lock:
                    server.slow += 1
                    server.at_once = max(server.at_once, server.slow)
                closing.wait(2)
                with lock:
                    server.slow -= 1
                self.answer(b"")
            elif kind == "trickle":
                self.answer(picture, len(picture), 0.05)
            elif kind == "cut":
                self.answer(picture[: len(picture) // 2], len(picture))
            elif kind == "login" and self.headers.get("Authorization") != LOGIN:
                self.send_error(401)
            elif kind.isdigit():
                self.send_error(int(kind))
            elif kind == "page":
                self.answer(b"<html>this picture is gone</html>")
            elif kind == "garbage":
                self.wfile.write(b"HTTP/9 what\r\n\r\n")
            elif kind == "endless":
                self.answer(bytes(3 << 20))
            else:
                self.answer(picture)

        def redirect(self, to: str) -> None:
            self.send_response(302)
            self.send_header("Location", to)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def answer(self, data: bytes, length: int | None = None, pause: float = 0) -> None:
            self.send_response(200)
            self.send_header("Set-Cookie", "who=you; Path=/")
            if length is not None:
                self.send_header("Content-Length", str(length))
            self.end_headers()  # else the end of the connection ends the answer
            for byte in range(0, len(data), 1 << 14 if not pause else 4):
                self.wfile.write(data[byte : byte + (1 << 14 if not pause else 4)])
                if pause and closing.wait(pause):
                    return

        def log_message(self, *arguments: object) -> None:
            pass

    class Http(http.server.ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # clients that went away

    httpd = Http(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{httpd.server_address[1]}"
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield server
    closing.set()
    httpd.shutdown()
    httpd.server_close()
    thread.join()

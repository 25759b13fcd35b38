"""A real HTTP server on the loopback interface."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, dict[str, str], str] | None  # status, headers, body; None: the server hangs up


@contextmanager
def http_server(reply: Callable[[str, str, Message, bytes], Reply]) -> Iterator[str]:
    """Yields its address. reply: (method, path, headers, body) → what the client gets; in a thread a connection"""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            answer = reply(self.command, self.path, self.headers, body)
            if answer is None:
                self.close_connection = True
                return
            status, headers, text = answer
            data = text.encode()
            with suppress(OSError):  # the client may have gone
                self.send_response(status)
                for name, value in ({"content-length": str(len(data))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket.listen(128)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()

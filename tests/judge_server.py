"""A local server of chat completions for tests: what it replies is decided by a function of the answer to grade."""

import json
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Reply = str | int | None
"""The text of a reply, the status of an error, or None for a connection that is closed without a reply."""


class JudgeServer(ThreadingHTTPServer):
    """Serves from threads, from `with` to the end of the block; `url` is the base URL of its interface."""

    request_queue_size = 256
    daemon_threads = True

    def __init__(self, reply: Callable[[str], Reply]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply = reply
        self.calls: Counter[str] = Counter()  # by the text of the answer
        self.closing = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def __enter__(self) -> "JudgeServer":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version, wbufsize = "HTTP/1.1", -1  # one packet per reply
    server: JudgeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions"
        text = body["messages"][0]["content"].split("<answer>\n")[1].split("\n</answer>")[0]
        self.server.calls[text] += 1
        reply = self.server.reply(text)
        if reply is None:
            self.close_connection = True
            return
        content = json.dumps({"choices": [{"message": {"content": reply}}]}).encode()
        self.send_response(reply if isinstance(reply, int) else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass

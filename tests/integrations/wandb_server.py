"""A server with the part of W&B's interface that a run needs: its state for a resume, its history and its files."""

import gzip
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROJECT = {"id": "p", "name": "bandpo", "entity": {"id": "e", "name": "me"}}


class WandbServer(ThreadingHTTPServer):
    """The server on a free port of this machine, with the one run that it has.

    Attributes:
        history: the rows of the history.
        files: names of the uploaded files.
        exit_code: of the finished run.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.history: list[dict[str, Any]] = []
        self.files: set[str] = set()
        self.exit_code: int | None = None
        self.exists = False
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """Print nothing when a killed client has closed its connection."""

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Return the data of a GraphQL query."""
        match = re.search(r"(?:query|mutation)\s+(\w+)", query)
        run = {"id": "b", "name": variables.get("name"), "displayName": "first"}
        run["historyLineCount"] = len(self.history)
        match match and match[1]:
            case "UpsertBucket":
                self.exists = True
                return {"upsertBucket": {"bucket": {**run, "project": PROJECT}, "inserted": True}}
            case "RunResumeStatus":
                tail = json.dumps([json.dumps(row) for row in self.history[-1:]])
                state = {
                    **dict.fromkeys(("logLineCount", "eventsLineCount"), 0), "historyTail": tail, "eventsTail": "[]",
                    "config": "{}", "summaryMetrics": "{}", "tags": [], "wandbConfig": json.dumps({"t": {"value": 1}}),
                }  # fmt: skip
                return {"model": {**PROJECT, "bucket": {**run, **state} if self.exists else None}}
            case "CreateRunFiles":
                url = f"{self.url}/upload"
                files = [{"name": name, "uploadUrl": f"{url}/{name}"} for name in variables["files"]]
                return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        return {"viewer": {"id": "u", "entity": "me", "flags": "{}"}, "serverInfo": {"features": []}}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbServer

    def log_message(self, *_: object) -> None:
        pass

    def _read(self) -> bytes:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(content) if self.headers.get("Content-Encoding") == "gzip" else content

    def _reply(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._reply({})

    def do_PUT(self) -> None:
        self._read()
        self.server.files.add(self.path.removeprefix("/upload/"))
        self._reply({})

    def do_POST(self) -> None:
        request = json.loads(self._read())
        if not self.path.endswith("/file_stream"):
            data = self.server.answer(request.get("query", ""), request.get("variables") or {})
            return self._reply({"data": data})
        if chunk := request.get("files", {}).get("wandb-history.jsonl"):
            self.server.history[chunk["offset"] :] = map(json.loads, chunk["content"])
        if request.get("complete"):
            self.server.exit_code = request["exitcode"]
        return self._reply({})

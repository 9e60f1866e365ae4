"""A retriever, its web pages and a model that sums up, as one process: `python web.py`.

It prints its port, and answers GET /seen with what it was asked. What a query asks for:

    fail N      500 to the first N posts of it
    slow N      nothing for 30 s, to the first N posts of it
    form X      X in place of the documents
    vary        a document with a number that grows with every request
    page X      a document whose page is X
    nothing     no documents
"""

import json
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PAGES = {
    "/owl": (200, "text/html; charset=utf-8", "<title>Owls</title><style>p{}</style>"
             "<p>Owls see at <b>night</b>.<script>no()</script><p>They &amp; mice\u2028meet."),
    "/plain": (200, "text/plain", "as it is"),
    "/paper": (200, "application/pdf", "%PDF"),
    "/gone": (404, "text/html", "gone"),
    "/moved": (302, "text/html", "/owl"),
    "/broken": (503, "text/html", "later"),
}  # fmt: skip
posts: Counter[str] = Counter()
seen: list[tuple[str, object, object]] = []
lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    """See above."""

    def answer(self, status: int, kind: str, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            **headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def note(self, body: object) -> int:
        with lock:
            seen.append((self.path, self.headers.get("Authorization"), body))
            key = json.dumps(body)
            posts[key] += 1
            return posts[key]

    def do_GET(self) -> None:
        if self.path == "/seen":
            return self.answer(200, "application/json", json.dumps(seen).encode())
        self.note(None)
        status, kind, text = PAGES[self.path]
        more = {"Location": text} if status == 302 else {}
        return self.answer(status, kind, text.encode(), **more)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = self.note(body)
        if "messages" in body:
            words = body["messages"][-1]["content"].split()
            reply = {"message": {"content": f" summed up {len(words)} words, no. {len(seen)} "}}
            return self.answer(200, "application/json", json.dumps({"choices": [reply]}).encode())
        what, _, of = body["query"].partition(" ")
        if what == "fail" and count <= int(of):
            return self.answer(500, "text/plain", b"out of order")
        if what == "slow" and count <= int(of):
            time.sleep(30)
        if what == "form":
            return self.answer(200, "application/json", of.encode())
        found = [
            {"id": str(n), "contents": f'"Title {n}"\nOf {body["query"]}.'}
            for n in range(body["top_n"] + 1)
        ]
        if what == "vary":
            found = [{"id": "1", "contents": f"Seen {len(seen)} times."}]
        if what == "page":
            url = of if "/" not in of else f"http://{self.headers['Host']}{of}"
            found = [{"title": "Page", "text": "its snippet", "url": url}]
        if what == "nothing":
            found = []
        return self.answer(200, "application/json", json.dumps(found).encode())

    def log_message(self, *args: object) -> None: ...


if __name__ == "__main__":
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.daemon_threads = True
    sys.stdout.write(f"{made.server_port}\n")
    sys.stdout.flush()
    made.serve_forever()

"""Images of a registry: tokens, redirects, digests, wrong content."""

import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentgrpo.sandbox.isolation.images import add_image, store_dir
from agentgrpo.sandbox.isolation.layers import ImageError
from tests.sandbox.isolation.test_images import ROOT, shown, store, write_layout

__all__ = ["store"]


class Registry(http.server.BaseHTTPRequestHandler):
    """One image, behind a token; blobs are on another host."""

    folder: Path
    requests: list[tuple[str, str | None]]
    wrong = ""

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        token = self.headers.get("Authorization")
        self.requests.append((self.path, token))
        host = f"http://{self.headers['Host']}"
        match = re.fullmatch(r"/v2/org/x/(manifests|blobs)/(.*)", self.path)
        if self.path.startswith("/token"):
            self._send(200, json.dumps({"token": "t"}).encode())
        elif self.path.startswith("/cdn/"):
            data = self._blob(self.path[5:])
            self._send(200, data[::-1] if self.wrong == "blob" else data)
        elif match is None:
            self._send(404, b"")
        elif token != "Bearer t":
            challenge = f'Bearer realm="{host}/token",service="s",scope="repository:org/x:pull"'
            self._send(401, b"", ("WWW-Authenticate", challenge))
        elif match[1] == "blobs":
            other = host.replace("127.0.0.1", "localhost")
            self._send(307, b"", ("Location", f"{other}/cdn/{match[2].removeprefix('sha256:')}"))
        elif match[2] == "v1":
            self._send(200, (self.folder / "index.json").read_bytes())
        elif match[2].startswith("sha256:"):
            data = self._blob(match[2].removeprefix("sha256:"))
            self._send(200, data + b" " if self.wrong == "manifest" else data)
        else:
            self._send(404, b"")

    def _blob(self, name: str) -> bytes:
        return (self.folder / "blobs" / "sha256" / name).read_bytes()

    def _send(self, code: int, data: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(code)
        for name, value in (*headers, ("Content-Length", str(len(data)))):
            self.send_header(name, value)
        self.end_headers()
        is_cut = self.wrong == "cut" and self.path.startswith("/cdn")
        self.wfile.write(data[:-9] if is_cut else data)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[tuple[type[Registry], str]]:
    folder = write_layout(tmp_path / "registry", ROOT)

    class Handler(Registry):
        pass

    Handler.folder, Handler.requests = folder, []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Handler, f"docker://127.0.0.1:{server.server_port}/org/x"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("by", ["tag", "digest"])
def test_an_image_is_pulled_from_a_registry(registry: tuple[type[Registry], str], by: str) -> None:
    handler, name = registry
    digest = json.loads((handler.folder / "index.json").read_text())["manifests"][0]["digest"]
    image = add_image("x", f"{name}:v1" if by == "tag" else f"{name}@{digest}")
    assert image.digest == digest
    assert shown(image) == "bin->usr/bin etc/ etc/os=one"
    blobs = [token for path, token in handler.requests if path.startswith("/cdn/")]
    assert blobs == [None, None]  # the other host gets no token
    token = "/token?service=s&scope=repository%3Aorg%2Fx%3Apull"
    assert [path for path, _ in handler.requests if path.startswith("/token")] == [token]


@pytest.mark.parametrize("wrong", ["manifest", "blob", "cut"])
def test_wrong_content_from_a_registry_is_refused(
    registry: tuple[type[Registry], str], wrong: str
) -> None:
    handler, name = registry
    digest = json.loads((handler.folder / "index.json").read_text())["manifests"][0]["digest"]
    handler.wrong = wrong
    with pytest.raises(ImageError):
        add_image("x", f"{name}@{digest}")
    assert list(store_dir().glob("*/*")) == []


def test_registry_references_are_parsed(registry: tuple[type[Registry], str]) -> None:
    with pytest.raises(ImageError, match="404"):
        add_image("x", f"{registry[1]}:v2")
    for reference in ("docker://", "docker://UPPER", "docker://x@sha256:12", "docker://a b"):
        with pytest.raises(ImageError, match="expected docker://"):
            add_image("x", reference)

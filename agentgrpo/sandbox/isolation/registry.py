"""Streams images from a registry (Docker Hub, ghcr.io, your own) over HTTP."""

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import IO, Any

from agentgrpo.sandbox.isolation.layers import ImageError

ACCEPT = ", ".join(
    f"application/vnd.{kind}+json"
    for kind in (
        *("oci.image.index.v1", "oci.image.manifest.v1"),
        *("docker.distribution.manifest.list.v2", "docker.distribution.manifest.v2"),
    )
)
TIMEOUT_S = 60
_HOST = r"(?:(localhost(?::\d+)?|[\w-]+(?:\.[\w-]+)+(?::\d+)?|[\w-]+:\d+)/)?"
_REFERENCE = re.compile(_HOST + r"([a-z0-9._/-]+)(?::([\w.-]+))?(?:@(sha256:[0-9a-f]{64}))?")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Drops the token in redirects: blobs are often on other hosts, which must not get it."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any,
        newurl: str,
    ) -> urllib.request.Request | None:  # fmt: skip
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        before, after = (urllib.parse.urlsplit(url) for url in (req.full_url, newurl))
        if before.scheme == "https" != after.scheme:
            raise ImageError(f"{before.netloc} redirects to {newurl!r}, which is not encrypted")
        if request is not None and before.netloc != after.netloc:
            request.headers.pop("Authorization", None)
        return request


class Registry:
    """An image in a registry, such as debian:12 or ghcr.io/org/name@sha256:DIGEST."""

    def __init__(self, reference: str) -> None:
        match = _REFERENCE.fullmatch(reference)
        if match is None:
            raise ImageError("expected docker://[HOST/]NAME[:TAG][@sha256:DIGEST]")
        host, name, tag, digest = match.groups()
        if host in (None, "docker.io"):
            host, name = "registry-1.docker.io", name if "/" in name else f"library/{name}"
        local = host.partition(":")[0] in ("localhost", "127.0.0.1")
        self._base, self._name = f"http{'' if local else 's'}://{host}/v2/{name}", name
        self.reference, self._token = digest or tag or "latest", ""
        self._opener = urllib.request.build_opener(_Redirects)

    def manifest(self, reference: str) -> Any:
        return self._get(f"manifests/{reference}")

    def blob(self, digest: str) -> Any:
        return self._get(f"blobs/{digest}")

    def _get(self, path: str) -> Any:
        """Send a request. If the registry requires a token, get one and repeat the request."""
        request = urllib.request.Request(f"{self._base}/{path}", headers={"Accept": ACCEPT})
        for attempt in range(2):
            if self._token:
                request.add_header("Authorization", f"Bearer {self._token}")
            try:
                return self._opener.open(request, timeout=TIMEOUT_S)
            except urllib.error.HTTPError as error:
                challenge = error.headers.get("WWW-Authenticate", "")
                if error.code != 401 or attempt or not challenge.startswith("Bearer "):
                    raise ImageError(
                        f"the registry returned {error.code} {error.reason}"
                    ) from error
            self._token = self._new_token(dict(re.findall(r'(\w+)="([^"]*)"', challenge)))
        raise AssertionError

    def _new_token(self, challenge: Mapping[str, str]) -> str:
        scope = challenge.get("scope", f"repository:{self._name}:pull")
        query = urllib.parse.urlencode({"service": challenge.get("service", ""), "scope": scope})
        with self._opener.open(f"{challenge['realm']}?{query}", timeout=TIMEOUT_S) as response:
            reply = json.load(response)
        return str(reply.get("token") or reply["access_token"])

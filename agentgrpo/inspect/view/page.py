"""Builds the page from data, style and scripts."""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Sequence
from importlib import resources

from agentgrpo.inspect.view.collect import STREAMS, RunData

SCRIPTS = (
    "dom.js",
    "data.js",
    "charts.js",
    "overview.js",
    "list.js",
    "tree.js",
    "tokens.js",
    "compare.js",
    "app.js",
)
"""Concatenated in this order: later files use definitions of earlier ones."""


def make_page(runs: Sequence[RunData]) -> str:
    """The page of one run or several."""
    if not runs:
        raise ValueError("expected at least one run, got none")
    assets = resources.files("agentgrpo.inspect.view") / "assets"
    text = (assets / "page.html").read_text()
    parts = {
        "title": html.escape(
            f"{len(runs)} runs"
            if len(runs) > 2
            else " and ".join(run.index["name"] for run in runs)
        ),
        "style": (assets / "style.css").read_text(),
        "script": "\n".join((assets / name).read_text() for name in SCRIPTS),
        "data": "\n".join(_elements(runs)),
    }
    for name, value in parts.items():
        before, mark, after = text.partition(f"<!--{name}-->")
        assert mark, f"page.html has no place for {name}"
        text = before + value + after
    return text


def _elements(runs: Sequence[RunData]) -> list[str]:
    elements = []
    for number, run in enumerate(runs):
        index = {**run.index, "streams": STREAMS}
        text = json.dumps(finite(index), ensure_ascii=False, separators=(",", ":"))
        # text may hold half a surrogate pair, which UTF-8 cannot encode
        elements.append(_element(f"run{number}", text.encode(errors="backslashreplace")))
        elements += [_element(f"run{number}-chunk{n}", c) for n, c in enumerate(run.chunks)]
    return elements


def _element(name: str, content: bytes) -> str:
    packed = base64.b64encode(gzip.compress(content, compresslevel=6, mtime=0)).decode()
    return f'<script type="text/plain" id="{name}">{packed}</script>'


def finite(value: object) -> object:
    """Replace nan and infinity, which JSON lacks, by None."""
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value

"""A search that the policy's code calls, and that runs outside of the sandbox: a host tool.

Here it looks into the texts of the example `search`. Put a request to your search engine in its
place: the network and the key are there where this runs, and not where the policy's code does.
"""

import json
import re
from functools import cache
from pathlib import Path

TEXTS = Path(__file__).parents[1] / "search" / "texts.jsonl"


@cache
def pages() -> list[tuple[str, str]]:
    """Title and text of each."""
    rows = map(json.loads, TEXTS.read_text().splitlines())
    return [(row["title"], row["text"]) for row in rows]


def web_search(query: str) -> str:
    """The page that fits the query best."""
    words = set(re.findall(r"\w+", query.lower()))
    if not words:
        raise ValueError("the query has no words")

    def fit(page: tuple[str, str]) -> int:
        title, text = page
        return 2 * (title.lower() in words) + len(words & set(re.findall(r"\w+", text.lower())))

    return max(pages(), key=fit)[1]

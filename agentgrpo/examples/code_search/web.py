"""A search as a host tool: the policy's code calls it, and it runs outside the sandbox.

Here it searches the texts of the example `search`. Replace it by a request to your search engine:
this code has the network and the key, and the policy's code does not.
"""

import json
import re
from functools import cache
from pathlib import Path

TEXTS = Path(__file__).parents[1] / "search" / "texts.jsonl"


@cache
def pages() -> list[tuple[str, str]]:
    """Title and text of each page."""
    rows = map(json.loads, TEXTS.read_text().splitlines())
    return [(row["title"], row["text"]) for row in rows]


def web_search(query: str) -> str:
    """The page that fits the query best."""
    words = set(re.findall(r"\w+", query.lower()))
    if not words:
        raise ValueError("the query has no words")

    def score(page: tuple[str, str]) -> int:
        title, text = page
        return 2 * (title.lower() in words) + len(words & set(re.findall(r"\w+", text.lower())))

    return max(pages(), key=score)[1]

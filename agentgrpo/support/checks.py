"""A check of this machine, as the doctors print it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check of this machine."""

    name: str
    ok: bool
    found: str
    remedy: str = ""
    """What to change; "" if nothing."""
    essential: bool = False
    """Without it nothing can be isolated or run."""

    def lines(self) -> Iterator[str]:
        yield f"{'ok  ' if self.ok else 'MISS'} {self.name:16} {self.found}"
        if not self.ok and self.remedy:
            yield f"     {'remedy':16} {self.remedy}"

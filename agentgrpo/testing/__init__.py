"""Assertions for tests of environments, rewards and agents."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agentgrpo.testing.cheats import assert_no_cheat_pays
    from agentgrpo.testing.learns import assert_learns, assert_repeats

__all__ = ["assert_learns", "assert_no_cheat_pays", "assert_repeats"]


def __getattr__(name: str) -> object:
    """Import on first use: every pytest loads the plugin, which needs none of these."""
    if name not in __all__:
        raise AttributeError(f"module 'agentgrpo.testing' has no attribute {name!r}")
    from agentgrpo.support.runtime import prepare_environment

    prepare_environment()
    from agentgrpo.testing import cheats, learns

    return getattr(cheats if name == "assert_no_cheat_pays" else learns, name)

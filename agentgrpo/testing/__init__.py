"""For tests of environments, rewards and agents: what learns, and what does not pay."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agentgrpo.testing.cheats import assert_no_cheat_pays
    from agentgrpo.testing.learns import assert_learns

__all__ = ["assert_learns", "assert_no_cheat_pays"]


def __getattr__(name: str) -> object:
    """Each when it is asked for: the plugin, which every pytest loads, needs none."""
    if name not in __all__:
        raise AttributeError(f"module 'agentgrpo.testing' has no attribute {name!r}")
    from importlib import import_module

    from agentgrpo.machine.runtime import prepare_environment

    prepare_environment()
    module = "learns" if name == "assert_learns" else "cheats"
    return getattr(import_module(f"agentgrpo.testing.{module}"), name)

"""Which command uses which settings: on its command line another is refused, by name."""

from __future__ import annotations

from collections.abc import Iterable

RECIPE_SECTIONS = ("flywheel", "sft", "curriculum", "measures")
"""What config/recipe.py has besides the sections of a run."""
_ALL = {"model", "seed", "out_dir", "agent", "env", "sandbox", "data", "endpoints"}
_PLAYS = {
    *(_ALL | {"engine", "rollout", "reward", "learner.trained_layers", "learner.max_tokens"}),
    "learner.lora.rank",  # without it there is no model `reference`
}
_TRAINS = {
    *(_ALL | {"engine", "rollout", "reward", "learner", "loss", "teacher", "evaluation"}),
    *("save_every", "eval_every", "keep_checkpoints", "trackers", "preflight"),
}
USES = {
    "train": _TRAINS | {"steps"},
    "evaluate": _PLAYS | {"evaluation", "measures"},
    "flywheel": _PLAYS | {"flywheel", "measures"},
    "sft": {
        *(_ALL | {"learner", "sft", "engine.dtype", "engine.max_model_len"}),
        *("save_every", "keep_checkpoints", "rollout.template_options", "rollout.call_timeout_s"),
    },
    "curriculum": _TRAINS | {"curriculum"},
}
USES["recipe"] = USES["evaluate"] | USES["flywheel"] | USES["sft"] | USES["curriculum"]
"""Sections and keys, by command."""
INSTEAD = {
    ("evaluate", "evaluation.temperature"): "measures.temperature",
    ("evaluate", "rollout.temperature"): "measures.temperature",
    ("flywheel", "rollout.temperature"): "flywheel.temperature",
}
"""Keys of sections that a command uses, of which it has its own."""


def uses(command: str, key: str) -> bool:
    """Whether a command uses a setting, `section.key`, or any of a section."""
    if (command, key) in INSTEAD:
        return False
    return any(f"{key}.".startswith(f"{u}.") or u.startswith(f"{key}.") for u in USES[command])


def require_used(command: str, keys: Iterable[str]) -> None:
    """Refuse settings of a command line that the command does not use; names what does."""
    for key in keys:
        if not uses(command, key):
            others = ", ".join(f"`{o}`" for o in USES if o != "recipe" and uses(o, key))
            by = f"; used by {others}" if others else ""
            own = INSTEAD.get((command, key))
            raise ValueError(
                f"{key}: `agentgrpo {command}` does not use it{f', but {own}' if own else by}"
            )

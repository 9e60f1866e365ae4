"""Which command uses which settings. Others are an error on its command line."""

from __future__ import annotations

from collections.abc import Iterable

RECIPE_SECTIONS = ("flywheel", "sft", "curriculum", "measures")
"""Sections that config/recipe.py adds to those of a run."""
_ALL = {"model", "seed", "out_dir", "agent", "env", "sandbox", "data", "endpoints"}
_PLAYS = {
    *(_ALL | {"engine", "rollout", "reward", "learner.trained_layers", "learner.max_tokens"}),
    "learner.lora.rank",  # the model `reference` exists only with an adapter
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
"""(command, key): the command's own key that replaces it."""


def uses(command: str, key: str) -> bool:
    """Whether a command uses the setting `section.key`, or any setting of a section."""
    if (command, key) in INSTEAD:
        return False
    return any(f"{key}.".startswith(f"{u}.") or u.startswith(f"{key}.") for u in USES[command])


def require_used(command: str, keys: Iterable[str]) -> None:
    """Raise ValueError for a setting that the command does not use; it names commands that do."""
    for key in keys:
        if not uses(command, key):
            others = ", ".join(f"`{o}`" for o in USES if o != "recipe" and uses(o, key))
            hint = f"; used by {others}" if others else ""
            if replacement := INSTEAD.get((command, key)):
                hint = f", but {replacement}"
            raise ValueError(f"{key}: `agentgrpo {command}` does not use it{hint}")

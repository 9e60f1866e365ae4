"""Which command reads which settings: one that a command does not read is refused, by name.

On a command line a setting is meant for that command. A file may be shared by several, so there a
setting is refused where nothing that takes such a file reads it. tests/test_unread.py runs the
commands and notes what they read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

RECIPE_SECTIONS = ("flywheel", "sft", "curriculum", "measures")
"""What config/recipe.py has besides the sections of a run."""
PLAYS = (
    "model seed engine.* agent.* env.* sandbox.* data.* rollout.* reward.* "
    "learner.lora.rank learner.trained_layers learner.max_tokens out_dir "
    "endpoints* !rollout.tasks_per_step "
    "!rollout.group_size !rollout.refill_below !rollout.max_refills !rollout.temperature "
    "!rollout.branching.* !reward.sigma_tool !reward.sigma_length !reward.decay_sigmas "
    "!engine.agreement_threshold !engine.sleep_level !data.promote_at"
)
"""Of what plays tasks without training on them. Without learner.lora.rank, which excludes
learner.trained_layers, there is no model `reference`; learner.max_tokens is held against
engine.max_model_len; out_dir has no default. "!" takes out of a section."""
TRAINS = (
    "model seed out_dir save_every eval_every keep_checkpoints trackers preflight engine.* agent.* "
    "env.* endpoints* rollout.* evaluation.* sandbox.* data.* reward.* learner.* loss.*"
)
_READS: Mapping[str, str] = {
    "train": f"{TRAINS} steps",
    "evaluate": f"{PLAYS} evaluation.* measures.* !evaluation.temperature !data.levels",
    "flywheel": (
        f"{PLAYS} flywheel.* measures.quality measures.judge !rollout.history "
        "!rollout.fork_threshold !rollout.max_retries !rollout.sampler !data.heldout_levels"
    ),
    "sft": (
        "model seed out_dir save_every keep_checkpoints engine.dtype engine.max_model_len agent.* "
        "env.* sandbox.* data.* rollout.template_options rollout.call_timeout_s "
        "learner.* endpoints* sft.* !data.levels !data.promote_at"
    ),
    "curriculum": f"{TRAINS} curriculum.*",
    "recipe": "",
}
READS = {command: tuple(keys.split()) for command, keys in _READS.items()}
RECIPE = ("evaluate", "flywheel", "sft", "curriculum")
"""The commands that a recipe is made of: it reads what one of them does."""
INSTEAD = {
    ("sft", "steps"): "sft.epochs says how long it is",
    ("sft", "rollout.*"): "nothing is sampled",
    ("sft", "loss.*"): "its loss is the likelihood",
    ("curriculum", "steps"): "curriculum.steps has those of each stage",
    ("recipe", "steps"): "sft.epochs and curriculum.steps say how long its parts are",
    ("flywheel", "steps"): "flywheel.tasks and flywheel.rounds say how long it is",
    ("evaluate", "evaluation.temperature"): "measures.temperature is what it plays with",
    ("evaluate", "rollout.temperature"): "measures.temperature is what it plays with",
    ("flywheel", "rollout.temperature"): "flywheel.temperature is what it plays with",
}
"""What to set, or why there is nothing to."""


def reads(command: str, key: str) -> bool:
    """Whether a command reads a setting, `section.key`; a whole section, any of it."""
    if command == "recipe":
        return any(reads(part, key) for part in RECIPE)
    patterns = READS[command]
    if any(fnmatchcase(f"!{key}", pattern) for pattern in patterns):
        return False
    return any(
        fnmatchcase(key, pattern) or pattern.startswith(f"{key}.") for pattern in patterns
    ) or any(key.startswith(f"{pattern}.") for pattern in patterns)


def require_read(command: str, keys: Iterable[str]) -> None:
    """Refuse settings of a command line that the command does not read.

    Raises:
        ValueError: it does not read one; names the key, and what does.
    """
    for key in keys:
        if not reads(command, key):
            raise ValueError(
                f"{key}: `agentgrpo {command}` does not read it{_instead(command, key)}"
            )


def require_read_somewhere(table: Mapping[str, Any], name: str) -> None:
    """Refuse keys of a file that nothing reads: one with a recipe's sections is no run's.

    Args:
        table: of the file itself, without what it extends.
        name: of the file.

    Raises:
        ValueError: as require_read().
    """
    if not table.keys() & {*RECIPE_SECTIONS}:
        return
    for key in table:
        if not reads("recipe", key) and reads("train", key):
            raise ValueError(
                f"{key}: {name} has sections of a recipe, and none of its commands reads it"
                f"{_instead('recipe', key)}"
            )


def _instead(command: str, key: str) -> str:
    said = next((s for (c, k), s in INSTEAD.items() if c == command and fnmatchcase(key, k)), "")
    those = [f"`{other}`" for other in READS if other != "recipe" and reads(other, key)]
    by = f"; read by {', '.join(those)}" if those else ""
    return f": {said}{by}" if said else by

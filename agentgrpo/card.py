"""A run's model card: what it was trained on, how, how well, with what; nothing of this machine.

Settings are shown as TOML that trains again. What may be a secret is left out of them by its name,
and said to be; a path of this machine is cut to its last part.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from agentgrpo.config import TrainConfig
from agentgrpo.measures.report import cell
from agentgrpo.settings import toml

Rows = Sequence[Mapping[str, Any]]
"""Of metrics.jsonl."""
SECRET = re.compile(
    r"(.*[_-])?(keys?|tokens?|secrets?|passw\w*|auth(?!or)\w*|credentials?|headers?|cookies?)", re.I
)
"""Names of what may be a secret."""
PLACES = {"out_dir", "trackers", "preflight"}
"""Settings of a run that say nothing of the model."""
CURVES = {"rollout/reward": ("training", "#2f6fd6"), "eval/reward": ("held out", "#c4660a")}
MOST_ROWS = 12


def without_place(text: str) -> str:
    """A path of this machine as its last part, an address without user and query; else the same."""
    if "://" in text:
        parts = urlsplit(text)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    if re.match(r"[/~]", text) and not re.search(r"\s", text):
        return Path(text).name
    for place, shown in ((Path.cwd(), "."), (Path.home(), "~")):
        if len(str(place)) > 1:
            text = text.replace(str(place), shown)
    return text


def published(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The settings that differ from their defaults, and the keys that were left out of them.

    Args:
        config: as run.json has it.
    """
    left_out: list[str] = []

    def shown(value: Any, where: str) -> Any:
        if isinstance(value, list):
            return [shown(inner, where) for inner in value]
        if not isinstance(value, Mapping):
            return without_place(value) if isinstance(value, str) else value
        kept = {}
        for key, inner in value.items():
            named = SECRET.fullmatch(key) or key in ("env", "environ")
            if named and not isinstance(inner, int | float | None):
                left_out.append(f"{where}.{key}")
            else:
                kept[key] = shown(inner, f"{where}.{key}")
        return kept

    least = TrainConfig(model="m", out_dir=Path())
    default = least.model_dump(mode="json", exclude={"model", "out_dir"})
    found: dict[str, Any] = {}
    for name, value in config.items():
        if name in PLACES or value == default.get(name):
            continue
        if isinstance(value, Mapping):
            value = {k: v for k, v in value.items() if v != default.get(name, {}).get(k)}
        found[name] = shown(value, name)
    return found, left_out


def as_config(settings: Mapping[str, Any]) -> str:
    """Settings as a config file."""
    top, sections = [], []
    for name, value in settings.items():
        if isinstance(value, Mapping):
            lines = [f"{key} = {toml(inner)}" for key, inner in value.items()]
            sections += ["", f"[{name}]", *lines] if lines else []
        else:
            top.append(f"{name} = {toml(value)}")
    return "\n".join([*top, *sections]) + "\n"


def model_name(model: str) -> tuple[str, str | None]:
    """A config's `model` as it can be told, and as the hub names it: None, if it is of no hub."""
    of_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not Path(model).exists()
    return without_place(model), model if of_hub else None


def curve(rows: Rows, step: int) -> str:
    """The run's reward as an SVG picture; a dashed line marks the step that is published."""
    series = {
        name: [(row["step"] + (name == "rollout/reward"), row[name]) for row in rows if name in row]
        for name in CURVES
    }
    points = [point for each in series.values() for point in each]
    low, high = (pick([*(y for _, y in points), 0.0, 1.0]) for pick in (min, max))
    last = max([*(x for x, _ in points), 1])

    def place(x: float, y: float) -> str:
        return f"{50 + 530 * x / last:.1f},{190 - 150 * (y - low) / (high - low):.1f}"

    drawn = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 220" font-family="sans-serif" '
        'font-size="12">',
        '<rect width="600" height="220" fill="#fff"/>',
    ]
    for at in (low, (low + high) / 2, high):
        x, _, y = place(0, at).partition(",")
        drawn.append(f'<path d="M{x},{y}H580" stroke="#dcdcd6"/>')
        drawn.append(f'<text x="44" y="{y}" text-anchor="end" dy="4">{at:.3g}</text>')
    drawn.append(f'<path d="M{place(step, low)}L{place(step, high)}" stroke="#62676f" '
                 'stroke-dasharray="3 3"/>')  # fmt: skip
    for number, (name, (label, colour)) in enumerate(CURVES.items()):
        if len(series[name]) > 1:
            path = "L".join(place(x, y) for x, y in series[name])
            drawn.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        drawn += [f'<circle cx="{p[0]}" cy="{p[1]}" r="3" fill="{colour}"/>'
                  for x, y in series[name] if (p := place(x, y).split(","))
                  and name == "eval/reward"]  # fmt: skip
        drawn.append(f'<text x="{50 + 120 * number}" y="22" fill="{colour}">{label}</text>')
    drawn.append(f'<text x="580" y="212" text-anchor="end">steps: {last}</text>')
    drawn.append('<text x="580" y="22" text-anchor="end">reward, mean of all rollouts</text>')
    return "\n".join([*drawn, "</svg>", ""])


def code(text: str, language: str = "") -> str:
    """A fenced block of Markdown that the text cannot end."""
    longest = max([2, *(len(run) for run in re.findall(r"`+", text))])
    return f"{'`' * (longest + 1)}{language}\n{text}{'`' * (longest + 1)}"


def span(text: str) -> str:
    """Code within a line."""
    return f"`{' '.join(text.replace('`', chr(39)).split())}`"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A table of Markdown."""
    return [f"| {' | '.join(map(cell, row))} |" for row in (head, ["---"] * len(head), *rows)]


def results(rows: Rows, step: int) -> list[str]:
    """Evaluations on held-out tasks up to a step, thinned to MOST_ROWS."""
    known = [row for row in rows if "eval/reward" in row and row["step"] <= step]
    if not known:
        return ["No evaluation was recorded up to this step."]
    every = -(-len(known) // MOST_ROWS)
    kept = [row for n, row in enumerate(reversed(known)) if n % every == 0 or row is known[0]][::-1]
    names = [name for name in ("eval/solved", "eval/reward") if any(name in row for row in kept)]
    head = ["steps", *(f"held out, {name.removeprefix('eval/')}" for name in names), "tasks"]
    return table(
        head,
        [
            [row["step"], *(f"{row[n]:.3f}" if n in row else "-" for n in names),
             f"{row['eval/rollouts']:.0f}" if "eval/rollouts" in row else "-"]
            for row in kept
        ],
    )  # fmt: skip


def make_card(
    repo: str, run: Mapping[str, Any], rows: Rows, step: int, *, adapter: bool
) -> dict[str, str]:
    """The files that tell about a checkpoint, by their names: the card, the config, the curve.

    Args:
        repo: its name on the hub.
        run: what run.json holds.
        rows: of metrics.jsonl.
        step: of the checkpoint.
        adapter: whether it is a LoRA adapter alone.
    """
    config = run["config"]
    settings, left_out = published(config)
    base, hub_name = model_name(run["base"])
    library = "peft" if adapter else "transformers"
    kind = f"Auto{'Peft' if adapter else ''}ModelForCausalLM"
    load = f"from {library} import {kind}\n\nmodel = {kind}.from_pretrained({json.dumps(repo)})\n"
    lines = [
        *_front_matter(library, hub_name),
        f"# {repo.rpartition('/')[2]}",
        "",
        f"{'A LoRA adapter to' if adapter else 'Made from'} {span(base)}: step {step} of "
        f"{config['steps']} of a run of GRPO with agentgrpo.",
        "",
        code(load, "python"),
        "",
        f"It was trained as the agent {span(config['agent']['kind'])} in the environment "
        f"{span(config['env']['kind'])}, and acts as it did there: `agentgrpo_config.toml` has the "
        "system prompt and the rest.",
        "",
        "## Results",
        "",
        "![Reward by step](curve.svg)",
        "",
        *results(rows, step),
        "",
        "## Data",
        "",
        *_data(config),
        "",
        "## Settings",
        "",
        "What differs from the defaults; paths are cut to their last part."
        + (f" Left out: {', '.join(map(span, left_out))}." if left_out else ""),
        "",
        code(as_config(settings), "toml"),
        "",
        "## Versions",
        "",
        *_versions(run),
        "",
    ]
    return {
        "README.md": "\n".join(lines),
        "agentgrpo_config.toml": as_config({"out_dir": "runs/again", **settings}),
        "curve.svg": curve(rows, step),
    }


def _front_matter(library: str, base: str | None) -> list[str]:
    """What the hub reads of a card: YAML, of which JSON is a part."""
    about = {
        "library_name": library,
        "pipeline_tag": "text-generation",
        "tags": ["agentgrpo", "grpo", "reinforcement-learning"],
        **({"base_model": base} if base else {}),
    }
    return ["---", *(f"{key}: {json.dumps(value)}" for key, value in about.items()), "---", ""]


def _data(config: Mapping[str, Any]) -> list[str]:
    data, rollout = config["data"], config["rollout"]
    rows = [
        ["trained on", without_place(str(data["train"]))],
        ["held out", without_place(str(data["heldout"]))],
        ["tasks of a step", rollout["tasks_per_step"]],
        ["rollouts of a task", rollout["group_size"]],
        ["reward", config["reward"]["kind"]],
    ]
    return table(["", ""], rows)


def _versions(run: Mapping[str, Any]) -> list[str]:
    chosen = {
        key: run.get(part, {}).get(key)
        for part, keys in (("engine", "device dtype"), ("learner", "weights trained_parameters"))
        for key in keys.split()
    }
    return [
        *table(["package", "version"], sorted(run.get("versions", {}).items())),
        "",
        *table(["what was chosen", ""], [(k, v) for k, v in chosen.items() if v is not None]),
    ]


def require_private(name: str, text: str, run: Path) -> None:
    """Refuse a text that tells of this machine or holds a secret of its environment.

    Raises:
        ValueError: it does; names the file and what was found, never its value.
    """
    places = {"the home directory": Path.home(), "the run's folder": run.resolve()}
    found = [what for what, path in places.items() if len(path.parts) > 1 and str(path) in text]
    found += [
        f"the value of ${key}"
        for key, value in os.environ.items()
        if SECRET.fullmatch(key) and len(value) >= 8 and value in text
    ]
    if found:
        raise ValueError(f"{name} would tell {', '.join(found)}: nothing was uploaded")

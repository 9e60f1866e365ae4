"""Generates the tables of docs/results.md and bench/results/README.md from bench/results.

    python -m bench.table            print all lines
    python -m bench.table --write    write them into the two pages, between the marks

Each line is the newest row of its kind and its baseline, if any.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentgrpo.support.atomic_files import read_lines
from bench.harness import RESULTS
from bench.pages import with_made

PAGE = RESULTS.parent.parent / "docs" / "results.md"
TABLES = RESULTS / "README.md"


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Args:
        what: in words.
        name: of the file of rows.
        ours, other: variants; other is what ours is compared with.
        other_is: `other` in words.
        shape: what the rows' shape must have.
        note: how the rows' notes must begin.
        detail: the line is in the long table only.
    """

    what: str
    name: str
    ours: str
    other: str = ""
    other_is: str = ""
    shape: Mapping[str, int] = field(default_factory=dict)
    note: str = ""
    detail: bool = False


PACKED = {"rollouts": 512, "tokens": 4096}
STEP = {"group": 8, "tokens": 2048, "prompt_percent": 67}

LINES = (
    Line(
        "quickstart, 12 steps: held-out problems solved, greedy", "quickstart", "heldout_after",
        "heldout_before", "before",
    ),
    Line("quickstart, three seeds: time of a run", "quickstart", "wall_s"),
    Line("the same: a step", "quickstart", "step_s", detail=True),
    Line(
        "the same: widest log-probability gap between sampler and learner, median of three",
        "quickstart", "max_dlogp", detail=True,
    ),
    Line(
        "quickstart, first two steps of 96 rollouts", "beside_trl",
        "here", "TRL 1.16.0", "TRL 1.16, vLLM colocated", note="data.num_heldout=8",
    ),
    Line(
        "recipe, three seeds: right held-out answers after fine-tuning, greedy",
        "recipe", "quality of 3 seeds, tuned", "quality of 3 seeds, prompting", "prompting",
    ),
    Line(
        "the same after two stages of RL on top", "recipe", "quality of 3 seeds, trained",
        "quality of 3 seeds, prompting", "prompting",
    ),
    Line(
        "the same: answer quality per tool call", "recipe", "efficiency of 3 seeds, trained",
        "efficiency of 3 seeds, prompting", "prompting", detail=True,
    ),
    Line("recipe: time of one seed", "recipe", "wall_s", detail=True),
    Line(
        "loss of 384 positions, all sampled, head frozen", "loss",
        "ours, frozen head, 100.0% sampled", "TRL 1.16 chunked, frozen head, 100.0% sampled",
        "TRL 1.16, chunked",
    ),
    Line(
        "the same, one in eight sampled", "loss", "ours, frozen head, 12.5% sampled",
        "TRL 1.16 chunked, frozen head, 100.0% sampled", "TRL 1.16, every row",
    ),
    Line(
        "packing 512 rollouts x 4096 tokens, prompts of 1024", "packing",
        "tree", "tree_trl", "TRL 1.16 TreeRow", {**PACKED, "prompt": 1024},
    ),
    Line(
        "the same, prompts of 3072", "packing", "tree", "tree_trl", "TRL 1.16 TreeRow",
        {**PACKED, "prompt": 3072}, detail=True,
    ),
    Line(
        "block mask of 8192 tokens", "packing", "blocks", "blocks_torch", "create_block_mask",
        detail=True,
    ),
    Line(
        "learner's step on a group of 8, two thirds prompt, SmolLM2-135M", "step",
        "tree", "rows", "unshared rows", STEP, "SmolLM2",
    ),
    Line(
        "the same, a random model of Qwen3's shape", "step", "tree", "rows", "unshared rows", STEP,
        "qwen3", detail=True,
    ),
    Line(
        "memory of that step, SmolLM2-135M", "step", "tree memory", "rows memory", "unshared rows",
        STEP, "SmolLM2",
    ),
    Line("from a fresh process to its first token", "rollout", "start to first token", detail=True),
    Line(
        "64 rollouts, heavy-tailed tools of 1 s on average: the engine idles",
        "rollout", "idle: barrier none", "idle: barrier each turn", "a barrier per turn",
    ),
    Line(
        "the same: wall time", "rollout", "barrier: none", "barrier: each turn",
        "a barrier per turn", detail=True,
    ),
    Line(
        "256 rollouts live: Python outside of the engine", "rollout",
        "python outside of the engine", detail=True,
    ),
    Line(
        "memory that a learner of 513 MiB adds to the sampler, shared", "rollout",
        "a learner's memory: shared", detail=True,
    ),
    Line("513 MiB of weights to the sampler, shared", "rollout", "publish: shared", detail=True),
    Line(
        "the same, copied in place", "rollout", "publish: copy", "publish: one plain copy",
        "one plain copy", detail=True,
    ),
    Line(
        "sandbox: new session to its first result", "sandbox", "cold: session",
        "cold: nsjail per call", "nsjail per call",
    ),
    Line(
        "the same with numpy, sympy and pandas imported", "sandbox",
        "cold: session + numpy, sympy, pandas", "cold: subprocess python + numpy, sympy, pandas",
        "plain subprocess",
    ),
    Line("sandbox: acquire from the pool", "sandbox", "acquire from the pool", detail=True),
    Line(
        "sandbox: sessions of three steps from four threads", "sandbox",
        "sessions (create, 3 steps, destroy)", "sessions (3 runs): nsjail per call",
        "nsjail per run", {"threads": 4},
    ),
    Line("sandbox: one step, one session live", "sandbox", "step: x += 1", detail=True),
    Line("the same, 200 live", "sandbox", "step round trip", shape={"live": 200}, detail=True),
    Line("sandbox: one step, 1,000 live", "sandbox", "step round trip", shape={"live": 1000}),
    Line(
        "sandbox: memory of a session", "sandbox", "memory of a session (PSS)", shape={"live": 1000}
    ),
    Line(
        "H100: quickstart, 10 steps of 384 rollouts: held-out problems solved, greedy",
        "gpu_quickstart", "heldout_after", "heldout_before", "before",
    ),
    Line("H100: the same: a step", "gpu_quickstart", "step_s"),
    Line(
        "H200: a step of 384 rollouts of the quickstart", "beside_trl", "here", "TRL 1.16.0",
        "TRL 1.16, vLLM colocated", note="rollout.tasks_per_step=24",
    ),
    Line(
        "H100: attention over a tree, error of the output", "gpu_probe", "tree: output",
        detail=True,
    ),
    Line(
        "H100: learner, 2 x 16 rollouts of 3,072 tokens, Qwen3 0.6B",
        "gpu_step", "0.6B full, tree", "0.6B full, rows varlen", "FlashAttention",
    ),
    Line(
        "H100: the same with Liger's layers", "gpu_step", "0.6B full, tree, Liger",
        "0.6B full, padded", "padded rows",
    ),
    Line(
        "H100: loss, gradients, 16,384 positions, hidden 4,096, all",
        "gpu_kernels", "from hidden: ours", "roof: three products", "the products alone",
        {"H": 4096, "sampled": 16384},
    ),
    Line(
        "H100: the same, one in eight sampled", "gpu_kernels", "from hidden: ours",
        "from hidden: plain torch", "plain torch", {"H": 4096, "sampled": 2048},
    ),
    Line(
        "H100: logits read by the forward kernel", "gpu_kernels", "from logits: forward read",
        "roof: copy", "a copy on the card", detail=True,
    ),
    Line(
        "H100: waking the engine, Qwen3 0.6B, shared weights", "gpu_colocated",
        "shared: wake_s", detail=True,
    ),
    Line(
        "H100: the same: putting it to sleep", "gpu_colocated", "shared: sleep_s", detail=True
    ),
)  # fmt: skip


def newest(line: Line, variant: str, *, beside: bool = False) -> dict[str, Any]:
    """The last row of this kind; of what it stands beside, which may not have all of its shape.

    Raises:
        LookupError: there is none.
    """
    rows = read_lines(RESULTS / f"{line.name}.jsonl")
    found = [
        row
        for row in rows
        if row["variant"] == variant
        and all(
            row["shape"].get(key, value if beside else None) == value
            for key, value in line.shape.items()
        )
        and row["note"].startswith(line.note)
    ]
    if not found:
        raise LookupError(
            f"bench/results/{line.name}.jsonl has no row {variant!r} of shape {line.shape} with a "
            f"note that begins with {line.note!r}"
        )
    row: dict[str, Any] = found[-1]
    return row


def quantity(value: float, unit: str) -> str:
    """Three digits, and a unit that a reader need not scale."""
    if unit == "share":
        return f"{value:.2f}"
    for small, large in (("us", "ms"), ("ms", "s")):
        if unit == small and value >= 1000:
            value, unit = value / 1000, large
    digits = f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
    return f"{digits} {unit}"


def table(*, detail: bool = True) -> str:
    """Markdown, with the lines of detail or without."""
    out = ["| measured | here | compared with | commit |", "|---|---|---|---|"]
    for line in LINES:
        if line.detail and not detail:
            continue
        ours = newest(line, line.ours)
        beside = ""
        if line.other:
            other = newest(line, line.other, beside=True)
            beside = f"{quantity(other['p50'], other['unit'])} ({line.other_is})"
        here = quantity(ours["p50"], ours["unit"])
        out.append(f"| {line.what} | {here} | {beside} | {ours['commit'][:7]} |")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the tables into their pages")
    if parser.parse_args().write:
        for page, made in ((PAGE, table(detail=False)), (TABLES, table())):
            page.write_text(with_made(page.read_text(), "bench.table", made))
    else:
        print(table())


if __name__ == "__main__":
    main()

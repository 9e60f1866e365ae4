"""Run folders of any size, written with RunLog."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from agentgrpo.records.metrics import RunLog
from agentgrpo.types import Group, Rollout, Segment, Status, Task, Turn
from tests import tiny

NASTY = "</script><script>document.title='taken'</script>"


def write_run(
    folder: Path,
    *,
    steps: int = 2,
    groups: int = 2,
    size: int = 4,
    turn_tokens: int = 12,
    turns: int = 2,
    offset: float = 0.0,
    temperature: float = 1.0,
    seed: int = 0,
) -> Path:
    """Write a run with text of the tiny tokenizer; returns its folder."""
    log = RunLog(folder)
    log.write_run_json(
        config={
            "steps": steps,
            "model": "tiny",
            "seed": seed,
            "rollout": {"temperature": temperature},
        },
        model=str(folder / "model"),
        learner={"device": "cpu", "weights": "shared"},
        sandbox={"rung": "zygote-userns"},
    )
    tiny.make_tokenizer().save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    log.rollouts(0, [heldout(n, offset) for n in range(3)], split="heldout")
    log.write(0, eval={"solved": 0.25, "reward": 0.25 + offset})
    for step in range(steps):
        played = [group(rng, f"{step}.{g}", size, turns, turn_tokens) for g in range(groups)]
        log.rollouts(step, played)
        reward = float(np.mean([r.reward for g in played for r in g.rollouts]))
        log.write(
            step,
            rollout={"reward": reward + offset, "decode_s": 2.0, "status_completed": 1.0},
            learner={"loss": 0.1 / (step + 1), "seconds": 1.0, "grad_norm": 0.5},
            engine={"max_dlogp": 1e-5},
            time={"playing_s": 2.0},
        )
    log.rollouts(steps, [heldout(n, offset) for n in range(3)], split="heldout")
    log.write(steps, eval={"solved": 0.75, "reward": 0.75 + offset})
    return folder


def heldout(number: int, offset: float) -> Group:
    """One greedy rollout of a held-out task."""
    rollout = play(f"held{number}", ["<code>1+1</code>"], ["2"], answer="2")
    rollout.rewards = {"answer": 1.0 if number else offset}
    return Group(task=rollout.task, rollouts=[rollout])


def group(rng: np.random.Generator, name: str, size: int, turns: int, length: int) -> Group:
    """Rollouts that differ from their first, third ... token on; the last one is truncated."""
    words = ["print(", "1+", "é…", "x ", "\n", NASTY[:9]]
    rollouts = []
    for index in range(size):
        texts = []
        for _ in range(turns):
            text = "".join(words[i] for i in rng.integers(len(words), size=length))
            texts.append(f"<code>{text}"[: max(8, length)])
        rollout = play(name, texts, ["answered: 日本 <b>"] * (turns - 1), answer=None)
        rollout.rewards = {"answer": float(index % 2), "format": 0.1}
        rollout.advantage = 1.0 if index % 2 else -1.0
        rollout.status = Status.TRUNCATED_LENGTH if index == size - 1 else Status.COMPLETED
        rollout.stats["tool_errors"] = float(index == 0)
        rollouts.append(rollout)
    return Group(task=rollouts[0].task, rollouts=rollouts)


def play(
    name: str, turns: Sequence[str], observations: Sequence[str], *, answer: str | None
) -> Rollout:
    """A rollout with these turns and observations, in the tiny tokenizer's tokens."""
    task = Task(
        id=name,
        messages=({"role": "user", "content": f"What is {name}? {NASTY}"},),
        spec={"answer": 2},
    )
    segments = [Segment(ids(f"<|im_start|>user\nWhat is {name}?<|im_end|>\n"))]
    for turn, text in enumerate(turns):
        sampled = ids(text)
        logprobs = -np.linspace(0.01, 3, len(sampled), dtype=np.float32)
        segments.append(Segment(sampled, logprobs))
        if turn < len(observations):
            text = f"<|im_end|>\n<|im_start|>user\n{observations[turn]}<|im_end|>"
            segments.append(Segment(ids(text)))
    counts = {"turns": len(turns), "tool_calls": len(observations), "tool_errors": 0}
    stats = {name: float(count) for name, count in counts.items()}
    return Rollout(
        task=task, segments=segments, status=Status.COMPLETED, answer=answer, stats=stats
    )


def write_program(folder: Path) -> Path:
    """A run of one rollout of a program: a conversation, a side conversation, a second attempt."""
    log = RunLog(folder)
    log.write_run_json(config={"agent": {"kind": "program"}}, model=str(folder / "model"))
    tiny.make_tokenizer().save_pretrained(folder / "model")
    rollout = play("main", ["plan", "act", "done"], ["go on", "and?"], answer="2")
    main = rollout.segments
    aside = [Segment(ids("Sum it up.")), sampled_segment("short")]
    prefix = np.concatenate([segment.token_ids for segment in main[:2]])
    again = [Segment(np.concatenate([prefix, ids("another way")])), sampled_segment("again")]
    rollout.closed_rows = [aside, again]
    for row, number in ((2, 1), (0, 1), (1, 1), (2, 3), (2, 5)):
        segments = rollout.rows[row][: number + 1]
        prompt = np.concatenate([segment.token_ids for segment in segments[:-1]])
        turn = Turn.of(prompt, segments[-1].token_ids, "stop")
        rollout.turns.append(replace(turn, row=row))
    rollout.rewards = {"answer": 1.0}
    log.rollouts(0, [Group(task=rollout.task, rollouts=[rollout])])
    log.write(0, rollout={"reward": 1.0}, learner={"loss": 0.1})
    return folder


def sampled_segment(text: str) -> Segment:
    sampled = ids(text)
    return Segment(sampled, -np.linspace(0.01, 3, len(sampled), dtype=np.float32))


_tokenizer = tiny.make_tokenizer()


def ids(text: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """The tiny tokenizer's ids of a text: one token per byte."""
    return np.array(_tokenizer.encode(text, add_special_tokens=False), np.int32)

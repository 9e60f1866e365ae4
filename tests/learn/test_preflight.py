"""A config that does not fit fails before the first step, with a size that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentgrpo.engine.engine import Engine
from agentgrpo.learn.preflight import preflight
from agentgrpo.support.memory import OutOfMemory, rss_bytes
from agentgrpo.types import Metrics
from tests.learn.given import learner_on


@dataclass
class Machine:
    """Engine and learner with room for a number of tokens."""

    room: int
    error: Callable[[], Exception] = lambda: torch.OutOfMemoryError("CUDA out of memory")
    publish_error: Exception | None = None
    room_checkpointed: int = 0
    auto: bool = True
    device: str = "cpu"
    calls: list[str] = field(default_factory=list)
    tried: list[int] = field(default_factory=list)

    def dry_pass(self, num_tokens: int) -> None:
        self.calls.append("dry_pass")
        self.tried.append(num_tokens)
        if num_tokens > self.room:
            raise self.error()

    def checkpoint_if_auto(self) -> bool:
        self.calls.append("checkpoint")
        self.room = max(self.room, self.room_checkpointed)
        return self.auto

    def publish(self) -> Metrics:
        self.calls.append("publish")
        if self.publish_error is not None:
            raise self.publish_error
        return {}

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake(self) -> Metrics:
        self.calls.append("wake")
        return {}


def test_preflight_runs_a_full_step_in_order() -> None:
    machine: Any = Machine(room=4096)
    metrics = preflight(machine, machine, max_tokens=4096)
    assert machine.calls == ["sleep", "dry_pass", "wake", "publish", "sleep"]
    assert machine.tried == [4096]
    assert metrics["seconds"] >= 0
    assert metrics["rss_gib"] > 0


def test_auto_checkpointing_is_enabled_when_needed() -> None:
    machine: Any = Machine(room=1000, room_checkpointed=4096)
    preflight(machine, machine, max_tokens=4096)
    assert machine.calls[:4] == ["sleep", "dry_pass", "checkpoint", "dry_pass"]
    request: Any = Machine(room=1000, room_checkpointed=4096, auto=False)
    with pytest.raises(OutOfMemory):
        preflight(request, request, max_tokens=9999)
    assert request.tried[:2] != [9999, 9999], "it is as it was asked to be"


@pytest.mark.parametrize(
    ("room", "fits"),
    [
        *((room, f"{room // 128 * 128} tokens do") for room in (128, 129, 1000, 2047, 4000, 4095)),
        (100, "not even 128 tokens do; train fewer layers"),
    ],
)
def test_error_names_the_number_that_fits(room: int, fits: str) -> None:
    machine: Any = Machine(room=room)
    with pytest.raises(OutOfMemory, match=f"max_tokens 4096 does not fit in memory: {fits}"):
        preflight(machine, machine, max_tokens=4096)
    assert len(machine.tried) <= 2 + 6


def test_error_if_the_weights_cannot_be_published() -> None:
    machine: Any = Machine(room=999, publish_error=torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(OutOfMemory, match=r"publishing the weights: a lower engine\.kv_cache_gib"):
        preflight(machine, machine, max_tokens=999)


def test_other_errors_pass_unchanged() -> None:
    machine: Any = Machine(room=10, error=lambda: RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        preflight(machine, machine, max_tokens=999)


def test_resident_memory_is_counted_in_bytes() -> None:
    before = rss_bytes()
    held = np.ones(2**26, np.uint8)
    assert 2**25 < rss_bytes() - before < 2**27
    assert held.sum() == 2**26


@pytest.mark.parametrize("rows", [None, "told so"])
def test_dry_pass_uses_all_tokens_and_changes_nothing(
    engine: Engine, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, rows: str | None
) -> None:
    """Where prefixes are not shared, as long a row as rows are with the most padding."""
    monkeypatch.setattr("agentgrpo.learn.policy.why_not_packed", lambda model: rows)
    learner = learner_on(engine, tiny_model)
    before = [p.detach().clone() for p in learner.model.parameters()]
    recorded: list[tuple[int, int]] = []
    learner._scorer.register_forward_pre_hook(
        lambda _, args: recorded.append((len(args[0].input_ids_T), len(args[0].row_N)))
    )
    metrics = preflight(engine, learner, max_tokens=400)
    assert recorded == [(400, 399) if rows is None else (534, 533)]
    assert engine.asleep
    assert learner.step_count == 0
    assert all(p.grad is None for p in learner.model.parameters())
    for then, now in zip(before, learner.model.parameters(), strict=True):
        assert torch.equal(then, now)
    assert metrics["rss_gib"] > 0


def test_several_ranks_try_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait in the failed pass: another pass would have another size."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    machine: Any = Machine(room=1000)
    with pytest.raises(OutOfMemory, match=r"max_tokens 4096 does not fit in memory: fewer may"):
        preflight(machine, machine, max_tokens=4096)
    assert machine.tried == [4096]

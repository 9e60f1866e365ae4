"""Fine-tune on rollouts or conversations: `agentgrpo sft CONFIG [key=value ...]`.

The data is a .jsonl file ([sft] data). A row is one of

* a rollout, as in a run's rollouts.jsonl or the flywheel's sft.jsonl. Its tokens are used as they
  are. Trained segments: those that the policy sampled; for the flywheel, those with an author.
* a conversation, {"messages": [...]}, for a cold start. It is rendered like a rollout: with the
  same chat template, after the agent's prompt. Trained: the assistant's messages, with the closing
  token unless the message ends with a stop string of the agent, where sampling would have ended. A
  message with the role "observation" is inserted into the assistant's turn unchanged, for agents
  whose tool results are there.

Prompts and tool results are never trained on. The learner is that of RL, with its packing, master
weights and checkpoints; every example has advantage 1. The loss is the mean negative log-likelihood
per trained token, over all tokens of a step. vLLM is not started.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agentgrpo.agents.base import Agent
from agentgrpo.config import TrainConfig
from agentgrpo.config.recipe import RecipeConfig, SftConfig
from agentgrpo.data.cells import message_of
from agentgrpo.data.files import named
from agentgrpo.learn.minibatches import plan_updates
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.models.models import SavedAdapter, named_base
from agentgrpo.recipe.processes import command, require_same_work
from agentgrpo.records import checkpoint
from agentgrpo.records.metrics import FileTail, RunLog
from agentgrpo.records.rollouts import read_rollout
from agentgrpo.records.run_folder import lock_run_dir, require_same_run, whole_checkpoint
from agentgrpo.support.atomic_files import numbered_rows
from agentgrpo.support.files import not_found
from agentgrpo.support.packages import require
from agentgrpo.train.command_line import Begin
from agentgrpo.train.dry_run import format_plan, plan_line
from agentgrpo.train.memory_estimate import room_checks
from agentgrpo.train.prepare import prepare_run
from agentgrpo.types import Group, Int32, Metrics, Rollout, Segment, Status, Task

if TYPE_CHECKING:  # it imports torch, which a faulty config does without
    from agentgrpo.learn.learner import Learner

SAVED = (f"sft/{checkpoint.SAVED}",)
"""Files below out_dir from which the command continues."""


def read_examples(
    path: Path, config: SftConfig, chat: ChatTemplate, agent: Agent, *, max_tokens: int
) -> list[Rollout]:
    """Read the examples of a file in order, each with advantage 1.

    Raises:
        ValueError: a row is invalid or too long, an example has no trained token, or no example is
            selected. The message starts with file:line.
    """
    examples = []
    for number, row in numbered_rows(path):
        try:
            example = _example(row, config, chat, agent, name=f"{path.name}:{number}")
        except (KeyError, TypeError, ValueError) as error:
            message = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path}:{number}: {message}") from error
        if example is None:
            continue
        length = max(sum(len(s.token_ids) for s in part) for part in example.rows)
        if length > max_tokens:
            raise ValueError(
                f"{path}:{number}: expected at most engine.max_model_len = {max_tokens} tokens, "
                f"got {length}"
            )
        examples.append(example)
    if not examples:
        raise ValueError(f"{path}: expected examples, got none with sft.keep = {config.keep!r}")
    return examples


def _example(
    row: Mapping[str, Any], config: SftConfig, chat: ChatTemplate, agent: Agent, *, name: str
) -> Rollout | None:
    """Convert a row to a rollout with advantage 1. None: sft.keep excludes it."""
    closed_rows: list[list[Segment]] = []
    if "messages" in row:
        segments = conversation(row["messages"], chat, agent)
        task = Task(id=name, messages=(), spec={})
    else:
        if row.get("split") == "heldout":
            return None
        rollout = read_rollout(dict(row))
        if rollout.status is Status.INFRA_ERROR or (config.keep == "solved" and not rollout.solved):
            return None
        rows = [[_segment(s.token_ids, s.sampled) for s in part] for part in rollout.rows]
        if "flywheel" in row:
            authors = row["flywheel"]["authors"]
            segments_with_authors = zip(rollout.segments, authors, strict=True)
            rows = [
                [_segment(s.token_ids, author is not None) for s, author in segments_with_authors]
            ]
        *closed_rows, segments = rows
        task = rollout.task
    if not any(s.sampled and len(s.token_ids) for part in (*closed_rows, segments) for s in part):
        raise ValueError("expected tokens of the policy, got none in this example")
    return Rollout(
        task=task,
        segments=segments,
        closed_rows=closed_rows,
        status=Status.COMPLETED,
        advantage=1.0,
    )


def conversation(
    messages: Sequence[Mapping[str, Any]], chat: ChatTemplate, agent: Agent
) -> list[Segment]:
    """Tokenize a conversation as a rollout. The assistant's segments are `sampled`.

    It needs a message before the first assistant message. The agent's prompt is added in front, and
    the agent's prefill in the first turn.
    """
    prompt, turns = _turns(messages)
    task = Task(id="conversation", messages=tuple(prompt), spec={})
    prompt_messages, tools = agent.messages(task), agent.tools(task)
    chat.require_shown(prompt_messages, tools)
    segments = [_segment(chat.prompt_ids(prompt_messages, tools), trained=False)]
    if prefill := agent.prefill(task):
        segments.append(_segment(chat.text_ids(prefill, own=True), trained=False))
    roles = [message["role"] for message in prompt_messages]
    for index, (text, observation) in enumerate(turns):
        ids_of_turn = chat.text_ids(text.removeprefix(prefill) if index == 0 else text, own=True)
        ends_with_stop = any(text.endswith(stop) for stop in agent.stop)
        if not ends_with_stop and not isinstance(observation, str):
            ids_of_turn = np.append(ids_of_turn, np.int32(chat.closing_id(observation)))
        segments.append(_segment(ids_of_turn, trained=True))
        if isinstance(observation, str):
            segments.append(_segment(chat.text_ids(observation), trained=False))
        elif observation:
            last_id = int(ids_of_turn[-1]) if len(ids_of_turn) else None
            ids = chat.observation_ids(
                list(observation), last_id=last_id, tools=bool(tools), roles=roles
            )
            roles += ["assistant", *(message["role"] for message in observation)]
            segments.append(_segment(ids, trained=False))
    return segments


Following = str | Sequence[Mapping[str, Any]]
"""What follows a turn: text within the assistant's turn, or messages (none after the last)."""


def _turns(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[tuple[str, Following]]]:
    """Split messages: those before the first assistant message, then each turn with its result."""
    messages = [
        message_of(m, f"message {i}").for_template() for i, m in enumerate(messages, start=1)
    ]
    roles = [message["role"] for message in messages]
    for key in ("tool_calls", "reasoning_content"):
        if any(key in message for message in messages if message["role"] == "assistant"):
            raise ValueError(f"{key}: expected it in `content`, in the model's own format")
    if "assistant" not in roles or roles[0] == "assistant":
        raise ValueError(f"expected a prompt and then an assistant message, got roles {roles}")
    first = roles.index("assistant")
    turns: list[tuple[str, Following]] = []
    for message in messages[first:]:
        observation: Following = turns[-1][1] if turns else ()
        if message["role"] == "assistant":
            if turns and not observation:
                raise ValueError(f"an assistant message follows another one, got roles {roles}")
            turns.append((message["content"], ()))
        elif message["role"] == "observation":
            if observation:
                raise ValueError(f"an observation must follow an assistant message, got {roles}")
            turns[-1] = (turns[-1][0], message["content"])
        else:
            if isinstance(observation, str):
                raise ValueError(
                    f"expected an assistant message after an observation, got roles {roles}"
                )
            turns[-1] = (turns[-1][0], [*observation, message])
    return list(messages[:first]), turns


def _segment(ids: Int32, trained: bool) -> Segment:
    # With log-probabilities of 0, the learner's gap to the sampler is the negative log-likelihood.
    return Segment(ids, np.zeros(len(ids), np.float32) if trained else None)


def batch_of(step: int, count: int, batch_size: int, seed: int) -> list[int]:
    """Indices of the examples of an optimizer step. Each epoch has another order.

    The last step of an epoch may be smaller.
    """
    per_epoch = math.ceil(count / batch_size)
    epoch, position = divmod(step, per_epoch)
    order = np.random.default_rng((seed, epoch)).permutation(count)
    return [int(i) for i in order[position * batch_size : (position + 1) * batch_size]]


def learn(learner: Learner, examples: Sequence[Rollout], config: TrainConfig) -> Metrics:
    """Make one optimizer step on the examples.

    Returns the learner's metrics; `nll` is the mean negative log-likelihood in nats per token.
    """
    groups = [Group(task=example.task, rollouts=[example]) for example in examples]
    metrics = learner.step(
        plan_updates(groups, config, step=0, share_prefixes=learner.shares_prefixes)
    )
    return {
        "nll": metrics["sampler_gap_mean"],
        **{
            name: metrics[name]
            for name in ("grad_norm", "learning_rate", "packed_tokens", "seconds", "num_tokens")
        },
    }


def make_learner(
    model: str, config: TrainConfig, total_steps: int, *, adapter: SavedAdapter | None = None
) -> Learner:
    """Make RL's learner without a sampler, and so without a limit for their difference."""
    import torch

    from agentgrpo.learn.learner import Learner
    from agentgrpo.learn.policy import Policy, load_model
    from agentgrpo.learn.preflight import require_fit
    from agentgrpo.learn.weight_sync import Publisher

    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load_model(model, device=device, dtype=config.engine.dtype_on(device))
    learner = Learner(
        Policy(loaded, config.learner, weights="own", adapter=adapter.folder if adapter else None),
        Publisher(),
        config.learner,
        config.loss,
        total_steps=total_steps,
        temperature=1.0,
        dlogp_limit=math.inf,
    )
    if device == "cuda":
        require_fit(learner, config.learner.max_tokens)
    return learner


def settings_of(recipe: RecipeConfig) -> TrainConfig:
    """The config of the fine-tuning run in out_dir/sft, whose loss is the likelihood."""
    rate = recipe.sft.learning_rate or recipe.learner.learning_rate
    return recipe.of_run(
        out_dir=str(recipe.out_dir / "sft"),
        loss={"loss_type": "dapo", "vllm_importance_sampling_correction": False},
        **{"learner.learning_rate": rate},
    )


def data_of(recipe: RecipeConfig) -> Path:
    """The file of examples. Raises FileNotFoundError if it does not exist."""
    flywheel_data = recipe.out_dir / "flywheel" / "sft.jsonl"
    data = Path(recipe.sft.data or flywheel_data)
    if data.exists():
        return data
    remedy = "; `agentgrpo flywheel CONFIG` writes it, or set sft.data=FILE"
    raise FileNotFoundError(f"sft.data: {not_found(data)}{remedy if data == flywheel_data else ''}")


def run_sft(recipe: RecipeConfig, args: argparse.Namespace, begin: Begin) -> None:
    """Fine-tune, from the newest checkpoint in out_dir/sft if any, or print the plan."""
    config, sft, path = settings_of(recipe), recipe.sft, data_of(recipe)
    with contextlib.ExitStack() as undo:
        if not args.dry_run:
            undo.enter_context(lock_run_dir(config.out_dir))
        require_same_run(config)
        resumed = whole_checkpoint(config)
        parts = prepare_run(config, model=str(resumed) if resumed else None)
        undo.callback(parts.close)
        require(room_checks(config, parts.model, trained=True, sampled=False), parts.progress.print)
        limit = recipe.engine.max_model_len
        examples = read_examples(path, sft, parts.chat, parts.agent, max_tokens=limit)
        data = {"sft.data": f"{len(examples)} examples of {named(path)}"}
        require_same_work(recipe, "sft", SAVED, data=data, write=not args.dry_run)
        steps = sft.epochs * math.ceil(len(examples) / sft.batch_size)
        if args.dry_run:
            longest = max(sum(len(s.token_ids) for s in part) for e in examples for part in e.rows)
            length_text = f"{sft.epochs} epochs: {steps} steps of {sft.batch_size}"
            lines = [
                plan_line("data", f"{len(examples)} examples, the longest has {longest} tokens"),
                plan_line("the run", f"{length_text}, saved every {config.save_every}"),
            ]
            print(format_plan(config, parts, lines, sampled=False))
            return
        learner = make_learner(parts.model, config, steps, adapter=parts.adapter)
        log, say = RunLog(config.out_dir), parts.progress.print
        offsets: dict[str, FileTail] = {}
        if resumed is not None:
            offsets = learner.load_state(resumed / checkpoint.STATE)["log_offsets"]
            say(f"resumed from {resumed}, after {learner.step_count} steps")
        log.truncate_to(offsets)
        log.write_run_json(
            config=config.model_dump(mode="json"), base=named_base(config.model),
            learner=learner.describe(),
            sft={"examples": len(examples), **sft.model_dump(mode="json")},
        )  # fmt: skip
        say(f"fine-tuning on {len(examples)} examples, {sft.epochs} epochs")

        def write(folder: Path) -> None:
            learner.policy.save(folder)
            parts.chat.save(folder)
            learner.save_state(folder / checkpoint.STATE, log_offsets=log.offsets())

        begin()
        for step in range(learner.step_count, steps):
            indices = batch_of(step, len(examples), sft.batch_size, config.seed)
            metrics = learn(learner, [examples[i] for i in indices], config)
            log.write(step, sft=metrics)
            say(
                f"step {step + 1}/{steps}  nll {metrics['nll']:.4f}  "
                f"{metrics['packed_tokens']:.0f} tokens in {metrics['seconds']:.1f}s"
            )
            if (step + 1) % config.save_every == 0 or step + 1 == steps:
                num_kept = config.keep_checkpoints
                saved = checkpoint.save(config.out_dir, learner.step_count, write, keep=num_kept)
                say(f"saved {saved}")


def main(arguments: list[str]) -> int:
    """Parse the command line, fine-tune. Returns the exit status."""
    return command("sft", __doc__, arguments, run_sft, saved=SAVED)

"""TRL's `rollout_func`, unchanged, as our sampler: `rollout.sampler = "rollout_func:module:name"`.

    def rollout_func(prompts, trainer) -> {"prompt_ids": [...], "completion_ids": [...],
                                           "logprobs": [...], "env_mask": [...], **more}

It is called once with every prompt repeated n times in a row, as TRL calls it, and a `trainer` that
has what such functions read: `processing_class` (the tokenizer), `args` (temperature,
num_generations, max_completion_length), and `llm` (vLLM's own object; also under
`vllm_generation.llm`). `generate_rollout_completions(trainer, prompts)` of TRL's examples is here
too. Further keys become named rewards if they are numbers. TRL's other form,
`environment_factory`, is an environment: env.kind = "factory".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from agentgrpo.config import RolloutConfig
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.models.encoding import ids_from_list
from agentgrpo.rollout.custom import RolloutParams, rollout_from_tokens
from agentgrpo.rollout.decoder import request_seed
from agentgrpo.types import Completion, Int32, Rollout, Status, Task
from agentgrpo.usercode import WrongResult, as_number, user_call

if TYPE_CHECKING:  # it imports vLLM
    from agentgrpo.engine.engine import Engine

RolloutFunc = Callable[[list[Any], Any], Mapping[str, Sequence[Any]]]
TOKENS = ("prompt_ids", "completion_ids", "logprobs")


@dataclass(slots=True)
class RolloutTrainer:
    """What a rollout_func reads of TRL's trainer."""

    engine: Engine
    chat: ChatTemplate
    params: RolloutParams
    args: SimpleNamespace
    calls: int = 0

    @property
    def processing_class(self) -> Any:
        """The tokenizer."""
        return self.chat.tokenizer

    @property
    def llm(self) -> Any:
        """VLLM's own object."""
        return self.engine.llm

    @property
    def vllm_generation(self) -> SimpleNamespace:
        """Where TRL keeps it."""
        return SimpleNamespace(llm=self.engine.llm)


def generate_rollout_completions(
    trainer: RolloutTrainer, prompts: Sequence[Any]
) -> list[dict[str, Any]]:
    """One completion per prompt, as TRL's generate_rollout_completions: a dict of ids and logprobs.

    Args:
        trainer: as the rollout_func got it.
        prompts: texts, in which a control token's name is that token, or lists of chat messages,
            which the model's template renders.
    """
    params, chat, engine = trainer.params, trainer.chat, trainer.engine
    trainer.calls += 1
    ids = [_ids(chat, prompt) for prompt in prompts]
    for index, prompt_ids in enumerate(ids):
        room = engine.max_model_len - len(prompt_ids)
        engine.add_request(
            f"{trainer.calls}.{index}",
            prompt_ids,
            max_tokens=min(params.max_turn_tokens, room),
            temperature=params.temperature,
            seed=request_seed(params.seed, trainer.calls, index) if params.temperature else None,
            stop_token_ids=params.stop_token_ids,
            filters=params.filters,
        )
    done: dict[str, Completion] = {}
    while engine.num_in_flight:
        done |= {completion.request_id: completion for completion in engine.step()}
    turns = [done[f"{trainer.calls}.{index}"] for index in range(len(ids))]
    return [
        {
            "prompt_ids": prompt_ids.tolist(),
            "completion_ids": turn.token_ids.tolist(),
            "logprobs": turn.logprobs.tolist(),
            "text": chat.decode(turn.token_ids),
        }
        for prompt_ids, turn in zip(ids, turns, strict=True)
    ]


def _ids(chat: ChatTemplate, prompt: Any) -> Int32:
    if isinstance(prompt, str):  # as vLLM reads it: most were made by apply_chat_template
        return ids_from_list(chat.tokenizer(prompt)["input_ids"])
    return chat.prompt_ids(prompt)


class RolloutFuncSampler:
    """A RolloutSampler that asks a rollout_func."""

    def __init__(self, function: RolloutFunc, chat: ChatTemplate, config: RolloutConfig) -> None:
        self._function, self._chat, self._config = function, chat, config

    def rollout(
        self, engine: Engine, tasks: Sequence[Task], n: int, params: RolloutParams
    ) -> list[list[Rollout]]:
        """One call of the function for all tasks.

        Raises:
            UserCodeError: it failed, a key is missing, or a value has another number of entries
                than prompts.
        """
        args = SimpleNamespace(
            temperature=params.temperature,
            num_generations=n,
            max_completion_length=params.max_response_tokens,
        )
        trainer = RolloutTrainer(engine, self._chat, params, args)
        repeated = [task for task in tasks for _ in range(n)]
        prompts = [[dict(message) for message in task.messages] for task in repeated]
        with user_call(self._function):
            returned = self._function(prompts, trainer)
            if not isinstance(returned, Mapping):
                raise WrongResult(f"expected a dict of lists, got {returned!r:.80}")
            for key in (*TOKENS, *returned):
                if key not in returned or len(returned[key]) != len(repeated):
                    got = len(returned[key]) if key in returned else "no such key"
                    raise WrongResult(f"{key!r}: expected {len(repeated)} values, got {got}")
            rollouts = [self._one(task, returned, i) for i, task in enumerate(repeated)]
        return [rollouts[i : i + n] for i in range(0, len(rollouts), n)]

    def _one(self, task: Task, returned: Mapping[str, Sequence[Any]], index: int) -> Rollout:
        row = {key: values[index] for key, values in returned.items()}
        mask = row.get("env_mask")
        ids = row["completion_ids"]
        whole = bool(len(ids)) and int(ids[-1]) in self._chat.stop_token_ids
        rollout = rollout_from_tokens(
            task,
            row["prompt_ids"],
            ids,
            row["logprobs"],
            mask,
            status=Status.COMPLETED if whole else Status.TRUNCATED_LENGTH,
        )
        last = rollout.segments[-1]
        rollout.answer = self._chat.decode(last.token_ids) if last.sampled and whole else None
        more = {k: as_number(v) for k, v in row.items() if k not in (*TOKENS, "env_mask")}
        rollout.rewards = {key: value for key, value in more.items() if value is not None}
        return rollout

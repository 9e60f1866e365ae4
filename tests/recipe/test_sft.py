"""Fine-tuning: what is trained on, that it is rendered as rollouts are, and that it learns."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentgrpo.actions import Observation, RunCode
from agentgrpo.agents.code import CodeAgent
from agentgrpo.config.recipe import RecipeConfig, SftConfig
from agentgrpo.models.chat import ChatTemplate
from agentgrpo.recipe.sft import (
    batch_of,
    conversation,
    learn,
    make_learner,
    read_examples,
    run_sft,
    settings_of,
)
from agentgrpo.records.checkpoint import newest
from agentgrpo.records.rollouts import rollout_record
from agentgrpo.support.atomic_files import read_lines
from agentgrpo.types import Rollout, Segment, Status, Task
from tests.playing import CHAT
from tests.tiny import NUMBERED, make_tokenizer

AGENT = CodeAgent(system_prompt="S")
PLAYED = [
    {"role": "user", "content": "6*7?"},
    {"role": "assistant", "content": "Hm. <code>6*7</code>"},
    {"role": "user", "content": "42"},
    {"role": "assistant", "content": "Answer: 42"},
]


def as_rollout() -> Rollout:
    """The conversation as the sampler would have recorded it."""
    task = Task(id="t", messages=(PLAYED[0],), spec={"answer": 42})
    told = AGENT.observe(RunCode("6*7"), Observation("42"))
    assert not isinstance(told, str)
    ids = [
        CHAT.prompt_ids(AGENT.messages(task)),
        CHAT.text_ids("Hm. <code>6*7</code>"),
        CHAT.observation_ids(told, last_id=None),
        np.append(CHAT.text_ids("Answer: 42"), np.int32(CHAT.end_of_turn_id)),
    ]
    segments = [
        Segment(part, -np.ones(len(part), np.float32) if index % 2 else None)
        for index, part in enumerate(ids)
    ]
    return Rollout(task=task, segments=segments, status=Status.COMPLETED, answer="42")


def split(segments: Sequence[Segment]) -> list[tuple[list[int], bool]]:
    return [(segment.token_ids.tolist(), segment.sampled) for segment in segments]


def test_S3_14_conversation_equals_the_rollout_byte_for_byte() -> None:
    """The same tokens, and the same ones are trained: none of the prompt or of the tool."""
    made = conversation(PLAYED, CHAT, AGENT)
    assert split(made) == split(as_rollout().segments)
    text = CHAT.tokenizer.decode(np.concatenate([s.token_ids for s in made]))
    assert text == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n6*7?<|im_end|>\n"
        "<|im_start|>assistant\nHm. <code>6*7</code><|im_end|>\n"
        "<|im_start|>user\n42<|im_end|>\n<|im_start|>assistant\nAnswer: 42<|im_end|>"
    )
    trained = [CHAT.tokenizer.decode(s.token_ids) for s in made if s.sampled]
    assert trained == ["Hm. <code>6*7</code>", "Answer: 42<|im_end|>"]


def test_roles_of_other_formats_are_converted() -> None:
    said = [{"from": {"user": "human", "assistant": "gpt"}.get(m["role"], m["role"]),
             "value": m["content"]} for m in PLAYED]  # fmt: skip
    assert split(conversation(said, CHAT, AGENT)) == split(as_rollout().segments)


def test_template_that_numbers_messages_gets_their_count() -> None:
    chat = ChatTemplate(make_tokenizer(NUMBERED))
    made = conversation([*PLAYED, *PLAYED[2:]], chat, AGENT)
    text = chat.tokenizer.decode(np.concatenate([s.token_ids for s in made]))
    assert re.findall(r"<.im_start.>(?:user|system) (\d+)", text) == ["1", "2", "4", "6"]


def test_tool_result_within_the_turn() -> None:
    inline = [*PLAYED[:2], {"role": "observation", "content": "\n42\n"}, PLAYED[3]]
    made = conversation(inline, CHAT, AGENT)
    assert [(CHAT.tokenizer.decode(s.token_ids), s.sampled) for s in made[1:]] == [
        ("Hm. <code>6*7</code>", True),
        ("\n42\n", False),
        ("Answer: 42<|im_end|>", True),
    ]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([PLAYED[0]], "expected a prompt and then an assistant message, got roles .'user'."),
        (PLAYED[1:], "expected a prompt and then an assistant message"),
        ([*PLAYED[:2], PLAYED[3]], "an assistant message follows another one"),
        ([*PLAYED[:3], {"role": "observation", "content": ""}], "an observation must follow"),
        (
            [*PLAYED[:2], {"role": "observation", "content": "x"}, PLAYED[2]],
            "expected an assistant message after an observation",
        ),
        ([{"content": "x"}], "message 1: expected .'role': text"),
        ([{"role": "critic", "content": "x"}, PLAYED[3]], ".*cannot begin a conversation"),
        ([PLAYED[0], {**PLAYED[3], "reasoning_content": "6*7"}], "reasoning_content: expected it"),
        (
            [PLAYED[0], {**PLAYED[3], "tool_calls": [{"function": {"name": "f"}}]}],
            "tool_calls: expected it in `content`",
        ),
    ],
)
def test_conversations_without_alternating_turns_are_rejected(
    tmp_path: Path, messages: Any, said: str
) -> None:
    path = write(tmp_path / "x.jsonl", [{"messages": messages}])
    with pytest.raises(ValueError, match=rf"x\.jsonl:1: {said}"):
        read_examples(path, SftConfig(), CHAT, AGENT, max_tokens=500)


def write(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


def test_S3_14_policy_tokens_of_rollouts_are_trained(tmp_path: Path) -> None:
    played = as_rollout()
    played.rewards = {"answer": 1.0}
    right = rollout_record(played)
    marked = json.loads(json.dumps(right))
    marked["flywheel"] = {"authors": [None, None, None, "critic"]}
    wrong = {**right, "rewards": {"answer": 0.0}}
    heldout = {**right, "split": "heldout"}
    broken = {**right, "status": "infra_error"}
    rows = [right, wrong, heldout, broken, marked]
    path = write(tmp_path / "rollouts.jsonl", rows)
    examples = read_examples(path, SftConfig(), CHAT, AGENT, max_tokens=500)
    assert len(examples) == 3
    assert split(examples[0].segments) == split(played.segments)
    assert [s.sampled for s in examples[2].segments] == [False, False, False, True]
    assert all(example.advantage == 1.0 for example in examples)
    solved = read_examples(path, SftConfig(keep="solved"), CHAT, AGENT, max_tokens=500)
    assert len(solved) == 2


def test_invalid_data_is_named(tmp_path: Path) -> None:
    def read(rows: Sequence[Any]) -> list[Rollout]:
        path = write(tmp_path / "d.jsonl", rows)
        return read_examples(path, SftConfig(), CHAT, AGENT, max_tokens=70)

    short = {"messages": [{"role": "user", "content": "x"}, PLAYED[3]]}
    with pytest.raises(
        ValueError, match=r"d\.jsonl:2: expected at most engine.max_model_len = 70 tokens, got \d+"
    ):
        read([short, {"messages": PLAYED}])
    record = rollout_record(as_rollout())
    with pytest.raises(ValueError, match=r"d\.jsonl: expected examples, got none"):
        read([{**record, "split": "heldout"}])
    record["flywheel"] = {"authors": [None] * 4}
    with pytest.raises(ValueError, match=r"d\.jsonl:1: expected tokens of the policy, got none"):
        read([record])
    with pytest.raises(ValueError, match=r"d\.jsonl:1: "):
        read([{}])


def test_each_epoch_has_every_example_once_in_another_order() -> None:
    epochs = [[i for step in range(3) for i in batch_of(3 * e + step, 10, 4, 7)] for e in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [len(batch_of(step, 10, 4, 7)) for step in range(4)] == [4, 4, 2, 4]
    assert batch_of(4, 10, 4, 7) == batch_of(4, 10, 4, 7) != batch_of(4, 10, 4, 8)


def recipe(folder: Path, model: Path, rank: int = 0, **sft: Any) -> RecipeConfig:
    return RecipeConfig.model_validate(
        {
            "model": str(model),
            "out_dir": folder / "out",
            "save_every": 2,
            "engine": {"max_model_len": 256},
            "agent": {"options": {"system_prompt": "S"}},
            "learner": {"learning_rate": 1e-2, "lora": {"rank": rank}},
            "sft": {"data": str(folder / "data.jsonl"), **sft},
        }
    )


def test_fine_tuning_has_its_own_learning_rate(tmp_path: Path, tiny_model: Path) -> None:
    assert settings_of(recipe(tmp_path, tiny_model)).learner.learning_rate == 1e-2
    own = recipe(tmp_path, tiny_model, learning_rate=3e-3)
    assert settings_of(own).learner.learning_rate == 3e-3
    assert own.of_run().learner.learning_rate == 1e-2


def test_S3_14_the_loss_is_cross_entropy_with_masked_labels(
    tiny_model: Path, tmp_path: Path
) -> None:
    """One SGD-like look: nll and the gradient's direction equal transformers' own with -100."""
    from transformers import AutoModelForCausalLM

    write(tmp_path / "data.jsonl", [{"messages": PLAYED}, {"messages": PLAYED[:2]}])
    config = settings_of(recipe(tmp_path, tiny_model))
    examples = read_examples(tmp_path / "data.jsonl", SftConfig(), CHAT, AGENT, max_tokens=256)
    learner = make_learner(str(tiny_model), config, 1)
    reference: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    total, count = torch.zeros(()), 0
    for example in examples:
        ids = torch.from_numpy(example.token_ids.astype(np.int64))
        labels = torch.cat(
            [
                torch.from_numpy(s.token_ids.astype(np.int64))
                if s.sampled
                else torch.full((len(s.token_ids),), -100)
                for s in example.segments
            ]
        )
        logits = reference(ids[None]).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum")
        count += int((labels[1:] >= 0).sum())
    (total / count).backward()
    metrics = learn(learner, examples, config)
    assert metrics["nll"] == pytest.approx(total.item() / count, rel=1e-4)
    assert metrics["num_tokens"] == count
    norm = torch.cat([p.grad.flatten() for p in reference.parameters()]).norm()
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-3)


@pytest.mark.nsjail
@pytest.mark.parametrize("rank", [0, 8])
def test_cold_start_learns_and_resumes_exactly(tmp_path: Path, tiny_model: Path, rank: int) -> None:
    """Also of an adapter, whose checkpoints hold no model."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{a}+1"},
                {"role": "assistant", "content": f"<code>{a}+1</code>"},
                {"role": "user", "content": str(a + 1)},
                {"role": "assistant", "content": f"Answer: {a + 1}"},
            ]
        }
        for a in range(1, 7)
    ]
    written: list[list[dict[str, Any]]] = []
    for name in ("whole", "resumed"):
        folder = tmp_path / name
        folder.mkdir()
        write(folder / "data.jsonl", rows)
        made = recipe(folder, tiny_model, rank, epochs=4, batch_size=4)
        if name == "resumed":
            interrupt_after(3, made)
        last = finetune(made)
        assert last.name == "step_000008"
        written.append(read_lines(made.out_dir / "sft" / "metrics.jsonl"))
    whole, resumed = written
    assert [row["step"] for row in whole] == [row["step"] for row in resumed] == list(range(8))
    for name in ("sft/nll", "sft/grad_norm"):
        assert [row[name] for row in whole] == [row[name] for row in resumed]
    assert whole[-1]["sft/nll"] < 0.7 * whole[0]["sft/nll"]
    assert (last / "tokenizer.json").exists()
    with pytest.raises(ValueError, match=r"with sft\.epochs = 4, now it is 5"):
        finetune(recipe(tmp_path / "resumed", tiny_model, rank, epochs=5, batch_size=4))
    write(tmp_path / "resumed" / "data.jsonl", [*rows[:5], rows[0]])
    with pytest.raises(ValueError, match=r"with sft\.data = '6 examples of data\.jsonl \(SHA-256 "):
        finetune(made)


def finetune(made: RecipeConfig) -> Path:
    run_sft(made, Namespace(dry_run=False), lambda: None)
    last = newest(made.out_dir / "sft")
    assert last is not None
    return last


def interrupt_after(step: int, made: RecipeConfig) -> None:
    """Fine-tune until a step has been recorded that no checkpoint has, then stop."""
    import agentgrpo.recipe.sft

    inner: Callable[..., Any] = agentgrpo.recipe.sft.learn
    seen: list[None] = []

    def stops(*args: Any) -> Any:
        if len(seen) == step:
            raise KeyboardInterrupt
        seen.append(None)
        return inner(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agentgrpo.recipe.sft, "learn", stops)
        with pytest.raises(KeyboardInterrupt):
            finetune(made)

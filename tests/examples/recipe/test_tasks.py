"""The recipe's tasks: one call solves each, and only a call; the scripted critic knows which."""

from __future__ import annotations

import re

import pytest

from agentgrpo.actions import CallTools, Finish, RunCode, ToolCall
from agentgrpo.agents.tags import TagAgent
from agentgrpo.config.read import load_config_of
from agentgrpo.config.recipe import RecipeConfig
from agentgrpo.data.word_problems import Split
from agentgrpo.examples.recipe import search_demo
from agentgrpo.examples.recipe import tasks as recipe_tasks
from agentgrpo.examples.recipe.tasks import LOOK, ComputeAndSearchEnv, critic, reflector
from agentgrpo.recipe.operators import FLAW, REDUNDANT, REFINE
from agentgrpo.sandbox import SandboxPool
from agentgrpo.types import Task
from tests.given import TASK

SPLITS: tuple[Split, Split] = ("train", "heldout")


@pytest.fixture
def env(pool: SandboxPool) -> ComputeAndSearchEnv:
    return ComputeAndSearchEnv(pool, 5.0)


def question(task: Task) -> str:
    return str(task.messages[-1]["content"])


def recipe() -> RecipeConfig:
    return load_config_of(RecipeConfig, "recipe")


def test_heldout_questions_share_neither_entries_nor_wordings() -> None:
    train, heldout = (search_demo.lookups(split) for split in SPLITS)
    names = [{task.spec["name"] for task in tasks} for tasks in (train, heldout)]
    assert not names[0] & names[1]
    assert len(names[0]) == 3 * len(names[1])
    forms = [
        {question(task).replace(task.spec["name"], "X") for task in tasks}
        for tasks in (train, heldout)
    ]
    assert not forms[0] & forms[1]


@pytest.mark.nsjail
@pytest.mark.parametrize("split", SPLITS)
def test_one_search_for_the_name_finds_the_answer(env: ComputeAndSearchEnv, split: Split) -> None:
    for task in search_demo.lookups(split):
        answer = task.spec["answer"]
        call = CallTools((ToolCall("search", {"query": task.spec["name"]}),))
        (told,) = env.reset(task).step(call).outputs
        assert re.search(rf"\b{re.escape(answer)}\b", told)
        assert answer not in question(task)


@pytest.mark.nsjail
def test_shots_match_the_environments_observations(env: ComputeAndSearchEnv) -> None:
    """Examples have the very form of what the policy will see; their facts are their own."""
    agent = TagAgent(**recipe().agent.options)
    shots = recipe().agent.options["shots"]
    assert len(shots) == 3
    for asked, said in shots:
        first, told, last = re.split("( <result>.*</result>)", said["content"], flags=re.S)
        action = agent.parse(first, TASK)
        assert agent.parse(last, TASK) == Finish(last[len(" <answer>") : -len("</answer>")])
        if isinstance(action, RunCode):
            task = Task(id="t", messages=(asked,), spec={})
            episode = env.reset(task)
            assert agent.observe(action, episode.step(action)) == told
            episode.close()
        else:
            assert isinstance(action, CallTools)
            assert action.calls[0].arguments["query"] not in {e.name for e in search_demo.entries()}
            assert re.fullmatch(r" <result>\n\[1\] (\w+)\n\1 .*\n</result>", told)


# -- the scripted critic ---------------------------------------------------------------------------

LOOKUP = next(task for task in recipe_tasks.tasks("train") if task.spec["kind"] == "lookup")
ANSWER = LOOKUP.spec["answer"]
CALL = f"{LOOK}<search>{LOOKUP.spec['name']}</search>"
END = f"<answer>{ANSWER}</answer>"
TOLD = f"\nResult: [1] It is {ANSWER}, they say."


def ask(template: str, *steps: str, task: Task = LOOKUP, **more: str) -> str:
    shown = "\n".join(f"Step {number}:\n{step}" for number, step in enumerate(steps, 1))
    prompt = template.format(question=question(task), steps=shown, accepted="(hidden)", **more)
    said = critic if template in (FLAW, REDUNDANT, REFINE) else reflector
    return said([{"role": "user", "content": prompt}])


@pytest.mark.parametrize(
    ("steps", "reply"),
    [
        ([CALL + TOLD, END], "Step: no"),
        ([END], "Step: no"),
        ([CALL + TOLD, "<python>1</python>\nResult: 1", END], f"Corrected step:\n{END}"),
        (["<python>1</python>\nResult: 1", CALL + TOLD, END], f"Corrected step:\n{CALL}"),
    ],
)
def test_critic_finds_useless_and_late_calls(steps: list[str], reply: str) -> None:
    said = ask(REDUNDANT, *steps)
    assert said.endswith(reply)
    if "Corrected" in said:
        late = steps[0].startswith(CALL)
        assert said.startswith("Step: 2" if late else "Step: 1")

"""The flywheel with a stub engine, a stub world and scripted critics; every operator by itself."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentgrpo.actions import InfrastructureError, Observation
from agentgrpo.agents.code import CodeAgent
from agentgrpo.config import BranchConfig, RolloutConfig
from agentgrpo.config.recipe import RecipeConfig
from agentgrpo.engine.in_process import EngineLoop
from agentgrpo.envs.runner import EpisodeRunner
from agentgrpo.recipe.flywheel import filter_trajectories, questions_of, run_flywheel
from agentgrpo.recipe.operators import FOR_RIGHT
from agentgrpo.recipe.trajectories import Trajectory, TrajectoryPlayer
from agentgrpo.records.rollouts import read_rollout
from agentgrpo.rewards.efficiency import well_formed
from agentgrpo.support.atomic_files import read_lines
from agentgrpo.train.prepare import models_of
from agentgrpo.train.progress import Progress
from agentgrpo.types import Rollout, Task
from tests.given import a_rollout, scored_by
from tests.playing import CHAT, TOKENIZER
from tests.rollout.stubs import StubEngine, StubEnv, Turn
from tests.rollout.test_second_role import AGENT as TALKER
from tests.rollout.test_second_role import Shop, speak

WRONG, RIGHT = "<code>bad</code>", "<code>good</code>"
HINT, LAST_HINT = "Wait, a tool. ", "No, a tool. "


def policy(number: int, prompt: str) -> Turn:
    """Wrong by itself; right once it is shown what good code says, or is given a hint."""
    question = prompt.rpartition("user\nQ:")[2]
    turn = prompt.rpartition("<|im_start|>assistant\n")[2]
    if turn:  # within a turn that a hint began
        return Turn(RIGHT)
    if "out of good" in question:
        return Turn("It is clear. Answer: 42<|im_end|>", steps=2)
    if "out of bad" in question:
        return Turn("I think so. Answer: 41<|im_end|>", steps=3)
    return Turn(f"Let me see. {RIGHT if 'easy' in question else WRONG}")


def critic(messages: Sequence[Mapping[str, Any]]) -> str:
    """Finds the first step flawed; corrects a redundant one; rewrites thoughts in capitals."""
    asked = messages[0]["content"]
    assert "Result: out of" in asked
    if "first step whose tool call is redundant" in asked:
        if "Better." in asked:
            return "Step: no"
        return f"Step: 1\nAnalysis: long\nCorrected step:\nBetter. {RIGHT} and more"
    if "Rewrite only the thoughts" in asked:
        return "\n".join(
            f"Thought {n}: BRIEF {n}." for n in re.findall(r"^Step (\d+):", asked, re.M)
        )
    assert "Accepted answers: 42" in asked
    return "Step: 1\nAnalysis: wrong code"


def reflector(messages: Sequence[Mapping[str, Any]]) -> str:
    asked = messages[0]["content"]
    return f"Anew. {RIGHT}" if "Analysis: use good" in asked else "use good"


def correct(rollout: Rollout) -> dict[str, float]:
    return {"answer": float(rollout.answer == "42"), "format": 0.0}


class World:
    """All that run_flywheel() needs, its parts open to the tests."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.chat = CHAT
        self.engine = StubEngine(TOKENIZER, policy)
        self.env = StubEnv()
        self.said: list[str] = []
        self.scripts: Any = sys.modules["scripts_of_the_test"]
        self.setup = SimpleNamespace(
            agent=CodeAgent(),
            env=self.env,
            chat=self.chat,
            engine=self.engine,
            reward=scored_by(correct),
            progress=Progress(1),
        )
        self.setup.progress.print = self.said.append
        scripts = {
            name: {"kind": "script", "function": f"scripts_of_the_test:{name}"}
            for name in ("critic", "reflector")
        }
        given = {"critic": "critic", "reflector": "reflector", "rounds": 1, "concurrency": 4}
        given |= {"step_hints": [HINT], "trajectory_hints": [LAST_HINT]}
        self.recipe = RecipeConfig.model_validate(
            {
                "model": "m",
                "out_dir": folder,
                "rollout": {"max_turns": 3, "max_turn_tokens": 400},
                "endpoints": scripts,
                "flywheel": {**given, **config},
            }
        )

    def run_flywheel(self, *tasks: Task) -> dict[str, Any]:
        (self.recipe.out_dir / "flywheel").mkdir(exist_ok=True)
        questions_of(self.recipe, given(*tasks), write=True)
        self.setup.models = models_of(self.recipe, None, trained=False)
        summary = run_flywheel(self.recipe, self.setup, tasks)  # type: ignore[arg-type]
        self.env.assert_all_closed_once()
        return dict(summary)

    def lines(self, name: str) -> list[dict[str, Any]]:
        return read_lines(self.recipe.out_dir / "flywheel" / name)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts are found by the name of this module."""
    scripts: Any = SimpleNamespace(critic=critic, reflector=reflector)
    monkeypatch.setitem(sys.modules, "scripts_of_the_test", scripts)


def given(*tasks: Task) -> Any:
    """A stream of these alone, of the same data whatever they are."""
    return SimpleNamespace(next=lambda count: tasks, state_dict=lambda: {"source": "a.jsonl"})


def question(name: str = "q") -> Task:
    messages = ({"role": "user", "content": f"Q: {name}"},)
    return Task(id=name, messages=messages, spec={"answer": 42})


def texts(record: Mapping[str, Any], world: World) -> list[tuple[str, str | None]]:
    decode = world.chat.tokenizer.decode
    written = zip(record["segments"], record["flywheel"]["authors"], strict=True)
    return [(decode(segment["token_ids"]), author) for segment, author in written][1:]


@pytest.mark.parametrize(
    ("operator", "turns"),
    [
        (
            "reflection",
            [(f"Anew. {RIGHT}", "reflector"), ("It is clear. Answer: 42<|im_end|>", "generator")],
        ),
        (
            "step_hint",
            [
                (f"Let me see. {WRONG}", "generator"),
                (HINT, "hint"),
                (RIGHT, "generator"),
                ("It is clear. Answer: 42<|im_end|>", "generator"),
            ],
        ),
        (
            "trajectory_hint",
            [
                (f"Let me see. {WRONG}", "generator"),
                (f"I think so. {LAST_HINT}", "hint"),
                (RIGHT, "generator"),
                ("It is clear. Answer: 42<|im_end|>", "generator"),
            ],
        ),
    ],
)
def test_S3_13_wrong_trajectory_is_repaired(
    tmp_path: Path, operator: str, turns: list[tuple[str, str]]
) -> None:
    made = World(tmp_path, operators=(operator,))
    made.run_flywheel(question())
    first, repaired = made.lines("rollouts.jsonl")
    then, now = first["flywheel"], repaired["flywheel"]
    assert (then["operator"], then["right"], first["answer"]) == ("fresh", False, "41")
    assert (now["operator"], now["parent"], now["quality"]) == (operator, 0, 1.0)
    assert now["right"]
    assert now["valid"]
    spoken = [part for part in texts(repaired, made) if part[1]]
    assert spoken == turns
    told = "".join(text for text, author in texts(repaired, made) if author is None)
    assert "out of good" in told  # fresh, not written by anyone
    assert made.env.executed.count("good") == 1
    # the kept prefix has the very tokens that were sampled, log-probabilities included
    kept_segments = 1 if operator == "reflection" else 3
    assert first["segments"][:kept_segments] == repaired["segments"][:kept_segments]


def test_S3_13_right_trajectory_is_improved(tmp_path: Path) -> None:
    made = World(tmp_path)
    made.run_flywheel(question("easy"))
    first, again, corrected, refined = made.lines("rollouts.jsonl")
    assert [r["flywheel"]["operator"] for r in (first, again, corrected, refined)] == [
        "fresh", "fresh", "redundant", "refinement",
    ]  # fmt: skip
    assert all(
        r["flywheel"]["right"] and r["flywheel"]["valid"]
        for r in (first, again, corrected, refined)
    )
    assert texts(corrected, made)[0] == (f"Better. {RIGHT}", "critic")  # cut behind the stop string
    results = [text for text, author in texts(first, made) if author is None]
    spoken = [part for part in texts(refined, made) if part[1]]
    assert spoken == [
        (f"BRIEF 1. {RIGHT}", "critic"),
        ("BRIEF 2. Answer: 42<|im_end|>", "critic"),
    ]
    assert [text for text, author in texts(refined, made) if author is None] == results
    assert made.env.executed == ["good"] * 3  # nothing was done for the refined one
    assert refined["answer"] == "42"
    assert refined["stats"] == first["stats"]


def test_S3_13_log_and_summary_count_trajectories(tmp_path: Path) -> None:
    made = World(tmp_path, rounds=2, operators=("reflection", "redundant"), keep=1)
    summary = made.run_flywheel(question())
    (record,) = made.lines("buffer.jsonl")
    assert [(e["round"], e["operator"], e["parent"], e["made"]) for e in record["log"]] == [
        (0, "reflection", 0, 1),
        (1, "redundant", 1, 2),
    ]
    assert summary["operators"] == {
        "fresh": {"made": 1, "right": 0, "kept": 0},
        "reflection": {"made": 1, "right": 1, "kept": 1},
        "redundant": {"made": 1, "right": 1, "kept": 0},
    }
    assert (summary["trajectories"], summary["kept"]) == (3, 1)
    assert json.loads((made.recipe.out_dir / "flywheel" / "summary.json").read_text()) == summary


@pytest.mark.parametrize(
    ("operator", "reply", "why"),
    [
        ("redundant", "I would say step two.", "expected 'Step: NUMBER' from 1 to 2, got 'I would"),
        ("redundant", "Step: 3", "expected 'Step: NUMBER' from 1 to 2"),
        ("redundant", "Step: 0", "expected 'Step: NUMBER' from 1 to 2"),
        ("redundant", "Step: no", "found no redundant step"),
        ("redundant", "Step: 1\nAnalysis: x", "has no 'Corrected step:'"),
        ("redundant", "Step: 1\nCorrected step:\n", "an empty step"),
        ("redundant", "Step: 1\nCorrected step:\n<code>x", "a malformed step"),
        ("refinement", "", "expected thoughts of steps [1, 2], got []"),
        ("refinement", "Thought 1: x", "steps [1, 2], got [1]"),
        ("refinement", "Thought 1: x\nThought 2: y\nThought 3: z", "steps [1, 2], got [1, 2, 3]"),
        (
            "refinement",
            "Thought 1: Answer: 1\nThought 2: y",
            "the rewritten thought contains an action tag",
        ),
        ("step_hint", "Step: 2", "the flawed step is the last one, so there is no next turn"),
    ],
)
def test_S3_13_reply_in_another_form_makes_no_trajectory(
    tmp_path: Path, operator: str, reply: str, why: str
) -> None:
    made = World(tmp_path, operators=(operator,))
    made.scripts.critic = lambda messages: reply
    name = "easy" if operator in FOR_RIGHT else "hard"
    assert made.run_flywheel(question(name))["nothing_made"] == {operator: 1}
    (record,) = made.lines("buffer.jsonl")
    assert len(record["trajectories"]) == 1
    assert why in record["log"][0]["why"]


@pytest.mark.parametrize("spec", [{}, {"answer": None}, {"answer": []}, {"answer": [None]}])
def test_critics_prompt_has_no_answers_if_there_are_none(
    tmp_path: Path, spec: dict[str, Any]
) -> None:
    """An environment that judges needs none in its rows."""
    made, asked = World(tmp_path, operators=("step_hint",)), list[str]()

    def critic(messages: Sequence[Mapping[str, Any]]) -> str:
        asked.append(messages[0]["content"])
        return "Step: 1"

    made.scripts.critic = critic
    summary = made.run_flywheel(dataclasses.replace(question(), spec=spec))
    assert summary["operators"]["step_hint"]["made"] == 1
    assert "Q: q\nA wrong solution in" in asked[0]


def test_S3_13_concurrent_questions_do_not_mix(tmp_path: Path) -> None:
    """Each request has the agent's own stop strings, whoever else asks; each question its own."""
    made = World(tmp_path, rounds=2, concurrency=8)
    tasks = [question(f"{'easy' if i % 3 else 'hard'} {i}") for i in range(12)]
    summary = made.run_flywheel(*tasks)
    assert summary["questions"] == 12
    assert {request.options["stop"] for request in made.engine.requests} == {("</code>",)}
    for record in made.lines("buffer.jsonl"):
        for one in record["trajectories"]:
            prompt = made.chat.tokenizer.decode(one["segments"][0]["token_ids"])
            assert f"Q: {record['id']}<|im_end|>" in prompt
    assert {r["task"]["id"] for r in made.lines("sft.jsonl")} == {task.id for task in tasks}


def test_S3_13_killed_work_resumes_after_finished_questions(tmp_path: Path) -> None:
    made = World(tmp_path)
    made.run_flywheel(question("easy 1"))
    path = made.recipe.out_dir / "flywheel" / "buffer.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"id": "easy 2", "traj')  # cut short
    asked = len(made.engine.requests)
    summary = made.run_flywheel(question("easy 1"), question("easy 2"))
    assert summary["questions"] == 2
    assert path.read_bytes().startswith(whole)
    assert len(path.read_bytes().splitlines()) == 2
    assert all(
        "easy 2" in made.chat.tokenizer.decode(r.prompt) for r in made.engine.requests[asked:]
    )
    again = made.run_flywheel(question("easy 1"), question("easy 2"))
    assert again == summary


def test_folder_of_another_flywheel_is_rejected(tmp_path: Path) -> None:
    World(tmp_path).run_flywheel(question("easy"))
    with pytest.raises(ValueError, match=r"with flywheel\.rounds = 1, now it is 3"):
        World(tmp_path, rounds=3).run_flywheel(question("easy"))
    table = World(tmp_path).recipe.model_dump()
    table["learner"]["learning_rate"] = 1.0  # which a flywheel does not read
    questions_of(RecipeConfig.model_validate(table), given(question("easy")), write=True)
    table["rollout"]["max_turns"] = 4
    with pytest.raises(ValueError, match=r"with rollout\.max_turns = 3, now it is 4"):
        questions_of(RecipeConfig.model_validate(table), given(question("easy")), write=False)
    other = given(question("easy"))
    other.state_dict = lambda: {"source": "b.jsonl"}
    with pytest.raises(ValueError, match=r"with data\.train = 'a\.jsonl', now it is 'b\.jsonl'"):
        questions_of(World(tmp_path).recipe, other, write=False)
    World(tmp_path, keep=1, concurrency=2).run_flywheel(question("easy"))
    with pytest.raises(ValueError, match="different task ids in the data, 1, got 2"):
        World(tmp_path).run_flywheel(question("a"), question("a"))


def test_each_trajectory_is_used_once(tmp_path: Path) -> None:
    made = World(tmp_path, rounds=3)
    made.run_flywheel(question("easy"))
    (record,) = made.lines("buffer.jsonl")
    parents = {entry["round"]: entry["parent"] for entry in record["log"]}
    assert len(parents) == len(set(parents.values())) > 1


def test_trajectories_use_append_history_without_branching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the runs of the recipe do."""
    made, seen = World(tmp_path), list[Any]()

    def player(*parts: Any) -> TrajectoryPlayer:
        seen.append(parts[-1])
        return TrajectoryPlayer(*parts)

    rollout = {"history": "render", "branching": BranchConfig(initial=2), "max_retries": 3}
    changed = {"rollout": made.recipe.rollout.model_copy(update=rollout)}
    made.recipe = made.recipe.model_copy(update=changed)
    monkeypatch.setattr("agentgrpo.recipe.flywheel.TrajectoryPlayer", player)
    made.run_flywheel(question("easy"))
    (limits,) = seen
    assert (limits.history, limits.branching, limits.max_retries) == ("append", BranchConfig(), 0)


def test_question_with_infrastructure_error_is_skipped_and_retried(tmp_path: Path) -> None:
    made = World(tmp_path, operators=("reflection",))

    def broken(code: str) -> None:
        if code == "good":
            raise InfrastructureError("no session")

    made.env.on_call = broken
    summary = made.run_flywheel(question("easy"), question("hard"))
    assert summary["failed_by_the_machine"] == 1
    (record,) = made.lines("buffer.jsonl")
    assert record["id"] == "hard"
    assert record["log"][0]["why"] == "infrastructure error: no session"
    made.env.on_call = lambda code: None
    assert made.run_flywheel(question("easy"), question("hard"))["questions"] == 2


def test_failing_critic_makes_no_trajectory_and_is_logged(tmp_path: Path) -> None:
    def silent(messages: Any) -> str:
        raise InfrastructureError("endpoint c: HTTP 500: busy")

    made = World(tmp_path, operators=("redundant", "fresh"))
    made.scripts.critic = silent
    summary = made.run_flywheel(question("easy"))
    (record,) = made.lines("buffer.jsonl")
    assert [entry["made"] for entry in record["log"]] == [None, 1]
    assert record["log"][0]["why"] == "infrastructure error: endpoint c: HTTP 500: busy"
    assert summary["nothing_made"] == {"redundant": 1}
    assert summary["failed_by_the_machine"] == 0


def record_of(tokens: int, calls: int, *, right: bool = True, valid: bool = True) -> dict[str, Any]:
    segments = [{"token_ids": [0] * 50}, {"token_ids": list(range(tokens))}]
    made = {"authors": [None, "generator"], "right": right, "valid": valid}
    return {"segments": segments, "stats": {"tool_calls": float(calls)}, "flywheel": made}


def test_filter_keeps_right_valid_different_and_cheap_trajectories() -> None:
    few_calls, short, long_ = record_of(9, 1), record_of(4, 2), record_of(6, 2)
    wrong, malformed = record_of(1, 0, right=False), record_of(2, 0, valid=False)
    everything = [long_, wrong, short, few_calls, malformed, record_of(9, 1)]
    assert filter_trajectories(everything, 9) == [few_calls, short, long_]
    assert filter_trajectories(everything, 1) == [few_calls]
    assert filter_trajectories([wrong, malformed], 1) == []


def test_hint_without_room_for_a_turn_ends_the_trajectory(tmp_path: Path) -> None:
    made = World(tmp_path, operators=("step_hint",))
    made.run_flywheel(question("q"))
    repaired = made.lines("rollouts.jsonl")[1]
    made.engine.max_model_len = sum(len(part["token_ids"]) for part in repaired["segments"][:4])
    made.run_flywheel(question("r"))
    *_, last = made.lines("rollouts.jsonl")
    assert last["status"] == "truncated_length"
    assert texts(last, made)[-2:] == [(HINT, "hint"), ("", "generator")]


def test_kept_turns_are_repeated_with_a_second_role() -> None:
    loop = EngineLoop(StubEngine(TOKENIZER, speak))  # type: ignore[arg-type]
    config = RolloutConfig(max_turns=9, max_turn_tokens=200, max_observation_tokens=200)
    runner = EpisodeRunner(1)
    reward = scored_by(lambda r: {})
    player = TrajectoryPlayer(loop, TALKER, Shop(), CHAT, reward, runner, config)
    with ThreadPoolExecutor(1) as side:

        def work() -> tuple[Trajectory, Trajectory]:
            first = player.play(question("Hello."), operator="fresh")
            more: dict[str, Any] = {
                "kept_turns": first.turns[:2],
                "begin": "Well, ",
                "author": "hint",
            }
            return first, player.play(question("Hello."), operator="step_hint", **more)

        playing = side.submit(work)
        playing.add_done_callback(lambda _: loop.stop())
        loop.serve()
        first, again = playing.result()
    assert [turn.text for turn in first.turns] == ["agent 0", "agent 1", "agent 2"]
    assert [turn.text for turn in again.turns] == ["agent 0", "agent 1", "Well, agent 2"]
    assert [turn.result_text for turn in again.turns] == ["customer 1", "customer 2", ""]
    assert again.rollout.stats == first.rollout.stats
    assert again.record()["segments"][:4] == first.record()["segments"][:4]


def test_written_answer_is_closed_like_a_sampled_one(tmp_path: Path) -> None:
    made = World(tmp_path, operators=("redundant",))
    made.scripts.critic = lambda messages: "Step: 1\nCorrected step:\nAnswer: 42"
    made.run_flywheel(question("easy"))
    *_, last = made.lines("rollouts.jsonl")
    assert texts(last, made) == [("Answer: 42<|im_end|>", "critic")]
    assert (last["answer"], last["status"]) == ("42", "completed")


def test_kept_turn_gets_the_fresh_observation(tmp_path: Path) -> None:
    made = World(tmp_path, operators=("step_hint",))
    told = iter([Observation("out of bad"), Observation("", done=True, answer="42")])
    made.env.answer = lambda code: next(told)
    made.run_flywheel(question())
    *_, last = made.lines("rollouts.jsonl")
    assert texts(last, made) == [(f"Let me see. {WRONG}", "generator")], "it ended there"
    assert last["answer"] == "42"


def test_best_trajectory_is_right_then_cheap() -> None:
    graded = [
        Trajectory(
            turns=(),
            rollout=a_rollout(stats={"tool_calls": calls}),
            operator="fresh",
            quality=worth,
        )
        for worth, calls in ((1.0, 2.0), (0.75, 1.0), (0.5, 0.0), (0.7, 3.0))
    ]
    assert [one.right for one in graded] == [True, True, False, False]
    assert sorted(range(4), key=lambda i: graded[i].rank) == [1, 0, 3, 2]


def test_records_are_rollouts(tmp_path: Path) -> None:
    made = World(tmp_path, operators=("step_hint",))
    made.run_flywheel(question())
    for record in made.lines("sft.jsonl"):
        played = read_rollout(record)
        assert well_formed(played)
        assert played.task == question()
        assert played.turns == [], "the engine's accounts are of turns that are all its own"
        sampled = [author == "generator" for author in record["flywheel"]["authors"]]
        assert [segment.sampled for segment in played.segments] == sampled

"""Code as action, with a real sandbox: rows S0-* of the systems that this one replaces."""

from __future__ import annotations

import contextlib
import random
import re
import resource
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentgrpo.agents.code import CodeAgent
from agentgrpo.config import AgentConfig, RewardConfig, SandboxConfig, TrainConfig
from agentgrpo.envs.python import PythonEnv
from agentgrpo.rewards.shipped import score
from agentgrpo.rollout.engine_protocol import request_seed
from agentgrpo.sandbox import Limits, SandboxPool
from agentgrpo.train.plugins import make_reward
from agentgrpo.train.prepare import make_agent, make_env, open_sandbox
from agentgrpo.train.resolve import resolve
from agentgrpo.types import Group, Status
from tests.given import TASK
from tests.playing import (
    EOT,
    TOKENIZER,
    generate,
    given_and_sampled,
    play,
    play_all,
    scripted,
    shown,
    task,
)
from tests.rollout.stubs import StubEnv, Turn

AGENT = CodeAgent()
DONE = f"Answer: 1{EOT}"


@pytest.fixture
def env(pool: SandboxPool) -> PythonEnv:
    return PythonEnv(pool, 2.0)


def outputs(rollout: Any) -> list[str]:
    """What was shown after each run of code."""
    texts = [text for sampled, text in given_and_sampled(rollout)[1:] if not sampled]
    return [t.split("user\n", 1)[1].rsplit(f"{EOT}\n<|im_start|>assistant", 1)[0] for t in texts]


def test_S0_1_groups_keep_their_order_whatever_ends_first() -> None:
    rng = random.Random(4)

    def policy(number: int, prompt: str) -> Turn:
        question = prompt.split("user\n")[1].split("<")[0]
        return Turn(f"Answer: {question}{EOT}", steps=rng.randint(1, 9))

    tasks = [task(f"Q{i}") for i in range(4)]
    groups = play_all(AGENT, StubEnv(), scripted(policy), tasks, 16)
    assert [[r.answer for r in group] for group in groups] == [[f"Q{i}"] * 16 for i in range(4)]


def test_S0_2_only_text_between_the_chosen_tags_runs() -> None:
    agent = CodeAgent(open_tag="<execute_code>", close_tag="</execute_code>")
    env = StubEnv()
    turns = ["so <execute_code>x = 1</execute_code>", "<execute_code>y = '<execute_code>'"]
    engine = scripted(lambda n, _: Turn([turns[0], f"{turns[1]}</execute_code>", DONE][n]))
    play(agent, env, engine=engine)
    assert env.executed == ["x = 1", "y = '<execute_code>'"], "a tag within code is code"
    assert engine.requests[0].options["stop"] == ("</execute_code>",)
    assert "between <execute_code> and </execute_code>" in engine.tokenizer.decode(
        engine.requests[0].prompt
    )


def test_S0_2_output_may_continue_the_policys_message() -> None:
    agent = CodeAgent(observation="<output>{output}</output>", observation_role="assistant")
    played = play(agent, StubEnv(), "<code>1</code>", DONE)
    assert shown(played).endswith(f"<code>1</code><output>out of 1</output>{DONE}")
    assert [sampled for sampled, _ in given_and_sampled(played)] == [False, True, False, True]


def test_S0_3_close_tag_alone_never_runs_the_prompt() -> None:
    agent = CodeAgent(system_prompt="Like this: <code>import os; os.remove('x')</code>")
    env = StubEnv()
    played = play(agent, env, "oh</code>", DONE)
    assert (env.executed, played.answer) == ([], "1")
    assert "Error: </code> without <code>" in shown(played)
    ended = play(agent, env, "oh</code>", DONE, max_malformed=1)
    assert (env.executed, ended.answer, ended.status) == ([], None, Status.MALFORMED)


TOOLS = '''"""Tools."""
print("loaded")
LOADS = globals().get("LOADS", 0) + 1


def weather(city: str, days: int = 1) -> str:
    """The weather of a city."""
    return f"{city} sunny {days}"


def _hidden() -> None: ...
'''


@pytest.mark.nsjail
@pytest.mark.parametrize("show", ["source", "signatures", "no"])
def test_S0_4_a_tool_script_is_loaded_and_shown(tmp_path: Path, show: Any) -> None:
    script = tmp_path / "tools.py"
    script.write_text(TOOLS)
    config = TrainConfig(
        model="m",
        out_dir=tmp_path,
        agent=AgentConfig(options={"show_tools": show}),
        sandbox=SandboxConfig(tools=script, max_live=2),
    )
    with open_sandbox(config.sandbox) as pool:
        env = make_env(resolve(config), pool)
        agent = make_agent(resolve(config), env)
        turns = ["<code>weather('Oslo')</code>", "<code>weather('Rome', 2), LOADS</code>", DONE]
        played = play(agent, env, *turns)
    said = ["'Oslo sunny 1'", "('Rome sunny 2', 1)"]
    assert outputs(played) == said, "loaded once, and silently"
    prompt = given_and_sampled(played)[0][1]
    assert ("return f" in prompt) == (show == "source")
    assert ("The weather of a city." in prompt) == (show != "no")
    assert ("_hidden" in prompt) == (show == "source")


class Around(PythonEnv):
    """Its episodes' steps are carried out by `during`."""

    def __init__(self, pool: SandboxPool, during: Callable[[Callable[[], Any]], Any]) -> None:
        super().__init__(pool, 5.0)
        self.during = during

    def reset(self, task: Any) -> Any:
        episode = super().reset(task)
        step = episode.step
        episode.step = lambda action: self.during(lambda: step(action))  # type: ignore[method-assign]
        return episode


@pytest.mark.nsjail
def test_S0_5_sandboxes_of_different_rollouts_work_at_the_same_time(pool: SandboxPool) -> None:
    meeting = threading.Barrier(8)

    def met(work: Callable[[], Any]) -> Any:
        meeting.wait(60)
        observation = work()
        meeting.wait(60)
        return observation

    engine = scripted(lambda n, _: Turn(f"<code>{n} * 10</code>" if n < 8 else DONE))
    (group,) = play_all(AGENT, Around(pool, met), engine, [task()], 8)
    assert [outputs(r) for r in group] == [[str(n * 10)] for n in range(8)]


@pytest.mark.nsjail
@pytest.mark.parametrize("stateless", [False, True])
def test_S0_6_sessions_remember_and_stateless_steps_do_not(
    pool: SandboxPool, stateless: bool
) -> None:
    env = PythonEnv(pool, 2.0, stateless=stateless)
    played = play(AGENT, env, "<code>x = 1</code>", "<code>print(x)</code>", DONE)
    expected = "NameError: name 'x' is not defined" if stateless else "1"
    assert outputs(played) == ["(no output)", expected]


@pytest.mark.nsjail
def test_S0_7_broken_session_does_not_affect_others(pool: SandboxPool) -> None:
    env = PythonEnv(pool, 20.0)
    evil = [
        "import socket\nsocket.create_connection(('1.1.1.1', 80), 1)",
        "open('/etc/passwd', 'a')",
        "import os\nos._exit(3)",
        "x = bytearray(10**10)",
        "while True: print('x' * 10**6)",
        "import os\nwhile True: os.fork()",
    ]
    turns = {n: f"<code>{code}</code>" for n, code in enumerate(evil)}
    turns[len(evil)] = "<code>6 * 7</code>"
    passwd = Path("/etc/passwd").read_bytes()
    engine = scripted(lambda n, _: Turn(turns.get(n, DONE)))
    (group,) = play_all(AGENT, env, engine, [task()], len(turns))
    assert outputs(group[-1]) == ["42"]
    for rollout in group[:-1]:
        assert rollout.status is Status.COMPLETED
        assert rollout.stats["tool_errors"] == 1
    assert Path("/etc/passwd").read_bytes() == passwd


@pytest.mark.nsjail
def test_S0_7_a_child_that_outlives_its_step_dies_with_its_session(env: PythonEnv) -> None:
    mark = f"lingering-{random.Random().getrandbits(60):x}"
    code = f"import subprocess\nsubprocess.Popen(['/bin/sh', '-c', 'sleep 99; : {mark}'])\n1"
    assert not running(mark)
    played = play(AGENT, env, f"<code>{code}</code>", "<code>2</code>", DONE)
    assert outputs(played) == ["1", "2"]
    ends = time.monotonic() + 30  # it was killed; a busy machine takes a while to bury it
    while running(mark) and time.monotonic() < ends:
        time.sleep(0.01)
    assert not running(mark)


def running(mark: str) -> list[str]:
    """Processes of this machine with the mark in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if mark.encode() in path.read_bytes():
                found.append(path.parent.name)
    return found


@pytest.mark.nsjail
def test_S0_8_endless_code_is_stopped_and_the_session_goes_on(pool: SandboxPool) -> None:
    env = PythonEnv(pool, 0.3)
    played = play(AGENT, env, "<code>x = 1\nwhile True: pass</code>", "<code>x</code>", DONE)
    first, second = outputs(played)
    within = 2 * (0.3 + pool.limits.grace_s) + 10  # of a busy machine; 30 s are another limit
    assert 0.3 <= played.stats["sandbox_wall_s"] < within
    assert played.stats["tool_errors"] == 1 + ("killed" in first)
    if "killed" in first:  # a machine so busy that the interrupt came too late
        assert first.startswith("Error: timeout killed\n(the interpreter was restarted")
        assert second == "NameError: name 'x' is not defined"
    else:
        assert (first, second) == ("Error: timeout", "1")


@pytest.mark.nsjail
def test_S0_9_ten_megabytes_are_cut_to_head_and_tail(
    pool: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentgrpo.envs.python.MAX_CHARS", 100)
    env = PythonEnv(pool, 5.0)
    episode = env.reset(task())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        text = episode.step(AGENT.parse("<code>print('a' * 10**6 + 'z' * 10**6)</code>", TASK)).text
        flood = episode.step(AGENT.parse("<code>print('a' * 10**7)</code>", TASK))
    finally:
        episode.close()
    assert text.startswith("a" * 50 + "\n... ")
    assert text.endswith(" characters left out ...\n" + "z" * 50)
    assert flood.failed
    assert re.fullmatch(
        r"a{50}\n... \d+ characters left out ...\n[^\n]{50}\nError: output limit\n.*restarted.*",
        flood.text,
    )
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 64 * 1024, "a flood is not collected in this process"


@pytest.mark.nsjail
@pytest.mark.parametrize("place", ["/var/tmp", "/tmp"])  # sessions have a /tmp of their own
def test_S0_10_packages_need_their_directory(env: PythonEnv, place: str) -> None:
    with tempfile.TemporaryDirectory(dir=place) as folder:
        _import_handy(Path(folder), env)


def _import_handy(folder: Path, env: PythonEnv) -> None:
    folder.chmod(0o755)
    (folder / "handy.py").write_text("answer = 42")
    code = "<code>import handy, os\nprint(handy.answer, os.environ['KEY'])</code>"
    assert "ModuleNotFoundError" in outputs(play(AGENT, env, code, DONE))[0]
    config = SandboxConfig(site_dirs=(str(folder),), env={"KEY": "v"}, max_live=2)
    with open_sandbox(config) as pool:
        assert outputs(play(AGENT, PythonEnv(pool, 2.0), code, DONE)) == ["42 v"]
        shell = CodeAgent(language="bash")
        assert outputs(play(shell, PythonEnv(pool, 2.0), "<code>echo $KEY</code>", DONE)) == ["v"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"template": "nowhere"}, "sandbox.template: no template 'nowhere'"),
        ({"site_dirs": ("relative",)}, "sandbox.site_dirs: expected an absolute path"),
        ({"env": {"1x": ""}}, "sandbox.env: expected names like HOME"),
        ({"tools": "nowhere.py"}, "sandbox.tools: nowhere.py: no such file"),
    ],
)
def test_S0_10_invalid_template_names_its_key(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_sandbox(SandboxConfig(**config))


def test_S0_11_calls_cost_what_the_config_sets() -> None:
    reward = make_reward(RewardConfig(tool_cost=0.05))
    once = play(AGENT, StubEnv(), "<code>1</code>", DONE, given=task(answer=1))
    thrice = play(AGENT, StubEnv(), *["<code>1</code>"] * 3, DONE, given=task(answer=1))
    score(Group(task=once.task, rollouts=[once, thrice]), reward)
    assert once.reward - thrice.reward == pytest.approx(2 * 0.05)
    assert once.rewards == {"answer": 1.0, "format": 0.1, "tool_cost": -0.05}


def test_S0_12_trained_tokens_are_the_sampled_tokens() -> None:
    engine = scripted(lambda n, _: Turn(["hm <code>1</code>", f"<code>2{EOT}", DONE][n]))
    played = play(AGENT, StubEnv(), engine=engine)
    sampled = np.concatenate([s.token_ids for s in played.segments if s.sampled])
    of_engine = np.concatenate([r.completion.token_ids for r in engine.requests])
    assert sampled.tolist() == of_engine.tolist()
    assert played.num_sampled == len(of_engine)


def test_S0_13_a_long_output_ends_one_rollout_and_no_other() -> None:
    engine = scripted(
        lambda n, _: Turn(f"<code>{'x' * 300 if n == 0 else n}</code>" if n < 3 else DONE),
        max_model_len=700,
    )
    (group,) = play_all(AGENT, StubEnv(), engine, [task()], 3)
    assert [r.status for r in group] == [Status.TRUNCATED_LENGTH] + [Status.COMPLETED] * 2
    assert all(len(r.token_ids) <= 700 for r in group)


@pytest.mark.nsjail
def test_S0_15_files_go_up_a_shell_works_on_them_and_the_result_comes_back(
    pool: SandboxPool,
) -> None:
    agent = CodeAgent(language="bash", open_tag="<sh>", close_tag="</sh>")
    given = task(files={"data/in.txt": "b\na\n"}, expected_files={"out.txt": "a\nb\n"})
    env = PythonEnv(pool, 5.0)
    sorted_ = play(
        agent, env, "<sh>sort data/in.txt > out.txt; cat out.txt</sh>", DONE, given=given
    )
    assert outputs(sorted_) == ["a\nb"]
    assert sorted_.rewards == {"files": 1.0}
    wrong = play(agent, env, "<sh>X=3</sh>", "<sh>echo $X > out.txt; false</sh>", DONE, given=given)
    assert wrong.rewards == {"files": 0.0}
    assert wrong.stats["tool_errors"] == 1, "bash remembers X, and false fails"
    assert play(agent, env, DONE, given=given).rewards == {"files": 0.0}


@pytest.mark.nsjail
def test_S0_15_javascript_sessions_keep_state() -> None:
    agent = CodeAgent(language="node")
    with SandboxPool(limits=Limits(memory_mib=1024)) as pool:  # without control groups it asks that
        env = PythonEnv(pool, 5.0)
        played = play(agent, env, "<code>x = 6</code>", "<code>x * 7</code>", DONE)
    if "not installed" in (played.error or ""):
        pytest.skip("no node under /usr")
    assert outputs(played)[1] == "42"


def test_generate_takes_texts_and_scores_nothing() -> None:
    engine: Any = scripted(lambda n, _: Turn(DONE))
    groups = generate(["a", "b"], engine, AGENT, 3, env=StubEnv(), tokenizer=TOKENIZER, seed=9)
    assert [(g.task.messages[0]["content"], len(g.rollouts)) for g in groups] == [
        ("a", 3),
        ("b", 3),
    ]
    asked = {request.options["seed"] for request in engine.requests}
    assert request_seed(9, 1, 2, 0, 0, "turn") in asked
    assert len(asked) == len(engine.requests)
    assert groups[0].rollouts[0].rewards == {}

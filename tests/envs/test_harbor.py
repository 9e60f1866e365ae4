# ruff: noqa: E501 - cheats, a line each
"""Harbor task folders: what is read and refused, played, judged, and what cheating pays."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from agentgrpo.actions import CallTools, RunCode, ToolCall
from agentgrpo.agents.program import ProgramAgent
from agentgrpo.envs import harbor_check
from agentgrpo.envs.harbor import HarborEnv
from agentgrpo.envs.harbor_tasks import folders_of, write_rows
from agentgrpo.inspect.verify.verify import verify_run
from agentgrpo.programs.launch import launcher_of
from agentgrpo.sandbox import Limits, SandboxPool, SandboxUnavailable
from agentgrpo.sandbox.isolation.images import get_image, save_image
from agentgrpo.sandbox.isolation.zygote import Rung
from agentgrpo.sandbox.session.dockerfile import Builder
from agentgrpo.support.atomic_files import read_lines
from agentgrpo.train import init
from agentgrpo.types import Status, Task
from tests import warm
from tests.envs.harbor_folders import (
    CHEATS,
    HONEST,
    LAZY,
    PLANTED,
    PRELOAD,
    PYTEST,
    REWARD,
    SMALL,
    SOLVED,
    TOML,
    add_task,
    make_folder,
    make_numbers,
)  # fmt: skip
from tests.envs.repair_answers import CHEATS as REPAIR_CHEATS
from tests.envs.repair_answers import PRICES
from tests.envs.repair_answers import TESTS as PRICE_TESTS
from tests.playing import TOKENIZER, scripted
from tests.programs.test_play import alone, played, turn
from tests.sandbox.isolation.tiny_image import TOOLS, add_tiny_image
from tests.warm import ROOT

pytestmark = pytest.mark.nsjail


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("harbor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        tools = ["nl", "pgrep", "pkill", "base64", "awk", "cut", "cmp"]
        image = get_image(add_tiny_image("tiny:1", tools=[*TOOLS, *tools]))
        layers = [Path(layer).name for layer in image.layers]
        save_image("debian:12", layers, image.env, image.workdir, image.digest)
        yield place


@pytest.fixture(scope="module")
def task(store: Path) -> Task:
    return add_task(make_folder(store / "answer", TOML, PYTEST))


@pytest.fixture(scope="module")
def like(store: Path) -> Iterator[SandboxPool]:
    with SandboxPool(limits=Limits(), max_live=4, min_idle=0, zygotes=1) as pool:
        yield pool


@pytest.fixture(scope="module")
def fresh(like: SandboxPool) -> Iterator[HarborEnv]:
    env = HarborEnv(like, 20.0)
    yield env
    env.close()


def play(env: HarborEnv, task: Task, *commands: str) -> tuple[float, Any]:
    episode = env.reset(task)
    try:
        for command in commands:
            episode.step(RunCode(command, "bash"))
        rewards = episode.finish("done")
        return rewards["solved"] + rewards["partial"], episode
    finally:
        episode.close()


@pytest.mark.parametrize("name", SOLVED)
def test_solution_scores_1(fresh: HarborEnv, task: Task, name: str) -> None:
    score, episode = play(fresh, task, SOLVED[name])
    assert score == 1.0, episode.output


@pytest.mark.parametrize("name", CHEATS)
def test_what_cheating_pays(fresh: HarborEnv, task: Task, name: str, tmp_path: Path) -> None:
    commands = CHEATS[name]
    if commands == ["PRELOAD"]:
        if shutil.which("gcc") is None:
            pytest.skip("needs gcc")
        source, library = tmp_path / "c.c", tmp_path / "c.so"
        source.write_text(PRELOAD)
        flags = ["-D_GNU_SOURCE", "-s", "-shared", "-fPIC"]
        subprocess.run(["gcc", *flags, "-o", library, source], check=True)
        text = base64.b64encode(library.read_bytes()).decode()
        commands = [f"echo {text} | base64 -d > /opt/c.so && echo /opt/c.so > /etc/ld.so.preload"]
    score, episode = play(fresh, task, *commands)
    assert score == 0.0, episode.output


BRANCHES = {
    "solved before": (HONEST, "true", 1.0),
    "solved before, spoilt after": (HONEST, "echo 'print(41)' > solve.py", 0.0),
    "solved before, removed after": (HONEST, "cd /; rm -rf /app", 0.0),
    "solved after": ("echo $RANDOM > /root/f", HONEST, 1.0),
    "solved in both": ("echo 42 > /opt/answer", SOLVED["solved, with a file in /opt"], 1.0),
    **{f"{name}, before": (commands, "true", 0.0) for name, commands in PLANTED.items()},
    "~ is replaced by a link, after": (
        f"mkdir -p /opt/r/.local/bin; echo '{REWARD}; exit 0' > /opt/r/.local/bin/env",
        "mv /root /opt/old; ln -s /opt/r /root",
        0.0,
    ),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_verdict_of_a_branch_filters_earlier_changes(
    fresh: HarborEnv, task: Task, name: str
) -> None:
    before, after, expected = BRANCHES[name]
    parent, branch = fresh.reset(task), fresh.reset(task)
    parent.step(RunCode(before, "bash"))
    copy = parent.snapshot()
    assert copy is not None
    assert branch.resume(copy)
    branch.step(RunCode(after, "bash"))
    assert branch.finish(None)["solved"] == expected, branch.output
    for ended in (parent, branch, copy):
        ended.close()


def test_verdict_in_the_agents_session_accepts_cheats_and_is_labelled(
    like: SandboxPool, task: Task
) -> None:
    with contextlib.closing(HarborEnv(like, 20.0, verifier="same")) as env:
        assert play(env, task, *CHEATS["files that end pytest with 0"][:1])[0] == 1.0
        assert play(env, task, HONEST)[0] == 1.0
        assert play(env, task)[0] == 0.0
        assert play(env, task, *CHEATS["the program under test ends its test"])[0] == 0.0
        episode = env.reset(task)
        episode.finish(None)
        assert episode.measures["verifier_same"] == 1.0
        episode.close()


def test_keep_restricts_the_changes_of_a_verdict(like: SandboxPool, task: Task) -> None:
    with contextlib.closing(HarborEnv(like, 20.0, keep=["/app"])) as env:
        assert play(env, task, HONEST)[0] == 1.0
        assert play(env, task, SOLVED["solved, with a file in /opt"])[0] == 0.0


def test_tools_read_search_replace_and_run_in_the_working_directory(
    fresh: HarborEnv, task: Task
) -> None:
    episode = fresh.reset(task)

    def call(tool: str, **arguments: Any) -> str:
        return str(episode.step(CallTools((ToolCall(tool, arguments),))).text)

    assert "print(41)" in call("read", path="solve.py")
    assert "./solve.py:1" in call("search", pattern="print")
    assert call("replace", path="solve.py", old="41", new="42") == "replaced"
    assert call("run", command="pwd; python3 solve.py; cat missing").startswith("/app\n42\ncat:")
    assert episode.finish("")["solved"] == 1.0
    episode.close()


LINES = {
    "import os; os.getcwd()": "'/app'\n>>> ",
    "for i in range(2):": "... ",
    "    print(i)": "... ",
    "": "0\n1\n>>> ",
    "_": "'/app'\n>>> ",
    "1 +": "invalid syntax\n>>> ",
    "1 / 0": 'Traceback (most recent call last):\n  File "<stdin>", line 1, in <module>\nZeroDivisionError: division by zero\n>>> ',
    "os.system('echo err >&2')": "err\n0\n>>> ",
    "open('solve.py', 'w').write('print(6 * 7)')": "12\n>>> ",
    "exit()": ">>> ",
    "i": "1\n>>> ",
    "os._exit(3)": "(the interpreter was restarted: its variables are gone)\n>>> ",
    "import os; print(open('solve.py').read(), 'i' in globals())": "print(6 * 7) False\n>>> ",
    "os.kill(1, 9); os.kill(os.getppid(), 9)": ">>> ",
}


def test_console_uses_the_images_python(like: SandboxPool, store: Path) -> None:
    env = HarborEnv(like, 20.0, console=True)
    task = add_task(make_folder(store / "console", **SMALL))
    env.begin(task)
    assert (env.answers, HarborEnv(like, 20.0).answers) == (("lines",), ("code", "tools"))
    episode = env.reset(task)
    for line, shown in LINES.items():
        assert episode.step(RunCode(line)).text.endswith(shown), line
    ended = episode.step(RunCode("submit_final_answer('done', 1)", submits=True))
    assert (ended.done, ended.answer) == (True, "done, 1")
    assert episode.finish("done")["solved"] == 1.0
    episode.close()
    env.close()


def test_policy_cannot_see_tests_or_solution(fresh: HarborEnv, task: Task) -> None:
    episode = fresh.reset(task)
    shown = episode.step(
        RunCode("ls / /tests /solution; grep -rl test_it / --include='*.py'", "bash")
    )
    assert "solve.sh" not in shown.text
    assert "test_outputs" not in shown.text
    episode.finish("")
    episode.close()
    assert "assert" not in episode.feedback


def test_dead_session_is_replaced_and_the_policy_is_notified(fresh: HarborEnv, task: Task) -> None:
    episode = fresh.reset(task)
    episode.step(RunCode(HONEST, "bash"))
    assert "files and variables" in episode.step(RunCode("kill -9 $$", "bash")).text
    assert "41" in episode.step(RunCode("cat solve.py", "bash")).text
    episode.close()


def test_time_limit_of_a_task_ends_its_episode(fresh: HarborEnv, task: Task) -> None:
    episode = fresh.reset(task)
    episode.step(RunCode(HONEST, "bash"))
    episode._ends_at = 0.0
    assert episode.step(RunCode("true", "bash")).done
    assert episode.finish(None)["solved"] == 1.0
    episode.close()


@pytest.mark.parametrize("ending", ["kill -9 $$", "kill $$", "sleep 1000"])
def test_script_that_does_not_end_by_itself_scores_0(
    ending: str, fresh: HarborEnv, store: Path
) -> None:
    name = f"ends-by-{ending.split()[-1].strip('$-')}"
    script = f"#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n{ending}\n"
    files: dict[str, Any] = {"Dockerfile": "FROM tiny:1\n", "test_sh": script}
    task = add_task(make_folder(store / name, TOML.replace("60", "1"), **files))
    assert play(fresh, task)[0] == 0.0


def test_snapshots_of_verdicts_are_deleted(fresh: HarborEnv, task: Task, store: Path) -> None:
    layers = store / "cache/agentgrpo/images/layers"
    before = {*os.listdir(layers)}
    play(fresh, task, HONEST)
    assert {*os.listdir(layers)} == before


def test_changed_folder_and_foreign_row_are_rejected(
    like: SandboxPool, task: Task, store: Path
) -> None:
    env = HarborEnv(like, 20.0)
    spec = {**task.spec, "digest": "0"}
    with pytest.raises(ValueError, match="has changed"):
        env.reset(Task(id="a", messages=(), spec=spec))
    with pytest.raises(ValueError, match="expected a row of a harbor task"):
        env.reset(Task(id="a", messages=(), spec={}))
    with pytest.raises(ValueError, match="keep: expected absolute paths"):
        HarborEnv(like, 20.0, keep=["app"])
    with pytest.raises(ValueError, match="language: expected 'bash'"):
        env.require_language("python")


@contextlib.contextmanager
def served(text: bytes) -> Iterator[int]:
    """The port of this machine at which each connection reads a text."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as connection:
                        connection.sendall(text)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


INSTALLING = """#!/bin/bash
[ -f /usr/bin/tool ] || { exec 3<>/dev/tcp/127.0.0.1/PORT && cat <&3 > /usr/bin/tool; }  # curl -O
[ "$(cat /usr/bin/tool)" = tool ] && [ "$(cat /app/x)" = 1 ] && echo 1 > /logs/verifier/reward.txt
"""


@pytest.mark.parametrize(("network", "expected"), [(True, 1.0), (False, 0.0)])
def test_installations_of_tests_are_a_layer_for_verdicts_only(
    network: bool, expected: float, fresh: HarborEnv, store: Path, tmp_path: Path
) -> None:
    with served(b"tool") as port, Builder(network=network) as builder:
        script, dockerfile = INSTALLING.replace("PORT", str(port)), "FROM tiny:1\nRUN mkdir /app\n"
        folder = make_folder(tmp_path / f"{network}", Dockerfile=dockerfile, test_sh=script)
        installed = add_task(folder, builder)
    assert play(fresh, installed, "echo 1 > /app/x")[0] == expected
    assert play(fresh, installed, "echo 2 > /app/x")[0] == 0.0
    assert play(fresh, installed)[0] == 0.0
    found = "cp /usr/bin/tool /app/x || ls /tests || echo 1 > /app/x"
    assert play(fresh, installed, found)[0] == expected


def test_build_beyond_the_tasks_time_limit_is_rejected(store: Path, tmp_path: Path) -> None:
    dockerfile = "FROM tiny:1\nRUN sleep 1000\n"
    make_folder(tmp_path / "t", "[environment]\nbuild_timeout_sec = 0.5", Dockerfile=dockerfile)
    with pytest.raises(ValueError, match=r"Dockerfile:2: RUN: .*took too"):
        add_task(tmp_path / "t")


SHOP_TESTS = """import subprocess
def test_change():
    code = "from shop.prices import change; print(change(100, 40))"
    done = subprocess.run(["python3", "-c", code], cwd="/app", capture_output=True, text=True)
    assert done.stdout == "[50, 10]\\n"
"""


@pytest.fixture(scope="module")
def shop(task: Task, store: Path) -> Task:
    """The package of test_repair.py, broken, whose function a hidden test runs in a process."""
    toml = TOML.replace("timeout_sec = 60", "timeout_sec = 20")
    dockerfile = f"FROM {task.spec['image']}\nCOPY shop /app/shop\n"
    files: dict[str, Any] = {"Dockerfile": dockerfile, "test_outputs_py": SHOP_TESTS}
    package = make_folder(store / "shop", toml, **files) / "environment/shop"
    for path, text in {
        "__init__.py": "", "tests/__init__.py": "", "tests/test_prices.py": PRICE_TESTS,
        "prices.py": PRICES.replace("left >= coin", "left > coin"),
    }.items():  # fmt: skip
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(text)
    return add_task(package.parents[1])


AROUND = (
    *("conftest", "sitecustomize", "pth", "pytest.ini", "plugin", "skip mark", "tests edited"),
    *("tests deleted", "shadowed library", "in the background"),
)
"""Files around the module: planted together."""
WITHIN = (
    *("exit", "exit in a function", "forged verdict", "equal and unequal", "reads the test"),
    *("skips", "function of another module", "link", "link of a folder", "binary", "deleted"),
    *("all memory", "no Python"),
)
"""Repair's other cheats change the interpreter that runs the tests: it is another process here."""


@pytest.mark.slow
@pytest.mark.parametrize("names", [AROUND, *((name,) for name in WITHIN)], ids=lambda n: n[0])
def test_repair_cheats_score_0(names: tuple[str, ...], fresh: HarborEnv, shop: Task) -> None:
    codes = (REPAIR_CHEATS[name].replace("{}", "shop/prices.py") for name in names)
    commands = (f"cat > /tmp/c.py <<'END'\n{code}\nEND\npython3 /tmp/c.py" for code in codes)
    score, episode = play(fresh, shop, *commands)
    assert score == 0.0, episode.output


@pytest.mark.slow
def test_honest_repair_scores_1(fresh: HarborEnv, shop: Task) -> None:
    score, episode = play(fresh, shop, "sed -i 's/left > coin/left >= coin/' shop/prices.py")
    assert score == 1.0, episode.output


EXAMPLES = ROOT / "agentgrpo/examples/harbor"


@pytest.fixture(scope="module")
def examples(store: Path) -> list[Task]:
    return [add_task(folder) for folder in folders_of(EXAMPLES)]


@pytest.mark.slow
def test_examples_pass_the_check(
    examples: list[Task], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(examples) == 10
    assert harbor_check.main(["check", str(EXAMPLES)]) == 0
    assert capsys.readouterr().out.count("ok: solution 1, nothing 0") == 10
    for name in ("find-largest", "sum-column"):
        shutil.copytree(EXAMPLES / name, tmp_path / name)
        shutil.rmtree(tmp_path / name / "solution")
    paid = "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"
    (tmp_path / "sum-column/tests/test.sh").write_text(paid)
    assert harbor_check.main(["check", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "find-largest: ok: no solution/solve.sh, nothing 0"
    assert lines[1] == "sum-column: nothing 1, expected 0"


@pytest.mark.slow
def test_cheats_in_examples_score_0(examples: list[Task], fresh: HarborEnv) -> None:
    """Each cheat against two tasks, each task against one cheat at least."""
    pairs = [(task, [*LAZY][n % len(LAZY)]) for n, task in enumerate(examples + examples[:6])]
    scores = {(task.id, name): play(fresh, task, LAZY[name])[0] for task, name in pairs}
    assert {name for _, name in scores} == {*LAZY}
    assert scores == dict.fromkeys(scores, 0.0)


def test_heldout_rows_have_other_instructions(store: Path, tmp_path: Path) -> None:
    for name in "abcde":
        make_folder(tmp_path / "tasks" / name, Dockerfile="FROM tiny:1\n")
    (tmp_path / "tasks/e/task.toml").write_text("[environment]\ngpus = 1")
    shutil.copy(tmp_path / "tasks/a/instruction.md", tmp_path / "tasks/b/instruction.md")
    train, *_ = write_rows([str(tmp_path / "tasks")], tmp_path / "c.toml", network=False)
    paths = (Path(train), tmp_path / "c.heldout.jsonl")
    trained, heldout = ({row["id"] for row in read_lines(path)} for path in paths)
    assert heldout
    assert sorted([*trained, *heldout]) == [*"abcd"]
    assert {"a", "b"} <= trained or {"a", "b"} <= heldout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_init_and_train_on_folders(
    store: Path, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`agentgrpo harbor check`, `agentgrpo init --harbor`, then a run whose engine is a stand-in."""
    folder, config = make_numbers(tmp_path / "tasks"), tmp_path / "c.toml"
    assert harbor_check.main(["check", str(folder)]) == 0
    assert "parity-0: ok" in capsys.readouterr().out
    more = [
        *("rollout.tasks_per_step=1", "rollout.group_size=4", "steps=2", f"out_dir={tmp_path}/run"),
        *("engine.max_model_len=1024", "learner.max_tokens=1024", "rollout.max_turn_tokens=64"),
    ]
    assert init.main([str(tiny_model), "--harbor", str(folder), "-o", str(config), *more]) == 0
    command = [sys.executable, "-m", "tests.quick", "train", str(config)]
    env = warm.environment(XDG_CACHE_HOME=str(store / "cache"))
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    played = read_lines(tmp_path / "run" / "rollouts.jsonl")
    assert {record["rewards"]["solved"] for record in played} == {0.0, 1.0}
    assert {record["stats"]["tool_calls"] for record in played} == {1.0}


PROGRAM = """import json, os, subprocess, sys, urllib.request
import code_in  # beside this file
task = json.load(sys.stdin)
body = {"model": "policy", "messages": [{"role": "user", "content": task["question"]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"Content-Type": "application/json"})
text = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
assert not any(map(os.path.exists, ("/tests", "/solution"))), os.listdir("/")
code = code_in.code_in(text)
print(os.getcwd(), flush=True)
subprocess.run(["bash", "-c", code], check=True)
"""
TURNS = {  # what the policy writes: the reward, the status, whether the program failed
    HONEST: (1.0, Status.COMPLETED, 0.0),
    "true": (0.0, Status.COMPLETED, 0.0),
    f"{HONEST}; exit 3": (1.0, Status.COMPLETED, 1.0),
    f"{HONEST}; kill -9 $PPID": (1.0, Status.COMPLETED, 1.0),
    f"mkdir -p /tests; {REWARD}": (0.0, Status.COMPLETED, 0.0),
    "echo 42 > /installed-agent/x; echo 'print(open(\"/installed-agent/x\").read())' > solve.py": (0.0, Status.COMPLETED, 0.0),
}  # fmt: skip


def make_program(folder: Path, code: str) -> Path:
    """PROGRAM and its module. `code`: an expression, the commands for a `text` of the policy."""
    folder.mkdir()
    (folder / "__main__.py").write_text(PROGRAM)
    (folder / "code_in.py").write_text(f"def code_in(text): return {code}\n")
    return folder


def program_agent(env: HarborEnv, files: list[Path], **options: Any) -> ProgramAgent:
    options.setdefault("command", ["python", *(f"./{path.name}" for path in files)])
    return ProgramAgent(
        pool=env.pool, call_reader=lambda _: cast(Any, None), env=env, files=files, **options
    )


def test_a_program_acts_in_the_session_that_is_judged(store: Path, tmp_path: Path) -> None:
    """A folder of a program and its packages, by the image's python3, at one turn a rollout."""
    code = "text.partition('<code>')[2].partition('</code>')[0]"
    agent = make_program(tmp_path / "agent", code)
    task = add_task(make_folder(tmp_path / "program", **SMALL))
    engine = scripted(lambda number, _: turn(f"<code>{[*TURNS][number]}</code>"))
    late = scripted(lambda *_: turn("<code>sleep 1000</code>"))
    with (
        SandboxPool(limits=Limits(), max_live=8, min_idle=0, zygotes=1) as pool,
        contextlib.closing(HarborEnv(pool, 20.0)) as env,
    ):
        launcher = cast(Any, launcher_of(program_agent(env, [agent])))
        options: dict[str, Any] = {
            "n": len(TURNS),
            "env": env,
            "of": [task],
            "max_turn_tokens": 200,
        }
        (group,) = played(launcher, engine, **options)[0]
        slow = alone(launcher, late, env=env, of=[task], timeout_s=2)
    assert (slow.status, slow.rewards["solved"]) == (Status.TIMED_OUT, 0.0)
    results = {}
    for rollout in group.rollouts:
        assert rollout.stats["verifier_same"] == 0.0
        assert rollout.segments[-1].sampled  # trained on
        text = TOKENIZER.decode(rollout.segments[-1].token_ids)
        code = text.partition("<code>")[2].partition("</code>")[0]
        failed = rollout.stats.get("program_failed", 0.0)
        results[code] = (rollout.rewards["solved"], rollout.status, failed)
        assert rollout.answer == "/app"
    assert results == TURNS


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_program_in_a_task_is_trained_and_verified(
    examples: list[Task], store: Path, tmp_path: Path, tiny_model: Path
) -> None:
    """The program solves the task if the text of the random model has an odd length."""
    solution = (EXAMPLES / "sum-column/solution/solve.sh").read_text()
    make_program(tmp_path / "agent", f"({solution!r} if len(text) % 2 else 'true')")
    settings = [
        "agent.kind=program", 'agent.options={command=["python", "agent"], files=["agent"]}',
        "out_dir=run", "steps=2", "eval_every=0", "rollout.tasks_per_step=1",
        "rollout.group_size=4", "rollout.max_turn_tokens=24", "engine.max_model_len=320",
        "engine.kv_cache_gib=0.0625", "learner.max_tokens=2048", "learner.learning_rate=1e-3",
    ]  # fmt: skip
    folders = ["--harbor", f"{EXAMPLES / 'find-largest'}", "--harbor", f"{EXAMPLES / 'sum-column'}"]
    assert init.main([f"{tiny_model}", *folders, "-o", f"{tmp_path}/c.toml", *settings]) == 0
    cache = str(store / "cache")
    train = warm.Command("-m", "agentgrpo.train", "c.toml", cwd=tmp_path, XDG_CACHE_HOME=cache)
    out, err = train.communicate(800)
    assert train.returncode == 0, out + err
    report = verify_run(tmp_path / "run")
    assert report.faults == []
    assert report.learned == report.terms > 0
    played = read_lines(tmp_path / "run/rollouts.jsonl")
    assert {record["rewards"]["solved"] for record in played} == {0.0, 1.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sandbox": "none"}, "sandbox: expected a command in the session that is judged, got 'none'"),
        ({"command": [], "files": [], "call": "m:f"}, "call: expected a command in the session .* got 'm:f'"),
        ({}, "image 'nopython' has no python; remedy: install it"),
    ],
)  # fmt: skip
def test_a_program_that_could_not_be_judged_is_refused(
    like: SandboxPool, store: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    add_tiny_image("nopython", python=False)
    env = HarborEnv(like, 20.0)
    toml = '[environment]\ndocker_image = "nopython"\n'
    env.begin(add_task(make_folder(tmp_path / "bare", toml)))
    (tmp_path / "agent.py").touch()
    files = options.pop("files", [tmp_path / "agent.py"])
    with contextlib.closing(env), pytest.raises(ValueError, match=message):
        program_agent(env, files, **options)


@pytest.mark.slow
def test_unplayable_tasks_are_rejected_before_the_run(
    like: SandboxPool, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = HarborEnv(like, 20.0)
    assert env.begin(task) is task
    with pytest.raises(ValueError, match="image: expected one in the store"):
        HarborEnv(like, 20.0).begin(Task(id="a", messages=(), spec={**task.spec, "image": "gone"}))
    env.close()
    without_users = partial(SandboxPool, rungs=(Rung.ZYGOTE_ROOT,))
    monkeypatch.setattr("agentgrpo.envs.harbor.SandboxPool", without_users)
    with pytest.raises(SandboxUnavailable, match="image needs user namespaces"):
        HarborEnv(like, 20.0).begin(task)

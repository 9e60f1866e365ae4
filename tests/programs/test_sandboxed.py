"""Programs in sessions of the sandbox and as processes: what they reach, leave and break."""

from __future__ import annotations

import os
import re
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import openai
import pytest

from agentgrpo.programs.launch import Launcher, Process, Sandboxed, launcher_of
from agentgrpo.sandbox import Limits, SandboxPool, Template
from agentgrpo.sandbox.isolation.zygote import LADDER, Rung
from agentgrpo.support.user_calls import UserCodeError
from agentgrpo.types import Status
from tests.isolation import gone, need_isolation
from tests.programs.test_play import alone, played, turn

PROGRAM = """
import json, os, sys
from openai import OpenAI

task = json.loads(sys.stdin.buffer.read())
assert task == json.load(open(os.environ["AGENTGRPO_TASK"]))
client = OpenAI()
said = client.chat.completions.create(
    model=os.environ["OPENAI_MODEL"], messages=[{"role": "user", "content": task["question"]}]
).choices[0].message.content
print("noise")
{ending}
"""
ENDINGS = [
    ('print(f"Answer: {said}")', "Answer: x", 0.0),
    ('open("answer.txt", "w").write(said + "!"); print("not this")', "x!", 0.0),
    ('print("so"); sys.exit(3)', "so", 1.0),
    ('raise SystemExit("why")', "noise", 1.0),
    ("import helper; print(helper.NAME)", "beside", 0.0),
    ('open("answer.txt", "w").write("kept"); os._exit(7)', "kept", 1.0),
    ("sys.stdout.flush(); os.kill(os.getpid(), 9)", "noise", 1.0),
    (
        "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.3), print('late'))).start()",
        "late", 0.0,
    ),
    (
        "import multiprocessing\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool: print(pool.map(abs, [-1, 2]))",
        "[1, 2]", 0.0,
    ),
]  # fmt: skip


def pool_of(env: Any = MappingProxyType({}), **settings: Any) -> SandboxPool:
    template = Template(site_dirs=(str(Path(openai.__file__).parents[1]),), env=env)
    limits = Limits(memory_mib=512)
    return SandboxPool(template=template, limits=limits, min_idle=1, **settings)


@pytest.fixture(scope="module")
def jails() -> Any:
    with pool_of() as pool:
        yield pool


def ending_with(ending: str, folder: Path, pool: SandboxPool | None = None) -> Launcher:
    """PROGRAM with this ending: in a session of the pool, or as a process."""
    file = folder / "agent.py"
    file.write_text(PROGRAM.replace("{ending}", ending))
    command = ["python", "agent.py"]
    return Process(command, [file]) if pool is None else Sandboxed(pool, command, [file], 60.0)


@pytest.mark.slow
@pytest.mark.nsjail
@pytest.mark.parametrize("where", ["session", "process"])
@pytest.mark.parametrize(("ending", "answer", "failed"), ENDINGS)
def test_user_program_with_openais_client(
    tmp_path: Path, jails: SandboxPool, where: str, ending: str, answer: str, failed: float
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "agent.py").write_text(PROGRAM.replace("{ending}", ending))
    (folder / "helper.py").write_text("NAME = 'beside'")
    command = ["python", "mine/agent.py"]
    made: Launcher = (
        Sandboxed(jails, command, [folder], 60.0)
        if where == "session"
        else Process(command, [folder])
    )
    rollout = alone(made, lambda *_: turn("x"))
    assert (rollout.answer, rollout.stats.get("program_failed", 0.0)) == (answer, failed)
    assert rollout.status is Status.COMPLETED
    assert not list(Path.cwd().glob("answer.txt"))


@pytest.mark.slow
@pytest.mark.nsjail
@pytest.mark.parametrize("rung", LADDER, ids=str)
def test_session_reaches_only_the_endpoint(tmp_path: Path, rung: Rung) -> None:
    """Neither the port on the host's loopback nor another rollout's key is of any use in it."""
    if rung is Rung.ZYGOTE_ROOT and os.geteuid() != 0:
        pytest.skip("zygote-root needs root")
    need_isolation(rung)
    from agentgrpo.programs.endpoint import Endpoint

    outside = Endpoint()
    reach = (
        "client.with_options(api_key='sk-another').models.list()\n"
        "import socket\n"
        f"try: socket.create_connection(('127.0.0.1', {outside.port}), 2)\n"
        "except OSError as error: print(type(error).__name__)\n"
        "else: print('reached')"
    )
    with pool_of(rungs=[rung]) as pool:
        rollout = alone(ending_with(reach, tmp_path, pool), lambda *_: turn("x"))
    outside.close()
    assert (rollout.answer, len(rollout.turns)) == ("ConnectionRefusedError", 1)


@pytest.mark.slow
def test_process_has_no_proxy_and_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.invalid:1")
    pid = tmp_path / "pid"
    ending = (
        "import subprocess\n"
        "left = subprocess.Popen(['sleep', '99'], stdout=subprocess.DEVNULL,\n"
        "                        stderr=subprocess.DEVNULL)\n"
        f"open({str(pid)!r}, 'w').write(str(left.pid))\n"
        "print(os.environ.get('HTTPS_PROXY'))"
    )
    rollout = alone(ending_with(ending, tmp_path), lambda *_: turn("x"))
    assert rollout.answer == "None"
    assert gone(int(pid.read_text())), "it was killed"


@pytest.mark.slow
def test_daemon_with_open_output_delays_nothing(tmp_path: Path) -> None:
    ending = (
        "import subprocess\nsubprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "print('done')"
    )
    rollout = alone(ending_with(ending, tmp_path), lambda *_: turn("x"), timeout_s=30)
    assert (rollout.answer, rollout.status) == ("done", Status.COMPLETED)


ATTACKS = {
    "[os.remove(f) for f in os.listdir() if f != 'kept']": ("noise", 0.0),
    "import shutil; shutil.rmtree(os.getcwd())": ("noise", 0.0),
    "os.mkfifo('.stdout'); os.mkfifo('.stderr')": ("noise", 0.0),
    "open('.stdout', 'w').write('mine'); os.chmod('.', 0o500)": ("noise", 0.0),
    "os.mkfifo('answer.txt')": (None, 1.0),
    "os.symlink('answer.txt', 'answer.txt')": (None, 1.0),
    "os.symlink('/proc/self/mem', 'answer.txt')": (None, 1.0),
}
"""What a program without a sandbox does to its own folder: its answer, and whether it failed."""


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_program_that_damages_its_files_fails_itself(tmp_path: Path, attack: str) -> None:
    rollout = alone(ending_with(attack, tmp_path), lambda *_: turn("x"))
    assert (rollout.answer, rollout.stats.get("program_failed", 0.0)) == ATTACKS[attack]
    assert rollout.status is Status.COMPLETED


@pytest.mark.slow
@pytest.mark.nsjail
@pytest.mark.parametrize("where", ["session", "process"])
def test_program_among_the_files_is_started(tmp_path: Path, jails: SandboxPool, where: str) -> None:
    program = tmp_path / "mine" / "agent.py"
    program.parent.mkdir()
    program.write_text(
        "#!/usr/bin/env python3\nimport json, os, urllib.request as http\n"
        "asked = {'model': 'policy', 'messages': [{'role': 'user', 'content': 'Q'}]}\n"
        "key = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "http.urlopen(http.Request(url, json.dumps(asked).encode(), key)).read()\n"
        "print('started')\n"
    )
    program.chmod(0o755)
    settings: Any = {"call": "", "command": ["./mine/agent.py"], "files": [program.parent]}
    settings |= {"sandbox": "none" if where == "process" else "session"}
    agent: Any = SimpleNamespace(env=None, **settings, pool=jails, timeout_s=60.0)
    rollout = alone(launcher_of(agent), lambda *_: turn("x"))
    assert (rollout.answer, rollout.status) == ("started", Status.COMPLETED)


OWN = "raise KeyError('x')"
FAILED = {
    ("process", OWN): True,
    ("process", "import nosuch"): True,
    ("process", "os.execvp('sh', ['sh', '-c', 'nosuch-program'])"): True,
    ("process", "os.execv(sys.executable, ['python', 'nosuch.py'])"): True,
    ("process", "os.kill(os.getpid(), 9)"): False,
    ("process", "raise MemoryError"): False,
    ("process", "sys.exit(3)"): False,
    ("process", "os.mkdir('answer.txt')"): False,
    ("process", "import traceback\ntry: nosuch\nexcept NameError: traceback.print_exc()\n"
     "os.kill(os.getpid(), 15)"): False,
    ("session", OWN): True,
    ("session", "while True: os.write(1, b'x' * 65536)"): False,
    ("session", "held = []\nwhile True: held.append(bytearray(1 << 26))"): False,
    ("session", "os.kill(os.getppid(), 9)"): False,
    ("session", "os.mkfifo('answer.txt')"): False,
}  # fmt: skip
"""Where all programs of a step run and how they end, and whether that ends the run."""


MARKS: dict[str, Any] = {"session": pytest.mark.nsjail, "process": ()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "ending"), [pytest.param(*key, marks=MARKS[key[0]]) for key in FAILED]
)
def test_run_ends_if_all_programs_fail_by_themselves(
    tmp_path: Path, request: pytest.FixtureRequest, where: str, ending: str
) -> None:
    pool = request.getfixturevalue("jails") if where == "session" else None
    made = ending_with(ending, tmp_path, pool)
    ends = pytest.raises(UserCodeError, match="exited with") if FAILED[where, ending] else None
    with ends or nullcontext():
        (group,), _ = played(made, lambda *_: turn("x"), n=2)
        assert [r.stats["program_failed"] for r in group.rollouts] == [1, 1]
        assert {r.status for r in group.rollouts} == {Status.COMPLETED}
        assert not any(set(r.answer or "") == {"x"} for r in group.rollouts), "of a flood"


MEMORY = {
    "held = []\nwhile True: held.append(bytearray(b'x') * (1 << 24))": "= 512",
    "import subprocess as s\n"
    "s.run([sys.executable, '-c', 'x = []\\nwhile 1: x += [1] * 9999999'], check=True)": "= 512",
    "raise MemoryError": "= 512",
    "os.kill(os.getpid(), 9)": r"exited with -9:",
}
"""How a program ends, and what is said of it."""


@pytest.mark.slow
@pytest.mark.nsjail
@pytest.mark.parametrize("ending", MEMORY)
def test_out_of_memory_program_names_the_setting(
    tmp_path: Path, jails: SandboxPool, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    alone(ending_with(ending, tmp_path, jails), lambda *_: turn("x"))
    told = capsys.readouterr().err
    assert re.search(MEMORY[ending], told), told
    assert ("memory_mib" in told) == ("512" in MEMORY[ending])


@pytest.mark.slow
@pytest.mark.nsjail
@pytest.mark.parametrize("where", ["session", "process"])
def test_users_environment_overrides_telemetry_defaults(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"OTEL_SDK_DISABLED": "mine", "OPENAI_API_KEY": "not-mine"}
    names = ("OTEL_SDK_DISABLED", "CREWAI_DISABLE_TELEMETRY", "NO_PROXY")
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    with pool_of(env=own) if where == "session" else nullcontext() as pool:
        made = ending_with(f"print([os.environ[name] for name in {names}])", tmp_path, pool)
        assert alone(made, lambda *_: turn("x")).answer == "['mine', 'true', '*']"


@pytest.mark.parametrize("command", [["python"], ["python", "-u", "agent.py"]])
def test_options_of_the_sessions_interpreter_are_rejected(command: list[str]) -> None:
    agent: Any = SimpleNamespace(env=None, call="", command=command, sandbox="session", pool=None)
    with pytest.raises(
        ValueError, match=r"agent\.options\.command: expected a file or -m after `python`"
    ):
        launcher_of(agent)

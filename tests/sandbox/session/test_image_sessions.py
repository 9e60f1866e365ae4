"""Sessions whose root directory is an image, and snapshots of them (the store: test_images.py)."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentgrpo.sandbox import (
    CommandResult,
    Limits,
    Sandbox,
    SandboxException,
    SandboxPool,
    SandboxUnavailable,
    Session,
    StepResult,
    StepStatus,
    Template,
    TimeoutException,
)
from agentgrpo.sandbox.isolation import policy
from agentgrpo.sandbox.isolation.errors import InvalidArgumentException, NotSupportedException
from agentgrpo.sandbox.isolation.images import get_image, store_dir
from agentgrpo.sandbox.isolation.snapshots import remove
from agentgrpo.sandbox.isolation.zygote import Rung, Zygote
from tests.sandbox.isolation.test_policy import ALLOW, decide, denied
from tests.sandbox.isolation.tiny_image import add_tiny_image, give, record
from tests.sandbox.test_fuzz import NUMBERS, OTHERS, TEXTS

pytestmark = pytest.mark.nsjail
LIMITS = Limits(timeout_s=20.0, memory_mib=256, home_mib=64, inodes=4096, processes=64)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        add_tiny_image()
        record("tiny", [])
        yield store_dir()


@pytest.fixture(scope="module")
def pool(store: Path) -> Iterator[SandboxPool]:
    template = Template(image="tiny")
    with SandboxPool(template=template, limits=LIMITS, min_idle=0, zygotes=1) as made:
        yield made


@pytest.fixture
def session(pool: SandboxPool) -> Iterator[Session]:
    with pool.acquire() as acquired:
        yield acquired


def shell(session: Session, command: str) -> str:
    """What a step printed, which must have worked."""
    result = session.step(command)
    assert result.status is StepStatus.OK, result
    return result.stdout.strip()


def double(number: int) -> int:
    return 2 * number


def printed(sandbox: Sandbox, command: str) -> str:
    result = sandbox.commands.run(command)
    assert isinstance(result, CommandResult)
    return result.stdout


def add_layer(store: Path, name: str, files: dict[str, str]) -> str:
    layer = store / "layers" / name
    layer.mkdir()
    for path, text in files.items():
        (layer / path).parent.mkdir(parents=True, exist_ok=True)
        (layer / path).write_text(text)
    give(layer)
    return name


def test_steps_run_in_one_bash_in_the_image(session: Session) -> None:
    assert shell(session, "pwd; id -u; cat /etc/version") == "/app/work\n0\n1"
    assert shell(session, 'X="a b"; cd /tmp; f() { echo "$X in $PWD"; }') == ""
    assert shell(session, "f") == "a b in /tmp"
    assert session.step("exit_code() { return 3; }; exit_code").error.value == "3"  # type: ignore[union-attr]
    assert shell(session, "grep -c localhost /etc/hosts; ls /dev/null") == "2\n/dev/null"


def test_variables_come_from_image_pool_and_session(store: Path) -> None:
    template = Template(image="tiny", env={"TEMPLATE": "t"})
    with (
        SandboxPool(template=template, limits=LIMITS, min_idle=0, zygotes=1) as pool,
        pool.acquire(env={"SESSION": "it's"}) as session,
    ):
        told = shell(session, 'echo "$GREETING|$TEMPLATE|$SESSION|$HOME|$TOKEN"')
        assert told == "hello world|t|it's|/root|"
        assert session.step('echo "$STEP"', env={"STEP": "s"}).stdout == "s\n"
        assert shell(session, 'echo "$STEP"') == ""


def test_one_pool_serves_all_images(pool: SandboxPool, store: Path) -> None:
    add_layer(store, "more", {"etc/version": "2\n", "opt/tool": "t"})
    record("other", ["more"], workdir="/opt")
    with pool.acquire(image="other") as other, pool.acquire() as session:
        assert shell(other, "pwd; cat /etc/version tool") == "/opt\n2\nt"
        assert (
            shell(session, "cat /etc/version; ls /opt/tool 2>/dev/null || echo none") == "1\nnone"
        )
    with pytest.raises(ValueError, match="expected a name or a snapshot"):
        pool.acquire(image=["other"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nowhere"):
        pool.acquire(image="nowhere")


def test_files_and_commands_work_as_with_other_templates(pool: SandboxPool) -> None:
    with Sandbox(pool=pool) as sandbox:
        assert printed(sandbox, "pwd; echo $GREETING") == "/app/work\nhello world\n"
        sandbox.files.write("a/b.txt", "text")
        assert printed(sandbox, "cat a/b.txt; stat -c %u a/b.txt") == "text0\n"
        sandbox.commands.run("ln -s / away")
        assert sandbox.files.read("away/etc/version") == "1\n"
        sandbox.files.remove("a")
        assert not sandbox.files.exists("/app/work/a")


def test_an_image_without_bash_runs_commands_with_sh(store: Path, pool: SandboxPool) -> None:
    add_tiny_image("plain", python=False, tools=["sh", "cat", "rm", "chmod"])
    with pool.acquire("plain") as session:
        error = session.step("echo hi").error
        assert error is not None
        assert "no /bin/bash" in error.value
    with Sandbox(pool=pool) as sandbox:
        assert printed(sandbox, "echo hi") == "hi\n"


TERMINALS = """
import os, pty, termios, fcntl, struct
pid, fd = pty.fork()
if pid == 0:
    os.execvp("sh", ["sh", "-c", "tty; read line; echo got $line; stty size 2>/dev/null; exit 0"])
fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
os.write(fd, b"text\\n")
told = b""
try:
    while piece := os.read(fd, 999): told += piece
except OSError: pass
print(told.decode())
"""


def test_python_cells_run_in_the_python_of_the_image(pool: SandboxPool) -> None:
    with Sandbox(pool=pool) as sandbox:
        assert sandbox.run_code("import sys; x = 20; sys.argv").text == "['']"
        assert sandbox.run_code("x + 22").text == "42"
        error = sandbox.run_code("def f():\n    return 1 / 0\nf()").error
        assert error is not None
        assert error.name == "ZeroDivisionError"
        assert "return 1 / 0" in error.traceback
        assert "plain" not in error.traceback
        with pytest.raises(TimeoutException):
            sandbox.run_code("while True: pass", timeout=0.5)
        sandbox.run_code("from os import environ")
        assert sandbox.run_code("x, environ['A']", envs={"A": "b"}).text == "(20, 'b')"
        assert sandbox.run_code("environ.get('A')").text is None
        other = sandbox.create_code_context()
        assert sandbox.run_code("x", context=other).error is not None
        sandbox.run_code("cd /tmp; Y=3", language="bash")
        assert sandbox.run_code("echo $PWD $Y", language="bash").logs.stdout == ["/tmp 3\n"]
        assert sandbox.run_code("print(len('\ud800'))").error is not None
        assert sandbox.run_code("raise SystemExit(3)").error is not None
        assert sandbox.run_code("x").text == "20"


def test_missing_languages_of_an_image_are_named(store: Path, pool: SandboxPool) -> None:
    add_tiny_image("shell", python=False)
    with Sandbox(pool=pool, image="shell") as sandbox:
        assert sandbox.get_info().template_id == "shell"
        with pytest.raises(NotSupportedException, match="'shell' has no python; remedy: install"):
            sandbox.run_code("1")
        with pytest.raises(NotSupportedException, match="no javascript"):
            sandbox.run_code("1", language="js")
        with pytest.raises(NotSupportedException, match="one bash"):
            sandbox.create_code_context(language="bash")
    with pytest.raises(InvalidArgumentException, match="host: expected None"):
        Sandbox(pool=pool, host_tools=[double])


def test_snapshots_work_through_the_e2b_api(pool: SandboxPool) -> None:
    with Sandbox.create(pool=pool) as sandbox:
        sandbox.files.write("/root/f", "1")
        snapshot = sandbox.create_snapshot()
    with Sandbox.create(snapshot.snapshot_id) as branch:
        assert branch.files.read("/root/f") == "1"
    with Sandbox.create("python") as plain, pytest.raises(NotSupportedException, match="no image"):
        plain.create_snapshot()


def test_terminals_are_private(session: Session) -> None:
    told = shell(session, f"python3 -c '{TERMINALS}'")
    assert "/dev/pts/0" in told
    assert "got text" in told


def test_proc_shows_the_machine_and_is_read_only(session: Session) -> None:
    assert "MemTotal" in shell(session, "cat /proc/meminfo")
    assert shell(session, "ls -d /proc/[0-9]* | wc -l") != "0"
    assert session.step("echo 1 > /proc/sys/net/ipv4/ip_forward").status is StepStatus.ERROR


def test_root_in_an_image_can_run_package_managers(session: Session) -> None:
    shell(session, "echo 1 > f; chmod 000 f; cat f; echo 2 >> f; chown nobody:nogroup f")
    shell(session, "mkdir r; chroot / true; mkfifo p; install() { cp -a /etc/passwd r; }; install")
    shell(session, "python3 -c 'import os; os.setgroups([]); os.setresuid(65534, 65534, 65534)'")
    low = 'import socket; socket.create_server(("127.0.0.1", 80)).close()'
    shell(session, f"python3 -c '{low}'")


@pytest.mark.parametrize(("rung", "needs_root"), [(Rung.ZYGOTE_ROOT, True), (Rung.BARE, False)])
def test_other_rungs_refuse_images(rung: Rung, needs_root: bool, store: Path) -> None:
    if needs_root and os.geteuid() != 0:
        pytest.skip("zygote-root needs root")
    with pytest.raises(SandboxUnavailable, match="image needs user namespaces"):
        Zygote(Template(image="tiny"), LIMITS, rung=rung)


@pytest.mark.parametrize(
    ("key", "value"),
    [("preload", ("json",)), ("site_dirs", ("/usr",)), ("setup", "x = 1"), ("tree", "/usr")],
)
def test_settings_without_effect_in_an_image_raise(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"template.{key}: expected nothing"):
        Template(image="tiny", **{key: value})


def test_a_pool_without_image_refuses_images(store: Path) -> None:
    with SandboxPool(min_idle=0, zygotes=1) as plain:
        with pytest.raises(
            InvalidArgumentException, match=r"image: expected None.*Template\(image"
        ):
            plain.acquire(image="tiny")
        with plain.acquire() as session, pytest.raises(NotSupportedException, match="no image"):
            session.snapshot()
    with pytest.raises(ValueError, match="own_network"):
        SandboxPool(own_network=False)


def test_an_image_whose_layer_was_removed_is_named(pool: SandboxPool, store: Path) -> None:
    record("broken", ["gone"])
    with pytest.raises(SandboxException, match=r"'broken': layer .*gone does not exist; remedy"):
        pool.acquire(image="broken")


def test_an_image_with_too_many_layers_is_refused(pool: SandboxPool, store: Path) -> None:
    names = [add_layer(store, f"{'l' * 16}{n:04}", {}) for n in range(200)]
    record("deep", [*names[:127]])
    with pool.acquire(image="deep") as session:
        assert shell(session, "cat /etc/version") == "1"
    record("deeper", [*names])
    with pytest.raises(ValueError, match="201 layers"):
        pool.acquire(image="deeper")


@pytest.mark.parametrize("name", ["proc", "dev"])
def test_an_image_whose_mount_points_are_links_is_refused(
    name: str, pool: SandboxPool, store: Path, tmp_path: Path
) -> None:
    layer = store / "layers" / f"link-{name}"
    layer.mkdir()
    (layer / name).symlink_to("/etc")
    give(layer)
    record(f"link-{name}", [layer.name])
    with pytest.raises(SandboxException, match="Not a directory"):
        pool.acquire(image=f"link-{name}")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_policy_of_images_adds_only_its_tables(machine: str) -> None:
    """Held against the policy of other sessions, call by call and option by option."""
    plain, image = policy.build(machine), policy.build(machine, image=True)
    arch, numbers = policy.AUDIT_ARCH[machine], policy.system_calls(machine, True)
    more = {numbers[n] for n in numbers.keys() - policy.system_calls(machine).keys()}
    seeming = {numbers[name] for name in policy.ONE_USER.split() if name in numbers}
    for number in range(600):
        expected = ALLOW if number in more else denied(0) if number in seeming else None
        if expected is None:
            expected = decide(plain, arch, number)
        assert decide(image, arch, number) == expected, number
    for call, more_options in policy.IMAGE_OPTIONS.items():
        index = policy.OPTIONS[call][0]
        for value in [*more_options, 0x5412, 0x5423, 0x541C, 0x5425, 0x4B4D]:
            arguments = [0] * index + [value]
            known = value in more_options
            wanted = ALLOW if known else decide(plain, arch, numbers[call], *arguments)
            assert decide(image, arch, numbers[call], *arguments) == wanted, hex(value)
            assert decide(plain, arch, numbers[call], *arguments) == denied(errno.ENOTTY)


# --- snapshots

CHANGE = """
cd /root; echo 1 > one; ln one two; ln -s /etc/passwd link; mkfifo fifo; rm /etc/version
rm -r /usr/lib/python3*/json; mkdir $(echo /usr/lib/python3*)/json; echo 1 > /new; chmod 4755 /new
truncate -s 50M sparse; mkdir -p d/e; touch -d @1000000000 d/e d; sleep 1000 &
"""
SEEN = """
cd /root; cat one two; stat -c %h one; readlink link; test -p fifo; cat /etc/version 2>&1
ls /usr/lib/python3*/json; stat -c '%a %u' /new; stat -c '%s %b' sparse; stat -c %Y d/e d
ls /proc | grep -c '^[0-9]'
"""


def test_a_branch_has_the_files_but_no_processes(pool: SandboxPool) -> None:
    with pool.acquire() as session:
        shell(session, CHANGE)
        snapshot = session.snapshot()
        shell(session, "echo 3 > /root/one")
        assert shell(session, "cat /root/one") == "3"
    with pool.acquire(snapshot) as branch, pool.acquire(image=snapshot) as other:
        told = branch.step(SEEN).stdout.splitlines()
        assert told[:4] == ["1", "1", "2", "/etc/passwd"]
        assert "No such file" in told[4]
        assert told[5:] == ["755 0", f"{50 << 20} 0", "1000000000", "1000000000", told[-1]]
        shell(branch, "echo 2 > /root/one; cd /root; X=1")
        assert shell(other, "cat /root/one; pwd") == "1\n/app/work"
        again = branch.snapshot()
    with pool.acquire(again) as branch:
        assert shell(branch, "cat /root/one /root/two /new") == "2\n1\n1"  # links
    with pool.acquire() as session:
        assert shell(session, "cat /etc/version; ls /root") == "1"


def test_unnamed_snapshots_are_removed_with_their_pool(store: Path) -> None:
    with SandboxPool(template=Template(image="tiny"), limits=LIMITS, min_idle=0) as pool:
        with pool.acquire() as session:
            shell(session, "echo 1 > /root/f")
            first = session.snapshot()
        with pool.acquire(first) as session:
            shell(session, "echo 2 > /root/g")
            assert session.snapshot("kept") == get_image("kept")
        with pool.acquire() as session:
            removed = session.snapshot()
    assert not Path(removed.layers[-1]).exists()
    assert Path(first.layers[-1]).is_dir(), "the kept one lies above it"
    with SandboxPool(template=Template(image="kept"), limits=LIMITS, min_idle=0) as pool:
        with pool.acquire() as session:
            assert shell(session, "cat /root/f /root/g") == "1\n2"
        with pytest.raises(SandboxException, match="does not exist"):
            pool.acquire(removed)
    with pytest.raises(SandboxException, match="closed"):
        session.snapshot()


def test_any_image_argument_gives_an_error_or_a_session(pool: SandboxPool) -> None:
    """As test_fuzz.py has it: no other exception, and each can be printed."""
    image = get_image("tiny")
    wrong = image._replace(layers=("/etc", "../../etc", "a:b", "a,upperdir=/"))
    odd: list[Any] = [*TEXTS, *NUMBERS, *OTHERS, wrong, image._replace(layers=(1, None))]  # type: ignore[arg-type]
    refusals: list[bytes] = []
    odd += [image._replace(workdir=text) for text in ("", "a", "/a\0b", "/\ud800", "/x" * 3000)]
    odd += [image._replace(env={name: "x"}) for name in ("", "A=B", "a b", "\ud800", "A\0")]
    with pool.acquire() as session:
        for value in odd:
            for call in (
                lambda v=value: pool.acquire(v, 0.1).close(),
                lambda v=value: session.snapshot(v),
                lambda v=value: Sandbox(pool=pool, image=v).kill(),
                lambda v=value: Sandbox(image=v, limits=LIMITS).kill(),
                lambda v=value: Template(image=v),
            ):
                try:
                    call()
                except SandboxException as error:
                    refusals.append(str(error).encode())
                except (ValueError, TypeError, AttributeError, LookupError):
                    pass
        assert shell(session, "echo 1") == "1"
    assert all(refusals)


HOSTILE = {
    "too deep": (
        'python3 -c \'import os\nos.chdir("/root")\n'
        'for _ in range(300): os.mkdir("d" * 100); os.chdir("d" * 100)\'',
        "nested deeper",
    ),
    "a file of a terabyte that has no data": ("truncate -s 60M /root/f", ""),
    "names of every byte": (
        "python3 -c 'import os\nfor b in range(1, 256):\n"
        '  if b not in (46, 47): open(b"/root/" + bytes([b, b]), "w").close()\'',
        "",
    ),
    "no rights": ("mkdir /root/d; echo 1 > /root/d/f; chmod 0 /root/d/f /root/d", ""),
    "a socket": (
        "python3 -c 'import socket; socket.socket(1).bind(\"/root/s\")'",
        "",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tree_is_copied_or_refused(name: str, session: Session) -> None:
    command, refusal = HOSTILE[name]
    shell(session, command)
    if refusal:
        with pytest.raises(SandboxException, match=refusal):
            session.snapshot()
        return
    layer = Path(session.snapshot().layers[-1])
    blocks = sum(
        os.lstat(os.path.join(at, f)).st_blocks for at, _, fs in os.walk(layer) for f in fs
    )
    assert blocks * 512 < 1 << 20


RACE = """
import os, threading, time
os.makedirs("/root/r/d", exist_ok=True)
def swap():
    while True:
        for make in ("file", "link", "fifo", "dir"):
            try: os.rename("/root/r/x", "/root/r/old")
            except OSError: pass
            try:
                if make == "file": open("/root/r/y", "w").write("x" * 99999)
                if make == "link": os.symlink("/etc/passwd", "/root/r/y")
                if make == "fifo": os.mkfifo("/root/r/y")
                if make == "dir": os.mkdir("/root/r/y"); os.symlink("/etc", "/root/r/y/l")
                os.rename("/root/r/y", "/root/r/x")
            except OSError: os.system("rm -rf /root/r/y /root/r/old /root/r/x")
swap()
"""


def test_a_tree_that_changes_during_the_copy_stays_inside(pool: SandboxPool) -> None:
    with pool.acquire() as session, closing(session.files()) as files:
        files.write("/root/race.py", RACE)
        shell(session, "python3 /root/race.py & sleep 0.2")
        for _ in range(30):
            try:
                snapshot = session.snapshot()
            except SandboxException:
                continue
            for at, _, names in os.walk(snapshot.layers[-1]):
                for name in names:
                    path = Path(at, name)
                    if path.name != "race.py" and path.is_file() and not path.is_symlink():
                        assert b"root:" not in path.read_bytes()
            remove(snapshot)
            assert isinstance(session.step("true"), StepResult)

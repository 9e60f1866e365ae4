# ruff: noqa: E501 - commands, a line each
"""Copies of sessions of images: what a branch finds, and what makes it repeat the steps instead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentgrpo.sandbox import Limits, SandboxPool, StepStatus, Template
from agentgrpo.sandbox.isolation.images import store_dir
from agentgrpo.sandbox.session import forks
from agentgrpo.sandbox.session.forks import Fork, fork
from tests.sandbox.isolation.tiny_image import add_tiny_image, give, record

pytestmark = pytest.mark.nsjail
LIMITS = Limits(timeout_s=20.0, memory_mib=256, home_mib=16, inodes=4096, processes=64)
SAME = {
    "nothing": ("true", "pwd"),
    "random": ("echo $RANDOM$RANDOM > /root/f", "cat /root/f"),
    "a removed file": ("rm /etc/passwd; echo $RANDOM > /etc/new", "ls /etc; cat /etc/new"),
    "directory": ("cd /tmp; mkdir a; cd a", "pwd; echo $OLDPWD; cd -"),
    "directory by a link": ("ln -s /usr/lib /l; cd /l", "pwd; pwd -P"),
    "variables": ("x=$RANDOM; export y='a b' z; f=1; p=2", "declare -p x y z f p; env | grep y="),
    "lines": ("x=$'a\\nb'; w=$'\\xff'; q=\"it's\"", "declare -p x w q"),
    "an unset variable": ("x=1; unset x OLDPWD", 'echo "${x-none} ${OLDPWD-none}"'),
    "arrays": ("declare -A a=([k]='v w'); b=(1 '2 3'); declare -r c=5", "declare -p a b c"),
    "functions": ("f() { cat <<X\ndeclare -i RANDOM\n#\nX\n}; g() { :; }; export -f g", "f; declare -F"),
    "a function named as a builtin": ('cd() { builtin cd "$@"; echo moved; }; cd /tmp', "cd /; pwd"),
    "options": ("set -uf -o pipefail; shopt -s extglob nullglob", 'echo "$-"; shopt -p extglob; set +o'),
    "errexit": ("set -e", 'echo "$-"'),
    "a trap": ("trap 'echo bye' EXIT", "trap -p"),
    "arguments": ("set -- a 'b c'", 'echo "$#" "$2"'),
    "umask": ("umask 077", "umask"),
    "aliases": ("shopt -s expand_aliases; alias e='echo hi'", "alias -p"),
    "separators": ("IFS=,; GLOBIGNORE='*'", 'x=a,b; printf "%s\\n" $x'),
    "commands that bash has looked up": ("ls /; cat /etc/passwd; grep root /etc/passwd", "hash | wc -l"),
}  # fmt: skip
"""What is done, and what prints it. A command of the last kind may print another number."""
REPEATED = {
    "a process": "sleep 100 &",
    "an orphan": "(sleep 50 & disown)",
    "a process that has ended": "sleep 0.01 & wait",
    "a file in memory": "echo 1 > /dev/shm/x",
    "a hidden file in memory": "echo 1 > /dev/shm/.x",
    "a descriptor": "exec 7</etc/passwd",
    "another output": "exec 2>/dev/null",
    "both outputs together": "exec 2>&1",
    "a debugger": "trap 'x=1' DEBUG",
    "a removed directory": "mkdir /tmp/q; cd /tmp/q; rmdir /tmp/q",
    "a removed variable": "unset PATH",
    "a limit": "ulimit -n 100",
    "directories on the stack": "pushd /tmp",
    "a large variable": "x=$(head -c 900000 /dev/zero | tr '\\0' a)",
    "another shell": "exec sh",
    "the end of the shell": "exit 3",
    "too deep": "for i in $(seq 200); do mkdir d; cd d; done; cd /",
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        add_tiny_image(python=False)
        changed = store_dir() / "layers/var"
        (changed / "var").mkdir(parents=True)
        (changed / "var/image").write_text("0\n")
        give(changed)
        record("tiny", ["var"])
        template = Template(image="tiny")
        with SandboxPool(template=template, limits=LIMITS, min_idle=0, zygotes=1) as made:
            yield made


def layers() -> set[Path]:
    return set((store_dir() / "layers").iterdir())


@pytest.mark.parametrize("name", SAME)
def test_a_copy_equals_the_session(pool: SandboxPool, name: str) -> None:
    change, show = SAME[name]
    with pool.acquire() as session:
        session.step(change)
        copy = fork(session, pool)
        assert copy is not None
        with pool.acquire(copy.image) as branch:
            assert copy.restore(branch)
            theirs, own = session.step(show), branch.step(show)
            assert theirs.stdout
            if not name.startswith("commands"):
                assert (own.stdout, own.stderr, own.status) == (
                    theirs.stdout, theirs.stderr, theirs.status,
                )  # fmt: skip
            assert branch.step("echo 1 > /root/own; true").status is StepStatus.OK
            assert session.step("[ ! -e /root/own ]").status is StepStatus.OK
        copy.close()


@pytest.mark.parametrize("name", REPEATED)
def test_a_session_with_uncopiable_state_is_not_copied(pool: SandboxPool, name: str) -> None:
    before = layers()
    with pool.acquire() as session:
        session.step(REPEATED[name])
        copy = fork(session, pool)
        if copy is not None:
            with pool.acquire(copy.image) as branch:
                assert not copy.restore(branch)
            copy.close()
    assert layers() == before
    assert forks._bytes == 0


def test_a_copy_can_be_copied(pool: SandboxPool) -> None:
    before, copies = layers(), []
    session = pool.acquire()
    for number in range(5):
        session.step(f"echo {number} >> /root/f; x{number}=$RANDOM")
        copy = fork(session, pool)
        assert copy is not None
        copies.append(copy)
        expected = session.step("cat /root/f; echo $x0 $x1 $x2 $x3 $x4").stdout
        session.close()
        session = pool.acquire(copy.image)
        assert copy.restore(session)
        assert session.step("cat /root/f; echo $x0 $x1 $x2 $x3 $x4").stdout == expected
    session.close()
    assert forks._bytes >= 5 * 2
    for copy in copies:
        copy.close()
    assert layers() == before
    assert forks._bytes == 0


def test_size_of_copies_is_limited(pool: SandboxPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for one that is being made, and of those that are, for 2 MiB."""
    monkeypatch.setattr(forks, "MAX_BYTES", (LIMITS.home_mib + 2) << 20)
    before = layers()
    with pool.acquire() as session:
        session.step("head -c 1048577 /dev/zero > /root/f")
        copies = [fork(session, pool) for _ in range(4)]
        made = [copy for copy in copies if isinstance(copy, Fork)]
        assert [copy is not None for copy in copies] == [True, True, False, False]
        made[0].close()
        copies.append(fork(session, pool))
        assert copies[-1] is not None
        for copy in (made[1], copies[-1]):
            copy.close()
    assert layers() == before


def test_a_copy_does_not_count_as_a_step(pool: SandboxPool) -> None:
    limits = Limits(timeout_s=20.0, memory_mib=256, home_mib=16, inodes=4096, steps=2)
    template = Template(image="tiny")
    with SandboxPool(template=template, limits=limits, min_idle=0, zygotes=1) as few:
        with few.acquire() as session:
            session.step("x=1")
            session.step("x=2")
            copy = fork(session, few)
            assert copy is not None
            assert session.alive
            with few.acquire(copy.image) as branch:
                assert copy.restore(branch)
                assert branch.step("echo $x").stdout == "2\n"
                assert branch.step("true").status is StepStatus.OK
        copy.close()


def test_a_session_of_another_image_is_not_restored(pool: SandboxPool) -> None:
    with pool.acquire() as session:
        session.step("cd /tmp")
        copy = fork(session, pool)
        assert copy is not None
        assert not copy.restore(session)
        copy.close()


ABOVE = {
    "nothing": ("echo 1 > /root/f", "true"),
    "a changed file": ("echo 1 > /root/f", "echo 2 >> /root/f"),
    "a removed file": ("echo 1 > /root/f", "rm /root/f"),
    "a removed file of the image": ("echo 1 > /etc/passwd", "rm /etc/passwd"),
    "a removed directory": ("mkdir -p /a/b; echo 1 > /a/b/f; echo 1 > /var/f", "rm -r /a /var"),
    "a directory made again": ("echo 1 > /var/f", "rm -r /var; mkdir /var; echo 2 > /var/g"),
    "a directory made again below another": ("mkdir -p /a/b/c; echo 1 > /a/b/f", "rm -r /a/b; mkdir /a/b"),
    "a file in place of a directory": ("mkdir /a; echo 1 > /a/f", "rm -r /a; echo 2 > /a"),
    "a directory in place of a file": ("echo 1 > /a", "rm /a; mkdir /a; echo 2 > /a/f"),
    "a directory in place of a link": ("ln -s /etc /a", "rm /a; mkdir /a; echo 2 > /a/f"),
    "a link in place of a directory": ("mkdir /a; echo 1 > /a/f", "rm -r /a; ln -s /etc /a"),
    "hard links": ("echo 1 > /a; ln /a /b", "echo 2 > /c; ln /c /d; rm /a; ln /c /a"),
    "modes": ("mkdir -m 700 /a; echo 1 > /a/f", "chmod 750 /a; chmod 600 /a/f"),
    "a directory of the session's that is back": ("rm -r /etc", "echo 1 > /etc/f"),
    "a directory that is back": ("rm -r /var", "mkdir /var; echo 1 > /var/f"),
}  # fmt: skip
LIST = "f() { find /a /b /c /d /etc /root /var $* 2>/dev/null | sort; }; f -printf %p-%M-%l\\\\n; cat $(f -type f ! -name hosts)"


@pytest.mark.parametrize("name", ABOVE)
def test_snapshot_since_has_one_layer_with_all_changes(pool: SandboxPool, name: str) -> None:
    with pool.acquire() as session:
        image = session.places.image
        assert image is not None
        session.step(ABOVE[name][0])
        copy = fork(session, pool)
        assert copy is not None
    with pool.acquire(copy.image) as branch:
        branch.step(ABOVE[name][1])
        whole, expected = branch.snapshot(since=image), branch.step(LIST).stdout
    copy.close()
    assert len(whole.layers) == len(image.layers) + 1
    with pool.acquire(whole) as other:
        assert other.step(LIST).stdout == expected
    pool.discard(whole)

"""A template's tree: each session changes its own copy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agentgrpo.sandbox import SandboxPool, SandboxUnavailable, Template
from agentgrpo.sandbox.isolation.jail import FIRST_UID, has_own_ids
from agentgrpo.sandbox.isolation.zygote import Rung

pytestmark = pytest.mark.nsjail


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    (folder / "inner").mkdir()
    (folder / "inner" / "a.txt").write_text("one")
    (folder / "b.txt").write_text("two")
    for at, _, files in os.walk(folder):
        for name in (".", *files) if has_own_ids() else ():
            os.chown(os.path.join(at, name), FIRST_UID, FIRST_UID)
    return folder


@pytest.fixture(scope="module")
def pool(tree: Path) -> Iterator[SandboxPool]:
    with SandboxPool(template=Template(tree=str(tree)), min_idle=0, zygotes=1) as made:
        yield made


CHANGE = """
import os
os.chdir("repo")
open("inner/a.txt", "a").write("!")
open("inner/new.txt", "w").write("new")
os.remove("b.txt")
os.chmod("inner", 0o700)
print(open("inner/a.txt").read(), sorted(os.listdir(".")), sorted(os.listdir("inner")))
"""


def test_changes_of_a_session_are_private(pool: SandboxPool, tree: Path) -> None:
    with pool.acquire() as first, pool.acquire() as second:
        assert first.step(CHANGE).stdout == "one! ['inner'] ['a.txt', 'new.txt']\n"
        with closing(second.files()) as files:
            files.write("repo/inner/a.txt", "the host's")
        assert second.step("open('repo/inner/a.txt').read()").value == repr("the host's")
        assert second.step("open('repo/b.txt').read()").value == repr("two")
    assert (tree / "inner" / "a.txt").read_text() == "one"
    assert sorted(os.listdir(tree)) == ["b.txt", "inner"]


def test_the_original_folder_is_not_visible(pool: SandboxPool, tree: Path) -> None:
    """Neither where it lies on the machine, nor where it is shown to the kernel, nor the copies."""
    places = str(tree), "/sandbox/tree", "/tmp"
    look = f"import os\n[os.path.exists(p) and os.listdir(p) for p in {places!r}]"
    with pool.acquire() as session:
        session.step(CHANGE)
        assert session.step(look).value == "[False, [], []]"
    assert pool.describe()["users"] == "one for all sessions"


@pytest.mark.skipif(os.geteuid() != 0, reason="zygote-root needs root")
def test_template_tree_needs_user_namespaces(tree: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="needs user namespaces"):
        SandboxPool(template=Template(tree=str(tree)), rungs=(Rung.ZYGOTE_ROOT,))

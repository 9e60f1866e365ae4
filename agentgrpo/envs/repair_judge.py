"""Packages as they are repaired, and what a repair is worth by their own tests.

A tree is a package's files alone, with no history and no second copy (no .git, RECORD or wheel),
kept in the user's cache under a name that its content decides.
Of an answer only the text of modules counts, in a fresh session. It runs in the process of its
tests, as pytest has it. So that it does not decide on the verdict, its words are counted, what
the tests run with is compared (repair_runner.py), and the verdict comes with a secret.
"""

from __future__ import annotations

import ast
import base64
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from agentgrpo.extras import require_installed
from agentgrpo.sandbox import Limits, SandboxException, SandboxPool, Session, Template
from agentgrpo.sandbox.errors import SandboxInfraError
from agentgrpo.sandbox.files import Files, FileType
from agentgrpo.sandbox.grade import Verdict, VerdictClock
from agentgrpo.sandbox.jail import FIRST_UID, has_own_ids, shown_site_dirs
from agentgrpo.sandbox.result import StepStatus

REPO = "/home/user/repo"  # where a session has it
NO_PART = re.compile(r"\.|__pycache__$|(build|dist|venv|env|node_modules|.*\.egg-info)$")
TEST = re.compile(r"(.*/)?(tests?(/.*)?|testing/.*|test_[^/]*|[^/]*_test\.py|conftest.*|setup\.py)")
SETUP = f"import os, sys\nos.chdir({REPO!r})\nsys.path[:0] = [{REPO!r}, {REPO + '/src'!r}]"
GROUPS = ("", "test", "tests", "testing", "dev")  # extras whose packages tests may import


class Tree(NamedTuple):
    """A package, prepared: in a folder `tree`, its files, and `site`, what they import."""

    name: str
    version: str
    folder: Path
    digest: str

    def sources(self) -> list[str]:
        """The files that may be broken and repaired: modules that are no tests."""
        top = self.folder / "tree"
        found = (path.relative_to(top).as_posix() for path in top.rglob("*.py"))
        return sorted(path for path in found if not TEST.fullmatch(path))

    def read(self, path: str) -> str:
        """A file of it."""
        return (self.folder / "tree" / path).read_bytes().decode()

    def pool(self, like: Template, limits: Limits, **options: Any) -> SandboxPool:
        """Sessions that find it; ValueError if they would find it a second time."""
        made = replace(
            like, name=f"repair {self.name}", tree=str(self.folder / "tree"), preload=("pytest",),
            site_dirs=(str(self.folder / "site"),), setup=f"{SETUP}\n{like.setup}",
        )  # fmt: skip
        tops = {path.removeprefix("src/").partition("/")[0] for path in self.sources()}
        names = [f"{at}*-packages/{top}" for at in ("", "python*/") for top in tops]
        for lib in map(Path, (*made.interpreter_paths, "/usr/lib", "/usr/local/lib")):
            for again in itertools.chain(*map(lib.glob, names)):
                raise ValueError(f"{again}: sessions would see this copy of {self.name}")
        site = shown_site_dirs(made)[0]
        env = {"PATH": f"{site}/bin:/usr/local/bin:/usr/bin:/bin", "PYTHONSAFEPATH": "1"}
        env["PYTHONPATH"] = f"{site}:{REPO}:{REPO}/src"
        made = replace(made, env={**like.env, **env})
        limits = replace(limits, memory_mib=max(512, limits.memory_mib), inodes=1 << 16)
        return SandboxPool(template=made, limits=limits, zygotes=1, **options)


@functools.cache
def prepare(source: str) -> Tree:
    """The tree of an installed package, by its name, or of a folder; ValueError if it is none."""
    require_installed("pytest", "env.kind = 'repair'")
    name, version, base, files, needed = _found(source)
    digest = hashlib.sha256(f"{sys.version} {needed} {metadata.version('pytest')}".encode())
    for path in files:
        digest.update(path.encode() + hashlib.sha256((base / path).read_bytes()).digest())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "agentgrpo", "repair")
    folder = cache / f"{name}-{(said := digest.hexdigest()[:12])}"
    if not folder.is_dir():
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            new = Path(scratch, "new")
            _fill(new / "tree", base, files)
            _fill_site(new / "site", name, version, needed)
            new.rename(folder)
    return Tree(name, version, folder, said)


def _found(source: str) -> tuple[str, str, Path, list[str], list[str]]:
    """Name, version, where its files lie, these, and what it requires."""
    path = Path(source).resolve()
    if not path.is_dir():
        try:
            dist = metadata.distribution(source)
        except metadata.PackageNotFoundError:
            raise ValueError(f"{source}: no folder, and no package that is installed") from None
        listed = [str(f) for f in dist.files or () if ".." not in f.parts and f.suffix != ".pyc"]
        files = sorted(f for f in listed if ".dist-info/" not in f and not f.endswith(".pth"))
        if not any(file.endswith(".py") for file in files):
            raise ValueError(f"{source}: its files lie elsewhere; give their folder instead")
        return source, dist.version, Path(str(dist.locate_file(""))), files, dist.requires or []
    said = path / "pyproject.toml"
    project = tomllib.loads(said.read_text()) if said.exists() else {}
    about = project.get("project", {})
    more = {**about.get("optional-dependencies", {}), **project.get("dependency-groups", {})}
    needed = [*about.get("dependencies", []), *(n for key in GROUPS for n in more.get(key, []))]
    files = []
    for at, names, found in os.walk(path):
        names[:] = sorted(name for name in names if not NO_PART.match(name))
        inside = (os.path.join(at, file) for file in sorted(found) if not file.startswith("."))
        files += [os.path.relpath(file, path) for file in inside if not os.path.islink(file)]
    name, needed = about.get("name", path.name), [need for need in needed if isinstance(need, str)]
    return name, about.get("version", "0"), path, files, needed


def _fill(tree: Path, base: Path, files: Sequence[str]) -> None:
    for file in files:
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(base / file, tree / file)
        os.chmod(tree / file, 0o644 | (base / file).stat().st_mode & 0o111)
    # not run: only compiled, under the names that sessions know
    compiled = [sys.executable, "-m", "compileall", "-qq", "-s", str(tree), "-p", REPO, str(tree)]
    subprocess.run(compiled, check=False)
    for at, _, names in os.walk(tree):
        for name in (".", *names) if has_own_ids() else ():
            os.chown(os.path.join(at, name), FIRST_UID, FIRST_UID)


def _fill_site(site: Path, name: str, version: str, needed: Sequence[str]) -> None:
    """What it requires and pytest, without itself; of itself a name and a version."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name as plain

    found = {plain(dist.metadata["Name"]): dist for dist in metadata.distributions()}
    own = [*map(Requirement, [*needed, "pytest"])]
    done, todo = {plain(name)}, [*own]
    for wanted in todo:  # which grows meanwhile
        key, marker = plain(wanted.name), wanted.marker
        extras = [{"extra": extra} for extra in (GROUPS if wanted in own else GROUPS[:1])]
        asked = marker is None or any(map(marker.evaluate, extras))
        if key not in done and key in found and asked:
            done.add(key)
            todo += map(Requirement, found[key].requires or ())
            for file in found[key].files or ():
                if ".." not in file.parts and os.path.isfile(file.locate()):
                    (site / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(str(file.locate()), site / file)
    if not (site / "pytest").is_dir():
        raise ValueError(f"{name}: pytest needs it, so that nothing is left to test it with")
    python = f"#!/bin/sh\nexec {Template().interpreter} -s -S"
    about = {f"{name}-{version}.dist-info/METADATA": f"Name: {name}\nVersion: {version}\n"}
    about |= {f"bin/{command}": f'{python} "$@"\n' for command in ("python", "python3")}
    about["bin/pytest"] = f'{python} -m pytest "$@"\n'
    for path, text in about.items():
        (site / path).parent.mkdir(exist_ok=True)
        (site / path).write_text(text)
        (site / path).chmod(0o755)


def patch(text: str, path: str, diff: str) -> str:
    r"""A file as a unified diff has it, which was made of it.

    >>> patch("a\nb\n", "x", "--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n")
    'a\nc\n'
    """
    lines, at, made = text.splitlines(True), 0, []
    for line in diff.partition(f"--- a/{path}\n+++ b/{path}\n")[2].splitlines(True):
        if line.startswith("--- a/"):
            break
        if found := re.match(r"@@ -(\d+)(,0)?", line):
            until = int(found[1]) - (found[2] is None)
            made += lines[at:until]
            at = until
        else:
            made += [line[1:]] if line[0] != "-" else []
            at += line[0] != "+"
    return "".join(made + lines[at:])


RUNNER = (Path(__file__).parent / "repair_runner.py").read_text()
Answer = Mapping[str, str]  # the files that were changed
PLAIN = """
__future__ array base64 binascii bisect calendar cmath collections contextlib copy dataclasses
datetime decimal difflib errno fractions functools hashlib heapq html itertools json keyword math
numbers operator queue random re statistics string struct textwrap unicodedata zlib
"""
REACHING = """
ABCMeta Enum EnumType Formatter ForwardRef IntEnum ag_frame attrgetter builtins co_code codecs
compile cr_frame ctypes delattr dir eval exec f_back f_builtins f_code f_globals f_locals format
format_map gc get_type_hints getattr getframe gi_frame globals import_module importlib inspect io
locals make_dataclass metaclass methodcaller mock modules new_class open os pathlib pickle posix
pytest redirect_stderr redirect_stdout setattr setprofile settrace shutil signal subprocess sys
tb_frame tb_next tempfile thread threading time traceback type types unittest update_wrapper vars
weakref wraps
"""
"""By these code reaches beyond its own values, or decides what they are equal to; not by PLAIN."""


def parsed(source: str) -> ast.Module:
    """CPython takes the depth of all threads' trees for one's (gh-106905), hence more than once."""
    for _ in range(9):
        with suppress(SystemError):
            return ast.parse(source)
    return ast.parse(source)


def words_of(source: str) -> Counter[str]:
    """How often a source uses REACHING, __names__ and classes of its own; what it imports."""
    used: list[str] = []
    imported: set[str] = set()
    reaching = REACHING.split()
    for node in ast.walk(parsed(source)):
        said = (getattr(node, field, None) for field in ("id", "attr", "name", "arg", "module"))
        used += [name for name in said if isinstance(name, str)]
        match node:
            case ast.Import(names=names):
                imported |= {alias.name for alias in names}
            case ast.ImportFrom(module=module, names=names, level=level):
                imported |= {f"{'.' * level}{module or ''}.{alias.name}" for alias in names}
            case ast.Attribute(attr=name) if name.strip("_") in sys.stdlib_module_names:
                imported.add(name.strip("_"))
            case ast.MatchClass(kwd_attrs=names):
                used += names
            case ast.Constant(str(text)) if re.fullmatch(r"\S+", text):
                used.append(text)
            case ast.ClassDef():
                used.append("__class__")  # which decides what its instances equal
    parts = [part for name in used for part in re.findall(r"\w+", name)]
    words = [w for part in parts for w in {part, part.strip("_")} if w in reaching]
    words += [part for part in parts if re.fullmatch("__.+__", part)]
    new = {name for name in imported if name.partition(".")[0] not in PLAIN.split()}
    return Counter([*words, *(f"import {name}" for name in new)])


def refusal(answer: Answer, tree: Tree) -> str:
    """Why an answer is not tried; "" if it is."""
    for path, text in answer.items():
        try:
            more = words_of(text) - words_of(tree.read(path))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return f"{path}: {type(error).__name__}: {error}"
        if more:
            return f"{path} uses {', '.join(sorted(more))} more often than it did"
    return ""


def put(files: Files, answer: Answer) -> None:
    """Files into a tree, and nothing that was compiled of others."""
    for path, text in answer.items():
        compiled = importlib.util.cache_from_source(path)
        for old in filter(files.exists, (f"{REPO}/{path}", f"{REPO}/{compiled}")):
            files.remove(old)
        files.write(f"{REPO}/{path}", text)


def answer_in(session: Session, given: Answer) -> Answer:
    """What a session has made of files that were broken, where that is a regular file of text."""
    changed = dict(given)
    with closing(session.files()) as files:
        for path in given:
            try:
                about = files.get_info(f"{REPO}/{path}")
                if about.type is FileType.FILE and about.size <= 1 << 20:
                    changed[path] = bytes(files.read(f"{REPO}/{path}", "bytes")).decode()
            except SandboxInfraError:
                raise
            except (SandboxException, UnicodeDecodeError):
                continue
    return changed


def run_tests(
    pool: SandboxPool, answer: Answer, tests: Sequence[str], timeout_s: float, *,
    backwards: bool = False, traced: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """What came of tests (all if none is named) of a pool's tree with these files in it, in a
    session of their own: `outcomes`, what the first that failed `said`, `infra_error`, and more.
    """
    secret = secrets.token_hex(16)
    with pool.acquire() as session:
        clock = VerdictClock(timeout_s, session)
        with clock.running(), closing(session.files()) as files:
            put(files, answer)
            call = f"run({[*tests]!r}, {REPO!r}, {secret!r}, {backwards}, {traced})"
            step = session.step(f"{RUNNER}\n{call}", clock.seconds())
    said = step.error.traceback if step.error is not None else step.detail
    try:
        told = json.loads(base64.b64decode((step.value or "")[1:-1]))
        if step.status is StepStatus.OK and told["secret"] == secret:
            return {**told, "infra_error": False}
    except Exception as error:  # whatever somebody else's text makes of its parts
        said = said or f"no verdict: {type(error).__name__}"
    broken = step.status is StepStatus.INFRA_ERROR
    return {"outcomes": {}, "said": f"{step.status}: {said}", "infra_error": broken}


def judge(
    pool: SandboxPool, tree: Tree, task: Mapping[str, Any], answer: Answer, timeout_s: float
) -> tuple[float, Verdict]:
    """The share of the broken tests that an answer mends, 0 if it breaks another; and why."""
    if why := refusal(answer, tree):
        return 0.0, Verdict(False, why)
    broken, others = task["tests"], task["others"]
    ran = run_tests(pool, answer, [*broken, *others], timeout_s)
    passed = {test for test, letter in ran["outcomes"].items() if letter == "p"}
    share = len(passed & {*broken}) / len(broken) if passed >= {*others} else 0.0
    return share, Verdict(share >= 1, ran["said"], ran["infra_error"])

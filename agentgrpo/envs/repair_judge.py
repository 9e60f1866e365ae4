"""Packages as they are repaired, and what a repair is worth by their own tests.

A tree is a package's files alone, with no history and no second copy (no .git, RECORD or wheel),
kept in the user's cache under a name that its content decides.
Of an answer only the text of the broken files counts. It runs in the process of its tests, so it
could decide their outcome. A verdict therefore also runs altered tests (repair_altered.py), which
right code fails: an answer that passes them is worth nothing.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from agentgrpo.envs.repair_altered import Place, copy_of
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
        from _pytest.config import default_plugins  # a fifth of a verdict else

        plugins = (f"_pytest.{name}" for name in default_plugins)
        made = replace(
            like, name=f"repair {self.name}", tree=str(self.folder / "tree"),
            preload=("pytest", "unittest", "pdb", "difflib", *plugins),
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
    site = _requirements(name, needed, base, files)
    versions = sorted((key, dist.version) for key, dist in site.items())
    digest = hashlib.sha256(f"{sys.version} {needed} {versions}".encode())
    for path in files:
        digest.update(path.encode() + hashlib.sha256((base / path).read_bytes()).digest())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "agentgrpo", "repair")
    folder = cache / f"{name}-{(said := digest.hexdigest()[:12])}"
    if not folder.is_dir():
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            new = Path(scratch, "new")
            _fill(new / "tree", base, files)
            _fill_site(new / "site", name, version, site.values())
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


def _requirements(
    name: str, needed: Sequence[str], base: Path, files: Sequence[str]
) -> dict[str, metadata.Distribution]:
    """What of its requirements, and of what its tests import, is installed; itself left out."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name as plain

    every = [*metadata.distributions()][::-1]  # of two on the path the first is imported
    installed = {plain(dist.metadata["Name"]): dist for dist in every}
    own = [*map(Requirement, [*needed, *_imported_by_tests(base, files), "pytest"])]
    found: dict[str, metadata.Distribution] = {}
    todo = [*own]
    for wanted in todo:  # which grows meanwhile
        key, marker = plain(wanted.name), wanted.marker
        extras = [{"extra": extra} for extra in (GROUPS if wanted in own else GROUPS[:1])]
        asked = marker is None or any(map(marker.evaluate, extras))
        if asked and key in installed and key not in found and key != plain(name):
            found[key] = installed[key]
            todo += map(Requirement, installed[key].requires or ())
    return found


def _imported_by_tests(base: Path, files: Sequence[str]) -> list[str]:
    """Packages whose modules its tests import, but not another copy of its own modules."""
    own = {file.removeprefix("src/").partition("/")[0].removesuffix(".py") for file in files}
    tests = [base / file for file in files if TEST.fullmatch(file) and file.endswith(".py")]
    imports = re.compile(rb"^[ \t]*(?:import|from)[ \t]+(\w+)", re.MULTILINE)
    names = {name.decode() for test in tests for name in imports.findall(test.read_bytes())}
    names -= {*own, *sys.stdlib_module_names}
    packages = metadata.packages_distributions() if names else {}
    return sorted({package for name in names for package in packages.get(name, ())})


def _fill_site(
    site: Path, name: str, version: str, packages: Iterable[metadata.Distribution]
) -> None:
    """What it requires, without itself; of itself a name and a version."""
    for dist in packages:
        for file in dist.files or ():
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
FORGED = "altered tests, which right code fails, pass: the code does not do what they test"
Answer = Mapping[str, str]  # the files that were changed
RUNS = 4  # of a verdict; a test runs as it is in one or two of them, altered in the others


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
    pool: SandboxPool, files: Answer, tests: Sequence[str], timeout_s: float, *,
    backwards: bool = False, traced: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Results of tests (all if none is named) in a new session whose tree has these files.

    Returns:
        `outcomes`, `errors` and `failed_at` by test, as repair_runner.py has them, `lines` if
        traced, `said`: the first error, and `infra_error`.
    """
    with pool.acquire() as session:
        clock = VerdictClock(timeout_s, session)
        with clock.running(), closing(session.files()) as opened:
            put(opened, files)
            call = f"run({[*tests]!r}, {REPO!r}, {backwards}, {traced})"
            step = session.step(f"{RUNNER}\n{call}", clock.seconds())
    reason = step.error.traceback if step.error is not None else step.detail
    with suppress(Exception):  # the code under test can return anything
        if step.status is StepStatus.OK:
            return read_results(step.value) | {"infra_error": False}
    broken = step.status is StepStatus.INFRA_ERROR
    reason = f"{step.status}: {reason or 'no results'}"
    return {"outcomes": {}, "errors": {}, "failed_at": {}, "said": reason, "infra_error": broken}


def read_results(value: str | None) -> dict[str, Any]:
    """What repair_runner.run() returned, from its repr()."""
    results = json.loads(base64.b64decode((value or "")[1:-1]))
    return {**results, "said": next(iter(results["errors"].values()), "")}


class Run(NamedTuple):
    """One run of a verdict: files, tests, and those that have to pass ("p") or to fail ("f")."""

    files: dict[str, str]
    tests: list[str]
    expected: dict[str, str]


def draw_runs(task: Mapping[str, Any], tree: Tree, rng: random.Random) -> list[Run]:
    """RUNS of a task's tests, so that nothing in a run shows which of its tests are altered."""
    runs = [Run({}, [], {}) for _ in range(RUNS)]
    copies: list[dict[str, dict[str, Any]]] = [{} for _ in runs]
    for head, places in task["altered"].items():
        path, _, name = head.partition("::")
        tests = [t for t in (*task["tests"], *task["others"]) if t.partition("[")[0] == head]
        as_it_is = rng.sample(range(RUNS), rng.choice((1, 2)))
        for number, run in enumerate(runs):
            altered = number not in as_it_is
            place = Place(*rng.choice(places))
            copies[number].setdefault(path, {})[f"::{name}"] = place, altered
            run.tests.extend(tests)
            expected = {*tests} & {*task["tests"]} if altered else tests
            run.expected.update(dict.fromkeys(expected, "f" if altered else "p"))
    for test in (t for t in task["others"] if t.partition("[")[0] not in task["altered"]):
        run = rng.choice(runs)
        run.tests.append(test)
        run.expected[test] = "p"
    for run, files in zip(runs, copies, strict=True):
        for path, drawn in files.items():
            run.files[path] = copy_of(tree.read(path), drawn, run.tests, rng)
    return runs


def judge(
    pool: SandboxPool, tree: Tree, task: Mapping[str, Any], answer: Answer, timeout_s: float,
    *, partial: bool = False,
) -> tuple[float, Verdict]:  # fmt: skip
    """The share of the broken tests that an answer mends, and why not all; 0 if it breaks another.

    A test is mended if it passes as it is, and fails wherever it is altered. Without `partial` the
    first result that is not as expected ends the verdict, with 0.
    """
    wrong: set[str] = set()
    errors: list[str] = []
    for run in draw_runs(task, tree, random.SystemRandom()):
        results = run_tests(pool, {**answer, **run.files}, run.tests, timeout_s)
        if results["infra_error"]:
            return 0.0, Verdict(False, results["said"], True)
        for test, letter in run.expected.items():
            if results["outcomes"].get(test) != letter:
                wrong.add(test)
                if letter == "p":  # what altered tests print is not shown
                    errors.append(results["errors"].get(test) or results["said"])
        if wrong and not partial:
            break
    spoilt = wrong & {*task["others"]} or (wrong and not partial)
    share = 0.0 if spoilt else len({*task["tests"]} - wrong) / len(task["tests"])
    return share, Verdict(not wrong, "" if not wrong else errors[0] if errors else FORGED)

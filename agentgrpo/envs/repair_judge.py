"""Packages as they are repaired, and what a repair is worth by their own tests.

A tree is a package's files alone, with no history and no second copy (no .git, RECORD or wheel),
kept in the user's cache under a name that its content decides.
Of an answer only the text of the broken files counts. It runs in the process of its tests, so it
could decide their outcome. A verdict therefore also runs copies of them (repair_altered.py), with
inputs that no test has; right code passes some and fails others, and nothing shows which.
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

from agentgrpo.envs.repair_altered import Copy, with_copies
from agentgrpo.sandbox import Limits, SandboxException, SandboxPool, Session, Template
from agentgrpo.sandbox.grading.grade import Verdict, VerdictClock
from agentgrpo.sandbox.isolation.errors import SandboxInfraError
from agentgrpo.sandbox.isolation.jail import FIRST_UID, has_own_ids, shown_site_dirs
from agentgrpo.sandbox.session.files import Files, FileType
from agentgrpo.sandbox.session.step_result import StepStatus
from agentgrpo.support.optional_deps import require_installed

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
OTHER_INPUTS = (
    "{} of {} copies of the tests, with other inputs and right or wrong expected values, do not "
    "end as for right code"
)
Answer = Mapping[str, str]  # the files that were changed
MOST_COPIES = 12  # of a verdict


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
    backwards: bool = False, traced: bool = False, shown: Sequence[str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Results of tests (all if none is named) in a new session whose tree has these files.

    There are errors of some that are `shown` (None: of all).

    Returns:
        `outcomes`, `errors` and `failed_at` by test, as repair_runner.py has them, `lines` if
        traced, `said`: the first error, and `infra_error`.
    """
    with pool.acquire() as session:
        clock = VerdictClock(timeout_s, session)
        with clock.running(), closing(session.files()) as opened:
            put(opened, files)
            call = f"run({[*tests]!r}, {REPO!r}, {backwards}, {traced}, {shown!r})"
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
    for key in ("outcomes", "errors"):
        results[key] = {str(test): str(text) for test, text in results[key].items()}
    failed_at = {test: (int(at), str(text)) for test, (at, text) in results["failed_at"].items()}
    said = next(filter(None, results["errors"].values()), "")
    return {**results, "failed_at": failed_at, "said": said}


Copies = Sequence[tuple[str, Copy, str | None]]  # test function, its copy, and what it expects


def run_copies(
    pool: SandboxPool, tree: Tree, answer: Answer, tests: Sequence[str], copies: Copies,
    timeout_s: float, rng: random.Random,
) -> tuple[dict[str, Any], list[tuple[str, str]]]:  # fmt: skip
    """Results of tests and of copies; of each copy "p", "f" or "", and what it failed with."""
    numbers = rng.sample(range(10**6), len(copies))
    names = [f"{head}_{number}" for (head, *_), number in zip(copies, numbers, strict=True)]
    by_file: dict[str, dict[str, list[tuple[str, Copy, str | None]]]] = {}
    for (head, copy, expected), name in zip(copies, names, strict=True):
        path, _, function = head.partition("::")
        of = by_file.setdefault(path, {}).setdefault(f"::{function}", [])
        of.append((name.rpartition("::")[2], copy, expected))
    every = [*tests, *names]
    paths = {path for test in every if (path := test.partition("::")[0]).endswith(".py")}
    files = {path: with_copies(tree.read(path), by_file.get(path, {}), every) for path in paths}
    results = run_tests(pool, {**answer, **files}, every, timeout_s, shown=[*tests])
    ended = dict.fromkeys(names, ("", ""))
    for test, letter in results["outcomes"].items():
        name = test.partition("[")[0]
        if name in ended and ended[name][0] != "f":
            ended[name] = letter, results["failed_at"].get(test, (0, ""))[1]
    return results, [ended[name] for name in names]


def judge(
    pool: SandboxPool, tree: Tree, task: Mapping[str, Any], answer: Answer, timeout_s: float,
    *, partial: bool = False,
) -> tuple[float, Verdict]:  # fmt: skip
    """The share of the broken tests that an answer mends, and why not all; 0 if it breaks another.

    A test counts if it passes, its copies that expect the right value do, and those that expect a
    wrong one fail. All run in one process: nothing shows which value is the right one.
    """
    rng = random.SystemRandom()
    copies = [(head, Copy(*one)) for head, of in task["copies"].items() for one in of]
    copies = rng.sample(copies, min(len(copies), MOST_COPIES))
    letters = ["p", "f", *rng.choices("pf", k=len(copies) - 2)]
    rng.shuffle(letters)
    drawn = [
        (head, copy, copy.right if letter == "p" else copy.wrong)
        for (head, copy), letter in zip(copies, letters, strict=True)
    ]
    tests = [*task["tests"], *task["others"]]
    results, ended = run_copies(pool, tree, answer, tests, drawn, timeout_s, rng)
    if results["infra_error"]:
        return 0.0, Verdict(False, results["said"], True)
    wrong = {test for test in tests if results["outcomes"].get(test) != "p"}
    errors = [results["errors"].get(test) or results["said"] for test in tests if test in wrong]
    unlike = [
        head for (head, _), (end, _), letter in zip(copies, ended, letters, strict=True)
        if end != letter
    ]  # fmt: skip
    if unlike:  # their inputs are not shown
        errors.append(OTHER_INPUTS.format(len(unlike), len(copies)))
    pairs = [(end, letter) for (end, _), letter in zip(ended, letters, strict=True)]
    of_head = [(head, *pair) for (head, _), pair in zip(copies, pairs, strict=True)]
    if errors:  # a share is of tests for which copies of both kinds speak, and none against
        heads = {test: test.partition("[")[0] for test in task["tests"]}
        proven = {head for head in heads.values() if {(head, *"pp"), (head, *"ff")} <= {*of_head}}
        wrong |= {test for test, head in heads.items() if head in unlike or head not in proven}
    forged = ("p", "f") in pairs
    spoilt = forged or wrong & {*task["others"]} or (wrong and not partial)
    share = 0.0 if spoilt else len({*task["tests"]} - wrong) / len(task["tests"])
    word = "tests alone" if unlike and len(errors) == 1 else ""
    return share, Verdict(not errors, errors[0] if errors else "", word=word)

"""Prepare packages for repair tasks, and score a repair with the package's tests.

A tree has only the package's files, without history or a second copy (no .git, RECORD or wheel). It
is stored in the user's cache under a name derived from its content.

Only the text of the broken files in an answer counts. It runs in the process of the tests, so it
could forge their outcome. A verdict therefore also runs copies of the tests (repair_altered.py)
with inputs that no test has. Correct code passes some copies and fails others, and nothing shows
which ones.
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
from agentgrpo.sandbox.grading.grade import WALL, Verdict, VerdictClock
from agentgrpo.sandbox.isolation.errors import SandboxInfraError
from agentgrpo.sandbox.isolation.jail import FIRST_UID, has_own_ids, shown_site_dirs
from agentgrpo.sandbox.session.files import Files, FileType
from agentgrpo.sandbox.session.step_result import StepStatus
from agentgrpo.support.optional_deps import require_installed

REPO = "/home/user/repo"  # path of the tree in a session
EXCLUDED_FOLDER = re.compile(r"\.|__pycache__$|(build|dist|venv|env|node_modules|.*\.egg-info)$")
TEST = re.compile(r"(.*/)?(tests?(/.*)?|testing/.*|test_[^/]*|[^/]*_test\.py|conftest.*|setup\.py)")
SETUP = f"import os, sys\nos.chdir({REPO!r})\nsys.path[:0] = [{REPO!r}, {REPO + '/src'!r}]"
GROUPS = ("", "test", "tests", "testing", "dev")  # extras whose packages tests may import


class Tree(NamedTuple):
    """A prepared package: `folder` has its files in `tree`, and its dependencies in `site`."""

    name: str
    version: str
    folder: Path
    digest: str

    def sources(self) -> list[str]:
        """The files that may be broken and repaired: modules except tests."""
        top = self.folder / "tree"
        paths = (path.relative_to(top).as_posix() for path in top.rglob("*.py"))
        return sorted(path for path in paths if not TEST.fullmatch(path))

    def read(self, path: str) -> str:
        return (self.folder / "tree" / path).read_bytes().decode()

    def pool(self, base: Template, limits: Limits, **options: Any) -> SandboxPool:
        """Make a pool of sessions with the tree. Other copies of the package are hidden."""
        from _pytest.config import default_plugins  # preloading them saves a fifth of a verdict

        plugins = (f"_pytest.{name}" for name in default_plugins)
        template = replace(
            base, name=f"repair {self.name}", tree=str(self.folder / "tree"),
            preload=("pytest", "unittest", "pdb", "difflib", *plugins),
            site_dirs=(str(self.folder / "site"),), setup=f"{SETUP}\n{base.setup}",
        )  # fmt: skip
        top_level = {path.removeprefix("src/").partition("/")[0] for path in self.sources()}
        names = [f"{prefix}*-packages/{top}" for prefix in ("", "python*/") for top in top_level]
        libs = [Path(lib) for lib in (*template.interpreter_paths, "/usr/lib", "/usr/local/lib")]
        copies = itertools.chain(*(lib.glob(name) for lib in libs for name in names))
        hidden = tuple(sorted({str(copy.parent) for copy in copies}))
        site = shown_site_dirs(template)[0]
        env = {"PATH": f"{site}/bin:/usr/local/bin:/usr/bin:/bin", "PYTHONSAFEPATH": "1"}
        env["PYTHONPATH"] = f"{site}:{REPO}:{REPO}/src"
        template = replace(template, env={**base.env, **env}, hidden=hidden)
        limits = replace(limits, memory_mib=max(512, limits.memory_mib), inodes=1 << 16)
        return SandboxPool(template=template, limits=limits, zygotes=1, **options)


@functools.cache
def prepare(source: str) -> Tree:
    """Prepare an installed package (by its name) or a folder; else raise ValueError."""
    require_installed("pytest", "env.kind = 'repair'")
    name, version, source_folder, files, requirements = _find_package(source)
    site = _requirements(name, requirements, source_folder, files)
    versions = sorted((key, dist.version) for key, dist in site.items())
    digest = hashlib.sha256(f"{sys.version} {requirements} {versions}".encode())
    for path in files:
        digest.update(path.encode() + hashlib.sha256((source_folder / path).read_bytes()).digest())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "agentgrpo", "repair")
    folder = cache / f"{name}-{(short_digest := digest.hexdigest()[:12])}"
    if not folder.is_dir():
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            new = Path(scratch, "new")
            _copy_files(new / "tree", source_folder, files)
            _fill_site(new / "site", name, version, site.values())
            new.rename(folder)
    return Tree(name, version, folder, short_digest)


def _find_package(source: str) -> tuple[str, str, Path, list[str], list[str]]:
    """Find a package: name, version, source folder, files, requirements."""
    path = Path(source).resolve()
    if not path.is_dir():
        try:
            dist = metadata.distribution(source)
        except metadata.PackageNotFoundError:
            raise ValueError(
                f"--repair: expected a folder or an installed package, got {source!r}"
            ) from None
        listed = [str(f) for f in dist.files or () if ".." not in f.parts and f.suffix != ".pyc"]
        files = sorted(f for f in listed if ".dist-info/" not in f and not f.endswith(".pth"))
        if not any(file.endswith(".py") for file in files):
            raise ValueError(f"{source}: its files are elsewhere. Use their folder instead")
        return source, dist.version, Path(str(dist.locate_file(""))), files, dist.requires or []
    pyproject = path / "pyproject.toml"
    settings = tomllib.loads(pyproject.read_text()) if pyproject.exists() else {}
    project = settings.get("project", {})
    groups = {**project.get("optional-dependencies", {}), **settings.get("dependency-groups", {})}
    needed = [*project.get("dependencies", []), *(n for key in GROUPS for n in groups.get(key, []))]
    files = []
    for directory, names, names_here in os.walk(path):
        names[:] = sorted(name for name in names if not EXCLUDED_FOLDER.match(name))
        paths = (
            os.path.join(directory, file) for file in sorted(names_here) if not file.startswith(".")
        )
        files += [os.path.relpath(file, path) for file in paths if not os.path.islink(file)]
    needed = [need for need in needed if isinstance(need, str)]
    return project.get("name", path.name), project.get("version", "0"), path, files, needed


def _copy_files(tree: Path, base: Path, files: Sequence[str]) -> None:
    for file in files:
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(base / file, tree / file)
        os.chmod(tree / file, 0o644 | (base / file).stat().st_mode & 0o111)
    # compileall does not run the code. -p: the paths that sessions see
    compiled = [sys.executable, "-m", "compileall", "-qq", "-s", str(tree), "-p", REPO, str(tree)]
    subprocess.run(compiled, check=False)
    for at, _, names in os.walk(tree):
        for name in (".", *names) if has_own_ids() else ():
            os.chown(os.path.join(at, name), FIRST_UID, FIRST_UID)


def _requirements(
    name: str, requirements: Sequence[str], base: Path, files: Sequence[str]
) -> dict[str, metadata.Distribution]:
    """Installed packages that it requires or that its tests import, without itself."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name as canonical

    dists = [*metadata.distributions()][::-1]  # the first of two on the path wins
    installed = {canonical(dist.metadata["Name"]): dist for dist in dists}
    direct = [*map(Requirement, [*requirements, *_imported_by_tests(base, files), "pytest"])]
    selected: dict[str, metadata.Distribution] = {}
    pending = [*direct]
    for requirement in pending:  # the loop appends to the list
        key, marker = canonical(requirement.name), requirement.marker
        extras = [{"extra": extra} for extra in (GROUPS if requirement in direct else GROUPS[:1])]
        is_needed = marker is None or any(map(marker.evaluate, extras))
        if is_needed and key in installed and key not in selected and key != canonical(name):
            selected[key] = installed[key]
            pending += map(Requirement, installed[key].requires or ())
    return selected


def _imported_by_tests(base: Path, files: Sequence[str]) -> list[str]:
    """Packages whose modules its tests import, except its own modules."""
    own_modules = {
        file.removeprefix("src/").partition("/")[0].removesuffix(".py") for file in files
    }
    tests = [base / file for file in files if TEST.fullmatch(file) and file.endswith(".py")]
    imports = re.compile(rb"^[ \t]*(?:import|from)[ \t]+(\w+)", re.MULTILINE)
    names = {name.decode() for test in tests for name in imports.findall(test.read_bytes())}
    names -= {*own_modules, *sys.stdlib_module_names}
    packages = metadata.packages_distributions() if names else {}
    return sorted({package for name in names for package in packages.get(name, ())})


def _fill_site(
    site: Path, name: str, version: str, packages: Iterable[metadata.Distribution]
) -> None:
    """Copy its requirements. Of the package itself only name and version are added."""
    for dist in packages:
        for file in dist.files or ():
            if ".." not in file.parts and os.path.isfile(file.locate()):
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(str(file.locate()), site / file)
    if not (site / "pytest").is_dir():
        raise ValueError(f"{name}: pytest depends on it, so pytest cannot test it")
    python = f"#!/bin/sh\nexec {Template().interpreter} -s -S"
    contents = {f"{name}-{version}.dist-info/METADATA": f"Name: {name}\nVersion: {version}\n"}
    contents |= {f"bin/{command}": f'{python} "$@"\n' for command in ("python", "python3")}
    contents["bin/pytest"] = f'{python} -m pytest "$@"\n'
    for path, text in contents.items():
        (site / path).parent.mkdir(exist_ok=True)
        (site / path).write_text(text)
        (site / path).chmod(0o755)


def patch(text: str, path: str, diff: str) -> str:
    r"""Apply a unified diff to a file's text.

    >>> patch("a\nb\n", "x", "--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n")
    'a\nc\n'
    """
    lines, position, patched = text.splitlines(True), 0, []
    for line in diff.partition(f"--- a/{path}\n+++ b/{path}\n")[2].splitlines(True):
        if line.startswith("--- a/"):
            break
        if hunk := re.match(r"@@ -(\d+)(,0)?", line):
            hunk_start = int(hunk[1]) - (hunk[2] is None)
            patched += lines[position:hunk_start]
            position = hunk_start
        else:
            patched += [line[1:]] if line[0] != "-" else []
            position += line[0] != "+"
    return "".join(patched + lines[position:])


RUNNER = (Path(__file__).parent / "repair_runner.py").read_text()
OTHER_INPUTS = (
    "{} of {} copies of the tests, with other inputs and right or wrong expected values, do not "
    "end as for right code"
)
Answer = Mapping[str, str]  # text of the changed files by path
MAX_COPIES = 12  # copies per verdict
WALL_TIME = "s of wall time on a busy machine"


def write(files: Files, answer: Answer) -> None:
    """Write files into a session's tree and remove their compiled versions."""
    for path, text in answer.items():
        compiled = importlib.util.cache_from_source(path)
        for old in filter(files.exists, (f"{REPO}/{path}", f"{REPO}/{compiled}")):
            files.remove(old)
        files.write(f"{REPO}/{path}", text)


def answer_in(session: Session, broken: Answer) -> Answer:
    """The current text of the broken files in a session, for those that are regular text files."""
    changed = dict(broken)
    with closing(session.files()) as files:
        for path in broken:
            try:
                info = files.get_info(f"{REPO}/{path}")
                if info.type is FileType.FILE and info.size <= 1 << 20:
                    changed[path] = bytes(files.read(f"{REPO}/{path}", "bytes")).decode()
            except SandboxInfraError:
                raise
            except (SandboxException, UnicodeDecodeError):
                continue
    return changed


def run_tests(
    pool: SandboxPool, files: Answer, tests: Sequence[str], timeout_s: float, *,
    backwards: bool = False, traced: bool = False, with_errors: Sequence[str] | None = None,
    limited: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Run tests (all if none are named) in a new session whose tree has these files.

    `with_errors`: tests whose errors are returned; None: all. `limited`: leave out slow tests, as
    repair_runner.py does.

    Returns:
        `outcomes`, `errors` and `failed_at` by test, as in repair_runner.py; `lines` if traced; and
        `said`: the first error, or why there are no outcomes.

    Raises:
        SandboxInfraError: the machine failed.
    """
    with pool.acquire() as session:
        clock = VerdictClock(timeout_s, session)
        with clock.running(), closing(session.files()) as session_files:
            write(session_files, files)
            limit_s = timeout_s if limited else 0.0
            options = f"{backwards}, {traced}, {with_errors!r}, {limit_s}"
            call = f"run({[*tests]!r}, {REPO!r}, {options})"
            step = session.step(f"{RUNNER}\n{call}", clock.seconds())
            is_wall = clock.seconds() <= 1e-3
    reason = step.error.traceback if step.error is not None else step.detail
    with suppress(Exception):  # the code under test can return anything
        if step.status is StepStatus.OK:
            return read_results(step.value)
    if step.status is StepStatus.INFRA_ERROR:
        raise SandboxInfraError(reason)
    reason = f"{step.status}: {reason or 'no results'}"
    if step.status in (StepStatus.TIMEOUT, StepStatus.TIMEOUT_KILLED):
        reason = f"took {timeout_s:g} s of CPU time"
        reason = f"took {WALL * timeout_s:g} {WALL_TIME}" if is_wall else reason
    return {"outcomes": {}, "errors": {}, "failed_at": {}, "said": reason}


def read_results(value: str | None) -> dict[str, Any]:
    """Parse the repr() of the value of repair_runner.run()."""
    results = json.loads(base64.b64decode((value or "")[1:-1]))
    for key in ("outcomes", "errors"):
        results[key] = {str(test): str(text) for test, text in results[key].items()}
    failed_at = {test: (int(at), str(text)) for test, (at, text) in results["failed_at"].items()}
    first_error = next(filter(None, results["errors"].values()), "")
    return {**results, "failed_at": failed_at, "said": first_error}


Copies = Sequence[tuple[str, Copy, str | None]]  # test function, its copy, expected value


def run_copies(
    pool: SandboxPool, tree: Tree, answer: Answer, tests: Sequence[str], copies: Copies,
    timeout_s: float, rng: random.Random, *, limited: bool = False,
) -> tuple[dict[str, Any], list[tuple[str, str]]]:  # fmt: skip
    """Run tests and copies. Returns the results, and per copy "p", "f" or "" with its message."""
    numbers = rng.sample(range(10**6), len(copies))
    names = [f"{head}_{number}" for (head, *_), number in zip(copies, numbers, strict=True)]
    by_file: dict[str, dict[str, list[tuple[str, Copy, str | None]]]] = {}
    for (head, copy, expected), name in zip(copies, names, strict=True):
        path, _, function = head.partition("::")
        function_copies = by_file.setdefault(path, {}).setdefault(f"::{function}", [])
        function_copies.append((name.rpartition("::")[2], copy, expected))
    all_tests = [*tests, *names]
    paths = {path for test in all_tests if (path := test.partition("::")[0]).endswith(".py")}
    files = {path: with_copies(tree.read(path), by_file.get(path, {}), all_tests) for path in paths}
    results = run_tests(
        pool, {**answer, **files}, all_tests, timeout_s, with_errors=[*tests], limited=limited
    )
    ends = dict.fromkeys(names, ("", ""))
    for test, letter in results["outcomes"].items():
        name = test.partition("[")[0]
        if name in ends and ends[name][0] != "f":
            ends[name] = letter, results["failed_at"].get(test, (0, ""))[1]
    return results, [ends[name] for name in names]


def judge(
    pool: SandboxPool, tree: Tree, task: Mapping[str, Any], answer: Answer, timeout_s: float,
    *, partial: bool = False,
) -> tuple[float, Verdict]:  # fmt: skip
    """The share of broken tests that an answer repairs, and a reason if not all; 0 if others fail.

    A test counts if it passes, its copies with the right value pass, and those with a wrong value
    fail. All run in one process, and nothing shows which value is right.
    """
    rng = random.SystemRandom()
    copies = [(head, Copy(*fields)) for head, rows in task["copies"].items() for fields in rows]
    copies = rng.sample(copies, min(len(copies), MAX_COPIES))
    letters = ["p", "f", *rng.choices("pf", k=len(copies) - 2)]
    rng.shuffle(letters)
    drawn_copies = [
        (head, copy, copy.right if letter == "p" else copy.wrong)
        for (head, copy), letter in zip(copies, letters, strict=True)
    ]
    tests = [*task["tests"], *task["others"]]
    results, ends = run_copies(pool, tree, answer, tests, drawn_copies, timeout_s, rng)
    failed_tests = {test for test in tests if results["outcomes"].get(test) != "p"}
    errors = [
        results["errors"].get(test) or results["said"] for test in tests if test in failed_tests
    ]
    unexpected = [
        head for (head, _), (end, _), letter in zip(copies, ends, letters, strict=True)
        if end != letter
    ]  # fmt: skip
    if unexpected:  # the message does not reveal their inputs
        errors.append(OTHER_INPUTS.format(len(unexpected), len(copies)))
    pairs = [(end, letter) for (end, _), letter in zip(ends, letters, strict=True)]
    of_head = [(head, *pair) for (head, _), pair in zip(copies, pairs, strict=True)]
    if errors:  # the share has only tests with correct copies of both kinds and no wrong copy
        heads = {test: test.partition("[")[0] for test in task["tests"]}
        proven = {head for head in heads.values() if {(head, *"pp"), (head, *"ff")} <= {*of_head}}
        failed_tests |= {
            test for test, head in heads.items() if head in unexpected or head not in proven
        }
    forged = ("p", "f") in pairs
    rejected = forged or failed_tests & {*task["others"]} or (failed_tests and not partial)
    share = 0.0 if rejected else len({*task["tests"]} - failed_tests) / len(task["tests"])
    word = "tests alone" if unexpected and len(errors) == 1 else ""
    return share, Verdict(not errors, errors[0] if errors else "", word=word)

"""Repair tasks made from packages: a place is broken, and the package's own tests show it.

Each is proven when it is made, by what judges answers: its tests pass before the break, some fail
behind it, no change scores 0, and the reverse of the break scores 1. There are copies of its tests
with other inputs (repair_altered.py). All code of a package runs in the sandbox. The same
packages, kinds and seed give the same tasks.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import itertools
import os
import random
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from agentgrpo.envs.repair_altered import (
    Copy,
    candidates,
    functions_by_name,
)
from agentgrpo.envs.repair_judge import (
    REPO,
    RUNNER,
    TEST,
    Answer,
    Copies,
    Tree,
    judge,
    patch,
    prepare,
    read_results,
    run_copies,
    run_tests,
)
from agentgrpo.envs.repair_places import apply, bodies_of, mutants_of
from agentgrpo.sandbox import Limits, Sandbox, SandboxPool, Template
from agentgrpo.support.atomic_files import write_json, write_lines
from agentgrpo.support.files import read_json

KINDS = ("place", "several", "body", "commit")  # as docs/environments.md has them
CPUS = len(os.sched_getaffinity(0))
CODE = sorted(Path(__file__).parent.glob("repair*.py"))  # of what others made nothing is kept
MAKER = hashlib.sha256(b"".join(path.read_bytes() for path in CODE)).hexdigest()[:8]
SUITE_S, VERDICT_S = 900.0, 6.0  # of a processor, for a suite and for the tests of a task
MOST_TESTS = 40  # of a task
MOST_FUNCTIONS, FEWEST_COPIES = 5, 4  # test functions that copies are made of; copies of a task
CONSOLE = Console(stderr=True)
Row = dict[str, Any]
Known = Mapping[str, Mapping[str, Sequence[int]]]
Break = tuple[Mapping[str, str], str, int, list[str]]
RULES = (
    "Repair it by changing {files}. Its tests are right. Only the text of these files counts: it "
    "is tested in a new copy of the repository, also with other inputs than the tests have."
)
WANTED = {"test": RULES, "line": "This line is wrong:"}
"""What a question shows: a test that fails, or the wrong line alone."""
REPAIR = (
    "You repair a Python package. Write bash between <code> and </code>; it runs in the repository "
    "and you see what it prints. When the tests pass, reply with: Answer: done"
)
LINE = "Reply with the line as it should be, and nothing else."
SECOND = "Tasks of other files or packages are held out; give a second --repair"
SHOT = '[{{role="user", content="This line is wrong:\\n{}"}}, {{role="assistant", content="{}"}}]'
SHOTS = (  # a line, and as it should be
    ("if count != 0:", "if count == 0:"), ("return first - rest", "return first + rest"),
    ("if name in names:", "if name not in names:"), ("if items:", "if not items:"),
)  # fmt: skip


def make(
    sources: Sequence[str], *, count: int, kinds: Sequence[str] = KINDS, show: str = "test",
    seed: int = 0,
) -> list[Row]:  # fmt: skip
    """Up to `count` tasks of each kind from each package, on all processors; ValueError if a source
    is no package, or its tests do not run.
    """
    rows: list[Row] = []
    for source in (str(Path(s).resolve()) if Path(s).is_dir() else s for s in sources):
        tree, limits = prepare(source), Limits(cpu_s=900, value_kib=1 << 16, output_max_mib=64)
        with tree.pool(Template(), limits, min_idle=0, all_cpus=CPUS) as pool:
            known = kept(tree.folder / f"{MAKER}-baseline.json", partial(baseline, tree, pool))
            for kind in kinds:
                found = breaks(tree, kind, known, seed, source)
                one = partial(prove, tree, pool, kind, show)
                some = partial(prove_some, f"{tree.name} {tree.version} {kind}", count, found, one)
                made = kept(tree.folder / f"{MAKER}-{kind}-{show}-{seed}-{count}.json", some)
                rows += [row | {"source": source} for row in made]
    return rows


def prove_some(name: str, count: int, found: Iterator[Break], prove: Any) -> list[Row]:
    """The first of them that are proven, of 8 for each and 40, tried on all processors."""
    done: list[Row] = []
    unaltered, found = 0, itertools.islice(found, 8 * count + 40)
    with Progress() as bar, ThreadPoolExecutor(CPUS) as threads:
        task = bar.add_task(name, total=count)
        while len(done) < count and (some := [*itertools.islice(found, 2 * CPUS)]):
            results = [*threads.map(prove, some)]
            done = [*done, *filter(None, results)][:count]
            unaltered += results.count({})
            bar.update(task, completed=len(done))
    if unaltered:
        CONSOLE.print(
            f"{name}: {unaltered} breaks left out: no copies of their tests with other inputs"
        )
    return done


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """What is made once, and kept in a file."""
    if not path.exists():
        write_json(path, make())
    return read_json(path)


def baseline(tree: Tree, pool: SandboxPool) -> dict[str, dict[str, list[int]]]:
    """The lines, by file, of each test that passed three times: as it is, backwards, and so by
    another process with another hash seed.
    """
    first = run_tests(pool, {}, [], SUITE_S, traced=True)
    if "p" not in first["outcomes"].values():
        raise ValueError(f"{tree.name}: {no_test_passes(tree, first)}")
    for path, error in first["errors"].items():
        if path not in first["outcomes"]:
            CONSOLE.print(f"{tree.name}: left out {path}: {error.splitlines()[-1]}", markup=False)
    second = run_tests(pool, {}, [], SUITE_S, backwards=True)
    with Sandbox.create(pool=pool, timeout=5 * SUITE_S) as sandbox:
        sandbox.files.write("/tmp/run.py", f"{RUNNER}\nprint('\\n' + run([], {REPO!r}, True))")
        command = "PYTHONHASHSEED=2 python /tmp/run.py || true"
        printed: Any = sandbox.commands.run(command, cwd=REPO, timeout=5 * SUITE_S)
    third = read_results(repr(printed.stdout.rpartition("\n\n")[2].strip()))
    runs = [run["outcomes"] for run in (first, second, third)]
    stable = [test for test in runs[0] if all(run.get(test) == "p" for run in runs)]
    if not stable:
        raise ValueError(f"{tree.name}: no test passes in each of three runs")
    return {test: first["lines"][test] for test in stable}


def no_test_passes(tree: Tree, results: Mapping[str, Any]) -> str:
    """Why none does, and what to do, from the first error."""
    error = results["said"]
    if not error:
        return "it has no tests (pytest collects none); give a folder that has them"
    if found := re.search(r"No module named '([\w.]+)'", error):
        top = found[1].partition(".")[0]
        if any(f"{top}/" in f"/{path}" for path in tree.sources()):
            return (
                f"its extension {found[1]} is not built; build it in place, or install the package"
            )
        return f"module {top} is missing, which its tests need; pip install {top}"
    return f"no test passes; the first error: {error[-999:]}"


def breaks(tree: Tree, kind: str, known: Known, seed: int, source: str) -> Iterator[Break]:
    """All that can be tried, by the seed: files, file and line of the first place, its tests."""
    rng = random.Random(f"{seed} {kind} {tree.digest}")
    if kind == "commit":
        yield from _commits(tree, known, source) if Path(source, ".git").exists() else ()
        return
    by_line: dict[tuple[str, int], set[str]] = {}
    for test, files in known.items():
        for file, line in ((file, line) for file, lines in files.items() for line in lines):
            by_line.setdefault((file, line), set()).add(test)
    places = []
    for file in tree.sources():
        with contextlib.suppress(SyntaxError, ValueError):
            found = (bodies_of if kind == "body" else mutants_of)(file, tree.read(file))
            places += [p for p in found if any((file, line) in by_line for line in p.lines)]
    rng.shuffle(places)
    for place in places:
        chosen, text = [place], tree.read(place.file)
        if kind == "several":
            others = {p.line: p for p in places if p.file == place.file and p.line != place.line}
            chosen += rng.sample([*others.values()], min(len(others), rng.choice((1, 2))))
        for one in sorted(chosen, key=lambda p: -p.line):  # the last first: lines stay
            text = apply(one, text)
        ran = {t for p in chosen for n in p.lines for t in by_line.get((p.file, n), ())}
        yield {place.file: text}, place.file, place.line, _chosen(ran, known)


def _chosen(tests: set[str], known: Known) -> list[str]:
    """MOST_TESTS of some tests: those that run the fewest lines."""
    return sorted(tests, key=lambda t: (sum(map(len, known[t].values())), t))[:MOST_TESTS]


def _commits(tree: Tree, known: Known, source: str) -> Iterator[Break]:
    """Commits of a checkout, taken back out of it as it is now, but for their tests."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", source, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    for commit in git("log", "--no-merges", "--format=%H", "-n", "500").split():
        shown = ["show", "--format=", "--relative", "--no-renames", "--no-ext-diff", commit]
        names = git(*shown, "--name-only").splitlines()
        files = sorted({*names} & {*tree.sources()})
        if not files or not any(map(TEST.fullmatch, names)):
            continue
        with tempfile.TemporaryDirectory() as place:
            for file in files:
                Path(place, file).parent.mkdir(parents=True, exist_ok=True)
                Path(place, file).write_text(tree.read(file))
            back, diff = ["git", "apply", "-R", "-"], git(*shown, "--", *files).encode()
            if subprocess.run(back, input=diff, cwd=place, capture_output=True).returncode:
                continue  # what came later has changed the same lines
            answer = {file: at.read_text() for file in files if (at := Path(place, file)).exists()}
        ran = {test for test, lines in known.items() if {*files} & lines.keys()}
        if answer:
            yield answer, min(answer), 1, _chosen(ran, known)


def copies_of(
    tree: Tree, pool: SandboxPool, broken: Answer, failed_at: Mapping[str, tuple[int, str]]
) -> dict[str, list[Copy]]:
    """Copies of tests, by test function, that original code ends as expected and broken code fails.

    The value that they expect is not in the test, and broken code returns another one or raises.
    """
    rng = random.Random(str(sorted(failed_at)))
    lines = {test.partition("[")[0]: line for test, (line, _) in failed_at.items()}
    tried: list[tuple[str, Copy]] = []
    bases: dict[tuple[str, int, int], Copy] = {}
    for head in rng.sample(sorted(lines), min(len(lines), MOST_FUNCTIONS)):
        path, _, name = head.partition("::")
        text = tree.read(path) if path.endswith(".py") else ""
        if function := functions_by_name(text).get(f"::{name}"):
            for one in candidates(function, lines[head], rng):
                tried.append((head, one))
                bases[head, one.at, one.case] = one.unchanged(function)
    if not tried:
        return {}

    def run(answer: Answer, copies: Copies) -> list[tuple[str, str]]:
        return run_copies(pool, tree, answer, (), copies, VERDICT_S, rng)[1]

    before = [(head, one, None) for (head, *_), one in bases.items()]
    ended = run({}, [*before, *((head, one, None) for head, one in tried)])
    base = dict(zip(bases, (value for _, value in ended), strict=False))
    found: list[tuple[str, Copy, str]] = []
    for (head, one), (_, value) in zip(tried, ended[len(bases) :], strict=True):
        if recorded := one.recorded(value, base[head, one.at, one.case], rng):
            found.append((head, recorded, value))
    by_broken = run(broken, [(head, one, None) for head, one, _ in found]) if found else []
    made = [
        (head, one) for (head, one, value), (letter, other) in zip(found, by_broken, strict=True)
        if letter == "f" and other != value and other[:1] in ("", "@")
    ]  # fmt: skip
    both = [(head, one, value) for head, one in made for value in (one.right, one.wrong)]
    ends = [letter for letter, _ in run({}, both)] if both else []
    copies: dict[str, list[Copy]] = {}
    for (head, one), right, wrong in zip(made, ends[::2], ends[1::2], strict=True):
        if (right, wrong) == ("p", "f"):
            copies.setdefault(head, []).append(one)
    return copies


def prove(tree: Tree, pool: SandboxPool, kind: str, show: str, broken: Break) -> Row | None:
    """The task of a break; None if no test fails by it, or it is not judged as it should be; {} if
    too few copies of its tests can be made.
    """
    answer, file, line, tests = broken
    wrong = answer[file].splitlines()[line - 1].strip()
    if show == "line" and wrong == "pass":  # nobody can know what stood there
        return None
    original = {path: tree.read(path) for path in answer}
    ran = run_tests(pool, answer, tests, VERDICT_S)
    failing = [test for test in tests if ran["outcomes"].get(test) == "f"]
    if not failing or {*ran["outcomes"].values()} - {"p", "f"}:
        return None
    failing.sort(key=lambda test: not ran["errors"].get(test))  # one with an error first
    failed_at = {test: ran["failed_at"].get(test, (0, "")) for test in failing}
    copies = copies_of(tree, pool, answer, failed_at)
    if sum(map(len, copies.values())) < FEWEST_COPIES:
        return {}
    diff = ""
    for path, text in original.items():
        both = text.splitlines(True), answer[path].splitlines(True)
        diff += "".join(difflib.unified_diff(*both, f"a/{path}", f"b/{path}"))
    row: Row = {
        "package": tree.name, "version": tree.version, "tree": tree.digest, "kind": kind,
        "diff": diff, "tests": failing, "others": [t for t in tests if t not in failing],
        "copies": copies,
    }  # fmt: skip
    answers = [original]
    if show == "line":  # which is not to be mended by leaving it out
        lines = answer[file].splitlines(True)
        answers.insert(0, {file: "".join([*lines[: line - 1], "\n", *lines[line:]])})
    scores = [judge(pool, tree, row, one, VERDICT_S)[0] for one in answers]
    again = {path: patch(text, path, diff) for path, text in original.items()}
    if 1.0 in scores[:-1] or scores[-1] != 1.0 or again != answer:
        return None
    rules = WANTED[show].format(files=", ".join(sorted(answer)))
    head = f"{tree.name} in {REPO} is broken: {len(failing)} tests fail, such as {failing[0]}"
    error = re.sub(r"0x[0-9a-f]+", "0x...", ran["errors"][failing[0]][-1500:])
    question = f"{head}\n\n{error}\n\n{rules}" if show == "test" else f"{rules}\n{wrong}"
    id = hashlib.sha256(f"{tree.name} {diff}".encode()).hexdigest()[:16]
    return row | {"id": id, "file": file, "line": line, "question": question}


def hold_out(rows: Sequence[Row], seed: int = 0) -> tuple[list[Row], list[Row]]:
    """Rows to train on and rows to evaluate by: they share no package, or of one alone no file."""
    key = "package" if len({row["package"] for row in rows}) > 1 else "file"
    keys = sorted({row[key] for row in rows})
    if len(keys) < 2:
        raise ValueError(
            f"{len(rows)} tasks of one file or none: nothing can be held out. {SECOND}"
        )
    random.Random(seed).shuffle(keys)
    counts = Counter(row[key] for row in rows)
    held: list[str] = []
    for name in keys:
        if sum(counts[one] for one in (*held, name)) <= len(rows) // 4:
            held.append(name)
    held = held or [min(keys, key=lambda name: counts[name])]
    return [row for row in rows if row[key] not in held], [row for row in rows if row[key] in held]


def write(sources: Sequence[str], config: Path, count: int, show: str) -> list[str]:
    """Make tasks and write them beside a config to be: the file to train on, and its settings."""
    if len({*sources}) == 1:
        tree = prepare(sources[0])
        files = [path for path in tree.sources() if any(mutants_of(path, tree.read(path)))]
        if len(files) < 2:
            raise ValueError(
                f"--repair {sources[0]}: it has one module that can be broken. {SECOND}"
            )
    kinds = KINDS[:1] if show == "line" else KINDS
    parts = hold_out(make(sources, count=count, kinds=kinds, show=show))
    paths = [config.resolve().with_suffix(f".{name}.jsonl") for name in ("train", "heldout")]
    for path, rows in zip(paths, parts, strict=True):
        write_lines(path, rows)
    answer, agent = "tree", [f"system_prompt={REPAIR}", "language=bash"]
    if show == "line":
        shots = ", ".join(SHOT.format(*both) for both in SHOTS)
        answer, agent = "line", [f"system_prompt={LINE}", "answer_prefix=", f"shots=[{shots}]"]
    return [
        str(paths[0]), "env.kind=repair", f"env.options.answer={answer}", "reward.format=0.0",
        f"data.heldout={paths[1]}", f"data.num_heldout={min(64, len(parts[1]))}",
        *(f"agent.options.{option}" for option in agent),
    ]  # fmt: skip

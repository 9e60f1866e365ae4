"""Make repair tasks from packages: break a place that the package's tests cover.

Each task is checked when it is made, with the code that scores answers: its tests pass before the
break, some fail after it, no change scores 0, and the original code scores 1. There are copies of
its tests with other inputs (repair_altered.py). All code of a package runs in the sandbox. The same
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

from agentgrpo.envs.repair_altered import Copy, candidates, functions_by_name
from agentgrpo.envs.repair_judge import (
    REPO,
    RUNNER,
    TEST,
    WALL_TIME,
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
from agentgrpo.envs.repair_places import apply_mutant, bodies_of, mutants_of
from agentgrpo.sandbox import Limits, Sandbox, SandboxPool, Template
from agentgrpo.support.atomic_files import write_json, write_lines
from agentgrpo.support.files import read_json

KINDS = ("place", "several", "body", "commit")  # as docs/environments.md has them
CPUS = len(os.sched_getaffinity(0))
CODE = sorted(Path(__file__).parent.glob("repair*.py"))  # cached tasks of other code are not used
CODE_DIGEST = hashlib.sha256(b"".join(path.read_bytes() for path in CODE)).hexdigest()[:8]
SUITE_S, VERDICT_S = 900.0, 6.0  # CPU seconds for a test suite, and for the tests of a task
MAX_TESTS = 40  # tests per task
MAX_FUNCTIONS, MIN_COPIES = 5, 4  # test functions with copies; copies per task
CONSOLE = Console(stderr=True)
Row = dict[str, Any]
Coverage = Mapping[str, Mapping[str, Sequence[int]]]
Break = tuple[Mapping[str, str], str, int, list[str]]
Made = tuple[Any, list[str]]  # a JSON value, and messages about what it does not have
RULES = (
    "Repair it by changing {files}. Its tests are right. Only the text of these files counts: it "
    "is tested in a new copy of the repository, also with other inputs than the tests have."
)
TASK_TEXT = {"test": RULES, "line": "This line is wrong:"}
"""Text of a question that shows a failing test, or only the wrong line."""
REPAIR = (
    "You repair a Python package. Write bash between <code> and </code>; it runs in the repository "
    "and you see what it prints. When the tests pass, reply with: Answer: done"
)
LINE = "Reply with the line as it should be, and nothing else."
SECOND = "Tasks of other files or packages are held out; give a second --repair"
SHOT = '[{{role="user", content="This line is wrong:\\n{}"}}, {{role="assistant", content="{}"}}]'
SHOTS = (  # wrong line, right line
    ("if count != 0:", "if count == 0:"), ("return first - rest", "return first + rest"),
    ("if name in names:", "if name not in names:"), ("if items:", "if not items:"),
)  # fmt: skip


class NoTask(Exception):
    """Why a break is not a task, as the predicate of a sentence."""


def make(
    sources: Sequence[str], *, count: int, kinds: Sequence[str] = KINDS, show: str = "test",
    seed: int = 0, min_files: int = 1,
) -> list[Row]:  # fmt: skip
    """Make up to `count` tasks of each kind from each package, on all processors.

    Raises ValueError if a source is not a package, or its tests run fewer than `min_files` modules.
    """
    rows: list[Row] = []
    for source in (str(Path(s).resolve()) if Path(s).is_dir() else s for s in sources):
        tree, limits = prepare(source), Limits(cpu_s=900, value_kib=1 << 16, output_max_mib=64)
        with tree.pool(Template(), limits, min_idle=0, all_cpus=CPUS) as pool:
            path = tree.folder / f"{CODE_DIGEST}-baseline.json"
            with CONSOLE.status(f"{tree.name}: running its tests three times"):
                coverage = cached(path, partial(baseline, tree, pool))
            files = {file for lines in coverage.values() for file in lines} & {*tree.sources()}
            if len(files) < min_files:
                raise ValueError(
                    f"--repair {source}: its tests run only {', '.join(files)}. {SECOND}"
                )
            for kind in kinds:
                possible, none = breaks(tree, kind, coverage, seed, source)
                prove_break = partial(prove, tree, pool, kind, show)
                name = f"{tree.name} {tree.version} {kind}"
                make_rows = partial(prove_some, name, count, possible, prove_break, none)
                path = tree.folder / f"{CODE_DIGEST}-{kind}-{show}-{seed}-{count}.json"
                rows += [row | {"source": source} for row in cached(path, make_rows)]
    return rows


def prove_some(
    name: str, count: int, possible: Iterator[Break], prove: Callable[[Break], Row], none: str = ""
) -> Made:
    """The first `count` valid tasks of at most 8 * count + 40 breaks, on all processors.

    `none`: why there are no breaks, if there are none.
    """
    rows: list[Row] = []
    reasons: Counter[str] = Counter()
    most = 8 * count + 40

    def attempt(broken: Break) -> Row | str:
        try:
            return prove(broken)
        except NoTask as reason:
            return str(reason)

    with Progress() as bar, ThreadPoolExecutor(CPUS) as threads:
        task = bar.add_task(name, total=count)
        possible = itertools.islice(possible, most)
        while len(rows) < count and (chunk := [*itertools.islice(possible, 2 * CPUS)]):
            results = [*threads.map(attempt, chunk)]
            rows += [result for result in results if not isinstance(result, str)]
            reasons.update(result for result in results if isinstance(result, str))
            bar.update(task, completed=min(len(rows), count))
    if len(rows) >= count:
        return rows[:count], []
    tried = len(rows) + reasons.total()
    breaks = f"breaks tried: {tried}{' of more' if tried == most else ''}" if tried else none
    details = (f"{number} {reason}" for reason, number in reasons.most_common())
    return rows, [f"{name}: made {len(rows)} of {count} tasks; {', '.join([breaks, *details])}"]


def cached(path: Path, make: Callable[[], Made]) -> Any:
    """Return the JSON value in a file, or make and store it; print its messages.

    A value that a busy machine may have changed is not stored.
    """
    is_stored = path.exists()
    value, messages = read_json(path) if is_stored else make()
    for message in messages:
        CONSOLE.print(message, markup=False, highlight=False, soft_wrap=True)
    if not is_stored and not any(WALL_TIME in message for message in messages):
        write_json(path, (value, messages))
    return value


def baseline(tree: Tree, pool: SandboxPool) -> Made:
    """The executed lines, by file, of each test that passes three times: in order, in reverse, and
    in reverse in another process with another hash seed.
    """
    first = run_tests(pool, {}, [], SUITE_S, traced=True)
    if "p" not in first["outcomes"].values():
        raise ValueError(f"{tree.name}: {no_test_passes(tree, first)}")
    messages = [
        f"{tree.name}: skipped {path}: {error.splitlines()[-1]}"
        for path, error in first["errors"].items() if path not in first["outcomes"]
    ]  # fmt: skip
    second = run_tests(pool, {}, [], SUITE_S, backwards=True)
    with Sandbox.create(pool=pool, timeout=5 * SUITE_S) as sandbox:
        sandbox.files.write("/tmp/run.py", f"{RUNNER}\nprint('\\n' + run([], {REPO!r}, True))")
        command = "PYTHONHASHSEED=2 python /tmp/run.py || true"
        printed: Any = sandbox.commands.run(command, cwd=REPO, timeout=5 * SUITE_S)
    third = {"outcomes": {}, "said": printed.stderr[-999:]}
    with contextlib.suppress(ValueError):  # the process ended before it printed results
        third = read_results(repr(printed.stdout.rpartition("\n\n")[2].strip()))
    runs = [run["outcomes"] for run in (first, second, third)]
    passed = [test for test, letter in runs[0].items() if letter == "p"]
    stable = [test for test in passed if all(run.get(test) == "p" for run in runs)]
    letters = Counter(runs[0].values())
    unstable = len(passed) - len(stable)
    counts = {"fail": letters["f"], "are skipped": letters["s"], "fail in other runs": unstable}
    if left_out := ", ".join(f"{n} {why}" for why, n in counts.items() if n):
        messages.append(f"{tree.name}: tasks use {len(stable)} of {len(runs[0])} tests; {left_out}")
    if not stable:
        raise ValueError(f"{messages[-1]}; the first error: {second['said'] or third['said']}")
    return {test: first["lines"][test] for test in stable}, messages


def no_test_passes(tree: Tree, results: Mapping[str, Any]) -> str:
    """Reason and remedy if no test passes, from the first error."""
    error = results["said"]
    if not error:
        return "it has no tests (pytest collects none); give a folder that has them"
    if match := re.search(r"No module named '([\w.]+)'", error):
        top = match[1].partition(".")[0]
        if any(f"{top}/" in f"/{path}" for path in tree.sources()):
            return (
                f"its extension {match[1]} is not built; build it in place, or install the package"
            )
        return f"module {top} is missing, which its tests need; pip install {top}"
    return f"no test passes; the first error: {error[-999:]}"


def breaks(
    tree: Tree, kind: str, coverage: Coverage, seed: int, source: str
) -> tuple[Iterator[Break], str]:
    """The breaks of a kind, and the reason if there are none.

    A break is the text of the broken files, file and line of the first place, and its tests.
    """
    if kind != "commit":
        return _mutations(tree, kind, coverage, seed), "its tests run no line that can be changed"
    if not Path(source).is_dir():
        return iter(()), "it is an installed package, not a git checkout"
    try:
        ids = _git(source, "log", "--no-merges", "--format=%H", "-n", "500").decode().split()
    except OSError:
        return iter(()), "git is not installed"
    except subprocess.CalledProcessError as error:
        return iter(()), f"git log: {error.stderr.decode(errors='replace').strip()}"
    none = f"none of its {len(ids)} newest commits changes modules and tests and can be undone"
    return _commits(tree, coverage, source, ids), none


def _mutations(tree: Tree, kind: str, coverage: Coverage, seed: int) -> Iterator[Break]:
    """Yield places to break in the seed's order."""
    rng = random.Random(f"{seed} {kind} {tree.digest}")
    by_line: dict[tuple[str, int], set[str]] = {}
    for test, files in coverage.items():
        for file, line in ((file, line) for file, lines in files.items() for line in lines):
            by_line.setdefault((file, line), set()).add(test)
    places = []
    for file in tree.sources():
        with contextlib.suppress(SyntaxError, ValueError):
            mutants = (bodies_of if kind == "body" else mutants_of)(file, tree.read(file))
            places += [p for p in mutants if any((file, line) in by_line for line in p.lines)]
    rng.shuffle(places)
    for place in places:
        chosen, broken_text = [place], tree.read(place.file)
        if kind == "several":
            others = {p.line: p for p in places if p.file == place.file and p.line != place.line}
            chosen += rng.sample([*others.values()], min(len(others), rng.choice((1, 2))))
        # The last line first, so that earlier line numbers stay valid.
        for mutant in sorted(chosen, key=lambda p: -p.line):
            broken_text = apply_mutant(mutant, broken_text)
        tests = {t for p in chosen for n in p.lines for t in by_line.get((p.file, n), ())}
        yield ({place.file: broken_text}, place.file, place.line, _cheapest_tests(tests, coverage))


def _cheapest_tests(tests: set[str], coverage: Coverage) -> list[str]:
    return sorted(tests, key=lambda t: (sum(map(len, coverage[t].values())), t))[:MAX_TESTS]


def _git(source: str, *arguments: str) -> bytes:
    command = ["git", "-C", source, *arguments]
    return subprocess.run(command, capture_output=True, check=True).stdout


def _commits(
    tree: Tree, coverage: Coverage, source: str, commits: Sequence[str]
) -> Iterator[Break]:
    """Yield breaks that revert a commit of the checkout, except its tests."""
    for commit in commits:
        git_show = ["show", "--format=", "--relative", "--no-renames", "--no-ext-diff", commit]
        names = _git(source, *git_show, "--name-only").decode(errors="replace").splitlines()
        files = sorted({*names} & {*tree.sources()})
        if not files or not any(map(TEST.fullmatch, names)):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            for file in files:
                Path(scratch, file).parent.mkdir(parents=True, exist_ok=True)
                Path(scratch, file).write_bytes(tree.read(file).encode())
            git_apply, diff = ["git", "apply", "-R", "-"], _git(source, *git_show, "--", *files)
            if subprocess.run(git_apply, input=diff, cwd=scratch, capture_output=True).returncode:
                continue  # later commits changed the same lines
            paths = {file: Path(scratch, file) for file in files}
            answer = {file: at.read_bytes().decode() for file, at in paths.items() if at.exists()}
        tests = {test for test, lines in coverage.items() if {*files} & lines.keys()}
        if answer:
            yield answer, min(answer), 1, _cheapest_tests(tests, coverage)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2][:100]


def require_outcomes(of: str, results: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the results, or raise NoTask if they have no test's outcome."""
    if not results["outcomes"]:
        reason = "they cannot be imported" if results["errors"] else _last_line(results["said"])
        raise NoTask(f"have {of} without results ({reason})")
    return results


def copies_of(
    tree: Tree, pool: SandboxPool, broken: Answer, failed_at: Mapping[str, tuple[int, str]]
) -> dict[str, list[Copy]]:
    """Copies by test function that the original code passes or fails as intended.

    Their expected value is not in the test, and the broken code returns another value or raises.
    """
    rng = random.Random(str(sorted(failed_at)))
    lines = {test.partition("[")[0]: line for test, (line, _) in failed_at.items()}
    tried: list[tuple[str, Copy]] = []
    bases: dict[tuple[str, int, int, int], Copy] = {}
    for head in rng.sample(sorted(lines), min(len(lines), MAX_FUNCTIONS)):
        path, _, name = head.partition("::")
        text = tree.read(path) if path.endswith(".py") else ""
        if function := functions_by_name(text).get(f"::{name}"):
            for variant in candidates(function, lines[head], rng):
                tried.append((head, variant))
                bases[head, variant.at, variant.case, variant.side] = variant.unchanged(function)
    if not tried:
        return {}

    def run(answer: Answer, copies: Copies) -> list[tuple[str, str]]:
        results, ends = run_copies(pool, tree, answer, (), copies, 2 * VERDICT_S, rng, limited=True)
        require_outcomes("copies of tests", results)
        return ends

    base_runs = [(head, variant, None) for (head, *_), variant in bases.items()]
    messages = run({}, [*base_runs, *((head, variant, None) for head, variant in tried)])
    usual = dict(zip(bases, (value for _, value in messages), strict=False))
    recorded: list[tuple[str, Copy, str]] = []
    for (head, variant), (_, value) in zip(tried, messages[len(bases) :], strict=True):
        base = usual[head, variant.at, variant.case, variant.side]
        if copied := variant.recorded(value, base, rng):
            recorded.append((head, copied, value))
    broken_ends = (
        run(broken, [(head, variant, None) for head, variant, _ in recorded]) if recorded else []
    )
    useful = [
        (head, variant)
        for (head, variant, value), (letter, other)
        in zip(recorded, broken_ends, strict=True)
        if letter == "f" and other != value and other[:1] in ("", "@")
    ]  # fmt: skip
    checks = [
        (head, variant, value)
        for head, variant in useful
        for value in (variant.right, variant.wrong)
    ]
    check_ends = [letter for letter, _ in run({}, checks)] if checks else []
    copies: dict[str, list[Copy]] = {}
    for (head, variant), right, wrong in zip(
        useful, check_ends[::2], check_ends[1::2], strict=True
    ):
        if (right, wrong) == ("p", "f"):
            copies.setdefault(head, []).append(variant)
    return copies


def prove(tree: Tree, pool: SandboxPool, kind: str, show: str, broken: Break) -> Row:
    """Make the task of a break, or raise NoTask."""
    answer, file, line, tests = broken
    broken_line = answer[file].splitlines()[line - 1].strip()
    if show == "line" and broken_line == "pass":
        raise NoTask("leave a line from which the original cannot be inferred")
    original = {path: tree.read(path) for path in answer}
    results = require_outcomes("tests", run_tests(pool, answer, tests, VERDICT_S))
    failing = [test for test in tests if results["outcomes"].get(test) == "f"]
    if not failing or {*results["outcomes"].values()} - {"p", "f"}:
        raise NoTask("fail no test" if not failing else "skip tests")
    failing.sort(key=lambda test: not results["errors"].get(test))  # one with an error first
    failed_at = {test: results["failed_at"].get(test, (0, "")) for test in failing}
    copies = copies_of(tree, pool, answer, failed_at)
    if sum(map(len, copies.values())) < MIN_COPIES:
        raise NoTask(f"have fewer than {MIN_COPIES} copies of tests with other inputs")
    diff = ""
    for path, text in original.items():
        before_and_after = text.splitlines(True), answer[path].splitlines(True)
        diff += "".join(difflib.unified_diff(*before_and_after, f"a/{path}", f"b/{path}"))
    row: Row = {
        "package": tree.name, "version": tree.version, "tree": tree.digest, "kind": kind,
        "diff": diff, "tests": failing, "others": [t for t in tests if t not in failing],
        "copies": {head: [*map(list, variants)] for head, variants in copies.items()},
    }  # fmt: skip
    answers = [original]
    if show == "line":  # deleting the line must not repair it
        lines = answer[file].splitlines(True)
        answers.insert(0, {file: "".join([*lines[: line - 1], "\n", *lines[line:]])})
    verdicts = [judge(pool, tree, row, scored_answer, VERDICT_S) for scored_answer in answers]
    if 1.0 in [score for score, _ in verdicts[:-1]]:
        raise NoTask("are repaired by deleting the line")
    score, verdict = verdicts[-1]
    if score != 1.0:
        raise NoTask(f"are not repaired by the original code ({_last_line(verdict.reason)})")
    if {path: patch(text, path, diff) for path, text in original.items()} != answer:
        raise NoTask("cannot be written as a diff")
    rules = TASK_TEXT[show].format(files=", ".join(sorted(answer)))
    head = f"{tree.name} in {REPO} is broken: {len(failing)} tests fail, such as {failing[0]}"
    error = re.sub(r"0x[0-9a-f]+", "0x...", results["errors"][failing[0]][-1500:])
    question = f"{head}\n\n{error}\n\n{rules}" if show == "test" else f"{rules}\n{broken_line}"
    id = hashlib.sha256(f"{tree.name} {diff}".encode()).hexdigest()[:16]
    return row | {"id": id, "file": file, "line": line, "question": question}


def hold_out(rows: Sequence[Row], seed: int = 0) -> tuple[list[Row], list[Row]]:
    """Split rows in training and held-out rows that share no package (or file, of one package)."""
    key = "package" if len({row["package"] for row in rows}) > 1 else "file"
    keys = sorted({row[key] for row in rows})
    if len(keys) < 2:
        raise ValueError(
            f"--repair: expected tasks of two files or more, got {len(rows)} tasks of {len(keys)}. "
            f"{SECOND}"
        )
    random.Random(seed).shuffle(keys)
    counts = Counter(row[key] for row in rows)
    heldout: list[str] = []
    for name in keys:
        if sum(counts[key_] for key_ in (*heldout, name)) <= len(rows) // 4:
            heldout.append(name)
    heldout = heldout or [min(keys, key=lambda name: counts[name])]
    return [row for row in rows if row[key] not in heldout], [
        row for row in rows if row[key] in heldout
    ]


def write_rows(sources: Sequence[str], config: Path, count: int, show: str) -> list[str]:
    """Make tasks and write them next to a future config. Returns the training file and settings."""
    is_single = len({*sources}) == 1
    if is_single:
        tree = prepare(sources[0])
        files = [path for path in tree.sources() if any(mutants_of(path, tree.read(path)))]
        if len(files) < 2:
            raise ValueError(
                f"--repair {sources[0]}: expected two modules that can be broken, got one. {SECOND}"
            )
    kinds = KINDS[:1] if show == "line" else KINDS
    rows = make(sources, count=count, kinds=kinds, show=show, min_files=1 + is_single)
    parts = hold_out(rows)
    paths = [config.resolve().with_suffix(f".{name}.jsonl") for name in ("train", "heldout")]
    for path, part in zip(paths, parts, strict=True):
        write_lines(path, part)
    answer, agent = "tree", [f"system_prompt={REPAIR}", "language=bash"]
    if show == "line":
        shots = ", ".join(SHOT.format(*pair) for pair in SHOTS)
        answer, agent = "line", [f"system_prompt={LINE}", "answer_prefix=", f"shots=[{shots}]"]
    return [
        str(paths[0]), "env.kind=repair", f"env.options.answer={answer}", "reward.format=0.0",
        f"data.heldout={paths[1]}", f"data.num_heldout={min(64, len(parts[1]))}",
        *(f"agent.options.{option}" for option in agent),
    ]  # fmt: skip

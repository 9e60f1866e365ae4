"""Public calls raise sandbox exceptions, and untrusted code cannot cause one that ends a run."""

import os
import tempfile
from typing import Any

import pytest

from agentgrpo.sandbox import (
    InvalidArgumentException,
    OutputMessage,
    Sandbox,
    SandboxInfraError,
    SandboxPool,
    SandboxUnavailable,
    Session,
    TimeoutException,
)
from agentgrpo.sandbox.isolation.guards import as_bytes, wraps_os_errors
from tests.isolation import within

pytestmark = pytest.mark.nsjail


@pytest.mark.parametrize(
    ("raised", "comes"),
    [(OSError(28, "full"), SandboxInfraError), (BlockingIOError(11, "x"), SandboxInfraError),
     (MemoryError(), SandboxInfraError),
     (RuntimeError("can't start new thread"), SandboxInfraError),
     (OverflowError("x"), InvalidArgumentException), (ValueError("x"), ValueError),
     (RuntimeError("x"), RuntimeError), (SandboxUnavailable("x"), SandboxUnavailable)],
)  # fmt: skip
def test_os_errors_become_sandbox_errors(raised: Exception, comes: type[Exception]) -> None:
    @wraps_os_errors
    class Called:
        def act(self) -> None:
            raise raised

    with pytest.raises(comes) as caught:
        Called().act()
    assert type(caught.value) is comes
    assert str(raised) in str(caught.value)


def test_file_names_can_have_any_bytes(pool: SandboxPool) -> None:
    with Sandbox.create(pool=pool) as sandbox:
        sandbox.run_code(
            "import os; os.makedirs(b'd/\\xff/e'); open(b'd/\\xff/f\\xfe', 'w').write('x')"
        )
        entries = sandbox.files.list(depth=4)
        assert [os.fsencode(entry.name) for entry in entries] == [b"d", b"\xff", b"e", b"f\xfe"]
        assert sandbox.files.read(entries[-1].path) == "x"
        for text in ("\ud800", "\udcff", "é"):
            sandbox.files.write(text, text)
            assert sandbox.files.read(text, format="bytes") == as_bytes(text)
            counted: Any = sandbox.commands.run(f"printf %s '{text}' | wc -c")
            assert int(counted.stdout) == len(as_bytes(text))


def test_remove_times_out_if_code_stops_it(
    pool: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops = (
        "import os, signal\nos.mkdir('d')\nif os.fork() == 0:\n"
        " while True:\n"
        "  for pid in map(int, filter(str.isdigit, os.listdir('/proc'))):\n"
        "   try: pid in (1, 2, os.getpid()) or os.kill(pid, signal.SIGSTOP)\n"
        "   except OSError: pass"
    )
    monkeypatch.setattr("agentgrpo.sandbox.session.files.REMOVE_S", 1.0)
    with Sandbox.create(pool=pool) as sandbox:
        sandbox.run_code(stops)

        def remove() -> None:
            for _ in range(50):  # it may have been done before it was seen
                sandbox.files.make_dir("d")
                sandbox.files.remove("d")

        with pytest.raises(TimeoutException, match="not removed in 1 s"):
            remove()


def test_characters_are_not_split_between_pieces(pool: SandboxPool) -> None:
    text = "é\N{SNOWMAN}\N{GRINNING FACE}"
    slowly = (
        f"import os, time\nfor byte in {text.encode()!r} + b'\\xf0\\x9f':\n"
        " os.write(1, bytes([byte])); time.sleep(0.01)"
    )
    with Sandbox.create(pool=pool) as sandbox:
        got: list[OutputMessage] = []
        sandbox.run_code(slowly, on_stdout=got.append)
        assert "".join(message.line for message in got) == text + "\ufffd"
        sandbox.files.write("slowly.py", slowly)
        pieces: list[str] = []
        sandbox.commands.run(f"{pool.template.interpreter} slowly.py", on_stdout=pieces.append)
        assert "".join(pieces) == text + "\ufffd"


def test_an_exception_of_a_listener_is_raised_after_the_step(
    pool: SandboxPool, session: Session
) -> None:
    heard = []

    def fail(*told: object) -> None:
        heard.append(told)
        session.files().write("heard", "")
        raise KeyError("in the listener")

    code = "import os\nprint(1, flush=True)\nwhile not os.path.exists('heard'): pass\nprint(2)"
    with pytest.raises(KeyError, match="in the listener"):
        session.cell(code, listener=fail)
    assert heard == [(0, b"1\n")]
    assert session.step("6 * 7").value == "42"
    with Sandbox.create(pool=pool) as sandbox:
        for call in (
            lambda: sandbox.run_code("print(1)", on_stdout=fail),
            lambda: sandbox.run_code("1", on_result=fail),
            lambda: sandbox.run_code("1 / 0", on_error=fail),
            lambda: sandbox.commands.run("echo 1", on_stdout=fail),
        ):
            with pytest.raises(KeyError):
                call()


def test_no_space_for_another_zygote_is_an_infra_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with SandboxPool(max_live=2, min_idle=0, zygotes=1) as pool:
        (zygote,) = pool._spawner._zygotes
        os.kill(zygote.pid, 9)
        assert within(lambda: not zygote.answers())

        def full(*_: object, **__: object) -> str:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(tempfile, "mkdtemp", full)
        with pytest.raises(SandboxInfraError, match="No space"):
            pool.acquire()
        with pytest.raises(SandboxUnavailable, match="No space"):
            SandboxPool()

"""Attacks on the channel to the host, on the loop that serves it, and on how an end is reported."""

from agentgrpo.sandbox.hostile.case import expect, needs_proc, on_session, still_works, value_of
from agentgrpo.sandbox.result import StepStatus
from agentgrpo.sandbox.session import Session

FORGE = (
    "import os, struct\n"
    "def frame(number, *fields):\n"
    " body = struct.pack('<II', number, len(fields))\n"
    " body += b''.join(struct.pack('<I', len(f)) + f for f in fields)\n"
    " return struct.pack('<I', len(body)) + body\n"
)


@on_session
def system_exit(s: Session) -> None:
    """Asking to exit with 0 is not ok, and keeps the state."""
    expect(s.step("x = 1; import sys; sys.exit(0)"), StepStatus.EXIT, lost=False)
    assert value_of(s, "x") == "1"


@on_session
def os_exit_zero(s: Session) -> None:
    """A process that exits with 0 is not ok, and the session is over."""
    result = expect(s.step("import os; os._exit(0)"), StepStatus.EXIT, lost=True)
    assert result.exit_code == 0


@on_session
def abort(s: Session) -> None:
    """An abort is reported as signal 6."""
    assert expect(s.step("import os; os.abort()"), StepStatus.SIGNAL, lost=True).signal == 6


@on_session
def segfault(s: Session) -> None:
    """A segmentation fault is reported as signal 11."""
    result = expect(s.step("import ctypes; ctypes.string_at(0)"), StepStatus.SIGNAL, lost=True)
    assert result.signal == 11


@on_session
def kills_init(s: Session) -> None:
    """PID 1 cannot be killed or stopped from inside."""
    code = "import os\nfor n in (9, 15, 19, 2, 11): os.kill(1, n)"
    expect(s.step(code), StepStatus.OK)
    still_works(s)


@on_session
def kills_everything(s: Session) -> None:
    """kill(-1, SIGKILL) kills nothing outside, not even init."""
    expect(s.step("import os; os.kill(-1, 9)"), StepStatus.OK, StepStatus.SIGNAL, StepStatus.ERROR)


@on_session
def kills_itself(s: Session) -> None:
    """SIGKILL to itself is reported as what it is, not as a timeout or as memory."""
    result = expect(s.step("import os; os.kill(os.getpid(), 9)"), StepStatus.SIGNAL, lost=True)
    assert result.signal == 9


@on_session
def closes_everything(s: Session) -> None:
    """Closing every descriptor ends the session, and does not hang the host."""
    result = s.step("import os; os.closerange(0, 1000)", 5.0)
    assert result.state_lost, result


@on_session
def closes_request_pipe(s: Session) -> None:
    """Closing the request pipe ends the session at the next step at the latest."""
    s.step("import os; os.close(3)")
    assert s.step("1").state_lost


@on_session
def atexit_output(s: Session) -> None:
    """What atexit prints belongs to no step."""
    s.step("import atexit; atexit.register(print, 'PASSED')")
    assert s.step("import sys; sys.exit(0)").stdout == ""


@on_session
def exception_with_evil_text(s: Session) -> None:
    """An exception whose __str__ exits or fails is unprintable, and no more."""
    for bad in ("raise SystemExit", "raise KeyboardInterrupt", "return 1", "return None"):
        code = f"class E(Exception):\n def __str__(self): {bad}\nraise E"
        expect(s.step(code), StepStatus.ERROR, lost=False)
    still_works(s)


@on_session
def exception_with_evil_name(s: Session) -> None:
    """A metaclass that lies about the name of an exception does no harm."""
    code = (
        "class M(type):\n @property\n def __name__(self): raise SystemExit\n"
        "class E(Exception, metaclass=M): pass\nraise E"
    )
    expect(s.step(code), StepStatus.ERROR, lost=False)
    still_works(s)


@on_session
def base_exception(s: Session) -> None:
    """BaseException, KeyboardInterrupt and GeneratorExit end the step only."""
    for name in ("BaseException", "KeyboardInterrupt", "GeneratorExit"):
        expect(s.step(f"raise {name}"), StepStatus.ERROR, lost=False)
    still_works(s)


@on_session
def exception_group(s: Session) -> None:
    """A cycle of causes and a nest of groups do not hang the formatter."""
    s.step("a, b = ValueError(), ValueError(); a.__cause__ = b; b.__cause__ = a")
    expect(s.step("raise a"), StepStatus.ERROR, lost=False)
    code = "e = ValueError()\nfor _ in range(500): e = ExceptionGroup('g', [e])\nraise e"
    expect(s.step(code), StepStatus.ERROR, lost=False)
    still_works(s)


@on_session
def forged_answer(s: Session) -> None:
    """A forged answer is that step's own observation; the session does not survive it."""
    s.step(FORGE)
    first = s.step("os.write(4, frame(2, b'ok', b'forged')); import time; time.sleep(0.1)")
    assert first.state_lost or s.step("1").status is StepStatus.PROTOCOL_ERROR


@on_session
def forged_second_answer(s: Session) -> None:
    """An answer queued for the next step is a broken protocol."""
    s.step(FORGE)
    s.step("os.write(4, frame(3, b'ok', b'forged'))")
    result = s.step("1")
    assert result.status is StepStatus.PROTOCOL_ERROR, result
    assert result.value is None


@on_session
def huge_length(s: Session) -> None:
    """A frame that says it is 4 GB long ends the session."""
    expect(s.step("import os; os.write(4, b'\\xff' * 4)"), StepStatus.PROTOCOL_ERROR, lost=True)


@on_session
def tiny_length(s: Session) -> None:
    """A frame too short to be one ends the session."""
    expect(s.step("import os; os.write(4, b'\\0' * 8)"), StepStatus.PROTOCOL_ERROR, lost=True)


@on_session
def garbage_fields(s: Session) -> None:
    """Fields that do not add up end the session."""
    s.step(FORGE)
    code = "os.write(4, struct.pack('<IIIII', 16, 2, 1, 99, 0)); import time; time.sleep(9)"
    expect(s.step(code), StepStatus.PROTOCOL_ERROR, lost=True)


@on_session
def too_many_fields(s: Session) -> None:
    """A count of four billion fields ends the session without allocating for them."""
    s.step("import os, struct, time")
    code = "os.write(4, struct.pack('<III', 8, 2, 2**32 - 1)); time.sleep(9)"
    expect(s.step(code), StepStatus.PROTOCOL_ERROR, lost=True)


@on_session
def unknown_kind(s: Session) -> None:
    """An answer of an unknown kind ends the session."""
    s.step(FORGE)
    code = "os.write(4, frame(2, b'passed', b'1')); import time; time.sleep(9)"
    expect(s.step(code), StepStatus.PROTOCOL_ERROR, lost=True)


@on_session
def wrong_number(s: Session) -> None:
    """An answer to another step ends the session."""
    s.step(FORGE)
    code = "os.write(4, frame(7, b'ok')); import time; time.sleep(9)"
    expect(s.step(code), StepStatus.PROTOCOL_ERROR, lost=True)


@on_session
def partial_frame(s: Session) -> None:
    """Half a frame and then nothing runs into the deadline."""
    code = "import os, time; os.write(4, b'\\x20\\0\\0\\0\\1'); time.sleep(100)"
    result = s.step(code, 0.2)
    assert result.state_lost or s.step("1").state_lost, result


@on_session
def flooded_channel(s: Session) -> None:
    """A stream of valid-looking frames ends the session."""
    s.step(FORGE)
    code = "while True: os.write(4, frame(2, b'ok') * 100)"
    expect(s.step(code), StepStatus.PROTOCOL_ERROR, lost=True)


@on_session
def pickled_payload(s: Session) -> None:
    """A pickle in the place of an answer is never loaded."""
    code = (
        "import os, pickle, struct\n"
        "class P:\n def __reduce__(self): return os.system, ('touch /tmp/owned',)\n"
        "b = pickle.dumps(P()); os.write(4, struct.pack('<I', len(b)) + b)"
    )
    expect(s.step(code), StepStatus.PROTOCOL_ERROR, lost=True)


@on_session
def replaced_primitives(s: Session) -> None:
    """Replacing what the loop is made of does not break it."""
    s.step(
        "import builtins, os, struct, sys, traceback, linecache, ast, signal\n"
        "def bad(*a, **k): raise RuntimeError('replaced')\n"
        "for n in ('exec', 'eval', 'compile', 'repr', 'str', 'len', 'isinstance', 'type', 'open',\n"
        "          'getattr', 'zip', 'dict', 'BaseException', 'SystemExit', 'KeyboardInterrupt'):\n"
        " setattr(builtins, n, bad)\n"
        "for m, n in ((os, 'read'), (os, 'write'), (os, 'getpid'), (os, '_exit'),\n"
        "             (struct, 'pack'), (struct, 'Struct'), (struct, 'unpack'), (ast, 'parse'),\n"
        "             (traceback, 'TracebackException'), (signal, 'signal')):\n"
        " setattr(m, n, bad)"
    )
    assert s.step("6 * 7").value == "42"
    assert s.step("1 / 0").status is StepStatus.ERROR
    assert s.step("6 * 7").value == "42"


@on_session
def cleared_modules(s: Session) -> None:
    """Clearing sys.modules, builtins and the namespace ends at worst that session."""
    s.step("import sys, builtins; sys.modules.clear(); builtins.__dict__.clear()")
    result = s.step("1")
    assert result.value == "1" or result.status is StepStatus.ERROR or result.state_lost, result


@on_session
def fork_at_top_level(s: Session) -> None:
    """A fork that reaches the end of the step does not answer a second time."""
    expect(s.step("import os; pid = os.fork()"), StepStatus.OK)
    assert value_of(s, "pid > 0") == "True"
    still_works(s)


@on_session
def fork_that_exits(s: Session) -> None:
    """A fork that raises SystemExit does not answer for its parent."""
    expect(
        s.step("import os, sys\nif os.fork() == 0: sys.exit(3)\nos.wait()[1] >> 8"), StepStatus.OK
    )
    still_works(s)


@on_session
def frames_of_the_loop(s: Session) -> None:
    """Reaching into the loop's own frames breaks at most that session."""
    code = (
        "import sys\nf = sys._getframe()\nwhile f.f_back: f = f.f_back\n"
        "for v in list(f.f_locals.values()):\n"
        " if hasattr(v, '__dict__'):\n"
        "  try: v.__dict__.clear()\n"
        "  except Exception: pass"
    )
    s.step(code)
    s.step("1")


@on_session
def init_is_out_of_reach(s: Session) -> None:
    """Nothing of init can be opened: descriptors, memory, environment."""
    code = (
        "got = []\nimport os\n"
        "for n in ('fd', 'mem', 'environ', 'maps', 'root', 'cwd', 'exe', 'fdinfo'):\n"
        " for go in (lambda p: os.listdir(p), lambda p: open(p).read(1), os.readlink):\n"
        "  try: got.append((n, go(f'/proc/1/{n}')))\n"
        "  except OSError: pass\ngot"
    )
    assert value_of(s, code) == "[]"


@on_session
def only_its_own_descriptors(s: Session) -> None:
    """The interpreter holds its three streams and two pipes, and nothing else."""
    code = (
        "import fcntl\ngot = []\nfor fd in range(5000):\n"
        " try: fcntl.fcntl(fd, fcntl.F_GETFD); got.append(fd)\n"
        " except OSError: pass\ngot"
    )
    assert value_of(s, code) == "[0, 1, 2, 3, 4]"


@on_session
def children_do_not_inherit_the_channel(s: Session) -> None:
    """Child programs do not get the pipes of the protocol."""
    needs_proc(s)
    code = "import subprocess; subprocess.run(['ls', '/proc/self/fd'], close_fds=False)"
    assert s.step(code).stdout.split() == ["0", "1", "2", "3"], "3 is the directory being listed"


@on_session
def out_of_descriptors(s: Session) -> None:
    """A step that leaves no descriptor free is still answered."""
    code = "import os\nkeep = []\ntry:\n while True: keep.append(os.dup(0))\nexcept OSError: pass"
    expect(s.step(code), StepStatus.OK)
    s.step("for fd in keep: os.close(fd)")
    still_works(s)


@on_session
def environment_is_data(s: Session) -> None:
    """Environment values with quotes, newlines and code arrive verbatim."""
    for value in ("'; import os #", 'a"b', "line\nline", "\N{SNOWMAN}", "x" * 100_000, ""):
        result = s.step("import os; os.environ['KEY'] == bytes.fromhex(os.environ['HEX']).decode()",
                        env={"KEY": value, "HEX": value.encode().hex()})  # fmt: skip
        assert result.value == "True", (value[:40], result)
    assert value_of(s, "'KEY' in os.environ") == "False", "for one step only"

"""Attacks on the channel to the host, the interpreter's loop, and the reports of ends."""

from agentgrpo.sandbox.selftest import ALIVE, ERROR, EXIT, OK, Test, require_proc, table
from agentgrpo.sandbox.session.step_result import StepResult, StepStatus

BROKEN = StepStatus.PROTOCOL_ERROR
FORGE = (
    "import os, struct, time\n"
    "def frame(number, *fields):\n"
    " body = struct.pack('<II', number, len(fields))\n"
    " body += b''.join(struct.pack('<I', len(f)) + f for f in fields)\n"
    " return struct.pack('<I', len(body)) + body\n"
)
ENVIRONMENT = ("'; import os #", 'a"b', "line\nline", "\N{SNOWMAN}", "x" * 100_000, "")


def by(number: int) -> Test:
    """The interpreter died of that signal."""
    return lambda result: result.signal == number


def lost(result: StepResult) -> bool:
    """The session is over, however."""
    return result.state_lost


ANY = tuple(StepStatus)
row = table(__name__)
# fmt: off
row("Closing every descriptor ends the session without blocking the host",
    ("import os; os.closerange(0, 1000)", (*ANY, lost), 5.0))
row("Closing the request pipe ends the session at the next step at the latest",
    ("import os; os.close(3)",), ("1", (*ANY, lost)))
row("Output of atexit handlers belongs to no step",
    ("import atexit; atexit.register(print, 'PASSED')",),
    ("import sys; sys.exit(0)", (EXIT, lambda result: result.stdout == "")))
row("An exception whose __str__ exits or fails is reported as unprintable",
    *((f"class E(Exception):\n def __str__(self): {bad}\nraise E", ERROR)
      for bad in ("raise SystemExit", "raise KeyboardInterrupt", "return 1", "return None")),
    ALIVE)
row("A metaclass that fakes the name of an exception is harmless", ("""
    class M(type):
     @property
     def __name__(self): raise SystemExit
    class E(Exception, metaclass=M): pass
    raise E""", ERROR), ALIVE)
row("BaseException, KeyboardInterrupt and GeneratorExit end only the step",
    *((f"raise {name}", ERROR) for name in ("BaseException", "KeyboardInterrupt", "GeneratorExit")),
    ALIVE)
row("Cyclic causes and nested exception groups do not block the formatter",
    ("a, b = ValueError(), ValueError(); a.__cause__ = b; b.__cause__ = a",), ("raise a", ERROR),
    ("e = ValueError()\nfor _ in range(500): e = ExceptionGroup('g', [e])\nraise e", ERROR),
    ALIVE)
row("A forged answer affects only its own step and ends the session", (FORGE,),
    ("os.write(4, frame(2, b'ok', b'value', b'forged')); time.sleep(0.1)",), ("1", (BROKEN,)))
row("An answer queued for the next step is a protocol error", (FORGE,),
    ("os.write(4, frame(3, b'ok', b'value', b'forged'))",),
    ("1", (BROKEN, lambda result: result.value is None)))
row("A frame with a length of 4 GB ends the session",
    ("import os; os.write(4, b'\\xff' * 4)", BROKEN))
row("A too short frame ends the session", ("import os; os.write(4, b'\\0' * 8)", BROKEN))
row("Inconsistent field lengths end the session", (FORGE,),
    ("os.write(4, struct.pack('<IIIII', 16, 2, 1, 99, 0)); time.sleep(9)", BROKEN))
row("A count of four billion fields ends the session without allocating for them", (FORGE,),
    ("os.write(4, struct.pack('<III', 8, 2, 2**32 - 1)); time.sleep(9)", BROKEN))
row("An answer of an unknown kind ends the session", (FORGE,),
    ("os.write(4, frame(2, b'passed', b'1')); time.sleep(9)", BROKEN))
row("An answer to another step ends the session", (FORGE,),
    ("os.write(4, frame(7, b'ok')); time.sleep(9)", BROKEN))
row("Half a frame runs into the deadline",
    ("import os, time; os.write(4, b'\\x20\\0\\0\\0\\1'); time.sleep(100)", None, 0.2),
    ("1", (*ANY, lost)))
row("A stream of valid-looking frames ends the session", (FORGE,),
    ("while True: os.write(4, frame(2, b'ok') * 100)", BROKEN))
row("A pickle instead of an answer is never loaded", ("""
    import os, pickle, struct
    class P:
     def __reduce__(self): return os.system, ('touch /tmp/owned',)
    b = pickle.dumps(P()); os.write(4, struct.pack('<I', len(b)) + b)""", BROKEN))
row("Replacing the functions of the loop does not break it", ("""
    import builtins, os, struct, sys, traceback, linecache, ast, signal
    def bad(*a, **k): raise RuntimeError('replaced')
    for n in ('exec', 'eval', 'compile', 'repr', 'str', 'len', 'isinstance', 'type', 'open',
              'getattr', 'zip', 'dict', 'BaseException', 'SystemExit', 'KeyboardInterrupt'):
     setattr(builtins, n, bad)
    for m, n in ((os, 'read'), (os, 'write'), (os, 'getpid'), (os, '_exit'),
                 (struct, 'pack'), (struct, 'Struct'), (struct, 'unpack'), (ast, 'parse'),
                 (traceback, 'TracebackException'), (signal, 'signal')):
     setattr(m, n, bad)""",), ("6 * 7", "42"), ("1 / 0", ERROR), ("6 * 7", "42"))
row("Clearing sys.modules, builtins and the namespace ends at most that session",
    ("import sys, builtins; sys.modules.clear(); builtins.__dict__.clear()",),
    ("1", (*ANY, lambda r: r.value == "1" or r.status is ERROR or r.state_lost)))
row("A fork that reaches the end of the step does not answer a second time",
    ("import os; pid = os.fork()", OK), ("pid > 0", "True"), ALIVE)
row("A fork that raises SystemExit does not answer for its parent",
    ("import os, sys\nif os.fork() == 0: sys.exit(3)\nos.wait()[1] >> 8", OK), ALIVE)
row("Changing the loop's frames breaks at most that session", ("""
    import sys
    f = sys._getframe()
    while f.f_back: f = f.f_back
    for v in list(f.f_locals.values()):
     if hasattr(v, '__dict__'):
      try: v.__dict__.clear()
      except Exception: pass""",), ("1",))
row("Child programs do not get the pipes of the protocol",  # 3 is the directory being listed
    ("import subprocess; n = subprocess.run(['ls', '/proc/self/fd'], close_fds=False)",
     lambda result: result.stdout.split() == ["0", "1", "2", "3"]), needs=require_proc)
row("A step that uses up all descriptors is still answered",
    ("import os\nkeep = []\ntry:\n while True: keep.append(os.dup(0))\nexcept OSError: pass", OK),
    ("for fd in keep: os.close(fd)",), ALIVE)
row("Environment values with quotes, newlines and code arrive verbatim",
    *(("import os; os.environ['KEY'] == bytes.fromhex(os.environ['HEX']).decode()", "True", None,
       {"KEY": value, "HEX": value.encode().hex()}) for value in ENVIRONMENT),
    ("'KEY' in os.environ", "False"))  # for one step only
# fmt: on

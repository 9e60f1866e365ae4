"""Attacks on what the kernel counts for the whole machine, per user, or not at all."""

from pathlib import Path

from agentgrpo.sandbox.hostile.case import (
    LIMITS,
    expect,
    on_pool,
    on_session,
    still_works,
    value_of,
)
from agentgrpo.sandbox.hostile.escape import LIBC
from agentgrpo.sandbox.pool import SandboxPool
from agentgrpo.sandbox.result import StepStatus
from agentgrpo.sandbox.session import Session

OK, ERROR, TIMEOUT = StepStatus.OK, StepStatus.ERROR, StepStatus.TIMEOUT


@on_session
def unmapped_memory(s: Session) -> None:
    """Memory that no address space holds (memfd, SysV segments) is bounded all the same."""
    for make in (
        "fd = os.memfd_create('x'); os.write(fd, b'x' * (8 << 20)); keep.append(fd)",
        "i = libc.shmget(0, 8 << 20, 0o1600); a = libc.shmat(i, None, 0)\n"
        "  if i < 0: raise OSError\n"
        "  ctypes.memset(a, 1, 8 << 20); libc.shmdt(ctypes.c_void_p(a))",
    ):
        code = (
            "import ctypes, os\nkeep = []; n = 0; libc = ctypes.CDLL(None)\n"
            "libc.shmat.restype = ctypes.c_void_p\n"
            f"try:\n while n < 100:\n  {make}\n  n += 1\nexcept OSError: pass\nn"
        )
        result = s.step(code)
        if result.status is StepStatus.OOM:
            return
        assert expect(result, OK).value is not None
        assert int(result.value or 0) * 8 <= LIMITS.memory_mib, result


@on_session
def queued_signals(s: Session) -> None:
    """Signals queued by a session do not use up the queue of the user who runs the host."""
    before = _queued()
    code = (
        "import ctypes, os, signal\nlibc = ctypes.CDLL(None)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [40])\nn = 0\n"
        "while n < 100_000 and libc.sigqueue(os.getpid(), 40, ctypes.c_void_p(1)) == 0: n += 1\nn"
    )
    assert int(value_of(s, code)) < 1000
    assert _queued() - before < 1000


def _queued() -> int:
    """Signals queued for this process's user."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("SigQ:"))
    return int(line.split()[1].split("/")[0])


@on_session
def buffers_of_sockets(s: Session) -> None:
    """What sockets buffer in the kernel is bounded like other memory."""
    code = (
        "import socket, time\nserver = socket.create_server(('127.0.0.1', 0), backlog=200)\n"
        "keep = []; n = 0\nfor _ in range(100):\n"
        " a = socket.create_connection(server.getsockname()); b, _ = server.accept()\n"
        " a.setblocking(False); keep += [a, b]; stop = time.monotonic() + 0.1\n"
        " try:\n  while time.monotonic() < stop: n += a.send(b'x' * 65536)\n"
        " except BlockingIOError: pass\ntime.sleep(1); n >> 20  # a watchdog's time"
    )
    result = s.step(code)
    if result.status not in (StepStatus.OOM, TIMEOUT):
        assert int(expect(result, OK).value or 0) <= 2 * LIMITS.memory_mib, result


@on_session
def core_dumps(s: Session) -> None:
    """A crash cannot be made to start the machine's core dump handler."""
    code = (
        "import resource as r, ctypes, mmap\nlibc = ctypes.CDLL(None)\n"
        "r.setrlimit(r.RLIMIT_CORE, (0, 0)); libc.setrlimit(4, (ctypes.c_uint64 * 2)(0, 0))\n"
        "libc.syscall(ctypes.c_long(160), 4, (ctypes.c_uint64 * 2)(0, 0))\n"
        "libc.mmap.restype = ctypes.c_void_p\n"
        "low = libc.mmap(ctypes.c_void_p(1 << 32), 4096, 3, 0x32, -1, 0)  # its lower half is 0\n"
        "libc.prlimit64(0, 4, ctypes.c_void_p(low), None)\n"
        "low == 1 << 32, r.getrlimit(r.RLIMIT_CORE)"
    )
    assert value_of(s, code) == "(True, (1, 1))"


@on_session
def huge_pages(s: Session) -> None:
    """The machine's pool of huge pages cannot be used."""
    code = (
        "import ctypes, errno, mmap, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "libc.mmap.restype = ctypes.c_void_p\ngot = []\n"
        "libc.mmap(None, 2 << 20, 3, 0x40022, -1, 0); got.append(ctypes.get_errno())\n"
        "try: os.memfd_create('x', 4)\nexcept OSError as e: got.append(e.errno)\n"
        "libc.shmget(0, 2 << 20, 0o4600); got.append(ctypes.get_errno()); set(got) <= {12, 38}"
    )
    assert value_of(s, code) == "True"


@on_session
def flushing_the_disks(s: Session) -> None:
    """sync() says that it was done, and flushes nothing of the machine."""
    assert value_of(s, "import os; [os.sync() for _ in range(1000)] == [None] * 1000") == "True"


@on_session
def twins_of_pages(s: Session) -> None:
    """Pages cannot be merged with equal ones of others, cores not be kept from them."""
    code = (
        "import ctypes, mmap\nlibc = ctypes.CDLL(None, use_errno=True)\ngot = []\n"
        "try: mmap.mmap(-1, 8192).madvise(12); got.append('merged')\nexcept OSError: pass\n"
        "got += [p for p in ((62, 1, 0, 0, 0), (67, 1, 0, 0, 0)) if libc.prctl(*p) == 0]\ngot"
    )
    assert value_of(s, code) == "[]"


@on_session
def out_of_memory_order(s: Session) -> None:
    """A machine without memory left ends sessions first, and no session can change that."""
    assert Path(f"/proc/{s.init_pid}/oom_score_adj").read_text() == "1000\n"
    expect(s.step("open('/proc/self/oom_score_adj', 'w').write('-1000')"), ERROR)


@on_session
def access_control_lists(s: Session) -> None:
    """No file gets an access control list: 64 KiB that no limit counts."""
    code = (
        "import os\nopen('f', 'w').close()\nfd = os.open('f', os.O_RDWR)\ngot = []\n"
        "for f, follow in (('f', True), (fd, True), ('f', False)):\n"
        " try: os.setxattr(f, 'user.x', b'', follow_symlinks=follow); got.append('set')\n"
        " except OSError as e: got.append(e.errno)\ngot"
    )
    assert value_of(s, code) == "[95, 95, 95]"


@on_session
def record_locks(s: Session) -> None:
    """A hundred thousand locks of records take no memory of the kernel."""
    code = (
        "import fcntl\nf = open('f', 'w')\n"
        "for i in range(100_000): fcntl.lockf(f, fcntl.LOCK_EX, 1, 2 * i)"
    )
    expect(s.step(code), OK)
    locks = Path("/proc/locks").read_text().splitlines()
    pid = str(s._pid)
    assert not [line for line in locks if line.split()[4] == pid]


@on_session
def flushing_a_file(s: Session) -> None:
    """Flushing a file flushes no disk: what a session can write is in memory."""
    code = LIBC + "[libc.fsync(-1), libc.fdatasync(-1), libc.sync_file_range(-1, 0, 0, 7)]"
    assert value_of(s, code) == "[0, 0, 0]", "not even the descriptor was looked at"


@on_session
def programs_of_filters(s: Session) -> None:
    """Further filters cannot be installed: their compiled code uses up what the machine has."""
    code = LIBC + (
        "class P(ctypes.Structure): _fields_ = [('len', ctypes.c_ushort), ('f', ctypes.c_void_p)]\n"
        "allow = ctypes.create_string_buffer(bytes.fromhex('060000000000ff7f'))\n"
        "p = P(1, ctypes.addressof(allow))\nlibc.prctl(22, 2, ctypes.byref(p), 0, 0)"
    )
    assert value_of(s, code) == "-1"


@on_session
def forgotten_shared_memory(s: Session) -> None:
    """Shared memory that is unmapped but for a page is bounded all the same."""
    code = LIBC + (
        "import mmap\nlibc.mmap.restype = ctypes.c_void_p; n = 0\n"
        "zero = os.open('/dev/zero', os.O_RDWR)\n"
        "for flags, fd in 20 * [(0x21, -1), (0x1, zero)]:\n"
        " at = libc.mmap(None, 20 << 20, 3, flags, fd, 0)\n"
        " if at is None or at == 2**64 - 1: continue\n"
        " ctypes.memset(at, 1, 20 << 20); n += 20\n"
        " libc.munmap(ctypes.c_void_p(at + 4096), ctypes.c_size_t((20 << 20) - 4096))\nn"
    )
    result = expect(s.step(code), OK, StepStatus.OOM)
    assert int(result.value or 0) <= LIMITS.memory_mib, result


HOPS = (
    "import os, time\nread, write = os.pipe()\nstop = time.monotonic() + {seconds}\n"
    "for _ in range({chains}):\n"
    " if os.fork() == 0:\n"
    "  x = bytearray({mib} << 20); x[::4096] = b'1' * len(x[::4096])\n"
    "  while time.monotonic() < stop:\n"
    "   try:\n    if os.fork() != 0: os._exit(0)\n"
    "   except OSError: pass  # too many have not been reaped yet\n"
    "  os._exit(0)\n"
    "os.close(write); os.read(read, 1)  # until all of them have ended"
)
"""Chains of processes, each the child of the one before, that hand on mib of memory."""


@on_session
def memory_that_hops(s: Session) -> None:
    """Memory held by processes that are replaced by their children all the time is bounded."""
    result = expect(s.step(HOPS.format(seconds=15, chains=10, mib=50), 30.0), OK, StepStatus.OOM)
    assert result.status is StepStatus.OOM or result.oom_kills > 0, result


@on_session
def buffers_of_unix_sockets(s: Session) -> None:
    """What unix sockets buffer in the kernel is bounded like other memory."""
    code = (
        "import os, socket\nread, write = os.pipe()\n"
        "def fill():\n"
        " keep = []; n = 0\n"
        " try:\n"
        "  while True:\n"
        "   keep += socket.socketpair()\n"
        "   for s in keep[-2:]:\n"
        "    s.setblocking(False)\n"
        "    try:\n"
        "     while True: n += s.send(b'x' * 65536)\n"
        "    except BlockingIOError: pass\n"
        " except OSError: pass\n"
        " os.write(write, n.to_bytes(8, 'little')); os.close(write); signal.pause()\n"
        "import signal\n"
        "for _ in range(10):\n"
        " if os.fork() == 0: fill()\n"
        "os.close(write); sent = b''\n"
        "while len(sent) < 80 and (more := os.read(read, 80)): sent += more\n"
        "import time; time.sleep(1)  # a watchdog's time\n"
        "sum(int.from_bytes(sent[i : i + 8], 'little') for i in range(0, len(sent), 8)) >> 20"
    )
    result = expect(s.step(code, 30.0), OK, StepStatus.OOM)
    if result.status is OK and not result.oom_kills:
        assert int(result.value or 0) <= LIMITS.memory_mib, result


@on_pool
def descriptors_in_flight(pool: SandboxPool) -> None:
    """Descriptors that a session leaves in flight keep no other one from starting."""
    code = (
        "import socket\nkeep = []\ntry:\n while True:\n  keep += socket.socketpair()\n"
        "  for _ in range(4): socket.send_fds(keep[-2], [b'x'], [0] * 250)\n"
        "except OSError as e: print(e.errno)"
    )
    with pool.acquire() as a:
        assert a.step(code).stdout in ("109\n", "24\n")
        for _ in range(pool.min_idle + 2):  # those that were ready before, and later ones
            with pool.acquire() as b:
                still_works(b)

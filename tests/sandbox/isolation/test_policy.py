"""The system call filter, run by a small interpreter of classic BPF and checked against headers."""

import errno
import re
import struct
from pathlib import Path

import pytest

from agentgrpo.sandbox import SandboxPool, SandboxUnavailable, StepStatus
from agentgrpo.sandbox.isolation import policy

DOCS = Path(__file__).parents[3] / "docs" / "sandbox.md"
ALLOW, KILL = policy.ALLOW, policy.KILL_PROCESS
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


def decide(program: bytes, arch: int, number: int, *arguments: int) -> int:
    """What the kernel would answer: the return value of the filter."""
    data = struct.pack("<IIQ", number, arch, 0)
    data += struct.pack("<6Q", *(a & 2**64 - 1 for a in (*arguments, *[0] * (6 - len(arguments)))))
    code = list(struct.iter_unpack("<HBBI", program))
    accumulator, at = 0, 0
    while True:
        operation, yes, no, operand = code[at]
        at += 1
        if operation == policy.LOAD:
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif operation == policy.AND:
            accumulator &= operand
        elif operation == policy.RETURN:
            return int(operand)
        elif operation == policy.JUMP:
            at += operand
        else:
            holds = {
                policy.EQUAL: accumulator == operand,
                policy.GREATER: accumulator > operand,
                policy.AT_LEAST: accumulator >= operand,
                policy.ANY_BIT: bool(accumulator & operand),
            }[operation]
            at += yes if holds else no


def denied(error: int) -> int:
    return policy.ERRNO | error


MACHINES = pytest.mark.parametrize("machine", ["x86_64", "aarch64"])


@MACHINES
def test_only_the_calls_of_the_table_are_allowed(machine: str) -> None:
    program, arch = policy.build(machine), policy.AUDIT_ARCH[machine]
    known = policy.system_calls(machine)
    by_argument = policy._filters(machine, namespaced=True, shared_memory=True, own_user=True)
    filtered = {known[name] for name in by_argument if name in known}
    for number in range(600):
        answer = decide(program, arch, number)
        if number in filtered:
            continue
        wanted = ALLOW if number in known.values() else denied(errno.ENOSYS)
        assert answer == wanted, number


@MACHINES
def test_call_numbers_match_the_kernel_headers(machine: str) -> None:
    header = HEADERS[machine]
    if not header.exists():
        pytest.skip(f"{header} is not installed")
    pattern = r"#define __NR(?:3264)?_(\w+)\s+(\d+)"
    numbers = {name: int(n) for name, n in re.findall(pattern, header.read_text())}
    numbers.setdefault("newfstatat", 79)
    compared = 0
    for name, number in policy.system_calls(machine).items():
        if name in numbers:
            assert numbers[name] == number, name
            compared += 1
    assert compared > 150


def test_other_architectures_are_killed_and_x32_calls_get_enosys() -> None:
    program, arch = policy.build("x86_64"), policy.AUDIT_ARCH["x86_64"]
    assert decide(program, 0x40000003, 20) == KILL  # i386
    assert decide(program, arch, 0x40000000 | 39) == denied(errno.ENOSYS)


@MACHINES
def test_only_the_listed_options_are_allowed(machine: str) -> None:
    program, arch = policy.build(machine), policy.AUDIT_ARCH[machine]
    known = policy.system_calls(machine)
    others = [*range(128), *range(1000, 1040), 0x1001, 0x2001, 0x5401, 0x5412, 0x8901, 0x9408]
    for call, (index, error, listed) in policy.OPTIONS.items():
        no_ops = policy.NO_OPS.get(call, [])
        for value in [*others, *listed, 1 << 31] if call in known else ():
            expected = ALLOW if value in listed else denied(0 if value in no_ops else error)
            flags = (0, 0x80, 0x100, 0x180) if call == "futex" else (0,)
            for high in (0, 1 << 32):  # the kernel takes an int
                for flag in flags:
                    if not flag or value < 0x80:
                        arguments = [0] * index + [value | flag | high]
                        answer = decide(program, arch, known[call], *arguments)
                        assert answer == expected, (call, value, flag)
    for level in range(45):
        for name in range(80):
            wanted = denied(errno.ENOPROTOOPT)
            if name in policy.SOCKET_OPTIONS.get(level, ()):
                wanted = ALLOW
            elif level == 1 and name in (7, 8):
                wanted = denied(0)
            answer = decide(program, arch, known["setsockopt"], 3, level, name)
            assert answer == wanted, (level, name)


O_DIRECTORY, O_NOFOLLOW, O_DIRECT = (0x10000, 0x4000), (0x20000, 0x8000), (0x4000, 0x10000)
"""By machine."""
REFUSED_FLAGS = {  # each bit, one by one
    "clone": {0x1000, 0x2000, 0x8000, 0x20000, 0x800000, 0x80000000,
              *(1 << bit for bit in range(25, 31))},
    "mmap": {0x80, 0x200, 0x400, 0x40000, 0x80000, *(1 << bit for bit in range(21, 32))},
}  # fmt: skip


@MACHINES
def test_only_the_listed_flags_are_allowed(machine: str) -> None:
    program, arch = policy.build(machine), policy.AUDIT_ARCH[machine]
    known, arm = policy.system_calls(machine), machine == "aarch64"
    bits = {4, 8, 16, 32, 0x200, 0x2000, O_DIRECT[arm], 0x40000, *(1 << n for n in range(23, 32))}
    refused = REFUSED_FLAGS | {"openat": bits}
    for call, index in (("clone", 0), ("mmap", 3), ("openat", 2)):
        for bit in range(32):
            answer = decide(program, arch, known[call], *[0] * index, 1 << bit)
            assert (answer != ALLOW) == (1 << bit in refused[call]), (call, hex(1 << bit))
    for flag in (O_DIRECTORY[arm], O_NOFOLLOW[arm], 0x241, 0x202):
        assert decide(program, arch, known["openat"], 0, 0, flag) == ALLOW
    for flag in (0x200, 0x203, 0x240):  # O_TRUNC without a right to write
        assert decide(program, arch, known["openat"], 0, 0, flag) == denied(errno.EPERM)


NEEDED_BY = {
    "SO_REUSEADDR": "socket.create_server(('127.0.0.1', 0))",
    "SO_REUSEPORT": "socket.create_server(('127.0.0.1', 0), reuse_port=True)",
    "SO_BROADCAST": "asyncio.run(datagrams(allow_broadcast=True))",
    "SO_KEEPALIVE": "s.setsockopt(1, socket.SO_KEEPALIVE, 1)",
    "SO_LINGER": "s.setsockopt(1, socket.SO_LINGER, bytes(8))",
    "SO_RCVTIMEO": "s.setsockopt(1, socket.SO_RCVTIMEO, bytes(16))",
    "SO_SNDTIMEO": "s.setsockopt(1, socket.SO_SNDTIMEO, bytes(16))",
    "TCP_NODELAY": "asyncio.run(streams())",
    "TCP_KEEPIDLE": "s.setsockopt(6, socket.TCP_KEEPIDLE, 60)",
    "TCP_KEEPINTVL": "s.setsockopt(6, socket.TCP_KEEPINTVL, 60)",
    "TCP_KEEPCNT": "s.setsockopt(6, socket.TCP_KEEPCNT, 3)",
    "IPV6_V6ONLY": "socket.create_server(('::1', 0), family=socket.AF_INET6)",
    "PR_SET_PDEATHSIG": "assert libc.prctl(1, 9, 0, 0, 0) == 0",
    "PR_GET_DUMPABLE": "assert libc.prctl(3, 0, 0, 0, 0) == 1",
    "PR_SET_NAME": "assert libc.prctl(15, b'name', 0, 0, 0) == 0",
    "PR_GET_NAME": "assert libc.prctl(16, b'x' * 16, 0, 0, 0) == 0",
    "PR_CAPBSET_READ": "run('ls -la --color')",
    "ARCH_SET_FS": "run('true')",
    "ARCH_GET_FS": "a = ctypes.c_ulong(); assert libc.arch_prctl(0x1003, ctypes.byref(a)) == 0",
    "ARCH_GET_XCOMP_PERM": "libc.arch_prctl(0x1022, ctypes.byref(ctypes.c_ulong()))",
    "ARCH_REQ_XCOMP_PERM": "libc.arch_prctl(0x1023, ctypes.c_long(18))",  # oneDNN's; where AMX is
    "FIONREAD": "fcntl.ioctl(s, 0x541B, bytes(4))",
    "FIONBIO": "s.setblocking(False); s.settimeout(1)",
    "FIOCLEX": "os.set_inheritable(s.fileno(), True); os.set_inheritable(s.fileno(), False)",
    "FIONCLEX": "os.set_inheritable(s.fileno(), True)",
    "F_DUPFD": "fcntl.fcntl(0, fcntl.F_DUPFD, 9)",
    "F_DUPFD_CLOEXEC": "os.dup(0)",
    "F_GETFD": "fcntl.fcntl(0, fcntl.F_GETFD)",
    "F_SETFD": "run('exec 7<&0')",
    "F_GETFL": "os.get_blocking(0)",
    "F_SETFL": "a = os.pipe(); fcntl.fcntl(a[0], fcntl.F_SETFL, os.O_NONBLOCK)",
    "F_GETLK": "sqlite3.connect('db').execute('create table if not exists t(a)')",
    "F_OFD_GETLK": "fcntl.fcntl(open('f', 'w'), 36, struct.pack('hhqqixxxx', 1, 0, 0, 0, 0))",
    "F_GETPIPE_SZ": "fcntl.fcntl(os.pipe()[0], fcntl.F_GETPIPE_SZ)",
    "FUTEX_WAIT": "threading.Event().wait(0.01)",
    "FUTEX_WAKE": "t = threading.Thread(target=print); t.start(); t.join()",
    "FUTEX_WAIT_BITSET": "multiprocessing.Semaphore(0).acquire(timeout=0.01)",
    "FUTEX_WAKE_BITSET": "futex(10, 1)",
    "FUTEX_REQUEUE": "futex(3)",
    "FUTEX_CMP_REQUEUE": "futex(4)",
    "FUTEX_WAKE_OP": "futex(5)",
    "AF_UNIX": "asyncio.run(asyncio.sleep(0))",
    "CLOSE_RANGE_CLOEXEC": "assert libc.close_range(200, 201, 4) == 0",
    "no flags": "os.closerange(200, 201); os.preadv(os.open(os.__file__, 0), [bytearray(9)], 0); "
    "os.pwritev(os.open('f', 66), [b'x'], 0)",
    **{f"MADV_{name}": f"m.madvise(mmap.MADV_{name})" for name in (
        "NORMAL", "RANDOM", "SEQUENTIAL", "WILLNEED", "DONTNEED", "FREE", "DONTFORK", "DOFORK",
        "HUGEPAGE", "NOHUGEPAGE", "DONTDUMP", "DODUMP")},
    **{f"POSIX_FADV_{name}": f"os.posix_fadvise(0, 0, 0, os.POSIX_FADV_{name})" for name in (
        "NORMAL", "RANDOM", "SEQUENTIAL", "WILLNEED", "NOREUSE")},
}  # fmt: skip
"""Code that uses each option of the lists."""
ORDINARY = """
import asyncio, ctypes, fcntl, mmap, multiprocessing, os, socket, sqlite3, struct, subprocess
import threading
libc = ctypes.CDLL(None)
s, m = socket.socket(), mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
def run(command): subprocess.run(["bash", "-c", command], check=True, capture_output=True)
def futex(operation, bits=0):
    word = (ctypes.c_uint32 * 2)()
    assert libc.syscall(202, word, operation, 1, 1, ctypes.byref(word, 4), bits) >= 0
async def datagrams(**options):
    loop = asyncio.get_running_loop()
    local = ("127.0.0.1", 0)
    await loop.create_datagram_endpoint(asyncio.DatagramProtocol, local_addr=local, **options)
async def streams():
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    await asyncio.open_connection(*server.sockets[0].getsockname())
"""
PROGRAMS = """
cd /tmp && git init -q r && cd r && git config user.email a@b && git config user.name x
echo 1 > f && git add . && git commit -qm one && git checkout -qb b && echo 2 > f && git stash -q
git gc -q && git clone -q . ../r2 && cd ../r2 && git log --stat | cat && git status
printf 'int main(){return 0;}' > m.c && (! command -v gcc || (gcc m.c -o m && ./m))
tar czf t.tgz m.c && cp -a m.c n && sort m.c | uniq -c && dd if=/dev/zero of=z bs=1M count=1
find . -name '*.c' | xargs -P2 grep -l main && timeout 9 nohup nice flock lock true && sync
"""


@pytest.mark.nsjail
def test_each_allowed_option_is_used_by_some_code_and_works(pool: SandboxPool) -> None:
    tables = [listed for _, _, listed in policy.OPTIONS.values()]
    tables += policy.SOCKET_OPTIONS.values()
    assert {name for table in tables for name in table.values()} == NEEDED_BY.keys()
    with pool.acquire() as session:
        assert session.step(ORDINARY).status is StepStatus.OK
        for name, code in NEEDED_BY.items():
            result = session.step(code, 30)
            assert result.status is StepStatus.OK, (name, result)
        result = session.step(f"print(subprocess.run(['bash', '-ec', {PROGRAMS!r}]))", 60)
        assert "returncode=0" in result.stdout, result


def test_the_page_names_the_limits_of_the_calls() -> None:
    page = DOCS.read_text()
    limits = {name for _, bound, _ in policy.GROUPS for name in re.findall(r"`(\w+)`", bound)}
    assert {"open_files", "memory_mib", "processes", "cpu_s", "cpus"} == limits
    assert [name for name in limits if f"`{name}`" not in page] == []


# fmt: off
BY_ARGUMENT = [
    ("socket", ALLOW, [(1, 5, 0), (2, 1, 6), (10, 0x80802, 17)]),
    ("socket", errno.EPROTONOSUPPORT, [(2, 3, 1), (2, 5, 0), (2, 1, 262)]),
    ("socket", errno.EAFNOSUPPORT, [(16, 3, 0), (40, 1, 0)]),
    ("mknod", ALLOW, [(0, 0o010644)]),
    ("mknod", errno.EPERM, [(0, 0o020644)]),
    ("mknodat", ALLOW, [(0, 0, 0o140644)]),
    ("mknodat", errno.EPERM, [(0, 0, 0o060644)]),
    *((name, 0, [(3,)]) for name in ("sync", "fsync", "fdatasync", "sync_file_range")),
    *((name, errno.EOPNOTSUPP, [()]) for name in ("setxattr", "lsetxattr", "fsetxattr")),
    *((call, 0, [(1, 9), (1 << 32 | 1, 9)]) for call in policy.SIGNALS),
    *((call, ALLOW, [(2, 9), (0, 9), (-1, 9), (1 << 32, 9)]) for call in policy.SIGNALS),
    *((call, errno.ESRCH, [(1,), (1, 1), (1 << 32 | 1,)]) for call in policy.ABOUT_A_PROCESS),
    *((call, ALLOW, [(0,), (2, 1), (-1,)]) for call in policy.ABOUT_A_PROCESS),
    ("prlimit64", errno.ESRCH, [(1, 0), (1, 4, 8), (7 << 32 | 1, 7)]),
    ("prlimit64", ALLOW, [(0, 0), (2, 7, 8), (0, 4)]),
    ("prlimit64", 0, [(0, 4, 8), (0, 4, 1 << 32)]),
    ("setpriority", errno.ESRCH, [(0, 1), (1, 1), (0, 1 << 32 | 1)]),
    ("setpriority", errno.EPERM, [(2, 0), (2, 65534), (1 << 32 | 2, 5)]),
    ("setpriority", ALLOW, [(0, 0), (0, 2), (1, 0)]),
    ("timer_create", errno.EINVAL, [(0xFFFFFFF2,), (-16,), (-10,), (0xFFFFFFF6,)]),
    ("timer_create", ALLOW, [(0,), (1,), (2,), (0xFFFFFFEA,), (-6,)]),
    ("setrlimit", 0, [(4, 1)]),
    ("setrlimit", ALLOW, [(7, 1)]),
]
# fmt: on


@pytest.mark.parametrize(("call", "wanted", "cases"), BY_ARGUMENT)
def test_calls_are_filtered_by_arguments(
    call: str, wanted: int, cases: list[tuple[int, ...]]
) -> None:
    number, arch = policy.system_calls("x86_64")[call], policy.AUDIT_ARCH["x86_64"]
    for arguments in cases:
        answer = decide(policy.build("x86_64"), arch, number, *arguments)
        assert answer == (wanted if wanted == ALLOW else denied(wanted)), arguments


@MACHINES
def test_shared_anonymous_memory_is_denied_without_control_group(machine: str) -> None:
    arch, number = policy.AUDIT_ARCH[machine], policy.system_calls(machine)["mmap"]
    strict = policy.build(machine, shared_memory=False)
    for flags, wanted in (
        (0x21, denied(errno.EPERM)),  # MAP_SHARED | MAP_ANONYMOUS
        (0x23, denied(errno.EPERM)),  # MAP_SHARED_VALIDATE | MAP_ANONYMOUS
        (0x4021, denied(errno.EPERM)),
        (0x22, ALLOW),
        (0x1, ALLOW),
        (0x40022, denied(errno.ENOMEM)),
    ):
        assert decide(strict, arch, number, 0, 4096, 3, flags) == wanted, hex(flags)
        shared = flags & 0x21 == 0x21
        assert decide(policy.build(machine), arch, number, 0, 4096, 3, flags) == (
            ALLOW if shared else wanted
        )


def test_unknown_architecture_raises() -> None:
    with pytest.raises(SandboxUnavailable, match="riscv64"):
        policy.build("riscv64")


@pytest.mark.parametrize("namespaced", [True, False])
@MACHINES
def test_limits_can_be_read_and_core_dumps_not_enabled(machine: str, namespaced: bool) -> None:
    program, arch = policy.build(machine, namespaced=namespaced), policy.AUDIT_ARCH[machine]
    number = policy.system_calls(machine)["prlimit64"]
    core, files, somewhere = policy.RLIMIT_CORE, 7, 0x7F00_1234_5678
    assert decide(program, arch, number, 0, core, 0, somewhere) == ALLOW
    assert decide(program, arch, number, 0, core, somewhere, 0) == denied(0)
    assert decide(program, arch, number, 0, core, 1 << 32, 0) == denied(0)
    assert decide(program, arch, number, 0, files, somewhere, 0) == ALLOW
    other = decide(program, arch, number, 2, files, 0, somewhere)
    assert other == (ALLOW if namespaced else denied(errno.EPERM))


def test_without_namespaces_calls_that_reach_processes_are_denied() -> None:
    program, arch = policy.build("x86_64", namespaced=False), policy.AUDIT_ARCH["x86_64"]
    known = policy.system_calls("x86_64")
    for name in policy.OUTSIDE.split():
        assert decide(program, arch, known[name]) == denied(errno.ENOSYS), name
    for name in policy.LEAVE_THE_GROUP:
        assert decide(program, arch, known[name]) == denied(0), name
    same_user = policy.build("x86_64", namespaced=False, own_user=False)
    for name in policy.CHANGES.split():
        assert decide(program, arch, known[name]) == ALLOW, name
        assert decide(same_user, arch, known[name]) == denied(0), name

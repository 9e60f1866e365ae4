"""The system calls that untrusted code may make, as a seccomp program.

An allow-list: what is not named here answers ENOSYS, as on a kernel that does not have it, so that
libraries take their fallbacks and system calls of later kernels start out denied; so do those that
use up what the machine has per user (inotify: 128 instances, the host's own user's included, as a
namespace's use counts for its owner). Some are allowed by argument only, among them every call that
takes the number of a process: none takes that of the session's PID 1, whose limits, priority and
signals are not the session's to change (but capget(2), which only looks; the kernel itself lets
setpgid(2) and the waits have nothing but children). What names a process otherwise is not there:
signals by a descriptor, which may be /proc/1, and futexes that lend their owner priority. A foreign
architecture (int 0x80 included) kills the process.

The instruction set is classic BPF (linux/filter.h); the table gives the number on x86-64 and on the
generic ABI (aarch64), "-" where the architecture does not have the call.
"""

import errno
import platform
import struct
from itertools import accumulate, chain

from agentgrpo.sandbox.errors import SandboxUnavailable

ALLOWED = """
read:0:63 write:1:64 open:2:- close:3:57 stat:4:- fstat:5:80 lstat:6:- poll:7:- lseek:8:62
mmap:9:222 mprotect:10:226 munmap:11:215 brk:12:214 rt_sigaction:13:134 rt_sigprocmask:14:135
rt_sigreturn:15:139 ioctl:16:29 pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66 access:21:-
pipe:22:- select:23:- sched_yield:24:124 mremap:25:216 msync:26:227 mincore:27:232 madvise:28:233
shmget:29:194 shmat:30:196 shmctl:31:195 dup:32:23 dup2:33:- pause:34:- nanosleep:35:101
getitimer:36:102 alarm:37:- setitimer:38:103 getpid:39:172 sendfile:40:71 socket:41:198
connect:42:203 accept:43:202 sendto:44:206 recvfrom:45:207 sendmsg:46:211 recvmsg:47:212
shutdown:48:210 bind:49:200 listen:50:201 getsockname:51:204 getpeername:52:205 socketpair:53:199
setsockopt:54:208 getsockopt:55:209 clone:56:220 fork:57:- vfork:58:- execve:59:221 exit:60:93
wait4:61:260 kill:62:129 uname:63:160 shmdt:67:197 fcntl:72:25 flock:73:32 fsync:74:82
fdatasync:75:83 truncate:76:45 ftruncate:77:46 getdents:78:- getcwd:79:17 chdir:80:49 fchdir:81:50
rename:82:- mkdir:83:- rmdir:84:- creat:85:- link:86:- unlink:87:- symlink:88:- readlink:89:-
chmod:90:- fchmod:91:52 chown:92:- fchown:93:55 lchown:94:- umask:95:166 gettimeofday:96:169
getrlimit:97:163 getrusage:98:165 sysinfo:99:179 times:100:153 getuid:102:174 getgid:104:176
setuid:105:146 setgid:106:144 geteuid:107:175 getegid:108:177 setpgid:109:154 getppid:110:173
getpgrp:111:- setsid:112:157 setreuid:113:145 setregid:114:143 getgroups:115:158 setgroups:116:159
setresuid:117:147 getresuid:118:148 setresgid:119:149 getresgid:120:150 getpgid:121:155
getsid:124:156 capget:125:90 rt_sigpending:127:136 rt_sigtimedwait:128:137 rt_sigqueueinfo:129:138
rt_sigsuspend:130:133 sigaltstack:131:132 utime:132:- mknod:133:- personality:135:92 statfs:137:43
fstatfs:138:44 getpriority:140:141 setpriority:141:140 sched_setparam:142:118
sched_getparam:143:121 sched_setscheduler:144:119 sched_getscheduler:145:120
sched_get_priority_max:146:125 sched_get_priority_min:147:126 mlock:149:228 munlock:150:229
mlockall:151:230 munlockall:152:231 prctl:157:167 arch_prctl:158:- setrlimit:160:164 sync:162:81
gettid:186:178 readahead:187:213 setxattr:188:5 lsetxattr:189:6 fsetxattr:190:7 getxattr:191:8
lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11 llistxattr:195:12 flistxattr:196:13
removexattr:197:14 tkill:200:130 time:201:- futex:202:98 sched_setaffinity:203:122
sched_getaffinity:204:123 epoll_create:213:- getdents64:217:61 set_tid_address:218:96
restart_syscall:219:128 fadvise64:221:223 timer_create:222:107 timer_settime:223:110
timer_gettime:224:108 timer_getoverrun:225:109 timer_delete:226:111 clock_gettime:228:113
clock_getres:229:114 clock_nanosleep:230:115 exit_group:231:94 epoll_wait:232:- epoll_ctl:233:21
tgkill:234:131 utimes:235:- waitid:247:95 ioprio_set:251:30 ioprio_get:252:31 openat:257:56
mkdirat:258:34 mknodat:259:33
fchownat:260:54 futimesat:261:- newfstatat:262:79 unlinkat:263:35 renameat:264:38 linkat:265:37
symlinkat:266:36 readlinkat:267:78 fchmodat:268:53 faccessat:269:48 pselect6:270:72 ppoll:271:73
set_robust_list:273:99 get_robust_list:274:100 sync_file_range:277:84 utimensat:280:88
epoll_pwait:281:22 signalfd:282:- timerfd_create:283:85 eventfd:284:- fallocate:285:47
timerfd_settime:286:86 timerfd_gettime:287:87 accept4:288:242 signalfd4:289:74 eventfd2:290:19
epoll_create1:291:20 dup3:292:24 pipe2:293:59 preadv:295:69 pwritev:296:70
recvmmsg:299:243 prlimit64:302:261 sendmmsg:307:269 sched_setattr:314:274 sched_getattr:315:275
renameat2:316:276 getrandom:318:278 memfd_create:319:279 membarrier:324:283 mlock2:325:284
copy_file_range:326:285 preadv2:327:286 pwritev2:328:287 pkey_mprotect:329:288 pkey_alloc:330:289
pkey_free:331:290 statx:332:291 rseq:334:293 pidfd_open:434:434
close_range:436:436 openat2:437:437 faccessat2:439:439 epoll_pwait2:441:441 futex_waitv:449:449
fchmodat2:452:452 futex_wake:454:454 futex_wait:455:455 futex_requeue:456:456
mseal:462:462
"""

UNMAPPED_MEMORY = {"memfd_create", "shmget"}
MAP_SHARED, MAP_ANONYMOUS = 0x1, 0x20
OTHER_PROCESSES = """
kill tkill tgkill rt_sigqueueinfo pidfd_open setsid setpgid setpriority
sched_setparam sched_setscheduler sched_setattr sched_setaffinity ioprio_set get_robust_list socket
shmget shmat shmctl
"""
"""Calls that reach beyond the caller's process where no namespace bounds them."""
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000

# include/uapi/linux/{bpf_common,seccomp}.h
LOAD, AND, JUMP, RETURN = 0x20, 0x54, 0x05, 0x06
EQUAL, GREATER, AT_LEAST, ANY_BIT = 0x15, 0x25, 0x35, 0x45
ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, ARGUMENT = 0, 4, 16
TO_BODY = 1 << 20  # an operand of JUMP, until it is known where things lie

NEW_NAMESPACES = 0x7E020000  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}
FILE_TYPE, CHARACTER_DEVICE, BLOCK_DEVICE = 0o170000, 0o020000, 0o060000
RLIMIT_CORE = 4
SOL_SOCKET, SOL_TCP, TCP_ULP = 1, 6, 31
SOCKET_FILTERS = [26, 50, 51, 52]  # SO_ATTACH_{FILTER,BPF,REUSEPORT_CBPF,REUSEPORT_EBPF}
MAP_HUGETLB, MFD_HUGETLB, SHM_HUGETLB = 0x40000, 0x4, 0x800  # a pool that no limit divides
PR_SET_SECCOMP = 22  # compiled programs of all processes of the machine share one limit
MADV_MERGEABLE, PR_SET_MEMORY_MERGE = 12, 67  # whether a page has a twin elsewhere can be timed
PR_SCHED_CORE = 62  # keeps others from the core's second thread
MEANT_FOR_OTHERS = [PR_SET_SECCOMP, PR_SCHED_CORE, PR_SET_MEMORY_MERGE]
PR_SET_DUMPABLE = 4  # a process that is not hides from the watchdog what it has open
CLONE_FILES, CLONE_THREAD, CLOSE_RANGE_UNSHARE = 0x400, 0x10000, 0x2
FLUSHES = ("sync", "fsync", "fdatasync", "sync_file_range")
"""They say that they did: what a session can write is in memory, the machine's disks are not its
own, and even a file that is only read can be flushed."""
ATTRIBUTES = ("setxattr", "lsetxattr", "fsetxattr")
"""An access control list takes 64 KiB of memory per file that the kernel does not count."""
TIOCSTI, TIOCLINUX = 0x5412, 0x541C  # type into the terminal of somebody else
TIOCSETD = 0x5423  # loads kernel modules
TERMINALS, SOCKETS = 0x5400, 0x8900  # requests of ioctl(2); FIONREAD and its kin are of the first
ASK_PERSONALITY, NO_RANDOM_ADDRESSES = 0xFFFFFFFF, 0x40000
F_SETLEASE, F_NOTIFY = 1024, 1026
INIT = 1
"""The session's PID 1, in its own numbering."""
SIGNALS = ("kill", "tkill", "tgkill", "rt_sigqueueinfo")
"""To PID 1 they seem to be sent, as the kernel has it for a PID 1 that does not handle them."""
ABOUT_A_PROCESS = (
    "pidfd_open", "get_robust_list", "sched_setparam", "sched_getparam", "sched_setscheduler",
    "sched_getscheduler", "sched_setaffinity", "sched_getaffinity", "sched_setattr",
    "sched_getattr", "getpgid", "getsid",
)  # fmt: skip
"""Their first argument names a process, or 0 for the caller."""
ABOUT_SOME_PROCESSES = {"setpriority": 2, "getpriority": 2, "ioprio_set": 3, "ioprio_get": 3}
"""Their first argument says what the second names; that value of it means all of a user's."""
CLOCKS_OF_INIT = [(~INIT << 3 & 0xFFFFFFFF) | kind for kind in (0, 1, 2, 4, 5, 6)]
CLOCKS = ("clock_gettime", "clock_getres", "clock_nanosleep", "timer_create")
PI_FUTEXES = [6, 7, 8, 11, 12, 13]  # they lend priority to whatever thread a word in memory names
FUTEX_FLAGS = 0x180  # FUTEX_PRIVATE_FLAG, FUTEX_CLOCK_REALTIME
RECORD_LOCKS = [6, 7, 37, 38]  # F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW
F_SETOWN, F_SETSIG, F_SETOWN_EX = 8, 10, 15  # signals to whomever one names
FIOSETOWN, SIOCSPGRP = 0x8901, 0x8902  # the same, of sockets
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def _deny(error: int) -> Instruction:
    return (RETURN, 0, 0, ERRNO | error)


_ALLOW: Instruction = (RETURN, 0, 0, ALLOW)


def _argument(index: int) -> Instruction:
    return (LOAD, 0, 0, ARGUMENT + 8 * index)


def _upper_half(index: int) -> Instruction:
    return (LOAD, 0, 0, ARGUMENT + 8 * index + 4)


def _one_of(values: list[int], then: list[Instruction]) -> list[Instruction]:
    """Run ``then`` (which returns) if the accumulator is one of values; else fall through."""
    last = len(values) - 1
    tests = [
        (EQUAL, last - i, 0 if i < last else len(then), value) for i, value in enumerate(values)
    ]
    return [*tests, *then]


def _unless(index: int, values: list[int], error: int) -> list[Instruction]:
    """Allow it unless an argument is one of values (its lower half: the kernel takes an int)."""
    return [_argument(index), *_one_of(values, [_deny(error)]), _ALLOW]


def _only(index: int, values: list[int], error: int) -> list[Instruction]:
    """Allow it only if an argument is one of values."""
    return [_argument(index), *_one_of(values, [_ALLOW]), _deny(error)]


def _without(index: int, flags: int, error: int) -> list[Instruction]:
    """Allow it unless an argument has one of flags."""
    return [_argument(index), (ANY_BIT, 0, 1, flags), _deny(error), _ALLOW]


def _mmap(*, memory_by_address_space: bool) -> list[Instruction]:
    """No huge pages; where memory counts as far as it is mapped, none that stays when it is not."""
    shared = MAP_SHARED | MAP_ANONYMOUS
    if not memory_by_address_space:
        return _without(3, MAP_HUGETLB, errno.ENOMEM)
    flags, *tests = _without(3, MAP_HUGETLB, errno.ENOMEM)
    return [flags, (AND, 0, 0, shared), *_one_of([shared], [_deny(errno.EPERM)]), flags, *tests]


def _no_device(index: int) -> list[Instruction]:
    """Allow it unless the mode that an argument is means a device."""
    device, *tests = _unless(index, [CHARACTER_DEVICE, BLOCK_DEVICE], errno.EPERM)
    return [device, (AND, 0, 0, FILE_TYPE), *tests]


def _socket() -> list[Instruction]:
    """Unix sockets; of the internet's only streams and datagrams: others load kernel modules."""
    internet = [
        _argument(1),
        (AND, 0, 0, 0xF),  # without SOCK_NONBLOCK and SOCK_CLOEXEC
        (EQUAL, 2, 0, 1),  # SOCK_STREAM
        (EQUAL, 1, 0, 2),  # SOCK_DGRAM
        _deny(errno.EPROTONOSUPPORT),
        *_only(2, [0, 6, 17], errno.EPROTONOSUPPORT),  # any, TCP, UDP
    ]
    families = _one_of([AF_INET, AF_INET6], internet)
    return [_argument(0), *_one_of([AF_UNIX], [_ALLOW]), *families, _deny(errno.EAFNOSUPPORT)]


def _socket_options() -> list[Instruction]:
    """All but those that load kernel modules or attach programs."""
    filters = _unless(2, SOCKET_FILTERS, errno.ENOPROTOOPT)
    protocols = _unless(2, [TCP_ULP], errno.ENOPROTOOPT)
    levels = [*_one_of([SOL_SOCKET], filters), *_one_of([SOL_TCP], protocols)]
    return [_argument(1), *levels, _ALLOW]


def _not_init(error: int) -> list[Instruction]:
    """Allow it unless the first argument is PID 1 (its lower half: the kernel takes an int)."""
    return _unless(0, [INIT], error)


def _some_processes(of_a_user: int) -> list[Instruction]:
    """Allow it unless it is about PID 1, or about all processes of a user."""
    return [
        _argument(0),
        *_one_of([of_a_user], [_deny(errno.EPERM)]),
        *_unless(1, [INIT], errno.ESRCH),
    ]


def _futex() -> list[Instruction]:
    """No priority inheritance: C libraries then say that they have none."""
    operation, *tests = _unless(1, PI_FUTEXES, errno.ENOSYS)
    return [operation, (AND, 0, 0, ~FUTEX_FLAGS & 0xFFFFFFFF), *tests]


def _files() -> list[Instruction]:
    """A lease or a watch on a shared read-only file would hold up its owner outside. The memory of
    record locks the kernel does not count: whoever asks for one seems to get it (flock() is real).
    """
    locks = _one_of(RECORD_LOCKS, [_deny(0)])
    refused = [F_SETLEASE, F_NOTIFY, F_SETOWN, F_SETSIG, F_SETOWN_EX]
    command, *tests = _unless(1, refused, errno.EPERM)
    return [command, *locks, *tests]


def _ioctl() -> list[Instruction]:
    """Requests of terminals, of descriptors and those that look at sockets: all others go to a
    driver, that of the machine's file systems too, or load kernel modules (SIOCGIFBR and later).
    """
    refused = [TIOCSTI, TIOCLINUX, TIOCSETD, FIOSETOWN, SIOCSPGRP]
    request, *tests = _unless(1, refused, errno.EPERM)
    return [
        request,
        *tests[:-1],
        (AND, 0, 0, 0xFF00),
        *_one_of([TERMINALS], [_ALLOW]),
        request,
        (AND, 0, 0, 0xFFC0),
        *_one_of([SOCKETS], [_ALLOW]),
        _deny(errno.ENOTTY),
    ]


def _clone() -> list[Instruction]:
    """No namespaces, and no thread with descriptors of its own: those of a process are counted at
    any of its threads.
    """
    flags, *tests = _without(0, NEW_NAMESPACES, errno.EPERM)
    both = CLONE_FILES | CLONE_THREAD
    alone = _one_of([CLONE_THREAD], [_deny(errno.EINVAL)])
    return [flags, (AND, 0, 0, both), *alone, flags, *tests]


def _process_options() -> list[Instruction]:
    """Being dumpable seems to change and stays; the rest is about others."""
    option, *tests = _unless(0, MEANT_FOR_OTHERS, errno.EINVAL)
    return [option, *_one_of([PR_SET_DUMPABLE], [_deny(0)]), *tests]


def _limits(*, alone: bool) -> list[Instruction]:
    """Changing RLIMIT_CORE seems to work and does nothing: at 1, where it stands, the kernel does
    not even start the machine's core dump handler, which at 0 it does (core(5)), as its root.
    """
    others = [(EQUAL, 0, 1, INIT), _deny(errno.ESRCH)]
    return [
        _argument(0),
        *(others if alone else [(EQUAL, 1, 0, 0), _deny(errno.EPERM)]),
        _argument(1),
        (EQUAL, 1, 0, RLIMIT_CORE),
        _ALLOW,
        _argument(2),
        (EQUAL, 0, 2, 0),
        _upper_half(2),
        (EQUAL, 1, 0, 0),  # a null pointer: it only asks
        _deny(0),
        _ALLOW,
    ]


def _filters(*, alone: bool, memory_by_address_space: bool = False) -> dict[str, list[Instruction]]:
    """For the calls that depend on their arguments: a program that always returns."""
    return {
        **{name: _not_init(0) for name in SIGNALS},
        **{name: _not_init(errno.ESRCH) for name in ABOUT_A_PROCESS},
        **{name: _some_processes(kind) for name, kind in ABOUT_SOME_PROCESSES.items()},
        **{name: _unless(0, CLOCKS_OF_INIT, errno.EINVAL) for name in CLOCKS},
        "clone": _clone(),
        "close_range": _without(2, CLOSE_RANGE_UNSHARE, errno.EINVAL),
        "socket": _socket(),
        "socketpair": _only(0, [AF_UNIX], errno.EAFNOSUPPORT),
        "setsockopt": _socket_options(),
        "fcntl": _files(),
        "futex": _futex(),
        "ioctl": _ioctl(),
        "personality": _only(0, [0, ASK_PERSONALITY, NO_RANDOM_ADDRESSES], errno.EPERM),
        "mmap": _mmap(memory_by_address_space=memory_by_address_space),
        "memfd_create": _without(1, MFD_HUGETLB, errno.ENOMEM),
        "shmget": _without(2, SHM_HUGETLB, errno.ENOMEM),
        "madvise": _unless(2, [MADV_MERGEABLE], errno.EINVAL),
        "prctl": _process_options(),
        **{name: [_deny(0)] for name in FLUSHES},
        **{name: [_deny(errno.EOPNOTSUPP)] for name in ATTRIBUTES},
        "mknod": _no_device(1),
        "mknodat": _no_device(2),
        "setrlimit": _unless(0, [RLIMIT_CORE], 0),
        "prlimit64": _limits(alone=alone),
    }


def system_calls(machine: str) -> dict[str, int]:
    """Name to number of every call the policy knows, argument-filtered ones included."""
    column = {"x86_64": 1, "aarch64": 2}[machine]
    rows = [entry.split(":") for entry in ALLOWED.split()]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def _ranges(numbers: list[int]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if merged and number == merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], number)
        else:
            merged.append((number, number))
    return merged


def _tree(leaves: list[tuple[int, list[Instruction]]]) -> list[Instruction]:
    """Binary search: the kernel walks the program once for every system call there is, whenever a
    session installs it (130 us; a list took 183), and for each call that its arguments decide.
    """
    if len(leaves) == 1:
        return [*leaves[0][1], _deny(errno.ENOSYS)]
    middle = len(leaves) // 2
    below, above = _tree(leaves[:middle]), _tree(leaves[middle:])
    start = leaves[middle][0]
    if len(below) > 255:  # further than a conditional jump reaches
        return [(AT_LEAST, 0, 1, start), (JUMP, 0, 0, len(below)), *below, *above]
    return [(AT_LEAST, len(below), 0, start), *below, *above]


def build(
    machine: str | None = None, *, memory_by_address_space: bool = False, alone: bool = True
) -> bytes:
    """The seccomp program for this machine: 8 bytes per instruction.

    Args:
        machine: as ``platform.machine()``; None is this one.
        memory_by_address_space: there is no control group, so that memory is bounded only where it
            is mapped: then what holds memory without mapping it is refused.
        alone: namespaces hide every process outside; without them the calls that reach other
            processes are left out.

    Raises:
        SandboxUnavailable: there is no table for this architecture.
    """
    machine = machine or platform.machine()
    if machine not in AUDIT_ARCH:
        raise SandboxUnavailable(
            f"no system call table for {machine!r}; the sandbox knows {', '.join(AUDIT_ARCH)}"
        )
    numbers = system_calls(machine)
    if memory_by_address_space:
        numbers = {name: n for name, n in numbers.items() if name not in UNMAPPED_MEMORY}
    if not alone:
        numbers = {name: n for name, n in numbers.items() if name not in OTHER_PROCESSES.split()}
    program: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, NUMBER),
    ]
    if machine == "x86_64":
        program += [(AT_LEAST, 0, 1, X32_BIT), _deny(errno.ENOSYS)]
    filters = _filters(alone=alone, memory_by_address_space=memory_by_address_space)
    by_body: dict[tuple[Instruction, ...], list[int]] = {}
    for name, number in numbers.items():
        by_body.setdefault(tuple(filters.get(name, [_ALLOW])), []).append(number)
    leaves = []
    for at, (body, alike) in enumerate(by_body.items()):
        for low, high in _ranges(alike):
            then = _ALLOW if body == (_ALLOW,) else (JUMP, 0, 0, TO_BODY + at)
            tests = [(AT_LEAST, 0, 2, low), (GREATER, 1, 0, high)]
            leaves.append((low, [*([(EQUAL, 0, 1, low)] if low == high else tests), then]))
    program += _tree(sorted(leaves, key=lambda leaf: leaf[0]))
    return _pack(program, list(by_body))


def _pack(program: list[Instruction], bodies: list[tuple[Instruction, ...]]) -> bytes:
    """The program, then each body once: jumps to TO_BODY + n become jumps to where it lies."""
    starts = list(accumulate(map(len, bodies), initial=len(program)))
    for at, (code, _, _, operand) in enumerate(program):
        if code == JUMP and operand >= TO_BODY:
            program[at] = (JUMP, 0, 0, starts[operand - TO_BODY] - at - 1)
    return b"".join(struct.pack("<HBBI", *one) for one in (*program, *chain(*bodies)))

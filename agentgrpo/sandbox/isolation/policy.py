"""The system calls that untrusted code can make, as a seccomp program.

An allow-list, recorded from the calls of Python, numpy, bash, git, pip and gcc. All other calls
return ENOSYS, as on a kernel that does not have them, so that libraries use their fallbacks and the
calls of later kernels are denied. Some calls are allowed only with listed arguments: options,
requests, flags and advice, recorded in the same way. No call that takes a process id accepts that
of the session's PID 1, so a session cannot change its limits, priority or signals (except
capget(2), which only reads; the kernel itself restricts setpgid(2) and the waits to children). A
call of another architecture (int 0x80 included) kills the process.

The instruction set is classic BPF (linux/filter.h). The table gives the numbers on x86-64 and on
the generic ABI (aarch64), "-" where the architecture does not have the call.
"""

import errno
import platform
import struct
from collections.abc import Iterable
from itertools import accumulate, chain

from agentgrpo.sandbox.isolation.errors import SandboxUnavailable

GROUPS = (
    (
        "Files and directories",
        "the session's own tmpfs: bytes and inodes, counted as its memory",
        """
read:0:63 write:1:64 pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66 preadv:295:69
pwritev:296:70 preadv2:327:286 pwritev2:328:287 lseek:8:62 open:2:- openat:257:56 creat:85:-
close:3:57 access:21:- faccessat:269:48 faccessat2:439:439 stat:4:- fstat:5:80 lstat:6:-
newfstatat:262:79 statx:332:291 statfs:137:43 fstatfs:138:44 readlink:89:- readlinkat:267:78
getdents:78:- getdents64:217:61 getcwd:79:17 chdir:80:49 fchdir:81:50 rename:82:-
renameat:264:38 renameat2:316:276 mkdir:83:- mkdirat:258:34 rmdir:84:- link:86:- linkat:265:37
unlink:87:- unlinkat:263:35 symlink:88:- symlinkat:266:36 chmod:90:- fchmod:91:52
fchmodat:268:53 fchmodat2:452:452 chown:92:- fchown:93:55 lchown:94:- fchownat:260:54
umask:95:166 truncate:76:45 ftruncate:77:46 fallocate:285:47 utime:132:- utimes:235:-
futimesat:261:- utimensat:280:88 mknod:133:- mknodat:259:33 fcntl:72:25 flock:73:32 ioctl:16:29
sendfile:40:71 copy_file_range:326:285 fadvise64:221:223 readahead:187:213 getxattr:191:8
lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11 llistxattr:195:12 flistxattr:196:13
removexattr:197:14 setxattr:188:5 lsetxattr:189:6 fsetxattr:190:7 sync:162:81 fsync:74:82
fdatasync:75:83 sync_file_range:277:84
""",
    ),
    (
        "Descriptors that hold data",
        "`open_files` per process; a pipe: 64 KiB; a socket: `memory_mib`, or 416 KiB",
        """
dup:32:23 dup2:33:- dup3:292:24 close_range:436:436 pipe:22:- pipe2:293:59 eventfd:284:-
eventfd2:290:19 signalfd:282:- signalfd4:289:74 timerfd_create:283:85 timerfd_settime:286:86
timerfd_gettime:287:87 epoll_create:213:- epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232:-
epoll_pwait:281:22 epoll_pwait2:441:441 poll:7:- ppoll:271:73 select:23:- pselect6:270:72
socket:41:198 socketpair:53:199 connect:42:203 accept:43:202 accept4:288:242 bind:49:200
listen:50:201 shutdown:48:210 sendto:44:206 recvfrom:45:207 sendmsg:46:211 recvmsg:47:212
sendmmsg:307:269 recvmmsg:299:243 getsockname:51:204 getpeername:52:205 setsockopt:54:208
getsockopt:55:209 pidfd_open:434:434
""",
    ),
    (
        "Memory",
        "`memory_mib`: by control group, or address space and watchdog; 64 KiB of it locked",
        """
mmap:9:222 mprotect:10:226 munmap:11:215 brk:12:214 mremap:25:216 msync:26:227 madvise:28:233
mlock:149:228 munlock:150:229 mlockall:151:230 munlockall:152:231
""",
    ),
    (
        "Processes and threads",
        "`processes`, `cpu_s`, `cpus`",
        """
clone:56:220 fork:57:- vfork:58:- execve:59:221 exit:60:93 exit_group:231:94 wait4:61:260
waitid:247:95 set_tid_address:218:96 futex:202:98 set_robust_list:273:99 rseq:334:293
arch_prctl:158:- prctl:157:167 setpgid:109:154 getpgid:121:155 getpgrp:111:- setsid:112:157
getsid:124:156 sched_yield:24:124 sched_getaffinity:204:123 sched_setaffinity:203:122
sched_get_priority_max:146:125 sched_get_priority_min:147:126 getpriority:140:141
setpriority:141:140 getrlimit:97:163 setrlimit:160:164 prlimit64:302:261 getrusage:98:165
times:100:153
""",
    ),
    (
        "Signals and timers",
        "64 that wait, timers included",
        """
kill:62:129 tkill:200:130 tgkill:234:131 rt_sigaction:13:134 rt_sigprocmask:14:135
rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigtimedwait:128:137 rt_sigsuspend:130:133
sigaltstack:131:132 pause:34:- restart_syscall:219:128 alarm:37:- getitimer:36:102
setitimer:38:103 timer_create:222:107 timer_settime:223:110 timer_gettime:224:108
timer_getoverrun:225:109 timer_delete:226:111 nanosleep:35:101 clock_nanosleep:230:115
""",
    ),
    (
        "Queries, and privileged calls that always fail",
        "nothing is allocated",
        """
getpid:39:172 getppid:110:173 gettid:186:178 getuid:102:174 geteuid:107:175 getgid:104:176
getegid:108:177 getgroups:115:158 getresuid:118:148 getresgid:120:150 setuid:105:146
setgid:106:144 setreuid:113:145 setregid:114:143 setresuid:117:147 setresgid:119:149
setgroups:116:159 capget:125:90 uname:63:160 sysinfo:99:179 gettimeofday:96:169 time:201:-
clock_gettime:228:113 clock_getres:229:114 getrandom:318:278
""",
    ),
)
"""Purpose, the limit of what is allocated, and the calls as name:x86_64:aarch64."""

IMAGE_GROUP = (
    "Images",
    "`inotify`: the kernel's limit per user; kernel memory by control group",
    """
inotify_init:253:- inotify_init1:294:26 inotify_add_watch:254:27 inotify_rm_watch:255:28
chroot:161:51
""",
)
"""More calls in sessions of an image, for services and package managers."""
ONE_USER = """chown lchown fchown fchownat setgroups setuid setgid setreuid setregid setresuid
setresgid"""
"""In sessions of an image these return 0 and do nothing: root is the only mapped user."""
OUTSIDE = "kill tkill tgkill pidfd_open setpriority sched_setaffinity socket connect bind truncate"
"""Denied without namespaces: they would reach processes and files outside of the session."""
LEAVE_THE_GROUP = ("setsid", "setpgid")
"""Without namespaces these return 0 and do nothing: a session is killed as one process group."""
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000

# include/uapi/linux/{bpf_common,seccomp}.h
LOAD, AND, JUMP, RETURN = 0x20, 0x54, 0x05, 0x06
EQUAL, GREATER, AT_LEAST, ANY_BIT = 0x15, 0x25, 0x35, 0x45
ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, ARGUMENT = 0, 4, 16
TO_BODY = 1 << 20  # a placeholder operand of JUMP, until _pack() knows the positions

SOCKET_OPTIONS = {
    1: {2: "SO_REUSEADDR", 6: "SO_BROADCAST", 9: "SO_KEEPALIVE", 13: "SO_LINGER",
        15: "SO_REUSEPORT", 20: "SO_RCVTIMEO", 21: "SO_SNDTIMEO"},
    6: {1: "TCP_NODELAY", 4: "TCP_KEEPIDLE", 5: "TCP_KEEPINTVL", 6: "TCP_KEEPCNT"},
    41: {26: "IPV6_V6ONLY"},
}  # fmt: skip
"""By level. Others load kernel modules, attach programs, or take memory that no limit counts."""
OPTIONS = {
    "prctl": (0, errno.EINVAL, {
        1: "PR_SET_PDEATHSIG", 3: "PR_GET_DUMPABLE", 15: "PR_SET_NAME", 16: "PR_GET_NAME",
        23: "PR_CAPBSET_READ"}),
    "arch_prctl": (0, errno.EINVAL, {
        0x1002: "ARCH_SET_FS", 0x1003: "ARCH_GET_FS", 0x1022: "ARCH_GET_XCOMP_PERM",
        0x1023: "ARCH_REQ_XCOMP_PERM"}),
    "ioctl": (1, errno.ENOTTY, {
        0x541B: "FIONREAD", 0x5421: "FIONBIO", 0x5450: "FIONCLEX", 0x5451: "FIOCLEX"}),
    "fcntl": (1, errno.EINVAL, {
        0: "F_DUPFD", 1: "F_GETFD", 2: "F_SETFD", 3: "F_GETFL", 4: "F_SETFL", 5: "F_GETLK",
        36: "F_OFD_GETLK", 1030: "F_DUPFD_CLOEXEC", 1032: "F_GETPIPE_SZ"}),
    "madvise": (2, errno.EINVAL, {
        0: "MADV_NORMAL", 1: "MADV_RANDOM", 2: "MADV_SEQUENTIAL", 3: "MADV_WILLNEED",
        4: "MADV_DONTNEED", 8: "MADV_FREE", 10: "MADV_DONTFORK", 11: "MADV_DOFORK",
        14: "MADV_HUGEPAGE", 15: "MADV_NOHUGEPAGE", 16: "MADV_DONTDUMP", 17: "MADV_DODUMP"}),
    "futex": (1, errno.ENOSYS, {
        0: "FUTEX_WAIT", 1: "FUTEX_WAKE", 3: "FUTEX_REQUEUE", 4: "FUTEX_CMP_REQUEUE",
        5: "FUTEX_WAKE_OP", 9: "FUTEX_WAIT_BITSET", 10: "FUTEX_WAKE_BITSET"}),
    "fadvise64": (3, 0, {
        0: "POSIX_FADV_NORMAL", 1: "POSIX_FADV_RANDOM", 2: "POSIX_FADV_SEQUENTIAL",
        3: "POSIX_FADV_WILLNEED", 5: "POSIX_FADV_NOREUSE"}),
    "socketpair": (0, errno.EAFNOSUPPORT, {1: "AF_UNIX"}),
    "close_range": (2, errno.EINVAL, {0: "no flags", 4: "CLOSE_RANGE_CLOEXEC"}),
    "preadv2": (5, errno.EOPNOTSUPP, {0: "no flags"}),
    "pwritev2": (5, errno.EOPNOTSUPP, {0: "no flags"}),
}  # fmt: skip
"""The index of the deciding argument, the errno for other values, and the allowed values.

No terminal requests: sessions have no terminal. No flags of preadv2(): RWF_NOWAIT would show which
pages of shared files are in memory."""
NO_OPS = {"prctl": [4], "fcntl": [6, 7, 37, 38]}
"""Values that return 0 and do nothing. PR_SET_DUMPABLE would hide a process from the watchdog;
record locks would take memory that the kernel does not count (flock() works)."""
IMAGE_OPTIONS = {
    "ioctl": {
        0x5401: "TCGETS", 0x5402: "TCSETS", 0x5403: "TCSETSW", 0x5404: "TCSETSF", 0x5409: "TCSBRK",
        0x540A: "TCXONC", 0x540B: "TCFLSH", 0x540E: "TIOCSCTTY", 0x540F: "TIOCGPGRP",
        0x5410: "TIOCSPGRP", 0x5413: "TIOCGWINSZ", 0x5414: "TIOCSWINSZ", 0x5422: "TIOCNOTTY",
        0x5429: "TIOCGSID", 0x5441: "TIOCGPTPEER", 0x80045430: "TIOCGPTN",
        0x40045431: "TIOCSPTLCK", 0x802C542A: "TCGETS2", 0x402C542B: "TCSETS2",
        0x402C542C: "TCSETSW2", 0x402C542D: "TCSETSF2"},
}  # fmt: skip
"""More values of OPTIONS in sessions of an image, which have private terminals. Not TIOCSTI, which
types into a terminal, and not TIOCSETD, which loads kernel modules."""
IMAGE_NO_OPS = {"ioctl": [0x5452], "fcntl": [8]}
"""FIOASYNC and F_SETOWN, which nginx calls: signals instead of poll()."""
IMAGE_SOCKET_OPTIONS = {
    0: {1: "IP_TOS", 11: "IP_RECVERR"},
    6: {3: "TCP_CORK", 9: "TCP_DEFER_ACCEPT", 12: "TCP_QUICKACK", 18: "TCP_USER_TIMEOUT"},
}
NO_OP_SOCKET_OPTIONS = [7, 8]  # SO_SNDBUF, SO_RCVBUF: the watchdog counts each socket as full
FLAGS = {
    "clone": (0, 0x17D4FFF, errno.EPERM),  # threads and forks: no namespaces, no pidfd
    "mmap": (3, 0x13F97F, errno.ENOMEM),  # no huge pages: the machine's pool has no limit per user
}
"""The index of the argument with flags, the allowed flags, and the errno for others."""
OPEN_FLAGS = {"x86_64": 0x7B9FC3, "aarch64": 0x7ADFC3}
"""No O_DIRECT, O_ASYNC, O_NOATIME."""
TRUNCATES, TRUNCATES_ONLY = 0x203, [0x200, 0x203]
"""O_TRUNC without write access, which Landlock before version 3 does not check."""

FILE_TYPE, DEVICES = 0o170000, [0o020000, 0o060000]  # character, block
RLIMIT_CORE = 4
SHARED = 0x21  # MAP_SHARED | MAP_ANONYMOUS: the memory stays allocated after munmap()
FUTEX_FLAGS = 0x180  # FUTEX_PRIVATE_FLAG, FUTEX_CLOCK_REALTIME
FLUSHES = ("sync", "fsync", "fdatasync", "sync_file_range")
"""These return 0 and do nothing. A session's files are in memory, and a flush of a file that it can
only read would load the machine's disks."""
ATTRIBUTES = ("setxattr", "lsetxattr", "fsetxattr")
"""Denied: an access control list takes 64 KiB of memory per file that the kernel does not count."""
CHANGES = """chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat
utimensat removexattr"""
"""Without a private user id these return 0 and do nothing: Landlock has no right for them, and
git init and shutil.copy() would fail at an error."""
INIT = 1
"""The session's PID 1, as seen inside."""
SIGNALS = ("kill", "tkill", "tgkill")
"""To PID 1 these return 0 and do nothing, as for a PID 1 that does not handle the signal."""
ABOUT_A_PROCESS = ("pidfd_open", "sched_setaffinity", "sched_getaffinity", "getpgid", "getsid")
"""The first argument is a process id, or 0 for the caller."""
CLOCKS_OF_INIT = [(~INIT << 3 & 0xFFFFFFFF) | kind for kind in (0, 1, 2, 4, 5, 6)]
CLOCKS = ("clock_gettime", "clock_getres", "clock_nanosleep", "timer_create")
PRIO_USER = 2
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def _deny(error: int) -> Instruction:
    return (RETURN, 0, 0, ERRNO | error)


_ALLOW: Instruction = (RETURN, 0, 0, ALLOW)


def _argument(index: int) -> Instruction:
    """Load the lower half of an argument: nearly all deciding arguments are ints in the kernel."""
    return (LOAD, 0, 0, ARGUMENT + 8 * index)


def _upper_half(index: int) -> Instruction:
    return (LOAD, 0, 0, ARGUMENT + 8 * index + 4)


def _one_of(values: Iterable[int], then: list[Instruction]) -> list[Instruction]:
    """Run ``then`` (which returns) if the accumulator is one of values; otherwise fall through."""
    *first, last = values
    tests = [(EQUAL, len(first) - i, 0, value) for i, value in enumerate(first)]
    return [*tests, (EQUAL, 0, len(then), last), *then]


def _only(index: int, values: Iterable[int], error: int) -> list[Instruction]:
    return [_argument(index), *_one_of(values, [_ALLOW]), _deny(error)]


def _unless(index: int, values: Iterable[int], error: int) -> list[Instruction]:
    return [_argument(index), *_one_of(values, [_deny(error)]), _ALLOW]


def _only_flags(index: int, flags: int, error: int) -> list[Instruction]:
    return [_argument(index), (ANY_BIT, 0, 1, ~flags & 0xFFFFFFFF), _deny(error), _ALLOW]


def _option(name: str, image: bool = False) -> list[Instruction]:
    index, error, values = OPTIONS[name]
    more = IMAGE_OPTIONS.get(name, {}) if image else {}
    argument, *tests = _only(index, [*values, *more], error)
    mask = [(AND, 0, 0, ~FUTEX_FLAGS & 0xFFFFFFFF)] if name == "futex" else []
    no_ops = [*NO_OPS.get(name, []), *(IMAGE_NO_OPS.get(name, []) if image else [])]
    return [argument, *mask, *(_one_of(no_ops, [_deny(0)]) if no_ops else []), *tests]


def _except(mask: int, values: list[int], program: list[Instruction]) -> list[Instruction]:
    """Deny the call if the argument that the program loads first is, masked, one of values."""
    argument, *tests = program
    return [argument, (AND, 0, 0, mask), *_one_of(values, [_deny(errno.EPERM)]), argument, *tests]


def _socket() -> list[Instruction]:
    """Allow unix sockets, and internet sockets of TCP and UDP only: others load kernel modules."""
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


def _connected_pairs() -> list[Instruction]:
    """Allow socketpair() except for datagrams, which can be sent to any address."""
    connected = _one_of([1, 5], _option("socketpair"))  # SOCK_STREAM, SOCK_SEQPACKET
    return [_argument(1), (AND, 0, 0, 0xF), *connected, _deny(errno.EPROTONOSUPPORT)]


def _socket_options(image: bool) -> list[Instruction]:
    levels: list[Instruction] = []
    allowed = {level: [*options] for level, options in SOCKET_OPTIONS.items()}
    for level, more in IMAGE_SOCKET_OPTIONS.items() if image else ():
        allowed[level] = [*allowed.get(level, []), *more]
    for level, options in allowed.items():
        option, *tests = _only(2, options, errno.ENOPROTOOPT)
        no_ops = _one_of(NO_OP_SOCKET_OPTIONS, [_deny(0)]) if level == 1 else []
        levels += _one_of([level], [option, *no_ops, *tests])
    return [_argument(1), *levels, _deny(errno.ENOPROTOOPT)]


def _priority() -> list[Instruction]:
    """Deny PID 1, and all processes of a user."""
    return [
        _argument(0),
        *_one_of([PRIO_USER], [_deny(errno.EPERM)]),
        *_unless(1, [INIT], errno.ESRCH),
    ]


def _limits(*, namespaced: bool) -> list[Instruction]:
    """Allow prlimit64(), but setting RLIMIT_CORE returns 0 and does nothing.

    It is 1, at which the kernel does not start the machine's core dump handler. At 0 the kernel
    starts that program, as root (core(5)).
    """
    others = [(EQUAL, 0, 1, INIT), _deny(errno.ESRCH)]
    return [
        _argument(0),
        *(others if namespaced else [(EQUAL, 1, 0, 0), _deny(errno.EPERM)]),
        _argument(1),
        (EQUAL, 1, 0, RLIMIT_CORE),
        _ALLOW,
        _argument(2),
        (EQUAL, 0, 2, 0),
        _upper_half(2),
        (EQUAL, 1, 0, 0),  # a null pointer: the call only reads the limit
        _deny(0),
        _ALLOW,
    ]


def _filters(
    machine: str, *, namespaced: bool, shared_memory: bool, own_user: bool, image: bool = False
) -> dict[str, list[Instruction]]:
    """Programs for the calls that depend on their arguments. Each program always returns."""
    flags = OPEN_FLAGS[machine]
    return {
        **{name: _option(name, image) for name in OPTIONS},
        **{name: _only_flags(*flags) for name, flags in FLAGS.items()},
        **(
            {}
            if shared_memory
            else {"mmap": _except(SHARED, [SHARED], _only_flags(*FLAGS["mmap"]))}
        ),
        "open": _except(TRUNCATES, TRUNCATES_ONLY, _only_flags(1, flags, errno.EINVAL)),
        "openat": _except(TRUNCATES, TRUNCATES_ONLY, _only_flags(2, flags, errno.EINVAL)),
        **({} if own_user else {name: [_deny(0)] for name in CHANGES.split()}),
        **{name: _unless(0, [INIT], 0) for name in SIGNALS},
        **{name: _unless(0, [INIT], errno.ESRCH) for name in ABOUT_A_PROCESS},
        **{name: _priority() for name in ("setpriority", "getpriority")},
        **{name: _unless(0, CLOCKS_OF_INIT, errno.EINVAL) for name in CLOCKS},
        "socket": _socket(),
        "setsockopt": _socket_options(image),
        **{name: [_deny(0)] for name in FLUSHES},
        **{name: [_deny(errno.EOPNOTSUPP)] for name in ATTRIBUTES},
        "mknod": _except(FILE_TYPE, DEVICES, [_argument(1), _ALLOW]),
        "mknodat": _except(FILE_TYPE, DEVICES, [_argument(2), _ALLOW]),
        "setrlimit": _unless(0, [RLIMIT_CORE], 0),
        "prlimit64": _limits(namespaced=namespaced),
        **({} if namespaced else {name: [_deny(0)] for name in LEAVE_THE_GROUP}),
        **({} if namespaced else {"socketpair": _connected_pairs()}),
        **({name: [_deny(0)] for name in ONE_USER.split()} if image else {}),
    }


def system_calls(machine: str, image: bool = False) -> dict[str, int]:
    """Names and numbers of all calls of the policy, argument-filtered ones included."""
    column = {"x86_64": 1, "aarch64": 2}[machine]
    groups = (*GROUPS, IMAGE_GROUP) if image else GROUPS
    rows = [entry.split(":") for _, _, calls in groups for entry in calls.split()]
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
    """A binary search over the call numbers.

    The kernel runs the program for every call number when a session installs it (130 us; a linear
    list took 183), and then for each call that depends on its arguments.
    """
    if len(leaves) == 1:
        return [*leaves[0][1], _deny(errno.ENOSYS)]
    middle = len(leaves) // 2
    below, above = _tree(leaves[:middle]), _tree(leaves[middle:])
    start = leaves[middle][0]
    if len(below) > 255:  # the maximum of a conditional jump
        return [(AT_LEAST, 0, 1, start), (JUMP, 0, 0, len(below)), *below, *above]
    return [(AT_LEAST, len(below), 0, start), *below, *above]


def build(
    machine: str | None = None,
    *,
    namespaced: bool = True,
    shared_memory: bool = True,
    own_user: bool = True,
    image: bool = False,
) -> bytes:
    """Build the seccomp program: 8 bytes per instruction.

    Args:
        machine: as ``platform.machine()``; None: this machine.
        namespaced: whether namespaces hide processes outside; without them the calls that reach
            other processes are denied.
        shared_memory: whether a control group limits memory; without one, shared anonymous memory,
            which stays allocated after munmap(), is denied.
        own_user: whether the session has its own user id, so that it cannot change files of this
            process's user (CHANGES).
        image: for sessions of an image, which have terminals and one mapped user.

    Raises:
        SandboxUnavailable: there is no table for this architecture.
    """
    machine = machine or platform.machine()
    if machine not in AUDIT_ARCH:
        raise SandboxUnavailable(
            f"machine: expected one of {', '.join(AUDIT_ARCH)}, got {machine!r}"
        )
    numbers = system_calls(machine, image)
    if not namespaced:
        numbers = {name: n for name, n in numbers.items() if name not in OUTSIDE.split()}
    program: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, NUMBER),
    ]
    if machine == "x86_64":
        program += [(AT_LEAST, 0, 1, X32_BIT), _deny(errno.ENOSYS)]
    options = {"namespaced": namespaced, "shared_memory": shared_memory, "own_user": own_user}
    filters = _filters(machine, **options, image=image)
    by_body: dict[tuple[Instruction, ...], list[int]] = {}
    for name, number in numbers.items():
        by_body.setdefault(tuple(filters.get(name, [_ALLOW])), []).append(number)
    leaves = []
    for at, (body, call_numbers) in enumerate(by_body.items()):
        for low, high in _ranges(call_numbers):
            then = _ALLOW if body == (_ALLOW,) else (JUMP, 0, 0, TO_BODY + at)
            tests = [(AT_LEAST, 0, 2, low), (GREATER, 1, 0, high)]
            leaves.append((low, [*([(EQUAL, 0, 1, low)] if low == high else tests), then]))
    program += _tree(sorted(leaves, key=lambda leaf: leaf[0]))
    return _pack(program, list(by_body))


def _pack(program: list[Instruction], bodies: list[tuple[Instruction, ...]]) -> bytes:
    """Append each body once, and replace jumps to TO_BODY + n by jumps to body n."""
    starts = list(accumulate(map(len, bodies), initial=len(program)))
    for at, (code, _, _, operand) in enumerate(program):
        if code == JUMP and operand >= TO_BODY:
            program[at] = (JUMP, 0, 0, starts[operand - TO_BODY] - at - 1)
    instructions = (*program, *chain(*bodies))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in instructions)

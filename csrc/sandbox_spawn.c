/* The jailed side of the sandbox: how a zygote process becomes a session.
 *
 * spawn_session() clones the (single-threaded, preloaded) zygote into new namespaces. The clone is
 * PID 1 of the session and never runs Python again: it builds the session's view of the machine,
 * gives up every privilege, forks the interpreter that will run untrusted code as PID 2, and
 * then only reaps children and reports how PID 2 ended on a socket that PID 2 never holds.
 * spawn_session() therefore returns twice: None in the zygote, a True in PID 2.
 *
 * Two thin system calls (unshare, mount) are here as well, for the launcher that prepares an outer
 * jail for a root user: Python 3.11 has neither.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "methods.h"
#include "sandbox.h"

#define NAMESPACES                                                                                 \
    (CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS)

struct session_spec {
    int status, request, response, out, err;
    const char *home_options, *tmp_options, *shm_options;
    unsigned long long address_space, processes, open_files, file_size, cpu_s;
    int niceness;
    int own_users; /* a user namespace per session; else a uid per session (root zygote) */
    unsigned int uid;
    const char *filter;
    Py_ssize_t filter_bytes;
};

static void
report(int status_fd, uint32_t kind, int32_t value, int32_t detail, const int *fds, int num_fds)
{
    struct sandbox_report message = {.kind = kind, .value = value, .detail = detail};
    struct rusage used;
    if (kind == SANDBOX_REPORT_EXIT && getrusage(RUSAGE_CHILDREN, &used) == 0) {
        message.max_rss_kib = used.ru_maxrss;
        message.cpu_us = (used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1000000 +
                         used.ru_utime.tv_usec + used.ru_stime.tv_usec;
    }
    struct iovec body = {.iov_base = &message, .iov_len = sizeof message};
    union {
        char bytes[CMSG_SPACE(2 * sizeof(int))];
        struct cmsghdr align;
    } control;
    struct msghdr header = {.msg_iov = &body, .msg_iovlen = 1};
    if (num_fds > 0) {
        const size_t length = (size_t)num_fds * sizeof(int);
        header.msg_control = control.bytes;
        header.msg_controllen = CMSG_SPACE(length);
        struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(length);
        memcpy(CMSG_DATA(rights), fds, length);
    }
    /* Nobody is left to tell if this fails: the host has closed its end and is gone. */
    if (sendmsg(status_fd, &header, MSG_NOSIGNAL) < 0) {
        _exit(SANDBOX_EXIT_SETUP);
    }
}

static void
refuse(const struct session_spec *spec, enum sandbox_setup_step step)
{
    report(spec->status, SANDBOX_REPORT_FAILED, (int32_t)step, errno, NULL, 0);
    _exit(SANDBOX_EXIT_SETUP);
}

static int
write_file(const char *path, const char *text)
{
    const int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) {
        return -1;
    }
    const ssize_t written = write(fd, text, strlen(text));
    const int error = errno;
    close(fd);
    errno = error;
    return written < 0 ? -1 : 0;
}

static void
enter_user_namespace(const struct session_spec *spec)
{
    char map[64];
    PyOS_snprintf(map, sizeof map, "%u %u 1", spec->uid, spec->uid);
    if (write_file("/proc/self/setgroups", "deny") < 0 ||
        write_file("/proc/self/uid_map", map) < 0 || write_file("/proc/self/gid_map", map) < 0) {
        refuse(spec, SANDBOX_SETUP_USERS);
    }
}

static void
mount_private_files(const struct session_spec *spec)
{
    const unsigned long plain = MS_NOSUID | MS_NODEV;
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
        mount("tmpfs", "/tmp", "tmpfs", plain, spec->tmp_options) < 0 ||
        mount("tmpfs", "/home/user", "tmpfs", plain, spec->home_options) < 0 ||
        mount("tmpfs", "/dev/shm", "tmpfs", plain | MS_NOEXEC, spec->shm_options) < 0) {
        refuse(spec, SANDBOX_SETUP_MOUNTS);
    }
    if (mount("proc", "/proc", "proc", plain | MS_NOEXEC | MS_RDONLY, "subset=pid") < 0) {
        refuse(spec, SANDBOX_SETUP_PROC);
    }
    if (chdir("/home/user") < 0) {
        refuse(spec, SANDBOX_SETUP_MOUNTS);
    }
}

static void
raise_loopback(const struct session_spec *spec)
{
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP};
    const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || ioctl(fd, SIOCSIFFLAGS, &request) < 0) {
        refuse(spec, SANDBOX_SETUP_NETWORK);
    }
    close(fd);
}

static void
limit(const struct session_spec *spec, __rlimit_resource_t resource, unsigned long long value)
{
    struct rlimit bound;
    if (getrlimit(resource, &bound) < 0) {
        refuse(spec, SANDBOX_SETUP_LIMITS);
    }
    /* Lower only: a hard limit that is already tighter than ours stays. */
    bound.rlim_max = value < bound.rlim_max ? value : bound.rlim_max;
    bound.rlim_cur = bound.rlim_max;
    if (setrlimit(resource, &bound) < 0) {
        refuse(spec, SANDBOX_SETUP_LIMITS);
    }
}

static void
set_limits(const struct session_spec *spec)
{
    limit(spec, RLIMIT_AS, spec->address_space);
    limit(spec, RLIMIT_NPROC, spec->processes);
    limit(spec, RLIMIT_NOFILE, spec->open_files);
    limit(spec, RLIMIT_FSIZE, spec->file_size);
    limit(spec, RLIMIT_CPU, spec->cpu_s);
    limit(spec, RLIMIT_CORE, 0);
    limit(spec, RLIMIT_MEMLOCK, 65536);
    limit(spec, RLIMIT_MSGQUEUE, 0);
    if (setpriority(PRIO_PROCESS, 0, spec->niceness) < 0) {
        refuse(spec, SANDBOX_SETUP_LIMITS);
    }
}

static void
drop_privileges(const struct session_spec *spec)
{
    for (unsigned long capability = 0;; capability++) {
        if (prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0) {
            if (errno == EINVAL && capability > 0) { /* one past the kernel's last capability */
                break;
            }
            refuse(spec, SANDBOX_SETUP_PRIVILEGES);
        }
    }
    if (!spec->own_users && (syscall(SYS_setgroups, 0, NULL) < 0 ||
                             syscall(SYS_setresgid, spec->uid, spec->uid, spec->uid) < 0 ||
                             syscall(SYS_setresuid, spec->uid, spec->uid, spec->uid) < 0)) {
        refuse(spec, SANDBOX_SETUP_PRIVILEGES);
    }
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct none[2] = {0};
    if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) < 0 ||
        syscall(SYS_capset, &header, none) < 0 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0) {
        refuse(spec, SANDBOX_SETUP_PRIVILEGES);
    }
}

/* The life of PID 1: reap, report the end of the interpreter, end with the host. Not reachable from
 * inside: PID 1 ignores signals of its own namespace, is not dumpable and listens to nobody. */
static void
run_init(int status_fd, pid_t interpreter)
{
    if (dup2(status_fd, 3) < 0 || syscall(SYS_close_range, 4, ~0U, 0) < 0) {
        _exit(SANDBOX_EXIT_SETUP);
    }
    close(0);
    close(1);
    close(2);
    prctl(PR_SET_NAME, "sandbox-init");
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    const int signals = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    struct pollfd watched[] = {{.fd = signals, .events = POLLIN}, {.fd = 3, .events = 0}};
    for (;;) {
        if (poll(watched, 2, -1) < 0 && errno != EINTR) {
            _exit(SANDBOX_EXIT_SETUP);
        }
        if (watched[1].revents != 0) { /* the host closed its end or died */
            _exit(0);
        }
        struct signalfd_siginfo info;
        while (read(signals, &info, sizeof info) > 0) {
        }
        int how;
        pid_t pid;
        while ((pid = waitpid(-1, &how, WNOHANG)) > 0) {
            if (pid == interpreter) {
                report(3, SANDBOX_REPORT_EXIT, how, 0, NULL, 0);
                _exit(0);
            }
        }
    }
}

/* In PID 2: standard streams, the two pipes of the protocol as 3 and 4, and nothing else. */
static void
become_interpreter(const struct session_spec *spec)
{
    setsid();
    const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    /* Through high numbers first, since any of them may itself be a number we assign below. */
    const int wanted[] = {null, spec->out, spec->err, spec->request, spec->response};
    int high[5];
    for (int i = 0; i < 5; i++) {
        high[i] = fcntl(wanted[i], F_DUPFD_CLOEXEC, 16);
        if (high[i] < 0) {
            refuse(spec, SANDBOX_SETUP_STREAMS);
        }
    }
    int status = fcntl(spec->status, F_DUPFD_CLOEXEC, 64);
    for (int i = 0; i < 5; i++) {
        if (dup3(high[i], i, i < 3 ? 0 : O_CLOEXEC) < 0 && errno != EINVAL) {
            _exit(SANDBOX_EXIT_SETUP);
        }
    }
    struct session_spec told = *spec;
    told.status = status;
    struct sock_fprog program = {.len = (unsigned short)(spec->filter_bytes / 8),
                                 .filter = (struct sock_filter *)(uintptr_t)spec->filter};
    /* While the status socket is still there to complain on; it is closed before Python runs. */
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) < 0) {
        refuse(&told, SANDBOX_SETUP_FILTER);
    }
    if (syscall(SYS_close_range, 5, ~0U, 0) < 0) {
        refuse(&told, SANDBOX_SETUP_STREAMS);
    }
}

/* In the clone: sets the session up; returns only in PID 2. */
static void
run_session(const struct session_spec *spec)
{
    signal(SIGCHLD, SIG_DFL); /* the zygote ignores it, which would discard the exit status */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (spec->own_users) {
        enter_user_namespace(spec);
    }
    mount_private_files(spec);
    raise_loopback(spec);
    if (sethostname("sandbox", 7) < 0) {
        refuse(spec, SANDBOX_SETUP_NETWORK);
    }
    set_limits(spec);
    drop_privileges(spec);
    prctl(PR_SET_DUMPABLE, 0); /* /proc/1/{mem,fd,environ} stay closed to PID 2 */
    sigset_t child, before;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, &before); /* before the fork: no exit may go unseen */
    const pid_t interpreter = fork();
    if (interpreter < 0) {
        refuse(spec, SANDBOX_SETUP_FORK);
    }
    if (interpreter > 0) {
        const int fds[] = {(int)syscall(SYS_pidfd_open, getpid(), 0),
                           (int)syscall(SYS_pidfd_open, interpreter, 0)};
        if (fds[0] < 0 || fds[1] < 0) {
            refuse(spec, SANDBOX_SETUP_FORK);
        }
        report(spec->status, SANDBOX_REPORT_READY, 0, 0, fds, 2);
        run_init(spec->status, interpreter);
    }
    sigprocmask(SIG_SETMASK, &before, NULL);
    prctl(PR_SET_DUMPABLE, 1);
    become_interpreter(spec);
}

PyDoc_STRVAR(
    spawn_session_doc,
    "spawn_session($module, status, request, response, out, err, home, tmp, shm, address_space,\n"
    "              processes, open_files, file_size, cpu_s, niceness, own_users, uid, filter, /)\n"
    "--\n"
    "\n"
    "Clone this process into a session; None here, True in the new interpreter (PID 2).\n"
    "\n"
    "The five descriptors are the session's ends of its channels. home, tmp and shm are tmpfs "
    "mount\n"
    "options. address_space and file_size are bytes, cpu_s seconds, filter the bytes of a seccomp\n"
    "program. What goes wrong inside the session is reported on status, not raised.\n"
    "Raises OSError if the clone itself is refused.");

static PyObject *
spawn_session(PyObject *Py_UNUSED(module), PyObject *args)
{
    struct session_spec spec;
    if (!PyArg_ParseTuple(args, "iiiiisssKKKKKipIy#", &spec.status, &spec.request, &spec.response,
                          &spec.out, &spec.err, &spec.home_options, &spec.tmp_options,
                          &spec.shm_options, &spec.address_space, &spec.processes, &spec.open_files,
                          &spec.file_size, &spec.cpu_s, &spec.niceness, &spec.own_users, &spec.uid,
                          &spec.filter, &spec.filter_bytes)) {
        return NULL;
    }
    if (spec.filter_bytes == 0 || spec.filter_bytes % 8 != 0 || spec.filter_bytes / 8 > 4096) {
        PyErr_Format(PyExc_ValueError,
                     "filter: expected 1 to 4096 instructions of 8 bytes, got %zd bytes",
                     spec.filter_bytes);
        return NULL;
    }
    const int namespaces = spec.own_users ? NAMESPACES : NAMESPACES & ~CLONE_NEWUSER;
    PyOS_BeforeFork();
    const long pid = syscall(SYS_clone, (unsigned long)(namespaces | SIGCHLD), 0, 0, 0, 0);
    if (pid != 0) {
        const int error = errno;
        PyOS_AfterFork_Parent();
        if (pid < 0) {
            errno = error;
            return PyErr_SetFromErrno(PyExc_OSError);
        }
        Py_RETURN_NONE;
    }
    run_session(&spec);
    PyOS_AfterFork_Child();
    Py_RETURN_TRUE;
}

PyDoc_STRVAR(unshare_doc, "unshare_mounts($module, /)\n"
                          "--\n"
                          "\n"
                          "Leave the shared mount namespace: later mounts are seen only by this\n"
                          "process and its children. Raises OSError.");

static PyObject *
unshare_mounts(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0) {
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(mount_doc, "mount($module, source, target, /)\n"
                        "--\n"
                        "\n"
                        "Bind source on target, or, with source None, a small tmpfs (mode 0755).\n"
                        "Raises OSError naming target.");

static PyObject *
mount_path(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *source, *target;
    if (!PyArg_ParseTuple(args, "zs", &source, &target)) {
        return NULL;
    }
    const int failed =
        source ? mount(source, target, NULL, MS_BIND | MS_REC, NULL)
               : mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=1m");
    if (failed < 0) {
        return PyErr_SetFromErrnoWithFilename(PyExc_OSError, target);
    }
    Py_RETURN_NONE;
}

PyMethodDef agentgrpo_sandbox_spawn_methods[] = {
    {"sandbox_spawn_session", spawn_session, METH_VARARGS, spawn_session_doc},
    {"sandbox_unshare_mounts", unshare_mounts, METH_NOARGS, unshare_doc},
    {"sandbox_mount", mount_path, METH_VARARGS, mount_doc},
    {NULL, NULL, 0, NULL},
};

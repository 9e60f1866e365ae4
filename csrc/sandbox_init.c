/* PID 1 of a session: reaps processes, reports how they ended, starts programs for the host, and
 * ends the session when the host has ended.
 *
 * It is trusted, and code inside cannot reach it: the kernel ignores signals from a namespace to
 * its own PID 1, it is not dumpable (so /proc/1/{mem,fd,environ} cannot be opened), and no process
 * that runs untrusted code ever had its socket. It has no more privileges than they have.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sandbox.h"

enum { CONTROL = 3, MAX_CHILDREN = 64, MAX_STRINGS = 4096, ORDER_BYTES = 1 << 18 };

/* The processes started for the host, each with the socket for the report of its end. */
static struct {
    pid_t pid;
    int status;
} children[MAX_CHILDREN];

/* The process whose end ends the session; 0 after the host has made it one of children. */
static pid_t interpreter;

void
sandbox_report(int status_fd, const struct sandbox_report *message, const int *fds, int num_fds)
{
    struct iovec body = {.iov_base = (void *)(uintptr_t)message, .iov_len = sizeof *message};
    union {
        char bytes[CMSG_SPACE(3 * sizeof(int))];
        struct cmsghdr align;
    } control = {0};
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
    if (sendmsg(status_fd, &header, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 && num_fds > 0) {
        /* The kernel limits a user's descriptors in flight (sendmsg(2), ETOOMANYREFS), and a
         * session can use them up: report the failure, without descriptors. */
        const struct sandbox_report refused = {
            .kind = SANDBOX_REPORT_FAILED, .value = SANDBOX_SETUP_STREAMS, .detail = errno};
        sandbox_report(status_fd, &refused, NULL, 0);
    }
    /* Otherwise the host has closed its end, and no one reads the report. */
}

void
sandbox_refuse(int status_fd, enum sandbox_setup_step step)
{
    const struct sandbox_report message = {
        .kind = SANDBOX_REPORT_FAILED, .value = (int32_t)step, .detail = errno};
    sandbox_report(status_fd, &message, NULL, 0);
    _exit(SANDBOX_EXIT_SETUP);
}

int
sandbox_lower_limit(__rlimit_resource_t resource, unsigned long long value)
{
    struct rlimit bound;
    if (getrlimit(resource, &bound) < 0) {
        return -1;
    }
    bound.rlim_max = value < bound.rlim_max ? value : bound.rlim_max;
    bound.rlim_cur = bound.rlim_max;
    return setrlimit(resource, &bound);
}

/* The last step of a process before it runs untrusted code: sources[i] becomes descriptor i (above
 * 2 not inherited by its children), and status_fd becomes descriptor count, for failure reports
 * until the caller closes it. All other descriptors are closed, limits are set, and the filter is
 * installed. */
void
sandbox_take_descriptors(int status_fd, const int *sources, int count,
                         const struct sandbox_bounds *bounds)
{
    int high[6];
    /* first to numbers from 16 on: a source may have a number that is assigned below */
    for (int i = 0; i <= count; i++) {
        high[i] = fcntl(i < count ? sources[i] : status_fd, F_DUPFD_CLOEXEC, 16);
    }
    for (int i = 0; i <= count; i++) {
        if (dup3(high[i], i, i < 3 ? 0 : O_CLOEXEC) < 0) {
            sandbox_refuse(high[count], SANDBOX_SETUP_STREAMS);
        }
    }
    /* descriptors inherited from the zygote or PID 1 would lead out of the session */
    if (syscall(SYS_close_range, count + 1, ~0U, 0) < 0) {
        sandbox_refuse(count, SANDBOX_SETUP_STREAMS);
    }
    /* only here, not in PID 1: its reaping must not use up a limit */
    if (sandbox_lower_limit(RLIMIT_NOFILE, (unsigned long long)bounds->open_files) < 0 ||
        sandbox_lower_limit(RLIMIT_CPU, bounds->cpu_s) < 0) {
        sandbox_refuse(count, SANDBOX_SETUP_LIMITS);
    }
    struct sock_fprog program = {.len = (unsigned short)(bounds->filter_bytes / 8),
                                 .filter = (struct sock_filter *)(uintptr_t)bounds->filter};
    /* last: from here on only the calls of the filter are possible */
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) < 0) {
        sandbox_refuse(count, SANDBOX_SETUP_FILTER);
    }
}

/* Splits an order into directory, argv and environ. Returns 0, or -1 if it is malformed. */
static int
parse_order(char *text, const char *end, const struct sandbox_order *order, char **directory,
            char **arguments, char **environment)
{
    if (order->num_arguments == 0 || order->num_arguments >= MAX_STRINGS ||
        order->num_environment >= MAX_STRINGS) {
        return -1;
    }
    char *at = text;
    for (uint32_t i = 0; i < 1 + order->num_arguments + order->num_environment; i++) {
        char *stop = memchr(at, 0, (size_t)(end - at));
        if (stop == NULL) {
            return -1;
        }
        if (i == 0) {
            *directory = at;
        } else if (i <= order->num_arguments) {
            arguments[i - 1] = at;
        } else {
            environment[i - 1 - order->num_arguments] = at;
        }
        at = stop + 1;
    }
    arguments[order->num_arguments] = NULL;
    environment[order->num_environment] = NULL;
    return 0;
}

static void
run_program(char *text, const char *end, const struct sandbox_order *order, const int *fds,
            int num_fds, const struct sandbox_bounds *bounds)
{
    static char *arguments[MAX_STRINGS], *environment[MAX_STRINGS];
    char *directory = NULL;
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (getppid() == 1) { /* without namespaces it stays in the group, see terminate_session() */
        setsid();
    }
    if (parse_order(text, end, order, &directory, arguments, environment) < 0) {
        errno = EINVAL;
        sandbox_refuse(fds[0], SANDBOX_SETUP_EXEC);
    }
    if (chdir(directory) < 0) {
        sandbox_refuse(fds[0], SANDBOX_SETUP_EXEC);
    }
    const int count = num_fds - 1;
    sandbox_take_descriptors(fds[0], fds + 1, count, bounds);
    if (count > 3) { /* the protocol's pipes survive this exec; the program sets CLOEXEC again */
        fcntl(3, F_SETFD, 0);
        fcntl(4, F_SETFD, 0);
    }
    execve(arguments[0], arguments, environment);
    if (errno == ENOENT && strcmp(arguments[0], "/bin/bash") == 0) { /* an image may have only sh */
        execve("/bin/sh", arguments, environment);
    }
    sandbox_refuse(count, SANDBOX_SETUP_EXEC);
}

static void
start_program(char *text, const char *end, const struct sandbox_order *order, const int *fds,
              int num_fds, const struct sandbox_bounds *bounds)
{
    struct sandbox_report message = {.kind = SANDBOX_REPORT_FAILED, .value = SANDBOX_SETUP_FORK};
    int slot = 0;
    while (slot < MAX_CHILDREN && children[slot].pid != 0) {
        slot++;
    }
    /* an order without arguments: the interpreter becomes a child whose end is not the session's */
    const int adopts = order->num_arguments == 0 && interpreter != 0;
    const pid_t pid = slot == MAX_CHILDREN ? -1 : adopts ? interpreter : fork();
    if (pid == 0) {
        run_program(text, end, order, fds, num_fds, bounds);
    }
    const int pidfd = pid > 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
    if (pidfd < 0) {
        message.detail = slot < MAX_CHILDREN ? errno : EAGAIN;
        sandbox_report(fds[0], &message, NULL, 0);
        return;
    }
    interpreter = adopts ? 0 : interpreter;
    children[slot].pid = pid;
    children[slot].status = fcntl(fds[0], F_DUPFD_CLOEXEC, CONTROL + 1);
    message.kind = SANDBOX_REPORT_READY;
    sandbox_report(fds[0], &message, &pidfd, 1);
    close(pidfd);
}

/* Ends the session. When PID 1 exits, the kernel kills its namespace. Without a namespace
 * (MODE_BARE) all processes are in one process group, which none of them can leave. */
static void
terminate_session(int code)
{
    if (getpid() != 1) {
        kill(0, SIGKILL);
    }
    _exit(code);
}

static void
handle_order(const struct sandbox_bounds *bounds)
{
    static char text[ORDER_BYTES];
    struct sandbox_order order;
    struct iovec body[] = {{.iov_base = &order, .iov_len = sizeof order},
                           {.iov_base = text, .iov_len = sizeof text}};
    union {
        char bytes[CMSG_SPACE(6 * sizeof(int))];
        struct cmsghdr align;
    } control;
    struct msghdr header = {.msg_iov = body,
                            .msg_iovlen = 2,
                            .msg_control = control.bytes,
                            .msg_controllen = sizeof control.bytes};
    const ssize_t count = recvmsg(CONTROL, &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    if (count <= 0) { /* the host closed its end or died: end the session */
        terminate_session(0);
    }
    struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
    if (rights == NULL || count < (ssize_t)sizeof order) {
        terminate_session(SANDBOX_EXIT_SETUP);
    }
    int fds[6];
    const int num_fds = (int)((rights->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    memcpy(fds, CMSG_DATA(rights), (size_t)num_fds * sizeof(int));
    const char *end = text + count - (ssize_t)sizeof order;
    start_program(text, end, &order, fds, num_fds, bounds);
    for (int i = 0; i < num_fds; i++) {
        close(fds[i]);
    }
}

/* Reaps ended processes, at most 256, so that a storm of them cannot keep it from orders of the
 * host. Returns whether there may be more. */
static int
reap(void)
{
    struct sandbox_report message = {.kind = SANDBOX_REPORT_EXIT};
    struct rusage used;
    for (int turn = 0; turn < 256; turn++) {
        const pid_t pid = wait4(-1, &message.value, WNOHANG, &used);
        if (pid <= 0) {
            return 0;
        }
        message.cpu_us = (used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1000000 +
                         used.ru_utime.tv_usec + used.ru_stime.tv_usec;
        if (pid == interpreter) {
            sandbox_report(CONTROL, &message, NULL, 0);
            terminate_session(0);
        }
        for (int i = 0; i < MAX_CHILDREN; i++) {
            if (children[i].pid == pid) {
                sandbox_report(children[i].status, &message, NULL, 0);
                close(children[i].status);
                children[i].pid = 0;
            }
        }
    }
    return 1;
}

/* The main loop of PID 1. SIGCHLD is blocked before, so that no end is missed. */
void
sandbox_run_init(int control_fd, pid_t pid, const struct sandbox_bounds *bounds)
{
    interpreter = pid;
    if ((control_fd != CONTROL && dup3(control_fd, CONTROL, O_CLOEXEC) < 0) ||
        syscall(SYS_close_range, CONTROL + 1, ~0U, 0) < 0) {
        _exit(SANDBOX_EXIT_SETUP);
    }
    for (int fd = 0; fd < CONTROL; fd++) {
        close(fd);
    }
    prctl(PR_SET_NAME, "sandbox-init");
    /* remove Python's handlers: the kernel ignores signals to PID 1 only where it has no handler */
    for (int number = 1; number <= 64; number++) {
        signal(number, SIG_DFL);
    }
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    const int signals = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    struct pollfd watched[] = {{.fd = signals, .events = POLLIN},
                               {.fd = CONTROL, .events = POLLIN}};
    /* reap once before waiting: signal() above has discarded the SIGCHLD of an early end */
    for (int more = 1;;) {
        if (poll(watched, 2, more ? 0 : -1) < 0 && errno != EINTR) {
            terminate_session(SANDBOX_EXIT_SETUP);
        }
        struct signalfd_siginfo info;
        while (read(signals, &info, sizeof info) > 0) {
        }
        more = reap();
        if (watched[1].revents != 0) {
            handle_order(bounds);
        }
    }
}

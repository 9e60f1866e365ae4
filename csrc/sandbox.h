/* What the files of the sandbox, and its two sides, agree on. */
#ifndef AGENTGRPO_SANDBOX_H
#define AGENTGRPO_SANDBOX_H

#include <stdint.h>
#include <sys/resource.h>
#include <sys/types.h>

enum { SANDBOX_REPORT_READY = 1, SANDBOX_REPORT_EXIT = 2, SANDBOX_REPORT_FAILED = 3 };
enum { SANDBOX_EXIT_SETUP = 125 };

/* The order is that of the names in agentgrpo/sandbox/inside/wire.py. */
enum sandbox_setup_step {
    SANDBOX_SETUP_CLONE,
    SANDBOX_SETUP_USERS,
    SANDBOX_SETUP_CGROUP,
    SANDBOX_SETUP_MOUNTS,
    SANDBOX_SETUP_PROC,
    SANDBOX_SETUP_NETWORK,
    SANDBOX_SETUP_LIMITS,
    SANDBOX_SETUP_PRIVILEGES,
    SANDBOX_SETUP_FORK,
    SANDBOX_SETUP_STREAMS,
    SANDBOX_SETUP_FILTER,
    SANDBOX_SETUP_EXEC,
    SANDBOX_SETUP_IMAGE,
};

/* One message of a session's PID 1 to the host. READY carries pidfds: of PID 1 and PID 2 for a
 * session, followed by the directory of the changes to its image if it has one; of the new process
 * for a command. */
struct sandbox_report {
    uint32_t kind;
    int32_t value;  /* EXIT: the wait status; FAILED: the setup step */
    int32_t detail; /* FAILED: errno */
    int32_t unused;
    int64_t max_rss_kib;
    int64_t cpu_us;
};

/* An order of the host to PID 1: run a program; without arguments, let the session outlive PID 2,
 * whose end is reported like a program's on the one descriptor that comes with it. Followed by
 * NUL-terminated strings (directory, argv, environment), with the descriptors status, stdin,
 * stdout, stderr and, if it speaks the step protocol, request and response. */
struct sandbox_order {
    uint32_t num_arguments, num_environment;
};

/* What holds for every process that runs untrusted code, and not for PID 1: reaping what they leave
 * must not use up a limit of its own. */
struct sandbox_bounds {
    int open_files;
    unsigned long long cpu_s;
    const char *filter;
    size_t filter_bytes;
};

void sandbox_report(int status_fd, const struct sandbox_report *message, const int *fds,
                    int num_fds);
void sandbox_refuse(int status_fd, enum sandbox_setup_step step);
/* Lowers a limit; one that is tighter already stays. Returns 0, or -1 with errno. */
int sandbox_lower_limit(__rlimit_resource_t resource, unsigned long long value);
void sandbox_take_descriptors(int status_fd, const int *wanted, int count,
                              const struct sandbox_bounds *bounds);
/* Leaves this process and its children nothing but: reading the paths in readable (joined by ":"),
 * everything in home. Does nothing where the kernel has no Landlock. Returns 0, or -1 with errno.
 */
int sandbox_restrict_files(const char *readable, const char *home);

void sandbox_run_init(int control_fd, pid_t pid, const struct sandbox_bounds *bounds);

#endif

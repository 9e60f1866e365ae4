/* Declarations shared by the files of the sandbox, and the messages between host and PID 1. */
#ifndef AGENTGRPO_SANDBOX_H
#define AGENTGRPO_SANDBOX_H

#include <stdint.h>
#include <sys/resource.h>
#include <sys/types.h>

enum { SANDBOX_REPORT_READY = 1, SANDBOX_REPORT_EXIT = 2, SANDBOX_REPORT_FAILED = 3 };
enum { SANDBOX_EXIT_SETUP = 125 };

/* In the order of SETUP_STEPS in agentgrpo/sandbox/inside/wire.py. */
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

/* A message from a session's PID 1 to the host. READY carries descriptors: for a session the pidfds
 * of PID 1 and PID 2, and the directory of the changes to its image if it has one; for a command
 * the pidfd of the new process. */
struct sandbox_report {
    uint32_t kind;
    int32_t value;  /* EXIT: the wait status; FAILED: the setup step */
    int32_t detail; /* FAILED: errno */
    int32_t unused;
    int64_t cpu_us;
};

/* An order from the host to PID 1: run a program. NUL-terminated strings follow (directory, argv,
 * environment), with the descriptors status, stdin, stdout, stderr and, if the program implements
 * the step protocol, request and response. Without arguments: let the session outlive PID 2, and
 * report its end like a program's on the only descriptor of the order. */
struct sandbox_order {
    uint32_t num_arguments, num_environment;
};

/* Limits of every process that runs untrusted code. They do not hold for PID 1, because reaping
 * must not use up a limit. */
struct sandbox_bounds {
    int open_files;
    unsigned long long cpu_s;
    const char *filter;
    size_t filter_bytes;
};

void sandbox_report(int status_fd, const struct sandbox_report *message, const int *fds,
                    int num_fds);
void sandbox_refuse(int status_fd, enum sandbox_setup_step step);
/* Lowers a limit; a lower one stays. Returns 0, or -1 with errno. */
int sandbox_lower_limit(__rlimit_resource_t resource, unsigned long long value);
void sandbox_take_descriptors(int status_fd, const int *sources, int count,
                              const struct sandbox_bounds *bounds);
/* Restricts this process and its children to reading the paths in readable (joined by ":") and full
 * access to home. Does nothing if the kernel has no Landlock. Returns 0, or -1 with errno.
 */
int sandbox_restrict_files(const char *readable, const char *home);

void sandbox_run_init(int control_fd, pid_t pid, const struct sandbox_bounds *bounds);

#endif

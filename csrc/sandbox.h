/* What the two sides of the sandbox agree on. */
#ifndef AGENTGRPO_SANDBOX_H
#define AGENTGRPO_SANDBOX_H

#include <stdint.h>

enum { SANDBOX_REPORT_READY = 1, SANDBOX_REPORT_EXIT = 2, SANDBOX_REPORT_FAILED = 3 };
enum { SANDBOX_EXIT_SETUP = 125 };

/* The order is that of the names in agentgrpo/sandbox/zygote.py. */
enum sandbox_setup_step {
    SANDBOX_SETUP_CLONE,
    SANDBOX_SETUP_USERS,
    SANDBOX_SETUP_MOUNTS,
    SANDBOX_SETUP_PROC,
    SANDBOX_SETUP_NETWORK,
    SANDBOX_SETUP_LIMITS,
    SANDBOX_SETUP_PRIVILEGES,
    SANDBOX_SETUP_FORK,
    SANDBOX_SETUP_STREAMS,
    SANDBOX_SETUP_FILTER,
};

/* One message of a session's PID 1 to the host, on the status socket. READY carries two pidfds. */
struct sandbox_report {
    uint32_t kind;
    int32_t value;  /* EXIT: the wait status; FAILED: the setup step */
    int32_t detail; /* FAILED: errno */
    int32_t unused;
    int64_t max_rss_kib;
    int64_t cpu_us;
};

#endif

/* One step of a session, as a state machine: shared by sandbox_step.c, which runs one and waits,
 * and sandbox_loop.c, which runs many. */
#ifndef AGENTGRPO_SANDBOX_STEP_H
#define AGENTGRPO_SANDBOX_STEP_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>
#include <stdint.h>

#include "sandbox.h"

/* The order is that of Ending in agentgrpo/sandbox/outcome.py. */
enum ending {
    RUNNING,
    ANSWERED,
    KILLED_AT_DEADLINE,
    OUTPUT_LIMIT,
    PROTOCOL,
    EXITED,       /* PID 1 reported how the interpreter ended */
    LOST,         /* PID 1 itself is gone without a word */
    SETUP_FAILED, /* PID 1 reported a step of the setup, before any code ran */
    HOST_FAILED,  /* a descriptor or the memory of the host itself: report.detail is the errno */
};

enum { REQUEST, RESPONSE, OUT, ERR, STATUS, NUM_CHANNELS };
enum { CHUNK = 65536, BACKGROUND_KEPT = 4096, REPORT_PATIENCE_S = 30 };

/* Output of one stream: its first and its last bytes, and how much there was. */
struct capture {
    char *head, *tail; /* keep bytes each, NULL before they are needed; tail is a ring */
    size_t keep, head_used, tail_used, tail_at;
    int ends; /* keep the last bytes too */
    uint64_t total;
};

struct step {
    int fds[NUM_CHANNELS]; /* -1: nothing more to expect on it */
    int init, interpreter; /* pidfds */
    Py_buffer request;
    size_t sent;
    uint32_t id;
    int goes_on; /* the rest of a step: what was printed meanwhile is not background */
    double timeout, grace, started, deadline; /* seconds; the last two of CLOCK_MONOTONIC */
    int interrupted;
    uint64_t output_max;
    struct capture streams[2], background;
    PyObject *listener;     /* called with (stream, bytes) as output arrives, or NULL */
    PyThreadState *waiting; /* this thread's, while it runs without the GIL */
    char head[4];
    size_t head_used;
    char *answer;
    size_t answer_bytes, answer_used, answer_max;
    int response_closed, awaits_report;
    enum ending ending;
    struct sandbox_report report;
};

double sandbox_seconds(void);

/* From the arguments of run_step(); NULL with an exception set. Needs the GIL. */
struct step *sandbox_step_new(PyObject *args);
void sandbox_step_free(struct step *step);
PyObject *sandbox_step_result(const struct step *step);

/* Without the GIL: start; channel i can be read or written; the deadline has passed. */
void sandbox_step_begin(struct step *step);
void sandbox_step_ready(struct step *step, int channel);
void sandbox_step_fail(struct step *step, int error);
void sandbox_step_expire(struct step *step);

#endif

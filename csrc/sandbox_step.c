/* The host side of a step: sends a request, collects output, enforces limits, finds how it ended.
 *
 * Untrusted code writes everything on the response, output and error pipes. The host reads a
 * limited amount of it and uses only lengths that it has checked. It takes the facts (whether the
 * interpreter ended, by which signal, when) from the session's PID 1, from pidfds and its own
 * clock.
 *
 * A step is a state machine over non-blocking descriptors; it ends when step->ending is set.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "methods.h"
#include "sandbox.h"

/* In the order of Ending in agentgrpo/sandbox/session/step_result.py. */
enum ending {
    RUNNING,
    ANSWERED,
    KILLED_AT_DEADLINE,
    OUTPUT_LIMIT,
    PROTOCOL,
    EXITED,       /* PID 1 reported how the interpreter ended */
    LOST,         /* PID 1 ended without a report */
    SETUP_FAILED, /* PID 1 reported a failed setup step, before any code ran */
    HOST_FAILED,  /* a descriptor or memory of the host failed: report.detail is the errno */
};

enum { REQUEST, RESPONSE, OUT, ERR, STATUS, NUM_CHANNELS };
enum { CHUNK = 65536, BACKGROUND_KEPT = 4096, REPORT_PATIENCE_S = 30 };

/* Output of a stream: its first and last bytes, and the number of all bytes. */
struct capture {
    char *head, *tail; /* keep bytes each, NULL before they are needed; tail is a ring */
    size_t keep, head_used, tail_used, tail_at;
    int ends; /* whether to keep the last bytes too */
    uint64_t total;
};

struct step {
    int fds[NUM_CHANNELS];             /* -1: closed or finished */
    int request_fd, init, interpreter; /* the last two are pidfds */
    Py_buffer request;
    size_t sent;
    uint32_t id;
    double timeout, grace, started, deadline; /* seconds; the last two on CLOCK_MONOTONIC */
    int interrupted;
    unsigned long long output_max;
    struct capture streams[2], background;
    PyObject *listener;     /* called with (stream, bytes) as output arrives, or NULL */
    PyObject *on_answer;    /* called with an answer, returns the next request or None; or NULL */
    PyThreadState *waiting; /* this thread's state, while it runs without the GIL */
    char head[4];
    size_t head_used;
    char *answer;
    size_t answer_bytes, answer_used, answer_max;
    int response_closed, awaits_report;
    enum ending ending;
    struct sandbox_report report;
};

static double
seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Allocates memory only when there is output: most steps print little, and malloc would map and
 * unmap 128 KiB in each. Without memory the output counts as omitted. */
static int
holds(char **memory, size_t keep)
{
    if (*memory == NULL) {
        *memory = malloc(keep);
    }
    return *memory != NULL;
}

static void
capture_bytes(struct capture *into, const char *data, size_t count)
{
    into->total += count;
    const size_t first = Py_MIN(count, into->keep - into->head_used);
    if (first > 0 && holds(&into->head, into->keep)) {
        memcpy(into->head + into->head_used, data, first);
        into->head_used += first;
    }
    data += first;
    count -= first;
    if (count == 0 || !into->ends || !holds(&into->tail, into->keep)) {
        return;
    }
    if (count > into->keep) { /* only the last keep bytes can survive */
        data += count - into->keep;
        count = into->keep;
    }
    const size_t before_wrap = Py_MIN(count, into->keep - into->tail_at);
    memcpy(into->tail + into->tail_at, data, before_wrap);
    memcpy(into->tail, data + before_wrap, count - before_wrap);
    into->tail_at = (into->tail_at + count) % into->keep;
    into->tail_used = Py_MIN(into->keep, into->tail_used + count);
}

static void
finish(struct step *step, enum ending ending)
{
    if (step->ending == RUNNING) {
        step->ending = ending;
    }
    if (ending != ANSWERED) { /* every other ending ends the session */
        syscall(SYS_pidfd_send_signal, step->init, SIGKILL, NULL, 0);
    }
}

/* A failure of this process, not of the session. */
static void
step_fail(struct step *step, int error)
{
    step->report.detail = error;
    finish(step, HOST_FAILED);
}

/* Passes output to the listener. One that raises is not called again; the step goes on. */
static void
call_listener(struct step *step, int stream, const char *data, Py_ssize_t count)
{
    PyEval_RestoreThread(step->waiting);
    PyObject *answer = PyObject_CallFunction(step->listener, "iy#", stream, data, count);
    if (answer == NULL) {
        step->listener = NULL;
    }
    Py_XDECREF(answer);
    step->waiting = PyEval_SaveThread();
}

/* Reads the available data. At end of file the channel is removed from the poll. */
static void
drain_stream(struct step *step, int channel, struct capture *into, uint64_t at_most)
{
    char chunk[CHUNK];
    uint64_t num_read = 0;
    while (step->fds[channel] >= 0 && num_read < at_most) {
        const ssize_t count = read(step->fds[channel], chunk, sizeof chunk);
        if (count > 0) {
            capture_bytes(into, chunk, (size_t)count);
            if (step->listener != NULL && into != &step->background) {
                call_listener(step, channel - OUT, chunk, count);
            }
            num_read += (uint64_t)count;
        } else if (count == 0 || errno != EAGAIN) {
            step->fds[channel] = -1;
        }
        if (count < (ssize_t)sizeof chunk) {
            return;
        }
    }
}

static void
read_output(struct step *step, int channel)
{
    struct capture *into = &step->streams[channel - OUT];
    drain_stream(step, channel, into, step->output_max);
    if (step->streams[0].total + step->streams[1].total > step->output_max) {
        finish(step, OUTPUT_LIMIT);
    }
}

/* Whether a descriptor has data, or the process of a pidfd has ended. */
static int
can_read(int fd)
{
    struct pollfd one = {.fd = fd, .events = POLLIN};
    return poll(&one, 1, 0) > 0 && (one.revents & POLLIN) != 0;
}

static void send_request(struct step *step);

static void
interrupt_code(struct step *step)
{
    step->interrupted = 1;
    step->deadline += step->grace;
    syscall(SYS_pidfd_send_signal, step->interpreter, SIGINT, NULL, 0);
}

/* Passes an answer to on_answer(). If that returns a request, the step goes on with it. Returns
 * whether the step goes on or has failed. */
static int
goes_on(struct step *step)
{
    PyEval_RestoreThread(step->waiting);
    PyObject *next =
        PyObject_CallFunction(step->on_answer, "y#O", step->answer, (Py_ssize_t)step->answer_used,
                              step->interrupted ? Py_True : Py_False);
    const int more = next != NULL && next != Py_None;
    if (more) {
        PyBuffer_Release(&step->request);
    }
    if (more && PyObject_GetBuffer(next, &step->request, PyBUF_SIMPLE) == 0) {
        free(step->answer);
        step->answer = NULL;
        step->answer_used = step->answer_bytes = step->head_used = step->sent = 0;
        step->fds[REQUEST] = step->request_fd;
        step->id++;
    }
    Py_XDECREF(next);
    const int failed = PyErr_Occurred() != NULL;
    step->waiting = PyEval_SaveThread();
    if (failed) {
        finish(step, LOST);
    } else if (more && !step->interrupted && seconds() >= step->deadline) {
        interrupt_code(step); /* the time ended during the call */
    }
    if (more && step->ending == RUNNING) {
        send_request(step);
    }
    return more || failed;
}

static void
take_answer(struct step *step)
{
    uint32_t id;
    memcpy(&id, step->answer, sizeof id);
    if (id != step->id || can_read(step->fds[RESPONSE])) { /* forged or more than one answer */
        finish(step, PROTOCOL);
        return;
    }
    /* The interpreter flushes before it answers, so its output is in the pipes. */
    read_output(step, OUT);
    read_output(step, ERR);
    if (step->ending == RUNNING && (step->on_answer == NULL || !goes_on(step))) {
        finish(step, ANSWERED);
    }
}

/* Reads from the response pipe once. Returns the bytes read, 0 if there are none now. */
static size_t
read_response(struct step *step, char *into, size_t size)
{
    const ssize_t count = read(step->fds[RESPONSE], into, size);
    if (count > 0) {
        return (size_t)count;
    }
    if (count == 0 || errno != EAGAIN) {
        /* The session closed it. If the interpreter is ending, PID 1 reports that soon. */
        step->fds[RESPONSE] = -1;
        step->response_closed = 1;
        step->deadline = Py_MIN(step->deadline, seconds() + step->grace);
    }
    return 0;
}

static void
read_answer(struct step *step)
{
    if (step->head_used < sizeof step->head) {
        step->head_used +=
            read_response(step, step->head + step->head_used, sizeof step->head - step->head_used);
        if (step->head_used < sizeof step->head) {
            return;
        }
        uint32_t length;
        memcpy(&length, step->head, sizeof length);
        if (length < 8 || length > step->answer_max) {
            finish(step, PROTOCOL);
            return;
        }
        step->answer_bytes = length;
        step->answer = malloc(length);
        if (step->answer == NULL) {
            step_fail(step, ENOMEM);
            return;
        }
    }
    while (step->answer_used < step->answer_bytes) {
        const size_t count = read_response(step, step->answer + step->answer_used,
                                           step->answer_bytes - step->answer_used);
        if (count == 0) {
            return;
        }
        step->answer_used += count;
    }
    take_answer(step);
}

static void
read_status(struct step *step)
{
    struct sandbox_report report;
    const ssize_t count = recv(step->fds[STATUS], &report, sizeof report, MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    if (count < 0 && errno != ECONNRESET) { /* ECONNRESET: PID 1 ended with an unread order */
        step_fail(step, errno);
        return;
    }
    if (count == (ssize_t)sizeof report) {
        step->report = report;
    }
    read_output(step, OUT);
    read_output(step, ERR);
    finish(step, count != (ssize_t)sizeof report            ? LOST
                 : step->report.kind == SANDBOX_REPORT_EXIT ? EXITED
                                                            : SETUP_FAILED);
}

static void
send_request(struct step *step)
{
    while (step->sent < (size_t)step->request.len) {
        const ssize_t count =
            write(step->fds[REQUEST], (const char *)step->request.buf + step->sent,
                  (size_t)step->request.len - step->sent);
        if (count < 0) {
            if (errno != EAGAIN) { /* the session closed it; the other channels show its end */
                step->fds[REQUEST] = -1;
            }
            return;
        }
        step->sent += (size_t)count;
    }
    step->fds[REQUEST] = -1; /* sent completely: remove it from the poll */
}

static void
step_begin(struct step *step)
{
    step->started = seconds();
    step->deadline = step->started + step->timeout;
    drain_stream(step, OUT, &step->background, step->output_max);
    drain_stream(step, ERR, &step->background, step->output_max);
    if (can_read(step->fds[RESPONSE])) {
        finish(step, PROTOCOL);
        return;
    }
    send_request(step);
}

static void
take(struct step *step, int channel)
{
    switch (channel) {
    case REQUEST:
        send_request(step);
        break;
    case RESPONSE:
        read_answer(step);
        break;
    case STATUS:
        read_status(step);
        break;
    default:
        read_output(step, channel);
    }
}

/* Runs Python's signal handlers. One that raises (Ctrl-C) ends the step and the session, because
 * the code would run on. */
static void
handle_signals(struct step *step)
{
    PyEval_RestoreThread(step->waiting);
    if (PyErr_CheckSignals() < 0) {
        finish(step, LOST);
    }
    step->waiting = PyEval_SaveThread();
}

/* Waits up to left seconds for data and handles it. */
static void
poll_once(struct step *step, double left)
{
    struct pollfd polled[NUM_CHANNELS];
    for (int i = 0; i < NUM_CHANNELS; i++) {
        polled[i] = (struct pollfd){.fd = step->fds[i], .events = i == REQUEST ? POLLOUT : POLLIN};
    }
    /* at most 0.25 s at a time: a signal just before the call does not interrupt it */
    const struct timespec wait = {.tv_sec = 0, .tv_nsec = (long)(Py_MIN(left, 0.25) * 1e9)};
    const int count = ppoll(polled, NUM_CHANNELS, &wait, NULL);
    if ((count < 0 && errno == EINTR) || (count == 0 && left > 0)) {
        handle_signals(step);
    } else if (count < 0) {
        step_fail(step, errno);
    }
    /* Output before answer before status, so that all output is read before the step ends. */
    static const int order[NUM_CHANNELS] = {OUT, ERR, REQUEST, RESPONSE, STATUS};
    for (int i = 0; i < NUM_CHANNELS && count > 0 && step->ending == RUNNING; i++) {
        const int events = polled[order[i]].revents;
        if (events & POLLNVAL) { /* another thread of this process has closed the descriptor */
            step_fail(step, EBADF);
        } else if (events != 0) {
            take(step, order[i]);
        }
    }
}

/* The deadline has passed: interrupt the code first, then end the session. But poll once more
 * before: this process may have been stopped for longer than the code took. */
static void
step_expire(struct step *step)
{
    poll_once(step, 0);
    if (step->ending != RUNNING) {
        return;
    }
    if (step->response_closed && !step->awaits_report && can_read(step->interpreter)) {
        step->awaits_report = 1; /* PID 1 reports how it ended, on a busy machine not at once */
        step->deadline += REPORT_PATIENCE_S;
        return;
    }
    if (step->response_closed) {
        finish(step, step->awaits_report ? LOST : PROTOCOL);
        return;
    }
    if (step->interrupted) {
        finish(step, KILLED_AT_DEADLINE);
        return;
    }
    interrupt_code(step);
}

static PyObject *
capture_tuple(const struct capture *stream)
{
    const size_t unwrapped = stream->tail_used < stream->keep ? 0 : stream->tail_at;
    PyObject *tail = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)stream->tail_used);
    if (tail == NULL) {
        return NULL;
    }
    if (stream->tail_used > 0) {
        char *to = PyBytes_AsString(tail);
        memcpy(to, stream->tail + unwrapped, stream->tail_used - unwrapped);
        memcpy(to + stream->tail_used - unwrapped, stream->tail, unwrapped);
    }
    return Py_BuildValue("y#NK", stream->head ? stream->head : "", (Py_ssize_t)stream->head_used,
                         tail, (unsigned long long)stream->total);
}

static PyObject *
step_result(const struct step *step)
{
    PyObject *out = capture_tuple(&step->streams[0]);
    PyObject *err = out ? capture_tuple(&step->streams[1]) : NULL;
    if (err == NULL) {
        Py_XDECREF(out);
        return NULL;
    }
    return Py_BuildValue(
        "iOdNNy#y#iLi", (int)step->ending, step->interrupted ? Py_True : Py_False,
        seconds() - step->started, out, err, step->background.head ? step->background.head : "",
        (Py_ssize_t)step->background.head_used, step->ending == ANSWERED ? step->answer : NULL,
        (Py_ssize_t)step->answer_used, step->report.value, (long long)step->report.cpu_us,
        step->report.detail);
}

/* run_step(channels, pidfds, request, id, timeout_s, grace_s, keep, output_max, answer_max,
 * listener, on_answer): run a step of a session; blocks without the GIL until it ends. Arguments
 * and result are StepArguments and RawStep of sandbox/session/step_result.py. Keeps the first and
 * last keep bytes of each stream; more than output_max bytes in all end the session. An exception
 * of a listener is raised after the step, one of a signal handler (Ctrl-C) at once, after the
 * session was killed. */
static PyObject *
run_step(PyObject *Py_UNUSED(module), PyObject *args)
{
    struct step step = {.background.keep = BACKGROUND_KEPT};
    struct capture *stream = step.streams;
    int *fds = step.fds;
    if (!PyArg_ParseTuple(args, "(iiiii)(ii)y*IddnKnOO", &fds[REQUEST], &fds[RESPONSE], &fds[OUT],
                          &fds[ERR], &fds[STATUS], &step.init, &step.interpreter, &step.request,
                          &step.id, &step.timeout, &step.grace, &stream->keep, &step.output_max,
                          &step.answer_max, &step.listener, &step.on_answer)) {
        return NULL;
    }
    step.request_fd = fds[REQUEST];
    step.on_answer = step.on_answer == Py_None ? NULL : step.on_answer;
    step.listener = step.listener == Py_None ? NULL : step.listener;
    stream->ends = 1;
    stream[1] = stream[0];
    step.waiting = PyEval_SaveThread();
    step_begin(&step);
    while (step.ending == RUNNING) {
        const double left = step.deadline - seconds();
        if (left <= 0) {
            step_expire(&step);
        } else {
            poll_once(&step, left);
        }
    }
    PyEval_RestoreThread(step.waiting);
    PyObject *result = PyErr_Occurred() ? NULL : step_result(&step);
    PyBuffer_Release(&step.request);
    char *const buffers[] = {stream[0].head, stream[0].tail,       stream[1].head,
                             stream[1].tail, step.background.head, step.answer};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) {
        free(buffers[i]);
    }
    return result;
}

PyMethodDef agentgrpo_sandbox_step_methods[] = {
    {"sandbox_run_step", run_step, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

/* Counts the memory of a process and its descendants, without the GIL: processes that fork and end
 * constantly would be gone before a Python thread gets to read the next file. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "methods.h"

enum { ROUNDS = 4, TRIES = 3 };

struct pids {
    int *at;
    size_t count, room;
};

static int
push(struct pids *pids, int pid)
{
    if (pids->count == pids->room) {
        const size_t room = pids->room ? 2 * pids->room : 64;
        int *at = realloc(pids->at, room * sizeof *at);
        if (at == NULL) {
            return -1;
        }
        pids->at = at;
        pids->room = room;
    }
    pids->at[pids->count++] = pid;
    return 0;
}

static int
holds(const struct pids *pids, int pid)
{
    for (size_t i = 0; i < pids->count; i++) {
        if (pids->at[i] == pid) {
            return 1;
        }
    }
    return 0;
}

/* Whether the last call failed because the process has ended. */
static int
gone(void)
{
    return errno == ENOENT || errno == ESRCH;
}

/* Reads a file of /proc as a string, cut to the size of text. Returns 0, or -1. */
static int
read_text(const char *path, char *text, size_t size)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return -1;
    }
    size_t got = 0;
    ssize_t more;
    while ((more = read(fd, text + got, size - 1 - got)) > 0) {
        got += (size_t)more;
    }
    text[got] = '\0';
    const int failed = errno;
    close(fd);
    errno = failed;
    return more < 0 ? -1 : 0;
}

/* Calls visit with each thread of a process, the main one first. Returns 0, also if it has ended,
 * or -1. */
static int
each_thread(int pid, int (*visit)(int pid, int thread, void *context), void *context)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *directory = opendir(path);
    if (directory == NULL) {
        return gone() ? 0 : -1;
    }
    int failed = 0;
    const struct dirent *entry;
    while (!failed && (entry = readdir(directory)) != NULL) {
        const int thread = atoi(entry->d_name); /* 0: . and .. */
        failed = thread != 0 && visit(pid, thread, context) < 0 && !gone();
    }
    const int error = errno;
    closedir(directory);
    errno = error;
    return failed ? -1 : 0;
}

struct listing {
    struct pids *pids;
    const struct pids *skipped;
};

static int
add_children(int pid, int thread, void *context)
{
    const struct listing *listing = context;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", pid, thread);
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return -1;
    }
    int failed = 0;
    for (int child; !failed && fscanf(file, "%d", &child) == 1;) {
        failed = !holds(listing->skipped, child) && push(listing->pids, child) < 0;
    }
    fclose(file);
    return failed ? -1 : 0;
}

/* Lists a process and its descendants, without those in skipped, until there are more than most.
 * Returns 0, or -1. */
static int
list_tree(int root, size_t most, struct pids *pids, const struct pids *skipped)
{
    struct listing listing = {pids, skipped};
    pids->count = 0;
    int failed = push(pids, root);
    for (size_t i = 0; !failed && i < pids->count && pids->count <= most; i++) {
        failed = each_thread(pids->at[i], add_children, &listing);
    }
    return failed;
}

/* KiB of a process's memory without file-backed pages, from the files of one of its threads. Pages
 * shared with its parent count in full; if exact, each is divided by the number of processes that
 * share it, unless this user lacks the permission. 0 if it has ended, -1 with errno. */
static long
thread_kib(int pid, int thread, int exact)
{
    char path[64], text[4096];
    const char *name = exact ? "smaps_rollup" : "statm";
    snprintf(path, sizeof path, "/proc/%d/task/%d/%s", pid, thread, name);
    if (read_text(path, text, sizeof text) < 0) {
        const int denied = errno == EACCES || errno == EPERM;
        return gone() ? 0 : exact && denied ? thread_kib(pid, thread, 0) : -1;
    }
    if (!exact) {
        long resident = 0, shared = 0;
        sscanf(text, "%*d %ld %ld", &resident, &shared);
        return (resident - shared) * (sysconf(_SC_PAGESIZE) >> 10);
    }
    long kib = 0;
    for (const char *line = text; line != NULL; line = strchr(line, '\n')) {
        line += *line == '\n';
        long part = 0;
        if (sscanf(line, "Pss: %ld", &part) == 1 || sscanf(line, "SwapPss: %ld", &part) == 1) {
            kib += part;
        }
    }
    return kib;
}

struct measurement {
    long kib;
    int exact;
};

/* Tries the next thread after 0: the kernel has no count for a main thread that has ended while
 * others run. */
static int
measure_thread(int pid, int thread, void *context)
{
    struct measurement *measurement = context;
    if (measurement->kib == 0) {
        measurement->kib = thread_kib(pid, thread, measurement->exact);
    }
    return measurement->kib < 0 ? -1 : 0;
}

/* Sums the processes that are not in counted, and adds them to it. Returns KiB, or -1. */
static long
sum_memory(const struct pids *pids, int exact, struct pids *counted)
{
    long total = 0;
    for (size_t i = 0; i < pids->count; i++) {
        if (!holds(counted, pids->at[i])) {
            struct measurement measurement = {0, exact};
            if (each_thread(pids->at[i], measure_thread, &measurement) < 0 ||
                push(counted, pids->at[i]) < 0) {
                return -1;
            }
            total += measurement.kib;
        }
    }
    return total;
}

/* Returns KiB, or -1 with errno. The exact count repeats the listing for processes that appear
 * while it runs: one that forks and ends passes its memory to its child. Then an ended process can
 * count together with its successor, so the smallest of several tries is used. */
static long
tree_memory(int root, size_t most, long enough, struct pids *pids, struct pids *counted)
{
    long least = list_tree(root, most, pids, counted) < 0 ? -1 : sum_memory(pids, 0, counted);
    for (int i = 0; i < TRIES && least >= 0 && least > enough; i++) {
        long total = 0;
        counted->count = 0;
        for (int round = 0; round < ROUNDS; round++) {
            const int failed = list_tree(root, most, pids, counted);
            const long more = failed ? -1 : sum_memory(pids, 1, counted);
            if (more < 0) {
                return -1;
            }
            total += more;
        }
        least = total < least ? total : least;
    }
    return least;
}

/* tree_kib(root, most, enough_kib): KiB of memory of a process and its descendants (about `most`
 * of them at most), without file-backed pages. Up to enough_kib the result is an upper bound, in
 * which pages that forks share count for each; above it each page counts once. Raises OSError. */
static PyObject *
tree_kib(PyObject *Py_UNUSED(module), PyObject *args)
{
    int root;
    Py_ssize_t most;
    long enough, kib;
    if (!PyArg_ParseTuple(args, "inl", &root, &most, &enough)) {
        return NULL;
    }
    struct pids pids = {0}, counted = {0};
    Py_BEGIN_ALLOW_THREADS
        kib = tree_memory(root, (size_t)most, enough, &pids, &counted);
        const int error = errno;
        free(pids.at);
        free(counted.at);
        errno = error;
    Py_END_ALLOW_THREADS
    return kib < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyLong_FromLong(kib);
}

PyMethodDef agentgrpo_sandbox_memory_methods[] = {
    {"sandbox_tree_kib", tree_kib, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

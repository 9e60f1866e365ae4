/* Small things every topic file needs: buffers checked by name, comparison of token runs. */
#ifndef AGENTGRPO_TOKENS_H
#define AGENTGRPO_TOKENS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Marks a function that is compiled for wide vectors too; the loader takes what the machine has. */
#if defined(__x86_64__) && defined(__gnu_linux__)
#define TOKENS_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define TOKENS_WIDE
#endif

/* How many leading elements a and b share, n at most. */
static inline int32_t
tokens_first_difference(const int32_t *a, const int32_t *b, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        if (a[i] != b[i]) {
            return i;
        }
    }
    return n;
}

/* The index of the first negative id, or n. */
static inline Py_ssize_t
tokens_first_negative(const int32_t *ids, Py_ssize_t n)
{
    int32_t all = 0; /* a pass without branches first, which the compiler vectorises */
    for (Py_ssize_t i = 0; i < n; i++) {
        all |= ids[i];
    }
    Py_ssize_t i = all < 0 ? 0 : n;
    while (i < n && ids[i] >= 0) {
        i++;
    }
    return i;
}

/* The index of the first element that is nan or infinite, or n. */
static inline Py_ssize_t
tokens_first_not_finite(const float *logp, Py_ssize_t n)
{
    const uint32_t exponent = 0x7f800000; /* all ones in nan and infinity */
    uint32_t found = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, logp + i, sizeof bits);
        found |= (bits & exponent) == exponent;
    }
    Py_ssize_t i = found ? 0 : n;
    while (i < n && isfinite(logp[i])) {
        i++;
    }
    return i;
}

/* Fills view with obj's 1-d contiguous memory of format 'i' (int32) or 'f' (float32). Returns 0, or
 * -1 with an exception that begins with name, and view not held. At most INT32_MAX elements.
 */
int tokens_get_buffer(PyObject *obj, char format, Py_buffer *view, const char *name);

#endif

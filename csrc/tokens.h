/* Small things every topic file needs: buffers checked by name, comparison of token runs. */
#ifndef AGENTGRPO_TOKENS_H
#define AGENTGRPO_TOKENS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

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

/* Fills view with obj's 1-d contiguous memory of format 'i' (int32) or 'f' (float32), writable or
 * not. Returns 0, or -1 with an exception that begins with the printf-formatted name, and view not
 * held. At most INT32_MAX elements.
 */
int tokens_get_buffer(PyObject *obj, char format, int writable, Py_buffer *view, const char *name,
                      ...);

#endif

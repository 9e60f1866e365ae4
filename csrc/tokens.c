/* Buffers checked by name (tokens.h). */
#include "tokens.h"

/* Returns what is wrong with view, or NULL. */
static const char *
fault(const Py_buffer *view, char format)
{
    if (view->ndim != 1) {
        return "not 1-d";
    }
    /* both types are four bytes long; another ABI may spell them otherwise */
    if (view->itemsize != 4 || view->format[0] != format || view->format[1] != '\0') {
        return "of another type";
    }
    if (view->shape[0] > 1 && view->strides[0] != view->itemsize) {
        return "not contiguous";
    }
    return view->shape[0] > INT32_MAX ? "longer than 2**31 - 1" : NULL;
}

int
tokens_get_buffer(PyObject *obj, char format, Py_buffer *view, const char *name)
{
    const int has_buffer = PyObject_CheckBuffer(obj);
    if (has_buffer && PyObject_GetBuffer(obj, view, PyBUF_FORMAT | PyBUF_STRIDES) < 0) {
        return -1;
    }
    const char *why = has_buffer ? fault(view, format) : NULL;
    if (has_buffer && why == NULL) {
        return 0;
    }
    const char *expected = format == 'i' ? "int32" : "float32";
    if (!has_buffer) {
        PyErr_Format(PyExc_TypeError, "%s: expected a 1-d %s array, got %R", name, expected,
                     (PyObject *)Py_TYPE(obj));
        return -1;
    }
    PyErr_Format(PyExc_ValueError,
                 "%s: expected a contiguous 1-d %s array, got one that is %s (%d-d, format '%s')",
                 name, expected, why, view->ndim, view->format);
    PyBuffer_Release(view);
    return -1;
}

/* Python lists, as an inference engine returns them, become the bytes of int32 and float32 arrays.
 */
#include "tokens.h"

#include "methods.h"

/* Returns a bytearray of 4 bytes per element of list, uninitialised, or NULL if it is not a list.
 */
static PyObject *
allocate_for(PyObject *list)
{
    if (!PyList_Check(list)) {
        return PyErr_Format(PyExc_TypeError, "expected a list, got %R", (PyObject *)Py_TYPE(list));
    }
    return PyByteArray_FromStringAndSize(NULL, 4 * PyList_Size(list));
}

PyDoc_STRVAR(
    ids_from_list_doc,
    "ids_from_list($module, ids, /)\n"
    "--\n"
    "\n"
    "The token ids of a list as the bytes of an int32 array.\n"
    "\n"
    "Raises TypeError for anything but a list of ints, ValueError for one not in [0, 2**31).");

static PyObject *
ids_from_list(PyObject *Py_UNUSED(module), PyObject *list)
{
    PyObject *result = allocate_for(list);
    if (result == NULL) {
        return NULL;
    }
    int32_t *out = (int32_t *)PyByteArray_AsString(result);
    const Py_ssize_t size = PyList_Size(list);
    for (Py_ssize_t i = 0; i < size; i++) {
        const Py_ssize_t value = PyLong_AsSsize_t(PyList_GetItem(list, i));
        if (value < 0 || value > INT32_MAX) {
            if (PyErr_Occurred() == NULL || PyErr_ExceptionMatches(PyExc_OverflowError)) {
                PyErr_Format(PyExc_ValueError, "ids[%zd] is not in [0, 2**31)", i);
            }
            Py_DECREF(result);
            return NULL;
        }
        out[i] = (int32_t)value;
    }
    return result;
}

PyDoc_STRVAR(logprobs_from_list_doc,
             "logprobs_from_list($module, logprobs, /)\n"
             "--\n"
             "\n"
             "The log-probabilities of a list as the bytes of a float32 array.\n"
             "\n"
             "Raises TypeError for anything but a list of floats, ValueError for one not finite.");

static PyObject *
logprobs_from_list(PyObject *Py_UNUSED(module), PyObject *list)
{
    PyObject *result = allocate_for(list);
    if (result == NULL) {
        return NULL;
    }
    float *out = (float *)PyByteArray_AsString(result);
    const Py_ssize_t size = PyList_Size(list);
    for (Py_ssize_t i = 0; i < size; i++) {
        const double value = PyFloat_AsDouble(PyList_GetItem(list, i));
        if (value == -1.0 && PyErr_Occurred() != NULL) {
            Py_DECREF(result);
            return NULL;
        }
        out[i] = (float)value;
    }
    const Py_ssize_t bad = tokens_first_not_finite(out, size);
    if (bad < size) {
        PyErr_Format(PyExc_ValueError, "logprobs[%zd] is not finite", bad);
        Py_CLEAR(result);
    }
    return result;
}

PyMethodDef agentgrpo_ingest_methods[] = {
    {"ids_from_list", ids_from_list, METH_O, ids_from_list_doc},
    {"logprobs_from_list", logprobs_from_list, METH_O, logprobs_from_list_doc},
    {NULL, NULL, 0, NULL},
};

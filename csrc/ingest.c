/* Python lists, as an inference engine returns them, become the bytes of int32 and float32 arrays.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>

#include "methods.h"

/* Returns a bytearray of 4 bytes per element of list, uninitialised, and its size in *size. */
static PyObject *
allocate_for(PyObject *list, Py_ssize_t *size)
{
    if (!PyList_Check(list)) {
        return PyErr_Format(PyExc_TypeError, "expected a list, got %R", (PyObject *)Py_TYPE(list));
    }
    *size = PyList_Size(list);
    return PyByteArray_FromStringAndSize(NULL, 4 * *size);
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
    Py_ssize_t size;
    PyObject *result = allocate_for(list, &size);
    if (result == NULL) {
        return NULL;
    }
    int32_t *out = (int32_t *)PyByteArray_AsString(result);
    for (Py_ssize_t i = 0; i < size; i++) {
        PyObject *item = PyList_GetItem(list, i); /* NULL: an item's __index__ shortened the list */
        int overflow = 0;
        const long value = item == NULL ? -1 : PyLong_AsLongAndOverflow(item, &overflow);
        if (value < 0 || value > INT32_MAX || overflow != 0) {
            if (PyErr_Occurred() == NULL) {
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
    Py_ssize_t size;
    PyObject *result = allocate_for(list, &size);
    if (result == NULL) {
        return NULL;
    }
    float *out = (float *)PyByteArray_AsString(result);
    for (Py_ssize_t i = 0; i < size; i++) {
        PyObject *item = PyList_GetItem(list, i);
        const double value = item == NULL ? -1.0 : PyFloat_AsDouble(item);
        out[i] = (float)value;
        if (!isfinite(out[i]) || (value == -1.0 && PyErr_Occurred() != NULL)) {
            if (PyErr_Occurred() == NULL) {
                PyErr_Format(PyExc_ValueError, "logprobs[%zd] is not finite", i);
            }
            Py_DECREF(result);
            return NULL;
        }
    }
    return result;
}

PyMethodDef agentgrpo_ingest_methods[] = {
    {"ids_from_list", ids_from_list, METH_O, ids_from_list_doc},
    {"logprobs_from_list", logprobs_from_list, METH_O, logprobs_from_list_doc},
    {NULL, NULL, 0, NULL},
};

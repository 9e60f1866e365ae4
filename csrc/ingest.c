/* Lists of token ids, as an inference engine returns them, become the bytes of int32 arrays. */
#include "tokens.h"

#include "methods.h"

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
    if (!PyList_Check(list)) {
        return PyErr_Format(PyExc_TypeError, "expected a list, got %R", (PyObject *)Py_TYPE(list));
    }
    const Py_ssize_t size = PyList_Size(list);
    PyObject *result = PyByteArray_FromStringAndSize(NULL, 4 * size);
    if (result == NULL) {
        return NULL;
    }
    int32_t *out = (int32_t *)PyByteArray_AsString(result);
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

PyMethodDef agentgrpo_ingest_methods[] = {
    {"ids_from_list", ids_from_list, METH_O, ids_from_list_doc},
    {NULL, NULL, 0, NULL},
};

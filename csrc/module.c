/* The extension module agentgrpo._C: collects the functions and types of the topic files.
 *
 * Built against CPython's stable ABI (3.11), so that one binary works on every later Python.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "methods.h"

static int
add_all(PyObject *module)
{
    // clang-format off: one table per line
    PyMethodDef *const tables[] = {
        agentgrpo_sandbox_files_methods,
        agentgrpo_sandbox_landlock_methods,
        agentgrpo_sandbox_memory_methods,
        agentgrpo_sandbox_spawn_methods,
        agentgrpo_sandbox_step_methods,
    };
    // clang-format on
    for (size_t i = 0; i < sizeof tables / sizeof tables[0]; i++) {
        if (PyModule_AddFunctions(module, tables[i]) < 0) {
            return -1;
        }
    }
    PyObject *type = PyType_FromModuleAndSpec(module, &agentgrpo_plan_spec, NULL);
    const int failed = type == NULL || PyModule_AddType(module, (PyTypeObject *)type) < 0;
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, add_all},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "agentgrpo._C",
    .m_doc = "Hot loops of the rollout path and the sandbox's system calls, in C.",
    .m_size = 0,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__C(void)
{
    return PyModuleDef_Init(&definition);
}

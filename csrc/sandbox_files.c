/* Opens files of a session from the host, with two system calls that Python does not have. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/fsuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "methods.h"

/* open_in(root, path, flags, mode): open path as a process whose root directory is descriptor
 * root, and return the descriptor. Symbolic links, also absolute ones, resolve inside root; the
 * magic links of /proc do not resolve. Does not block; the descriptor is not inherited. Raises
 * OSError. */
static PyObject *
open_in(PyObject *Py_UNUSED(module), PyObject *args)
{
    int root, flags, mode;
    const char *path;
    if (!PyArg_ParseTuple(args, "iyii", &root, &path, &flags, &mode)) {
        return NULL;
    }
    const int creates = (flags & O_CREAT) != 0;
    struct open_how how = {
        .flags = (unsigned int)(flags | O_CLOEXEC | ((flags & O_PATH) ? 0 : O_NONBLOCK | O_NOCTTY)),
        .mode = creates ? (unsigned int)mode : 0,
        .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS,
    };
    const long fd = syscall(SYS_openat2, root, path, &how, sizeof how);
    if (fd < 0) {
        return PyErr_SetFromErrnoWithFilename(PyExc_OSError, path);
    }
    return PyLong_FromLong(fd);
}

/* act_as(uid): access files as this user and group, in this thread only. Returns the previous
 * user. For a root thread this also suspends the capabilities that override permissions. Raises
 * PermissionError if this thread is not allowed to. */
static PyObject *
act_as(PyObject *Py_UNUSED(module), PyObject *arg)
{
    const unsigned long uid = PyLong_AsUnsignedLong(arg);
    if (PyErr_Occurred()) {
        return NULL;
    }
    setfsgid((gid_t)uid); /* the group first: a non-root user cannot change it */
    const int previous = setfsuid((uid_t)uid);
    /* both calls return the previous id and no error: call them again to see whether it changed */
    if (setfsuid((uid_t)uid) != (int)uid || setfsgid((gid_t)uid) != (int)uid) {
        errno = EPERM;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyLong_FromLong(previous);
}

PyMethodDef agentgrpo_sandbox_files_methods[] = {
    {"sandbox_open_in", open_in, METH_VARARGS, NULL},
    {"sandbox_act_as", act_as, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

/* Landlock: restricts the files that a process without its own mount namespace can open.
 *
 * The kernel's headers may be older than the kernel, so the interface of linux/landlock.h is
 * repeated here. A version that does not know a right cannot deny it (see policy.CHANGES).
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "methods.h"
#include "sandbox.h"

enum { CREATE_RULESET = 444, ADD_RULE = 445, RESTRICT_SELF = 446 }; /* on every architecture */
enum { ASK_VERSION = 1, RULE_PATH_BENEATH = 1 };

enum {
    EXECUTE = 1 << 0,
    WRITE_FILE = 1 << 1,
    READ_FILE = 1 << 2,
    READ_DIR = 1 << 3,
    REFER = 1 << 13,     /* version 2 */
    TRUNCATE = 1 << 14,  /* version 3 */
    IOCTL_DEV = 1 << 15, /* version 5 */
    OF_VERSION_1 = (1 << 13) - 1,
    OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV,
    READABLE = EXECUTE | READ_FILE | READ_DIR,
};
enum { SCOPE_ABSTRACT_SOCKETS = 1 << 0, SCOPE_SIGNALS = 1 << 1 }; /* version 6 */

struct ruleset {
    uint64_t files, network, scoped;
};

struct rule {
    uint64_t access;
    int32_t parent;
} __attribute__((packed));

static int
landlock_version(void)
{
    return (int)syscall(CREATE_RULESET, NULL, 0, ASK_VERSION);
}

/* Adds a rule for a path; a path that does not exist needs none. */
static int
allow(int rules, const char *path, uint64_t access)
{
    const int fd = open(path, O_PATH | O_CLOEXEC);
    if (fd < 0) {
        return errno == ENOENT ? 0 : -1;
    }
    struct stat info;
    int failed = fstat(fd, &info);
    if (failed == 0) {
        const struct rule rule = {.access = S_ISDIR(info.st_mode) ? access : access & OF_FILES,
                                  .parent = fd};
        failed = (int)syscall(ADD_RULE, rules, RULE_PATH_BENEATH, &rule, 0);
    }
    const int error = errno;
    close(fd);
    errno = error;
    return failed;
}

static int
add_rules(int rules, const char *readable, const char *home, uint64_t handled)
{
    char path[4096];
    while (*readable != '\0') {
        const size_t length = strcspn(readable, ":");
        if (length >= sizeof path) {
            errno = ENAMETOOLONG;
            return -1;
        }
        memcpy(path, readable, length);
        path[length] = '\0';
        if (allow(rules, path, READABLE) < 0) {
            return -1;
        }
        readable += length + (readable[length] == ':');
    }
    /* not /dev/zero: shared memory from mapping it stays after it is unmapped (jail.py) */
    static const char *const devices[] = {"/dev/null", "/dev/full", "/dev/random", "/dev/urandom"};
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++) {
        if (allow(rules, devices[i], READ_FILE | WRITE_FILE) < 0) {
            return -1;
        }
    }
    return allow(rules, home, handled & ~(uint64_t)IOCTL_DEV);
}

int
sandbox_restrict_files(const char *readable, const char *home)
{
    const int version = landlock_version();
    if (version <= 0) {
        return 0;
    }
    struct ruleset ruleset = {.files = OF_VERSION_1 | (version >= 2 ? REFER : 0) |
                                       (version >= 3 ? TRUNCATE : 0) |
                                       (version >= 5 ? IOCTL_DEV : 0),
                              .scoped = SCOPE_ABSTRACT_SOCKETS | SCOPE_SIGNALS};
    /* the size of the fields that this version knows */
    const size_t size = version >= 6   ? sizeof ruleset
                        : version >= 4 ? offsetof(struct ruleset, scoped)
                                       : offsetof(struct ruleset, network);
    const int rules = (int)syscall(CREATE_RULESET, &ruleset, size, 0);
    if (rules < 0) {
        return -1;
    }
    const int failed = add_rules(rules, readable, home, ruleset.files) < 0 ||
                       prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 ||
                       syscall(RESTRICT_SELF, rules, 0) < 0;
    const int error = errno;
    close(rules);
    errno = error;
    return failed ? -1 : 0;
}

/* landlock_version(): the version of Landlock in this kernel; 0 if there is none. */
static PyObject *
get_version(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    const int version = landlock_version();
    return PyLong_FromLong(version > 0 ? version : 0);
}

PyMethodDef agentgrpo_sandbox_landlock_methods[] = {
    {"sandbox_landlock_version", get_version, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

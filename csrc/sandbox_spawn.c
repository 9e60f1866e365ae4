/* The jailed side of the sandbox: turns a clone of the zygote into a session.
 *
 * spawn_session() clones the (single-threaded, preloaded) zygote into new namespaces. The clone is
 * PID 1 of the session and never runs Python again. It mounts the session's file systems, drops
 * every privilege, forks the interpreter that runs untrusted code as PID 2, and then only reaps
 * children and reports how PID 2 ended, on a socket that PID 2 never has. So spawn_session()
 * returns twice: None in the zygote, True in PID 2.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/capability.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "methods.h"
#include "sandbox.h"

#define NAMESPACES                                                                                 \
    (CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS)

enum mode {
    MODE_USERNS, /* clone into new namespaces, user namespace included */
    MODE_ROOT,   /* the same without a user namespace, with one user id per session */
    MODE_BARE,   /* no namespaces: Landlock, the filter, limits; home_options is the working
                  * directory, tmp_options the readable paths, joined by ":" */
};
/* JAIL_ID of agentgrpo/sandbox/isolation/jail.py: the user id inside. */
enum { MAX_CGROUPS = 3, JAIL_ID = 65534 };
/* Capabilities of a session with an image, over its own user namespace: it owns its files. The host
 * checks for the same mask (spawner.py). */
enum {
    ROOT_CAPABILITIES = 1 << CAP_CHOWN | 1 << CAP_DAC_OVERRIDE | 1 << CAP_FOWNER | 1 << CAP_FSETID |
    1 << CAP_SETGID | 1 << CAP_SETUID | 1 << CAP_KILL | 1 << CAP_NET_BIND_SERVICE |
    1 << CAP_SYS_CHROOT
};
/* They also count for the owner of the namespace: 96000 would be all that the host's user has. */
enum { MAX_QUEUED_SIGNALS = 64 };

struct session_spec {
    int status, request, response, out, err;
    const char *home_options, *tmp_options, *shm_options;
    const char *layers;       /* of the image, relative to /sandbox/layers, topmost first, joined by
                               * ":"; "": the session has the machine's files */
    const char *directory;    /* working directory of the image */
    int cgroups[MAX_CGROUPS]; /* -1: none */
    unsigned long long address_space, processes, file_size;
    int niceness, mode, own_proc, own_network;
    int upper; /* directory of the changes to the image; -1: no image */
    unsigned int uid;
    struct sandbox_bounds bounds;
};

static int
has_image(const struct session_spec *spec)
{
    return spec->layers[0] != 0;
}

static int
write_file(const char *path, const char *text)
{
    const int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) {
        return -1;
    }
    const ssize_t written = write(fd, text, strlen(text));
    const int error = errno;
    close(fd);
    errno = error;
    return written < 0 ? -1 : 0;
}

static void
enter_user_namespace(const struct session_spec *spec)
{
    char map[64];
    const unsigned int inside = has_image(spec) ? 0 : JAIL_ID;
    PyOS_snprintf(map, sizeof map, "%u %u 1", inside, spec->uid);
    if (write_file("/proc/self/setgroups", "deny") < 0 ||
        write_file("/proc/self/uid_map", map) < 0 || write_file("/proc/self/gid_map", map) < 0 ||
        syscall(SYS_setresgid, inside, inside, inside) < 0 ||
        syscall(SYS_setresuid, inside, inside, inside) < 0) {
        sandbox_refuse(spec->status, SANDBOX_SETUP_USERS);
    }
}

/* Only the user that makes a user namespace can map itself into it, so the zygote takes the
 * session's user id while it clones. A change of user resets "dumpable" (access to its own
 * /proc/self) and the parent-death signal (it must end with nsjail), so both are set again. Returns
 * 0, or -1 with errno. */
static int
set_effective_user(unsigned int uid)
{
    if (uid == geteuid()) {
        return 0;
    }
    return syscall(SYS_setresgid, -1, uid, -1) < 0 || syscall(SYS_setresuid, -1, uid, -1) < 0 ||
                   prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) < 0 ||
                   prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) < 0
               ? -1
               : 0;
}

/* Mounts the template's tree with copy-on-write. The changes go to a tmpfs that the session's /tmp
 * hides afterwards; an empty file system hides the tree itself. Returns whether it failed. */
static int
mount_tree(const char *size, unsigned long plain)
{
    const char *dirs = "lowerdir=/sandbox/tree,upperdir=/tmp/1,workdir=/tmp/2,userxattr";
    return mount("tmpfs", "/tmp", "tmpfs", plain, size) < 0 || mkdir("/tmp/1", 0755) < 0 ||
           mkdir("/tmp/2", 0755) < 0 || mkdir("/home/user/repo", 0755) < 0 ||
           mount("overlay", "/home/user/repo", "overlay", plain, dirs) < 0 ||
           mount("tmpfs", "/sandbox/tree", "tmpfs", plain | MS_RDONLY, "size=4k") < 0;
}

/* Creates what an image may lack: its working directory, and /etc/hosts. Called after pivot_root,
 * so that no link of the image leads out of it. Returns whether it failed. */
static int
complete_image(const char *directory)
{
    static const char hosts[] = "127.0.0.1 localhost sandbox\n::1 localhost\n";
    char path[PATH_MAX];
    PyOS_snprintf(path, sizeof path, "%s/", directory);
    for (char *slash = strchr(path + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(path, 0755);
        *slash = '/';
    }
    struct stat info;
    mkdir("/etc", 0755);
    if (lstat("/etc/hosts", &info) < 0 || (S_ISREG(info.st_mode) && info.st_size == 0)) {
        const int fd = open("/etc/hosts", O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644);
        if (fd < 0 || write(fd, hosts, sizeof hosts - 1) < 0) {
            return -1;
        }
        close(fd);
    }
    return chdir(path);
}

/* Makes the image the root directory: its layers, and a tmpfs for the session's changes on top.
 * /dev is the jail's, /proc the session's. Returns whether it failed. */
static int
mount_image(struct session_spec *spec, unsigned long plain)
{
    static char options[8192];
    static const char *const dirs[] = {"proc", "dev"};
    static const char terminals[] = "newinstance,ptmxmode=0666,mode=0620,max=16";
    PyOS_snprintf(options, sizeof options, "userxattr,upperdir=/tmp/1,workdir=/tmp/2,lowerdir=%s",
                  spec->layers);
    if (strlen(options) >= 4095) { /* the kernel reads one page and would drop the last layers */
        errno = E2BIG;
        return -1;
    }
    if (mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, terminals) < 0 ||
        chdir("/sandbox/layers") < 0 ||
        mount("tmpfs", "/tmp", "tmpfs", plain, spec->home_options) < 0 ||
        mkdir("/tmp/1", 0755) < 0 || mkdir("/tmp/2", 0755) < 0 || mkdir("/tmp/3", 0755) < 0 ||
        mount("overlay", "/tmp/3", "overlay", plain, options) < 0 || chdir("/tmp/3") < 0) {
        return -1;
    }
    for (size_t i = 0; i < sizeof dirs / sizeof *dirs; i++) {
        struct stat info; /* mount() would follow a link; no process can change the entry yet */
        mkdir(dirs[i], 0755);
        if (lstat(dirs[i], &info) < 0 || !S_ISDIR(info.st_mode)) {
            errno = ENOTDIR;
            return -1;
        }
    }
    spec->upper = open("/tmp/1", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return spec->upper < 0 || mount("/dev", "dev", NULL, MS_BIND | MS_REC, NULL) < 0 ||
           mount("/proc", "proc", NULL, MS_MOVE, NULL) < 0 ||
           syscall(SYS_pivot_root, ".", ".") < 0 || umount2(".", MNT_DETACH) < 0 ||
           complete_image(spec->directory) < 0;
}

static void
mount_private_files(struct session_spec *spec)
{
    const unsigned long plain = MS_NOSUID | MS_NODEV;
    const int image = has_image(spec);
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
        (!image && (mount("tmpfs", "/home/user", "tmpfs", plain, spec->home_options) < 0 ||
                    (access("/sandbox/tree", F_OK) == 0 && mount_tree(spec->home_options, plain)) ||
                    mount("tmpfs", "/tmp", "tmpfs", plain, spec->tmp_options) < 0)) ||
        mount("tmpfs", "/dev/shm", "tmpfs", plain | MS_NOEXEC, spec->shm_options) < 0) {
        sandbox_refuse(spec->status, SANDBOX_SETUP_MOUNTS);
    }
    const unsigned long locked = plain | MS_NOEXEC | MS_RDONLY;
    const char *subset = image ? NULL : "subset=pid"; /* programs of an image read /proc/meminfo */
    const int failed = spec->own_proc ? mount("proc", "/proc", "proc", locked, subset)
                                      : mount("tmpfs", "/proc", "tmpfs", locked, "size=4k");
    if (failed < 0) {
        sandbox_refuse(spec->status, SANDBOX_SETUP_PROC);
    }
    if (image ? mount_image(spec, plain) : chdir("/home/user") < 0) {
        sandbox_refuse(spec->status, image ? SANDBOX_SETUP_IMAGE : SANDBOX_SETUP_MOUNTS);
    }
}

static void
raise_loopback(const struct session_spec *spec)
{
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP};
    const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || ioctl(fd, SIOCSIFFLAGS, &request) < 0) {
        sandbox_refuse(spec->status, SANDBOX_SETUP_NETWORK);
    }
    close(fd);
    if (spec->cgroups[0] < 0) {
        /* The watchdog counts each socket with these maxima. The writes fail where a container
         * runtime mounts /proc/sys read-only. */
        write_file("/proc/sys/net/ipv4/tcp_rmem", "4096 131072 212992");
        write_file("/proc/sys/net/ipv4/tcp_wmem", "4096 16384 212992");
    }
}

static void
limit(const struct session_spec *spec, __rlimit_resource_t resource, unsigned long long value)
{
    if (sandbox_lower_limit(resource, value) < 0) {
        sandbox_refuse(spec->status, SANDBOX_SETUP_LIMITS);
    }
}

static void
set_limits(const struct session_spec *spec)
{
    limit(spec, RLIMIT_AS, spec->address_space);
    limit(spec, RLIMIT_NPROC, spec->processes);
    limit(spec, RLIMIT_FSIZE, spec->file_size);
    limit(spec, RLIMIT_CORE, 1); /* at 0 the kernel still starts a core dump handler: core(5) */
    limit(spec, RLIMIT_MEMLOCK, 65536);
    limit(spec, RLIMIT_MSGQUEUE, 0);
    limit(spec, RLIMIT_SIGPENDING, MAX_QUEUED_SIGNALS);
    /* under nice(1) the inherited value may be higher, and cannot be lowered */
    if (getpriority(PRIO_PROCESS, 0) < spec->niceness &&
        setpriority(PRIO_PROCESS, 0, spec->niceness) < 0) {
        sandbox_refuse(spec->status, SANDBOX_SETUP_LIMITS);
    }
}

static void
drop_privileges(const struct session_spec *spec)
{
    const unsigned int retained = has_image(spec) ? ROOT_CAPABILITIES : 0;
    const int has_capabilities = spec->mode != MODE_BARE || geteuid() == 0;
    for (unsigned long capability = 0; has_capabilities; capability++) {
        if (capability < 32 && (retained >> capability & 1) != 0) {
            continue;
        }
        if (prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0) {
            if (errno == EINVAL && capability > 0) { /* one past the kernel's last capability */
                break;
            }
            sandbox_refuse(spec->status, SANDBOX_SETUP_PRIVILEGES);
        }
    }
    const int own_user = spec->mode == MODE_ROOT || (spec->mode == MODE_BARE && geteuid() == 0);
    if (own_user && (syscall(SYS_setgroups, 0, NULL) < 0 ||
                     syscall(SYS_setresgid, spec->uid, spec->uid, spec->uid) < 0 ||
                     syscall(SYS_setresuid, spec->uid, spec->uid, spec->uid) < 0)) {
        sandbox_refuse(spec->status, SANDBOX_SETUP_PRIVILEGES);
    }
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2] = {{retained, retained, retained}, {0, 0, 0}};
    if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) < 0 ||
        syscall(SYS_capset, &header, data) < 0 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0) {
        sandbox_refuse(spec->status, SANDBOX_SETUP_PRIVILEGES);
    }
}

/* Enters the session's control groups, through descriptors that the host opened with its rights. */
static void
enter_cgroups(const struct session_spec *spec)
{
    for (int i = 0; i < MAX_CGROUPS && spec->cgroups[i] >= 0; i++) {
        if (write(spec->cgroups[i], "0", 1) < 0) {
            sandbox_refuse(spec->status, SANDBOX_SETUP_CGROUP);
        }
    }
}

static void
enter_namespaces(struct session_spec *spec)
{
    if (spec->mode == MODE_USERNS) {
        enter_user_namespace(spec);
    }
    if (unshare(CLONE_NEWCGROUP) < 0) { /* hides the group's path, which has a pid of the machine */
        sandbox_refuse(spec->status, SANDBOX_SETUP_CGROUP);
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* after the change of user, which resets it */
    if (spec->own_network) {
        raise_loopback(spec);
    }
    mount_private_files(spec);
    if (sethostname("sandbox", 7) < 0) {
        sandbox_refuse(spec->status, SANDBOX_SETUP_NETWORK);
    }
}

/* Without namespaces: a process group that nothing can leave (the filter denies setsid), an init
 * that gets all orphans, and Landlock for files. */
static void
enter_group(const struct session_spec *spec)
{
    if (setsid() < 0 || prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) < 0) {
        sandbox_refuse(spec->status, SANDBOX_SETUP_USERS);
    }
    if (chdir(spec->home_options) < 0 ||
        sandbox_restrict_files(spec->tmp_options, spec->home_options) < 0) {
        sandbox_refuse(spec->status, SANDBOX_SETUP_MOUNTS);
    }
}

/* In PID 1: sets up the session. Returns only in PID 2. Control groups first, so that all memory of
 * the session counts; mounts before the privileges that they need are dropped. */
static void
run_session(struct session_spec *spec)
{
    signal(SIGCHLD, SIG_DFL); /* the zygote ignores it; that would discard exit statuses */
    enter_cgroups(spec);
    if (spec->mode != MODE_BARE) {
        enter_namespaces(spec);
    }
    set_limits(spec);
    drop_privileges(spec);
    if (spec->mode == MODE_BARE) {
        enter_group(spec);
    }
    prctl(PR_SET_DUMPABLE, 0);
    sigset_t child, before;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, &before);
    const pid_t interpreter = fork();
    if (interpreter < 0) {
        sandbox_refuse(spec->status, SANDBOX_SETUP_FORK);
    }
    if (interpreter > 0) {
        const int fds[] = {(int)syscall(SYS_pidfd_open, getpid(), 0),
                           (int)syscall(SYS_pidfd_open, interpreter, 0), spec->upper};
        if (fds[0] < 0 || fds[1] < 0) {
            sandbox_refuse(spec->status, SANDBOX_SETUP_FORK);
        }
        const struct sandbox_report ready = {.kind = SANDBOX_REPORT_READY};
        sandbox_report(spec->status, &ready, fds, spec->upper < 0 ? 2 : 3);
        sandbox_run_init(spec->status, interpreter, &spec->bounds);
    }
    sigprocmask(SIG_SETMASK, &before, NULL);
    prctl(PR_SET_DUMPABLE, 1);
    if (spec->mode != MODE_BARE) {
        setsid();
    }
    const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    const int sources[] = {null, spec->out, spec->err, spec->request, spec->response};
    sandbox_take_descriptors(spec->status, sources, 5, &spec->bounds);
    close(5); /* the status socket, open until here for failure reports */
}

/* spawn_session(channels, cgroups, files, limits, mode, uid, own_proc, own_network, filter): turn
 * a clone of this process into a session. Returns None in the zygote, True in PID 2. Failures of
 * the setup are reported on the first of channels (status, request, response, out, err). Raises
 * OSError if the clone fails, ValueError for a malformed filter or mode.
 *
 * files: mount options of home, tmp and shm, then layers and working directory of an image; without
 * namespaces the home directory, the readable paths joined by ':', and empty strings. limits:
 * address space, processes, bytes of a file, CPU seconds, open files, niceness. */
static PyObject *
spawn_session(PyObject *Py_UNUSED(module), PyObject *args)
{
    struct session_spec spec = {.upper = -1};
    Py_ssize_t filter_bytes;
    if (!PyArg_ParseTuple(args, "(iiiii)(iii)(sssss)(KKKKii)iIppy#", &spec.status, &spec.request,
                          &spec.response, &spec.out, &spec.err, &spec.cgroups[0], &spec.cgroups[1],
                          &spec.cgroups[2], &spec.home_options, &spec.tmp_options,
                          &spec.shm_options, &spec.layers, &spec.directory, &spec.address_space,
                          &spec.processes, &spec.file_size, &spec.bounds.cpu_s,
                          &spec.bounds.open_files, &spec.niceness, &spec.mode, &spec.uid,
                          &spec.own_proc, &spec.own_network, &spec.bounds.filter, &filter_bytes)) {
        return NULL;
    }
    if (filter_bytes == 0 || filter_bytes % 8 != 0 || filter_bytes / 8 > 4096) {
        PyErr_Format(PyExc_ValueError,
                     "filter: expected 1 to 4096 instructions of 8 bytes, got %zd bytes",
                     filter_bytes);
        return NULL;
    }
    if (spec.mode < MODE_USERNS || spec.mode > MODE_BARE) {
        return PyErr_Format(PyExc_ValueError, "mode: expected 0 to 2, got %d", spec.mode);
    }
    spec.bounds.filter_bytes = (size_t)filter_bytes;
    if (spec.mode == MODE_BARE) { /* the zygote reaps the orphans of a killed init */
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    }
    const unsigned int zygote = geteuid();
    if (spec.mode == MODE_USERNS && set_effective_user(spec.uid) < 0) {
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    PyOS_BeforeFork();
    const int namespaces = (spec.mode == MODE_BARE     ? 0
                            : spec.mode == MODE_USERNS ? NAMESPACES
                                                       : NAMESPACES & ~CLONE_NEWUSER) &
                           ~(spec.own_network ? 0 : CLONE_NEWNET);
    const long pid = syscall(SYS_clone, (unsigned long)(namespaces | SIGCHLD), 0, 0, 0, 0);
    if (pid != 0) {
        const int error = errno;
        PyOS_AfterFork_Parent();
        if (spec.mode == MODE_USERNS && set_effective_user(zygote) < 0) {
            return PyErr_SetFromErrno(PyExc_OSError);
        }
        if (pid < 0) {
            errno = error;
            return PyErr_SetFromErrno(PyExc_OSError);
        }
        Py_RETURN_NONE;
    }
    run_session(&spec);
    PyOS_AfterFork_Child();
    Py_RETURN_TRUE;
}

/* collapse(start, end): back the address range start to end by huge pages where the kernel can.
 * Returns the bytes. A fork then copies one page table entry instead of 512. */
static PyObject *
collapse(PyObject *Py_UNUSED(module), PyObject *args)
{
    enum { COLLAPSE = 25 }; /* MADV_COLLAPSE, Linux 6.1 */
    const unsigned long long huge = 2ULL << 20;
    unsigned long long start, end, done = 0;
    if (!PyArg_ParseTuple(args, "KK", &start, &end)) {
        return NULL;
    }
    for (unsigned long long at = (start + huge - 1) / huge * huge; at + huge <= end; at += huge) {
        done += madvise((void *)(uintptr_t)at, huge, COLLAPSE) == 0 ? huge : 0;
    }
    return PyLong_FromUnsignedLongLong(done);
}

PyMethodDef agentgrpo_sandbox_spawn_methods[] = {
    {"sandbox_collapse", collapse, METH_VARARGS, NULL},
    {"sandbox_spawn_session", spawn_session, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

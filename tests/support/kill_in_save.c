/* Kills a rank inside a save, at a counted system call. Preloaded into every process of a run; armed in one rank.
 *
 * FAULT_RANK   the RANK of the process that is armed; unset: all ranks are
 * FAULT_BELOW  calls that change what lies below this folder are counted
 * FAULT_FROM   and only from the first one on whose path contains this
 * FAULT_AT     the point at which the process is killed; 0: never
 * FAULT_HANG   if it is set, the thread waits there forever in place of that, as on a disk that hangs
 * FAULT_LOG    each point of rank 1 is a line in the file of this name and "-1"
 *
 * A call has two points: before it, where a write has done half of its work, and after it. The renaming of a shard from
 * its temporary name is not seen, as Rust's tempfile asks the kernel itself; the points before and after it are.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define DESCRIPTORS 4096

static const char *below, *from;
static long at, points;
static int armed, begun, log_file = -1;
static char *paths[DESCRIPTORS];

/* Read the environment: when the process begins, and again in a fork that has changed its own. */
__attribute__((constructor)) void arm_from_environment(void) {
    const char *rank = getenv("RANK"), *wanted = getenv("FAULT_RANK"), *log = getenv("FAULT_LOG");
    char log_path[PATH_MAX];
    below = getenv("FAULT_BELOW");
    from = getenv("FAULT_FROM");
    if (!rank || !below || !from || !log || (wanted && strcmp(rank, wanted))) return;
    at = getenv("FAULT_AT") ? atol(getenv("FAULT_AT")) : 0;
    snprintf(log_path, sizeof log_path, "%s-%s", log, rank);
    log_file = syscall(SYS_openat, AT_FDCWD, log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    armed = 1;
}

/* The path of a file by its folder's descriptor and its name; NULL where it is not below the folder. */
static const char *place(int folder, const char *name, char *room) {
    if (!armed || !name) return NULL;
    if (name[0] != '/' && folder >= 0 && folder < DESCRIPTORS && paths[folder]) {
        snprintf(room, PATH_MAX, "%s/%s", paths[folder], name);
        name = room;
    }
    return strncmp(name, below, strlen(below)) ? NULL : name;
}

static const char *place_of(int descriptor) {
    return armed && descriptor >= 0 && descriptor < DESCRIPTORS ? paths[descriptor] : NULL;
}

/* Count a point, and return whether the process is to die at it; unless half a write is to be done first, it does. */
static int dies(const char *call, const char *path, int at_once) {
    if (!path) return 0;
    if (!begun && !strstr(path, from)) return 0;
    begun = 1;
    long point = __atomic_add_fetch(&points, 1, __ATOMIC_SEQ_CST);
    char line[PATH_MAX + 64];
    int length = snprintf(line, sizeof line, "%s %s\n", call, path);
    syscall(SYS_write, log_file, line, length);
    if (point == at && getenv("FAULT_HANG")) for (;;) pause();
    if (point == at && at_once) kill(getpid(), SIGKILL);
    return point == at;
}

static void remember(int descriptor, const char *path) {
    if (descriptor < 0 || descriptor >= DESCRIPTORS) return;
    free(paths[descriptor]);
    paths[descriptor] = path ? strdup(path) : NULL;
}

#define REAL(type, name, ...) type (*real)(__VA_ARGS__) = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

static int opened(const char *symbol, int folder, const char *name, int flags, mode_t mode) {
    char room[PATH_MAX];
    const char *path = place(folder, name, room);
    int changes = flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC);
    if (changes) dies("before open", path, 1);
    REAL(int, symbol, int, const char *, int, ...);
    int descriptor = real(folder, name, flags, mode);
    if (armed) remember(descriptor, path);
    if (changes) dies("after open", path, 1);
    return descriptor;
}

static mode_t mode_in(int flags, va_list rest) {
    return flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
}

#define OPENS(name, symbol)                              \
    int name(const char *path, int flags, ...) {         \
        va_list rest;                                    \
        va_start(rest, flags);                           \
        mode_t mode = mode_in(flags, rest);              \
        va_end(rest);                                    \
        return opened(symbol, AT_FDCWD, path, flags, mode); \
    }
#define OPENS_AT(name)                                          \
    int name(int folder, const char *path, int flags, ...) {    \
        va_list rest;                                           \
        va_start(rest, flags);                                  \
        mode_t mode = mode_in(flags, rest);                     \
        va_end(rest);                                           \
        return opened(#name, folder, path, flags, mode);        \
    }

OPENS(open, "openat")
OPENS(open64, "openat64")
OPENS_AT(openat)
OPENS_AT(openat64)

int creat(const char *path, mode_t mode) { return open(path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return open64(path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

int close(int descriptor) {
    REAL(int, "close", int);
    if (place_of(descriptor)) remember(descriptor, NULL);
    return real(descriptor);
}

ssize_t write(int descriptor, const void *data, size_t size) {
    REAL(ssize_t, "write", int, const void *, size_t);
    const char *path = place_of(descriptor);
    int last = dies("half of write", path, 0);
    ssize_t written = real(descriptor, data, last ? size / 2 : size);
    if (last) kill(getpid(), SIGKILL);
    dies("after write", path, 1);
    return written;
}

#define WRITES_AT(name, offset_type)                                                   \
    ssize_t name(int descriptor, const void *data, size_t size, offset_type offset) {  \
        REAL(ssize_t, #name, int, const void *, size_t, offset_type);                  \
        const char *path = place_of(descriptor);                                       \
        int last = dies("half of write", path, 0);                                     \
        ssize_t written = real(descriptor, data, last ? size / 2 : size, offset);      \
        if (last) kill(getpid(), SIGKILL);                                             \
        dies("after write", path, 1);                                                  \
        return written;                                                                \
    }

WRITES_AT(pwrite, off_t)
WRITES_AT(pwrite64, off64_t)

/* What is done to a file or to a name, as a whole or not at all. */
#define CALL(name, path, parameters, arguments, ...) \
    int name parameters {                            \
        char room[PATH_MAX];                         \
        (void)room;                                  \
        const char *where = path;                    \
        REAL(int, #name, __VA_ARGS__);               \
        dies("before " #name, where, 1);             \
        int result = real arguments;                 \
        dies("after " #name, where, 1);              \
        return result;                               \
    }

#define AT_CWD(name) place(AT_FDCWD, name, room)

CALL(fsync, place_of(fd), (int fd), (fd), int)
CALL(fdatasync, place_of(fd), (int fd), (fd), int)
CALL(ftruncate, place_of(fd), (int fd, off_t size), (fd, size), int, off_t)
CALL(ftruncate64, place_of(fd), (int fd, off64_t size), (fd, size), int, off64_t)
CALL(mkdir, AT_CWD(name), (const char *name, mode_t mode), (name, mode), const char *, mode_t)
CALL(mkdirat, place(fd, name, room), (int fd, const char *name, mode_t mode), (fd, name, mode), int, const char *, mode_t)
CALL(unlink, AT_CWD(name), (const char *name), (name), const char *)
CALL(unlinkat, place(fd, name, room), (int fd, const char *name, int flags), (fd, name, flags), int, const char *, int)
CALL(rmdir, AT_CWD(name), (const char *name), (name), const char *)
CALL(rename, AT_CWD(old), (const char *old, const char *new), (old, new), const char *, const char *)
CALL(renameat, place(fd, old, room), (int fd, const char *old, int to, const char *new), (fd, old, to, new), int,
     const char *, int, const char *)
CALL(renameat2, place(fd, old, room), (int fd, const char *old, int to, const char *new, unsigned flags),
     (fd, old, to, new, flags), int, const char *, int, const char *, unsigned)

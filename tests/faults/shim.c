/* Counts the calls of a process that touch files below a folder, and spoils one of them.

   Loaded with LD_PRELOAD; it does nothing until `faults_arm` is called, after a fork, in the process to be
   attacked. What that process starts is attacked along with it, if the variable FAULTS_SHARED names the file
   of `faults_share`: all count in one shared page.
   io_uring, aio and direct system calls go past it. */

#define _GNU_SOURCE
#define _LARGEFILE64_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { COUNT, KILL_GROUP, KILL_SELF, FAIL, SHORT, TORN };
enum { DST = 1, SRC = 2 };
#define FILES 65536

struct shared {
    atomic_long count; /* of calls in scope */
    atomic_long struck;
    char call[32];
    char path[512];
    int scope, changing_only, action, number, persistent;
    long nth;
    char prefix[2][512]; /* of DST, of SRC */
};

static struct shared *shared;
static int armed;
static unsigned char kinds[FILES];

struct shared *faults_share(const char *file) {
    int fd = open(file, O_RDWR);
    if (fd < 0 || ftruncate(fd, sizeof *shared) != 0) return NULL;
    void *page = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return shared = page == MAP_FAILED ? NULL : page;
}

__attribute__((constructor)) static void join(void) {
    const char *file = getenv("FAULTS_SHARED");
    armed = file != NULL && faults_share(file) != NULL;
}

void faults_arm(const char *dst, const char *src, int in_scope, int only_changes, long strike, int what,
                int error, int for_good) {
    snprintf(shared->prefix[0], sizeof shared->prefix[0], "%s", dst);
    snprintf(shared->prefix[1], sizeof shared->prefix[1], "%s", src);
    shared->scope = in_scope;
    shared->changing_only = only_changes;
    shared->nth = strike;
    shared->action = what;
    shared->number = error;
    shared->persistent = for_good;
    armed = 1;
}

static int below(const char *path, const char *folder) {
    size_t n = strlen(folder);
    return n && strncmp(path, folder, n) == 0 && (path[n] == '/' || path[n] == 0);
}

static int kind_of_fd(int fd) { return fd >= 0 && fd < FILES ? kinds[fd] : 0; }

static int kind_of(int folder, const char *path) {
    char whole[4096], working[2048];
    if (!armed || path == NULL) return 0;
    if (path[0] != '/') {
        if (folder != AT_FDCWD) return kind_of_fd(folder);
        if (getcwd(working, sizeof working) == NULL) return 0;
        snprintf(whole, sizeof whole, "%s/%s", working, path);
        path = whole;
    }
    return below(path, shared->prefix[0]) ? DST : below(path, shared->prefix[1]) ? SRC : 0;
}

static void remember(int fd, int kind) {
    if (armed && fd >= 0 && fd < FILES) kinds[fd] = (unsigned char)kind;
}

/* Whether this call is the one: kills, or returns the action to be done by the caller. */
static int strike(int kind, int changes, const char *call, const char *path, int fd) {
    if (!armed || !(kind & shared->scope) || (shared->changing_only && !changes)) return COUNT;
    long count = atomic_fetch_add(&shared->count, 1) + 1;
    if (shared->action == COUNT || (shared->persistent ? count < shared->nth : count != shared->nth)) return COUNT;
    if (atomic_fetch_add(&shared->struck, 1) == 0) {
        snprintf(shared->call, sizeof shared->call, "%s", call);
        snprintf(shared->path, sizeof shared->path, "%s", path);
        if (fd >= 0) { /* by its name: as this process has it open */
            char link[64];
            snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
            long n = syscall(SYS_readlink, link, shared->path, sizeof shared->path - 1);
            shared->path[n < 0 ? 0 : n] = 0;
        }
    }
    if (shared->action == KILL_GROUP) kill(0, SIGKILL);
    if (shared->action == KILL_SELF) kill(getpid(), SIGKILL);
    if (shared->action <= KILL_SELF) for (;;) pause();
    errno = shared->number;
    return shared->action;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(real))dlsym(RTLD_NEXT, #name)

#define FAILS(kind, changes, path) (strike(kind, changes, __func__, path, -1) == FAIL)
#define FAILS_AT(kind, changes, fd) (strike(kind, changes, __func__, "", fd) == FAIL)

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        int kind = kind_of(AT_FDCWD, path), changes = (flags & (O_CREAT | O_TRUNC)) != 0; \
        if (kind && FAILS(kind, changes, path)) return -1; \
        int fd = real(path, flags, mode); remember(fd, kind); return fd; \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        int kind = kind_of(folder, path), changes = (flags & (O_CREAT | O_TRUNC)) != 0; \
        if (kind && FAILS(kind, changes, path)) return -1; \
        int fd = real(folder, path, flags, mode); remember(fd, kind); return fd; \
    }
OPENAT(openat)
OPENAT(openat64)

int close(int fd) {
    REAL(close);
    int kind = kind_of_fd(fd);
    if (!kind) return real(fd);
    kinds[fd] = 0;
    int spoilt = FAILS_AT(kind, 0, fd), result = real(fd); /* as NFS: closed, and what was written is lost */
    if (spoilt) errno = shared->number;
    return spoilt ? -1 : result;
}

int dup2(int from, int to) {
    REAL(dup2);
    int fd = real(from, to);
    remember(fd, kind_of_fd(from));
    return fd;
}

#define BY_FD(result, name, changes, parameters, arguments) \
    result name parameters { \
        REAL(name); \
        int kind = kind_of_fd(fd); \
        if (kind && FAILS_AT(kind, changes, fd)) return -1; \
        return real arguments; \
    }
BY_FD(ssize_t, read, 0, (int fd, void *buffer, size_t n), (fd, buffer, n))
BY_FD(ssize_t, pread64, 0, (int fd, void *buffer, size_t n, off64_t at), (fd, buffer, n, at))
BY_FD(ssize_t, preadv64v2, 0, (int fd, const struct iovec *v, int n, off64_t at, int flags), (fd, v, n, at, flags))
BY_FD(ssize_t, preadv64, 0, (int fd, const struct iovec *v, int n, off64_t at), (fd, v, n, at))
BY_FD(ssize_t, readv, 0, (int fd, const struct iovec *v, int n), (fd, v, n))
BY_FD(ssize_t, writev, 1, (int fd, const struct iovec *v, int n), (fd, v, n))
BY_FD(ssize_t, pwritev64v2, 1, (int fd, const struct iovec *v, int n, off64_t at, int flags), (fd, v, n, at, flags))
BY_FD(int, fsync, 1, (int fd), (fd))
BY_FD(int, fdatasync, 1, (int fd), (fd))
BY_FD(int, ftruncate64, 1, (int fd, off64_t n), (fd, n))
BY_FD(int, flock, 1, (int fd, int operation), (fd, operation))
BY_FD(int, fstat64, 0, (int fd, struct stat64 *s), (fd, s))
BY_FD(int, fstat, 0, (int fd, struct stat *s), (fd, s))
BY_FD(int, fstatvfs64, 0, (int fd, struct statvfs64 *s), (fd, s))
BY_FD(int, fchmod, 1, (int fd, mode_t mode), (fd, mode))
BY_FD(int, futimens, 1, (int fd, const struct timespec times[2]), (fd, times))

/* Direct I/O is done by the block. */
static size_t half(size_t n) { return n < 8192 ? n / 2 : n / 2 & ~4095ul; }

ssize_t write(int fd, const void *data, size_t n) {
    REAL(write);
    int kind = kind_of_fd(fd);
    int what = kind ? strike(kind, 1, __func__, "", fd) : COUNT;
    if (what == FAIL) return -1;
    if (what == SHORT && n > 1) return real(fd, data, half(n));
    if (what == TORN) {
        (void)!real(fd, data, half(n));
        kill(0, SIGKILL);
        for (;;) pause();
    }
    return real(fd, data, n);
}

ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at) {
    REAL(pwrite64);
    int kind = kind_of_fd(fd);
    int what = kind ? strike(kind, 1, __func__, "", fd) : COUNT;
    if (what == FAIL) return -1;
    if (what == SHORT && n > 1) return real(fd, data, half(n), at);
    return real(fd, data, n, at);
}

int fcntl64(int fd, int command, ...) {
    REAL(fcntl64);
    va_list rest; va_start(rest, command); void *argument = va_arg(rest, void *); va_end(rest);
    int kind = kind_of_fd(fd), copies = command == F_DUPFD || command == F_DUPFD_CLOEXEC;
    int matters = copies || command == F_SETFL || command == F_SETLK || command == F_SETLKW;
    if (kind && matters && FAILS_AT(kind, !copies, fd)) return -1;
    int result = real(fd, command, argument);
    if (copies) remember(result, kind);
    return result;
}

#define BY_PATH(result, failed, name, changes, parameters, arguments) \
    result name parameters { \
        REAL(name); \
        int kind = kind_of(AT_FDCWD, path); \
        if (kind && FAILS(kind, changes, path)) return failed; \
        return real arguments; \
    }
BY_PATH(int, -1, unlink, 1, (const char *path), (path))
BY_PATH(int, -1, rmdir, 1, (const char *path), (path))
BY_PATH(int, -1, mkdir, 1, (const char *path, mode_t mode), (path, mode))
BY_PATH(int, -1, chmod, 1, (const char *path, mode_t mode), (path, mode))
BY_PATH(int, -1, truncate64, 1, (const char *path, off64_t n), (path, n))
BY_PATH(int, -1, access, 0, (const char *path, int mode), (path, mode))
BY_PATH(int, -1, stat64, 0, (const char *path, struct stat64 *s), (path, s))
BY_PATH(int, -1, lstat64, 0, (const char *path, struct stat64 *s), (path, s))
BY_PATH(int, -1, stat, 0, (const char *path, struct stat *s), (path, s))
BY_PATH(int, -1, lstat, 0, (const char *path, struct stat *s), (path, s))
BY_PATH(int, -1, statvfs64, 0, (const char *path, struct statvfs64 *s), (path, s))
BY_PATH(ssize_t, -1, readlink, 0, (const char *path, char *to, size_t n), (path, to, n))

#define BY_FOLDER(result, failed, name, changes, parameters, arguments) \
    result name parameters { \
        REAL(name); \
        int kind = kind_of(folder, path); \
        if (kind && FAILS(kind, changes, path)) return failed; \
        return real arguments; \
    }
BY_FOLDER(int, -1, unlinkat, 1, (int folder, const char *path, int flags), (folder, path, flags))
BY_FOLDER(int, -1, mkdirat, 1, (int folder, const char *path, mode_t mode), (folder, path, mode))
BY_FOLDER(int, -1, fstatat64, 0, (int folder, const char *path, struct stat64 *s, int flags), (folder, path, s, flags))
BY_FOLDER(int, -1, faccessat, 0, (int folder, const char *path, int mode, int flags), (folder, path, mode, flags))
BY_FOLDER(int, -1, utimensat, 1, (int folder, const char *path, const struct timespec t[2], int flags), (folder, path, t, flags))
BY_FOLDER(ssize_t, -1, readlinkat, 0, (int folder, const char *path, char *to, size_t n), (folder, path, to, n))

#define TWO_PATHS(name, first, second, parameters, arguments) \
    int name parameters { \
        REAL(name); \
        int kind = kind_of(first, path) | kind_of(second, to); \
        if (kind && FAILS(kind, 1, path)) return -1; \
        return real arguments; \
    }
TWO_PATHS(rename, AT_FDCWD, AT_FDCWD, (const char *path, const char *to), (path, to))
TWO_PATHS(link, AT_FDCWD, AT_FDCWD, (const char *path, const char *to), (path, to))
TWO_PATHS(symlink, AT_FDCWD, AT_FDCWD, (const char *path, const char *to), (path, to))
TWO_PATHS(renameat, one, two, (int one, const char *path, int two, const char *to), (one, path, two, to))
TWO_PATHS(renameat2, one, two, (int one, const char *path, int two, const char *to, unsigned flags), (one, path, two, to, flags))
TWO_PATHS(linkat, one, two, (int one, const char *path, int two, const char *to, int flags), (one, path, two, to, flags))

DIR *opendir(const char *path) {
    REAL(opendir);
    int kind = kind_of(AT_FDCWD, path);
    if (kind && FAILS(kind, 0, path)) return NULL;
    DIR *folder = real(path);
    if (folder) remember(dirfd(folder), kind);
    return folder;
}

struct dirent64 *readdir64(DIR *folder) {
    REAL(readdir64);
    int kind = kind_of_fd(dirfd(folder));
    if (kind && FAILS_AT(kind, 0, dirfd(folder))) return NULL;
    return real(folder);
}

int closedir(DIR *folder) {
    REAL(closedir);
    remember(dirfd(folder), 0);
    return real(folder);
}

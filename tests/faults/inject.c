/* Faults at any system call of this process that touches a file below one directory, whatever library makes the call.
 *
 * A seccomp filter turns the calls of interest into SIGSYS. The handler counts those on files below the directory, writes
 * them down, and at the chosen one answers with an error, does half of a write, or ends the process. Every other call it
 * makes itself, from the one address that the filter lets through. Threads and forked children are caught as well.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <ucontext.h>

#define ROWS 20000
#define NAME 232

enum { COUNT, ONCE, NO_MORE_WRITES, SHORT, KILL, TORN, NO_MORE_CHANGES };

struct row { int32_t call; char path[NAME]; };
struct report { int32_t count, fired; struct row rows[ROWS]; };

static struct report *report;
static char root[4096];
static long root_length;
static int chosen, mode, code, with_reads;

extern long raw(long call, long a, long b, long c, long d, long e, long f);
extern char raw_end[];
__asm__(".text\n.globl raw\n.globl raw_end\nraw:\n"
        "mov %rdi,%rax\nmov %rsi,%rdi\nmov %rdx,%rsi\nmov %rcx,%rdx\nmov %r8,%r10\nmov %r9,%r8\nmov 8(%rsp),%r9\n"
        "syscall\nraw_end:\nret\n");

/* What may change a file or a name: where the path or the descriptor stands among the arguments. */
enum { BY_FD = 1, BY_PATH = 2, BY_AT = 3, AT_SECOND = 4 };
static const struct { int call; int how; } CHANGES[] = {
    {SYS_write, BY_FD}, {SYS_pwrite64, BY_FD}, {SYS_writev, BY_FD}, {SYS_pwritev, BY_FD}, {SYS_pwritev2, BY_FD},
    {SYS_sendfile, BY_FD}, {SYS_ftruncate, BY_FD}, {SYS_fallocate, BY_FD}, {SYS_fsync, BY_FD}, {SYS_fdatasync, BY_FD},
    {SYS_fchmod, BY_FD}, {SYS_flock, BY_FD}, {SYS_close, BY_FD}, {SYS_truncate, BY_PATH}, {SYS_rename, BY_PATH},
    {SYS_link, BY_PATH}, {SYS_unlink, BY_PATH}, {SYS_rmdir, BY_PATH}, {SYS_mkdir, BY_PATH}, {SYS_creat, BY_PATH},
    {SYS_chmod, BY_PATH}, {SYS_open, BY_PATH}, {SYS_openat, BY_AT}, {SYS_renameat, BY_AT}, {SYS_renameat2, BY_AT},
    {SYS_linkat, BY_AT}, {SYS_unlinkat, BY_AT}, {SYS_mkdirat, BY_AT}, {SYS_fchmodat, BY_AT}, {SYS_utimensat, BY_AT},
    {SYS_symlink, AT_SECOND}, {SYS_symlinkat, AT_SECOND + 1}, {SYS_copy_file_range, AT_SECOND + 2},
};
/* What only looks. */
static const struct { int call; int how; } READS[] = {
    {SYS_read, BY_FD}, {SYS_pread64, BY_FD}, {SYS_getdents64, BY_FD}, {SYS_mmap, AT_SECOND + 3},
    {SYS_stat, BY_PATH}, {SYS_lstat, BY_PATH}, {SYS_newfstatat, BY_AT}, {SYS_statx, BY_AT},
};
#define LENGTH(list) (sizeof(list) / sizeof(*(list)))

static long number(char *at, long value) {
    char digits[20];
    long n = 0, k = 0;
    do digits[n++] = '0' + value % 10; while (value /= 10);
    while (n) at[k++] = digits[--n];
    at[k] = 0;
    return k;
}

static long of_link(const char *link, char *path) {
    long n = raw(SYS_readlink, (long)link, (long)path, 4000, 0, 0, 0);
    path[n < 0 ? 0 : n] = 0;
    return n < 0 ? 0 : n;
}

static void of_fd(int fd, char *path) {
    char link[64] = "/proc/self/fd/";
    if (fd < 0) { path[0] = 0; return; }
    number(link + 14, fd);
    of_link(link, path);
}

static void of_name(int directory, const char *name, char *path) {
    long n = 0;
    if (!name) { path[0] = 0; return; }
    if (name[0] != '/') {
        if (directory == AT_FDCWD) n = of_link("/proc/self/cwd", path);
        else { of_fd(directory, path); n = strlen(path); }
        if (!name[0]) return;
        path[n++] = '/';
    }
    strncpy(path + n, name, 4090 - n);
    path[4090] = 0;
}

static int how_of(long call) {
    for (unsigned k = 0; k < LENGTH(CHANGES); k++) if (CHANGES[k].call == call) return CHANGES[k].how;
    for (unsigned k = 0; k < LENGTH(READS); k++) if (READS[k].call == call) return READS[k].how;
    return 0;
}

static int is_write(long call) {
    return call == SYS_write || call == SYS_pwrite64 || call == SYS_writev || call == SYS_sendfile || call == SYS_pwritev;
}

static int matters(long call, long *a, char *path) {
    int how = how_of(call);
    path[0] = 0;
    if (how == BY_FD) of_fd(a[0], path);
    else if (how == BY_PATH) of_name(AT_FDCWD, (char *)a[0], path);
    else if (how == BY_AT) of_name(a[0], (char *)a[1], path);
    else if (how == AT_SECOND) of_name(AT_FDCWD, (char *)a[1], path);
    else if (how == AT_SECOND + 1) of_name(a[1], (char *)a[2], path);
    else if (how == AT_SECOND + 2) of_fd(a[2], path);
    else if (how == AT_SECOND + 3) of_fd(a[4], path);
    if (strncmp(path, root, root_length)) return 0;
    if (call == SYS_open || call == SYS_openat) {
        long flags = call == SYS_open ? a[1] : a[2];
        return with_reads || (flags & (O_CREAT | O_TRUNC | O_ACCMODE));
    }
    if (call == SYS_close) {
        long flags = raw(SYS_fcntl, a[0], F_GETFL, 0, 0, 0, 0);
        return flags >= 0 && (flags & O_ACCMODE);
    }
    return 1;
}

static long half_of(long call, long *a) {
    if (call == SYS_writev || call == SYS_pwritev) {
        struct iovec *pieces = (struct iovec *)a[1];
        long half = pieces[0].iov_len > 1 ? pieces[0].iov_len / 2 : pieces[0].iov_len;
        return call == SYS_writev ? raw(SYS_write, a[0], (long)pieces[0].iov_base, half, 0, 0, 0)
                                  : raw(SYS_pwrite64, a[0], (long)pieces[0].iov_base, half, a[3], 0, 0);
    }
    int size = call == SYS_sendfile ? 3 : 2;
    a[size] = a[size] > 1 ? a[size] / 2 : a[size];
    return raw(call, a[0], a[1], a[2], a[3], a[4], a[5]);
}

static long answer(long call, long *a) {
    char path[4096];
    if (!matters(call, a, path)) return raw(call, a[0], a[1], a[2], a[3], a[4], a[5]);
    int at = __sync_fetch_and_add(&report->count, 1);
    if (at < ROWS) {
        report->rows[at].call = call;
        strncpy(report->rows[at].path, path + root_length, NAME - 1);
    }
    int now = at == chosen || (mode == NO_MORE_WRITES && at > chosen && is_write(call)) ||
              (mode == NO_MORE_CHANGES && at > chosen);
    if (mode == COUNT || !now) return raw(call, a[0], a[1], a[2], a[3], a[4], a[5]);
    if (mode == NO_MORE_CHANGES && (call == SYS_close || call == SYS_flock))
        return raw(call, a[0], a[1], a[2], a[3], a[4], a[5]);
    if ((mode == SHORT || mode == TORN) && !is_write(call)) return raw(call, a[0], a[1], a[2], a[3], a[4], a[5]);
    report->fired++;
    if (mode == ONCE || mode == NO_MORE_WRITES || mode == NO_MORE_CHANGES) {
        if (call == SYS_close) raw(call, a[0], 0, 0, 0, 0, 0); /* the descriptor is gone all the same */
        return -code;
    }
    if (mode == SHORT) return half_of(call, a);
    if (mode == TORN) half_of(call, a);
    raw(SYS_kill, raw(SYS_getpid, 0, 0, 0, 0, 0, 0), SIGKILL, 0, 0, 0, 0);
    return -EIO;
}

static void on_call(int signal, siginfo_t *info, void *context) {
    (void)signal;
    int kept = errno;
    greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;
    long a[6] = {r[REG_RDI], r[REG_RSI], r[REG_RDX], r[REG_R10], r[REG_R8], r[REG_R9]};
    r[REG_RAX] = answer(info->si_syscall, a);
    errno = kept;
}

#define ADD(f) program[length++] = (struct sock_filter)f

/* From now on: `at` counts from 0; 0, or what could not be had as a negative number. */
int arm(const char *directory, const char *file, int at, int how, int error, int reads) {
    struct sock_filter program[16 + 2 * (LENGTH(CHANGES) + LENGTH(READS))];
    int length = 0, fd = open(file, O_RDWR);
    report = mmap(0, sizeof *report, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd < 0 || report == MAP_FAILED) return -errno;
    strncpy(root, directory, sizeof root - 1);
    root_length = strlen(root);
    chosen = at, mode = how, code = error, with_reads = reads;
    struct sigaction action = {.sa_sigaction = on_call, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART};
    if (sigaction(SIGSYS, &action, 0)) return -errno;
    uint64_t through = (uint64_t)raw_end;
    ADD(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, instruction_pointer)));
    ADD(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)through, 0, 3));
    ADD(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, instruction_pointer) + 4));
    ADD(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)(through >> 32), 0, 1));
    ADD(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    ADD(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)));
    for (unsigned k = 0; k < LENGTH(CHANGES); k++) {
        ADD(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, CHANGES[k].call, 0, 1));
        ADD(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP));
    }
    for (unsigned k = 0; reads && k < LENGTH(READS); k++) {
        ADD(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, READS[k].call, 0, 1));
        ADD(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP));
    }
    ADD(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    struct sock_fprog whole = {length, program};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return -errno;
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &whole)) return -errno;
    return 0;
}

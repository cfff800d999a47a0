/* The ends of programs, which their parents see, also where a program has not loaded this library.

   A process may start programs, and wait for them, by instructions that no function shows. The kernel counts the
   page faults of all children that a process has waited for. Each wrapped wait gets those of its child, and adds
   them up. At the end of the program, both numbers differ if it has waited for any other child. */
#define _GNU_SOURCE
#include "audit.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SMALL_LINE = 512 };

static pid_t (*real_wait4)(pid_t, int*, int, struct rusage*);
static int (*real_waitid)(idtype_t, id_t, siginfo_t*, int);

static struct {
    pid_t owner;           /* this process; between vfork and exec, a child has another id */
    atomic_long faults;    /* of the children that wrapped functions have waited for, or an earlier program */
    atomic_int waits;      /* that are under way */
    atomic_int incomplete; /* There were other waits, or a sandbox forbids to ask. */
} children;

static atomic_int sandboxed; /* also in a forked child */

static void begin_children(void) {
    children.owner = getpid();
    children.faults = 0;
    children.waits = 0;
}

static void resolve(void) {
    if (real_waitid)
        return;
    *(void**)&real_wait4 = real_dlsym(RTLD_NEXT, "wait4");
    *(void**)&real_waitid = real_dlsym(RTLD_NEXT, "waitid");
}

void prepare_children(int preloaded) {
    struct rusage usage;
    resolve();
    begin_children();
    pthread_atfork(NULL, NULL, begin_children);
    if (!preloaded || getrusage(RUSAGE_CHILDREN, &usage))
        children.incomplete = 1;
    else
        children.faults = usage.ru_minflt;
}

void note_other_wait(void) { children.incomplete = 1; }

void note_sandbox(void) {
    sandboxed = 1;
    children.incomplete = 1;
}

int is_sandboxed(void) { return sandboxed; }

void report_unseen_children(void) {
    struct rusage usage;
    char buffer[SMALL_LINE];
    Line line;
    if (children.incomplete || children.waits || children.owner != getpid() ||
        getrusage(RUSAGE_CHILDREN, &usage) || usage.ru_minflt <= children.faults)
        return;
    line_begin(&line, buffer, sizeof buffer, "unseen_children", audit_now());
    line_write(&line);
}

static void report_end(pid_t child, int status) {
    if (!audit_directory[0] || !audit_reports || child <= 0)
        return;
    char buffer[SMALL_LINE];
    Line line;
    line_begin(&line, buffer, sizeof buffer, "reaped", audit_now());
    line_integer(&line, "child", child);
    line_integer(&line, "status", status);
    line_write(&line);
}

static pid_t wait_for(pid_t pid, int* status, int options, struct rusage* usage) {
    struct rusage used = {0};
    int mine = 0;
    resolve();
    children.waits++;
    pid_t child = real_wait4(pid, &mine, options, &used);
    int ended = child > 0 && (WIFEXITED(mine) || WIFSIGNALED(mine));
    if (ended)
        children.faults += used.ru_minflt;
    children.waits--;
    if (status && child > 0)
        *status = mine;
    if (usage && child > 0)
        *usage = used;
    if (ended)
        report_end(child, WIFSIGNALED(mine) ? 128 + WTERMSIG(mine) : WEXITSTATUS(mine));
    return child;
}

EXPORT pid_t wait(int* status) { return wait_for(-1, status, 0, NULL); }

EXPORT pid_t wait3(int* status, int options, struct rusage* usage) {
    return wait_for(-1, status, options, usage);
}

EXPORT pid_t waitpid(pid_t pid, int* status, int options) { return wait_for(pid, status, options, NULL); }

EXPORT pid_t wait4(pid_t pid, int* status, int options, struct rusage* usage) {
    return wait_for(pid, status, options, usage);
}

EXPORT int waitid(idtype_t type, id_t id, siginfo_t* info, int options) {
    siginfo_t mine;
    memset(&mine, 0, sizeof mine);
    resolve();
    int result = real_waitid(type, id, info ? info : &mine, options);
    const siginfo_t* found = info ? info : &mine;
    if (!result && !(options & WNOWAIT) && found->si_pid) {
        note_other_wait(); /* It does not return the page faults. */
        if (found->si_code == CLD_EXITED)
            report_end(found->si_pid, found->si_status);
        else if (found->si_code == CLD_KILLED || found->si_code == CLD_DUMPED)
            report_end(found->si_pid, 128 + found->si_status);
    }
    return result;
}

/* The C library declares it with `...`. */
EXPORT int control_process(int option, long a, long b, long c, long d) __asm__("prctl");
LAST_CALL_IS_A_JUMP int control_process(int option, long a, long b, long c, long d) {
    static int (*real)(int, long, long, long, long);
    if (!real)
        *(void**)&real = real_dlsym(RTLD_NEXT, "prctl");
    if (option == PR_SET_SECCOMP)
        note_sandbox();
    return real(option, a, b, c, d);
}

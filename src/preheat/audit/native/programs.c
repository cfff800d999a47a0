/* Programs that are started: they are reported when they are executed and when they start.

   The functions of the C library that execute programs do not call each other through the symbol table, so
   each one is wrapped. A compiler that is started in any other way reports itself. */
#define _GNU_SOURCE
#include "audit.h"

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

extern char** environ;

#define PROBE "PREHEAT_AUDIT_PROBE" /* set in the environment of programs that a probe starts */
enum { SMALL_LINE = 512 };

/* The functions that are wrapped here */

typedef int (*Spawn)(pid_t*, const char*, const posix_spawn_file_actions_t*, const posix_spawnattr_t*,
                     char* const[], char* const[]);

static long first_syscall(long number, long a, long b, long c, long d, long e, long f);
static int (*real_execve)(const char*, char* const[], char* const[]);
static int (*real_execv)(const char*, char* const[]);
static int (*real_execvp)(const char*, char* const[]);
static int (*real_execvpe)(const char*, char* const[], char* const[]);
static int (*real_fexecve)(int, char* const[], char* const[]);
static int (*real_execveat)(int, const char*, char* const[], char* const[], int);
static Spawn real_posix_spawn;
static Spawn real_posix_spawnp;
static long (*real_syscall)(long, long, long, long, long, long, long) = first_syscall;
static int (*real_system)(const char*);
static FILE* (*real_popen)(const char*, const char*);
static void (*real__Exit)(int);
static void (*real__exit)(int);

/* Find the wrapped functions of the C library. This happens when the library is loaded, because a
   process between fork and exec must not search for symbols. */
static void resolve(void) {
    if (real__exit)
        return;
#define NEXT(name) *(void**)&real_##name = real_dlsym(RTLD_NEXT, #name)
    NEXT(execve), NEXT(execv), NEXT(execvp), NEXT(execvpe), NEXT(fexecve), NEXT(execveat);
    NEXT(posix_spawn), NEXT(posix_spawnp), NEXT(syscall), NEXT(system), NEXT(popen);
    NEXT(_Exit), NEXT(_exit);
#undef NEXT
}

/* A library that starts before this one may make a system call. */
static long first_syscall(long number, long a, long b, long c, long d, long e, long f) {
    resolve();
    return real_syscall(number, a, b, c, d, e, f);
}

/* Programs that are started */

static const char* own_role = "";

/* Return the role of a program that this process starts. What a probe starts belongs to the probe. */
static const char* role_in_child(const char* path, char* const argv[]) {
    const char* role = role_of(path, argv);
    return role[0] && !strcmp(own_role, "probe") ? own_role : role;
}

/* Return the value of a variable in `env`, or NULL. */
static const char* variable(char* const env[], const char* name) {
    size_t length = strlen(name);
    for (int i = 0; env && env[i]; i++)
        if (!strncmp(env[i], name, length) && env[i][length] == '=')
            return env[i] + length + 1;
    return NULL;
}

static int is_static(const char* path) {
    int file = open(path, O_RDONLY | O_CLOEXEC), found = 0;
    Elf64_Ehdr header;
    if (file < 0)
        return 0;
    if (read(file, &header, sizeof header) == sizeof header && !memcmp(header.e_ident, ELFMAG, SELFMAG) &&
        header.e_ident[EI_CLASS] == ELFCLASS64 && header.e_phnum) {
        found = 1;
        for (int i = 0; i < header.e_phnum && found; i++) {
            Elf64_Phdr part;
            off_t at = (off_t)(header.e_phoff + (size_t)i * header.e_phentsize);
            found = pread(file, &part, sizeof part, at) == sizeof part && part.p_type != PT_INTERP;
        }
    }
    close(file);
    return found;
}

/* Return why this library will not be loaded into a program, or NULL. There are more reasons than these:
   a program counts as audited only when it has reported itself. */
static const char* not_audited_reason(const char* path, char* const env[]) {
    const char *preload = variable(env, "LD_PRELOAD"), *directory = variable(env, "PREHEAT_AUDIT");
    struct stat status;
    if (!preload || !strstr(preload, audit_library))
        return "it was started without the LD_PRELOAD of the audit";
    if (!directory)
        return "it was started without the environment of the audit";
    if (strcmp(directory, audit_directory))
        return "it was started in another audit";
    if (!stat(path, &status) && (status.st_mode & (S_ISUID | S_ISGID)) && getuid())
        return "it runs with the rights of another user, so the audit library was not loaded";
    if (eaccess(audit_directory, W_OK | X_OK))
        return "it cannot write to the directory of the audit";
    return is_static(path) ? "it is statically linked, so the audit library was not loaded" : NULL;
}

/* Return whether /proc has the processes of another namespace, where this process has another id. */
static int is_foreign_proc(void) {
    char self[32];
    ssize_t length = readlink("/proc/self", self, sizeof self - 1);
    self[length > 0 ? length : 0] = 0;
    return atoi(self) != getpid();
}

/* Return when a process was born, in clock ticks since the start of the machine; 0 if it is not known.
   Together with its id, it names a process for ever. `child` is 0 for this process. */
static long long birth_of(pid_t child) {
    char path[64] = "/proc/self/stat", text[1024];
    enum { FIELDS_BEFORE = 20 }; /* between the name, which ends with a parenthesis, and the time */
    if (child && is_foreign_proc())
        return 0;
    if (child)
        snprintf(path, sizeof path, "/proc/%d/stat", (int)child);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t count = file < 0 ? 0 : read(file, text, sizeof text - 1);
    if (file >= 0)
        close(file);
    text[count > 0 ? count : 0] = 0;
    const char* at = strrchr(text, ')');
    for (int i = 0; at && i < FIELDS_BEFORE; i++)
        at = strchr(at + 1, ' ');
    return at ? atoll(at + 1) : 0;
}

/* Return the namespace of the ids of this process; 0 if it is not known. */
static long long own_namespace(void) {
    struct stat status;
    return stat("/proc/self/ns/pid", &status) ? 0 : (long long)status.st_ino;
}

typedef struct {
    const char* call;
    const char* path;
    char* const* argv;
    char* const* env;
    const void* caller;
} Start;

/* Report a program that is about to be executed in this process, or that was started as `child`. */
static void report_start(Scratch* scratch, const Start* start, pid_t child, const char* role, double time) {
    Line line;
    line_begin(&line, scratch->text, sizeof scratch->text, "exec", time);
    line.recent = !role[0];
    line_text(&line, "call", start->call);
    line_text(&line, "path", start->path);
    line_text(&line, "role", role);
    line_integer(&line, "parent", child ? getpid() : getppid());
    if (child)
        line_integer(&line, "child", child);
    line_integer(&line, "birth", birth_of(child));
    if (!child)
        line_integer(&line, "namespace", own_namespace());
    line_text(&line, "hidden", not_audited_reason(start->path, start->env));
    line_strings(&line, "argv", start->argv);
    if (scratch->object[0])
        line_text(&line, "caller", scratch->object);
    line_site(&line, scratch->site);
    line_write(&line);
}

static uint64_t hash(uint64_t before, const char* text) {
    while (*text)
        before = (before ^ (unsigned char)*text++) * 0x100000001b3ull;
    return (before ^ 0xff) * 0x100000001b3ull;
}

/* Return whether this process was refused the same start before: a search in PATH tries each directory. */
static int is_repeated(const Scratch* scratch, const Start* start) {
    static struct {
        pid_t pid;
        uint64_t start;
    } last;
    uint64_t now = hash(hash(0xcbf29ce484222325ull, base_name(start->path)), scratch->site);
    for (int i = 0; start->argv && start->argv[i]; i++)
        now = hash(now, start->argv[i]);
    int repeated = last.pid == getpid() && last.start == now;
    last.pid = getpid(), last.start = now;
    return repeated;
}

/* Return whether a program may be started. `path` is an executable file. */
static int permit_start(Scratch* scratch, const Start* start, const char* role, int searching) {
    if (audit_seal == SEAL_OFF || strcmp(role, "compiler"))
        return 1;
    if (!searching || !is_repeated(scratch, start))
        report_refusal(scratch, REFUSED_START, start->path, scratch->object);
    return audit_seal != SEAL_ERROR;
}

static int is_executable(const char* path) {
    struct stat status;
    return path && !stat(path, &status) && S_ISREG(status.st_mode) && !access(path, X_OK);
}

/* Find a program as `execvp` does. Return `name` itself if it has a slash or is not found. */
static const char* search_path(const char* name, char* out, size_t size) {
    const char* path = getenv("PATH");
    if (!name || strchr(name, '/'))
        return name;
    if (!path)
        path = "/bin:/usr/bin"; /* the default of the C library */
    for (;;) {
        size_t length = strcspn(path, ":");
        snprintf(out, size, "%.*s%s%s", (int)length, path, length ? "/" : "", name);
        if (is_executable(out))
            return out;
        if (!path[length])
            return name;
        path += length + 1;
    }
}

/* Find out who starts a program. A child between fork and exec does so for its parent's Python line. */
static void find_starter(Scratch* scratch, const Start* start) {
    audit_site(scratch->site, sizeof scratch->site);
    if (getpid() == audit_self)
        object_of(start->caller, scratch->object, sizeof scratch->object);
}

/* Report a start by one of the exec functions. Return 1 if it was reported, 0 if it is of no interest, and
   -1 if it is refused. */
static int before_exec(Start* start, int searching) {
    int error = errno, result = 0;
    Scratch* scratch = audit_directory[0] ? map_memory(sizeof *scratch) : NULL;
    if (!scratch)
        return 0;
    if (searching)
        start->path = search_path(start->path, scratch->path, sizeof scratch->path);
    if (is_executable(start->path)) {
        report_all_libraries();
        const char* role = role_in_child(start->path, start->argv);
        find_starter(scratch, start);
        result = permit_start(scratch, start, role, 1) ? 1 : -1;
        if (result > 0)
            report_start(scratch, start, 0, role, audit_now());
        if (result > 0 && audit_reports)
            report_unseen_children();
    }
    unmap_memory(scratch, sizeof *scratch);
    errno = result < 0 ? EPERM : error;
    return result;
}

/* An exec function has returned: the process continues as before. */
static int after_exec(int reported) {
    int error = errno;
    char buffer[SMALL_LINE];
    Line line;
    if (reported) {
        line_begin(&line, buffer, sizeof buffer, "exec_failed", audit_now());
        line.recent = 1;
        line_integer(&line, "error", error);
        line_write(&line);
    }
    errno = error;
    return -1;
}

#define EXECUTE(searching, call) \
    int reported = before_exec(&start, searching); \
    if (reported < 0) \
        return -1; \
    call; \
    return after_exec(reported)

static int execute_v(const char* path, char* const argv[], const char* call, const void* caller) {
    resolve();
    Start start = {call, path, argv, environ, caller};
    EXECUTE(0, real_execv(path, argv));
}

static int execute_ve(const char* path, char* const argv[], char* const env[], const char* call,
                      const void* caller) {
    resolve();
    Start start = {call, path, argv, env, caller};
    EXECUTE(0, real_execve(path, argv, env));
}

static int execute_vp(const char* name, char* const argv[], const char* call, const void* caller) {
    resolve();
    Start start = {call, name, argv, environ, caller};
    EXECUTE(1, real_execvp(name, argv));
}

EXPORT int execve(const char* path, char* const argv[], char* const env[]) {
    return execute_ve(path, argv, env, "execve", CALLER);
}

EXPORT int execv(const char* path, char* const argv[]) { return execute_v(path, argv, "execv", CALLER); }

EXPORT int execvp(const char* name, char* const argv[]) {
    return execute_vp(name, argv, "execvp", CALLER);
}

EXPORT int execvpe(const char* name, char* const argv[], char* const env[]) {
    resolve();
    Start start = {"execvpe", name, argv, env, CALLER};
    EXECUTE(1, real_execvpe(name, argv, env));
}

EXPORT int fexecve(int file, char* const argv[], char* const env[]) {
    resolve();
    char link[64], path[512];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length > 0 ? length : 0] = 0;
    Start start = {"fexecve", is_executable(path) ? path : link, argv, env, CALLER};
    EXECUTE(0, real_fexecve(file, argv, env));
}

/* Return whether a path is relative to the descriptor `place`. The kernel accepts NULL, and execveat is
   declared with a path that is not NULL. */
static int is_below(int place, const char* path) {
    return path && path[0] != '/' && (place != AT_FDCWD || !path[0]);
}

static int execute_at(int place, const char* path, char* const argv[], char* const env[], int flags,
                      const void* caller) {
    resolve();
    char full[PATH_BYTES];
    Start start = {"execveat", path, argv, env, caller};
    if (!real_execveat) { /* The C library is too old to have it. */
        errno = ENOSYS;
        return -1;
    }
    if (is_below(place, path)) {
        snprintf(full, sizeof full, "/proc/self/fd/%d%s%s", place, path[0] ? "/" : "", path);
        start.path = full;
    }
    EXECUTE(0, real_execveat(place, path, argv, env, flags));
}

EXPORT int execveat(int place, const char* path, char* const argv[], char* const env[], int flags) {
    return execute_at(place, path, argv, env, flags, CALLER);
}

typedef struct {
    long number, a, b, c, d, e;
} SystemCall;

static __attribute__((noinline)) long execute_by_number(const SystemCall* call, const void* caller) {
    if (call->number == SYS_execve)
        return execute_ve((const char*)call->a, (char* const*)call->b, (char* const*)call->c, "execve", caller);
    return execute_at((int)call->a, (const char*)call->b, (char* const*)call->c, (char* const*)call->d,
                      (int)call->e, caller);
}

/* The C library declares it with `...`. All other system calls go on by a jump that leaves the stack alone:
   where the caller has not given all arguments, they are memory of the caller. */
EXPORT long system_call(long number, long a, long b, long c, long d, long e, long f) __asm__("syscall");
LAST_CALL_IS_A_JUMP long system_call(long number, long a, long b, long c, long d, long e, long f) {
    if (number == SYS_seccomp || number == SYS_prctl)
        note_sandbox();
    if (number == SYS_execve || number == SYS_execveat)
        return execute_by_number(&(SystemCall){number, a, b, c, d, e}, CALLER);
    return real_syscall(number, a, b, c, d, e, f);
}

/* Collect the arguments of `execl` into an array on the stack; for `execle`, the environment follows. */
#define COLLECT(argv, first, arguments) \
    va_list arguments, counted_; \
    va_start(arguments, first); \
    va_copy(counted_, arguments); \
    size_t count_ = 1; \
    for (const char* word_ = (first); word_; word_ = va_arg(counted_, const char*)) \
        count_++; \
    va_end(counted_); \
    char* argv[count_]; \
    argv[0] = (char*)(first); \
    for (size_t i_ = 1; i_ < count_; i_++) \
        argv[i_] = va_arg(arguments, char*)

EXPORT int execl(const char* path, const char* first, ...) {
    COLLECT(argv, first, arguments);
    va_end(arguments);
    return execute_v(path, argv, "execl", CALLER);
}

EXPORT int execlp(const char* name, const char* first, ...) {
    COLLECT(argv, first, arguments);
    va_end(arguments);
    return execute_vp(name, argv, "execlp", CALLER);
}

EXPORT int execle(const char* path, const char* first, ...) {
    COLLECT(argv, first, arguments);
    char** env = va_arg(arguments, char**);
    va_end(arguments);
    return execute_ve(path, argv, env, "execle", CALLER);
}

/* Start a program by one of the spawn functions, and report it with the time before its own events. */
static int spawn(Spawn real, Start* start, int searching, pid_t* pid,
                 const posix_spawn_file_actions_t* actions, const posix_spawnattr_t* attributes) {
    const char* name = start->path;
    Scratch* scratch = audit_directory[0] ? map_memory(sizeof *scratch) : NULL;
    if (!scratch || !name) {
        unmap_memory(scratch, sizeof *scratch);
        return real(pid, name, actions, attributes, start->argv, start->env);
    }
    if (searching)
        start->path = search_path(name, scratch->path, sizeof scratch->path);
    const char* role = role_in_child(start->path, start->argv);
    pid_t child = 0;
    int result = EPERM;
    find_starter(scratch, start);
    /* A path that is no program here may be one in the directory to which `actions` change. A compiler that
       is found there refuses to run. */
    if (!is_executable(start->path) || permit_start(scratch, start, role, 0)) {
        double time = audit_now();
        result = real(&child, name, actions, attributes, start->argv, start->env);
        if (pid && !result)
            *pid = child;
        if (!result)
            report_start(scratch, start, child, role, time);
        else
            note_other_wait(); /* The C library has waited for the child. */
    }
    unmap_memory(scratch, sizeof *scratch);
    return result;
}

EXPORT int posix_spawn(pid_t* pid, const char* path, const posix_spawn_file_actions_t* actions,
                       const posix_spawnattr_t* attributes, char* const argv[], char* const env[]) {
    resolve();
    Start start = {"posix_spawn", path, argv, env, CALLER};
    return spawn(real_posix_spawn, &start, 0, pid, actions, attributes);
}

EXPORT int posix_spawnp(pid_t* pid, const char* name, const posix_spawn_file_actions_t* actions,
                        const posix_spawnattr_t* attributes, char* const argv[], char* const env[]) {
    resolve();
    Start start = {"posix_spawnp", name, argv, env, CALLER};
    return spawn(real_posix_spawnp, &start, 1, pid, actions, attributes);
}

/* Report a command for a shell. The C library starts the shell without any of the functions above. */
static void report_shell(const char* call, const char* command, const void* caller) {
    int error = errno;
    Scratch* scratch = audit_directory[0] && command ? map_memory(sizeof *scratch) : NULL;
    if (!scratch)
        return;
    Line line;
    line_begin(&line, scratch->text, sizeof scratch->text, "shell", audit_now());
    line.recent = 1;
    line_text(&line, "call", call);
    const char* hidden = not_audited_reason("/bin/sh", environ);
    if (hidden)
        note_other_wait(); /* The C library waits for the shell, which does not report itself. */
    line_text(&line, "hidden", hidden);
    line_text(&line, "command", command);
    line_text(&line, "caller", object_of(caller, scratch->object, sizeof scratch->object));
    audit_site(scratch->site, sizeof scratch->site);
    line_site(&line, scratch->site);
    line_write(&line);
    unmap_memory(scratch, sizeof *scratch);
    errno = error;
}

EXPORT int system(const char* command) {
    resolve();
    report_shell("system", command, CALLER);
    return real_system(command);
}

EXPORT FILE* popen(const char* command, const char* mode) {
    resolve();
    report_shell("popen", command, CALLER);
    return real_popen(command, mode);
}

/* The start and the end of this process */

/* Return whether the calls of the program come here. They do not where the library was loaded later, by
   Python or by the driver. No other library has a reason to wrap this function. Its address here would not
   tell, because the symbol may lead to the C library in this library, too. */
static int is_preloaded(void) {
    Dl_info found, own;
    void* function = real_dlsym(RTLD_DEFAULT, "execle");
    return function && dladdr(function, &found) && dladdr((void*)is_preloaded, &own) &&
           found.dli_fbase == own.dli_fbase;
}

/* Return the role of this program, which is at `path`. The kernel also keeps the path that was executed: a link
   to it may have the name of a tool. For a script, that is not this program. */
static const char* role_of_process(const char* path, char* const argv[]) {
    const char *executed = (const char*)getauxval(AT_EXECFN), *role = role_of(path, argv);
    struct stat named, self;
    if (!role[0] && executed && !stat(executed, &named) && !stat("/proc/self/exe", &self) &&
        named.st_dev == self.st_dev && named.st_ino == self.st_ino)
        role = role_of(executed, argv);
    if (!role[0])
        role = role_of_copy("/proc/self/exe", argv);
    return role[0] && getenv(PROBE) ? "probe" : role;
}

static void report_process(char* const argv[]) {
    static const char* const seals[] = {"off", "warn", "error"};
    Scratch* scratch = map_memory(sizeof *scratch);
    if (!scratch)
        return;
    ssize_t length = readlink("/proc/self/exe", scratch->path, sizeof scratch->path - 1);
    scratch->path[length > 0 ? length : 0] = 0;
    own_role = role_of_process(scratch->path, argv);
    int preloaded = is_preloaded();
    prepare_children(preloaded);
    Line line;
    line_begin(&line, scratch->text, sizeof scratch->text, "process", audit_now());
    line.recent = !own_role[0];
    line_integer(&line, "parent", getppid());
    line_integer(&line, "birth", birth_of(0));
    line_integer(&line, "namespace", own_namespace());
    line_integer(&line, "preloaded", preloaded);
    line_text(&line, "seal", seals[audit_seal]);
    line_text(&line, "path", scratch->path);
    line_text(&line, "role", own_role);
    line_strings(&line, "argv", argv);
    line_write(&line);
    if (preloaded && !strcmp(own_role, "probe"))
        setenv(PROBE, "1", 1);
    if (preloaded && !strcmp(own_role, "compiler") && audit_seal != SEAL_OFF) {
        report_refusal(scratch, REFUSED_RUN, scratch->path, NULL);
        if (audit_seal == SEAL_ERROR)
            _exit(126);
    }
    unmap_memory(scratch, sizeof *scratch);
}

/* Return whether the audit of this process uses another copy of this library, as inside another audit. */
static int is_other_copy(void) {
    const char* path = getenv("PREHEAT_AUDIT_LIBRARY");
    struct stat used, own;
    return path && !stat(path, &used) && !stat(audit_library, &own) &&
           (used.st_dev != own.st_dev || used.st_ino != own.st_ino);
}

__attribute__((constructor)) static void begin(int count, char** argv, char** env) {
    (void)count, (void)env;
    resolve();
    audit_self = getpid();
    const char* directory = getenv("PREHEAT_AUDIT");
    const char* seal = getenv("PREHEAT_AUDIT_SEAL");
    Dl_info self;
    if (!directory || directory[0] != '/' || strlen(directory) >= PATH_BYTES)
        return;
    if (dladdr((void*)begin, &self) && self.dli_fname && !realpath(self.dli_fname, audit_library))
        snprintf(audit_library, sizeof audit_library, "%s", self.dli_fname);
    if (is_other_copy())
        return;
    audit_reports = !getenv("PREHEAT_AUDIT_ONLY");
    if (seal)
        audit_seal = !strcmp(seal, "error") ? SEAL_ERROR : !strcmp(seal, "warn") ? SEAL_WARN : SEAL_OFF;
    const char* events = getenv("PREHEAT_EVENTS");
    if (events && events[0] == '/' && strlen(events) < PATH_BYTES)
        strcpy(audit_user_events, events);
    snprintf(audit_directory, sizeof audit_directory, "%s", directory);
    prepare_events();
    prepare_sites();
    report_process(argv);
    if (strcmp(own_role, "compiler")) /* It is seen as a program. */
        prepare_libraries();
}

static void report_exit(void) {
    if (!audit_directory[0] || !audit_reports)
        return;
    report_unseen_children();
    if (!own_role[0])
        return;
    char buffer[SMALL_LINE];
    Line line;
    line_begin(&line, buffer, sizeof buffer, "exit", audit_now());
    line_write(&line);
}

__attribute__((destructor)) static void end(void) {
    report_all_libraries();
    report_exit();
}

EXPORT void _exit(int status) {
    resolve();
    report_all_libraries();
    report_exit();
    real__exit(status);
    __builtin_unreachable();
}

EXPORT void _Exit(int status) {
    resolve();
    report_all_libraries();
    report_exit();
    real__Exit(status);
    __builtin_unreachable();
}

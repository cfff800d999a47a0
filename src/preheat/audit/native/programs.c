/* Programs that are started: they are reported when they are executed and when they start.

   The functions of the C library that execute programs do not call one another by their symbols, so that
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
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

extern char** environ;
static pid_t self; /* the process that loaded this library; a forked child is another one */

/* The functions that are wrapped here */

typedef int (*Spawn)(pid_t*, const char*, const posix_spawn_file_actions_t*, const posix_spawnattr_t*,
                     char* const[], char* const[]);

static int (*real_execve)(const char*, char* const[], char* const[]);
static int (*real_execv)(const char*, char* const[]);
static int (*real_execvp)(const char*, char* const[]);
static int (*real_execvpe)(const char*, char* const[], char* const[]);
static Spawn real_posix_spawn;
static Spawn real_posix_spawnp;
static int (*real_system)(const char*);
static FILE* (*real_popen)(const char*, const char*);
static pid_t (*real_waitpid)(pid_t, int*, int);
static pid_t (*real_wait4)(pid_t, int*, int, struct rusage*);
static void (*real__exit)(int);

/* Find the wrapped functions of the C library. This happens when the library is loaded, because a
   process between fork and exec must not search for symbols. */
static void resolve(void) {
    if (real__exit)
        return;
#define NEXT(name) *(void**)&real_##name = real_dlsym(RTLD_NEXT, #name)
    NEXT(execve), NEXT(execv), NEXT(execvp), NEXT(execvpe), NEXT(posix_spawn), NEXT(posix_spawnp);
    NEXT(system), NEXT(popen), NEXT(waitpid), NEXT(wait4), NEXT(_exit);
#undef NEXT
}

/* Roles of programs */

static const char* base_name(const char* path) {
    const char* slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* Return whether `name` is a compiler: alone, with a target before it, or a version behind it. */
static int is_compiler(const char* name) {
    static const char* const tools[] = {
        "nvcc", "cicc", "ptxas", "ptxas-blackwell", "cudafe++", "fatbinary", "nvlink", "tileiras",
        "gcc", "g++", "cc", "c++", "clang", "clang++", "cc1", "cc1plus", "collect2", "as", "ld",
        "ld.bfd", "ld.gold", "ld.lld", "lld", "mold", "tcc", "ninja", "hipcc", "icx", "icpx", NULL,
    };
    size_t length = strlen(name);
    while (length && (strchr("0123456789.", name[length - 1]) != NULL))
        length--;
    if (length != strlen(name) && length && name[length - 1] == '-')
        length--; /* gcc-13, clang-18.1 */
    else
        length = strlen(name);
    for (int i = 0; tools[i]; i++) {
        size_t size = strlen(tools[i]);
        if (size > length || strncmp(name + length - size, tools[i], size))
            continue;
        if (size == length || name[length - size - 1] == '-')
            return 1; /* x86_64-linux-gnu-gcc */
    }
    return 0;
}

/* Return whether a compiler is only asked about itself, and compiles nothing. */
static int is_probe(char* const words[]) {
    static const char* const questions[] = {
        "--version", "-V", "-dumpversion", "-dumpfullversion", "-dumpmachine", "-dumpspecs", "--help",
        "-h", "-###", "--dryrun", "-dryrun", "--list-gpu-arch", "--list-gpu-code", "-Wl,-t", "-qversion",
        NULL,
    };
    int count = 0;
    for (; words && words[count]; count++)
        if (count) {
            for (int i = 0; questions[i]; i++)
                if (!strcmp(words[count], questions[i]))
                    return 1;
            if (!strncmp(words[count], "-print-", 7) || !strncmp(words[count], "--print-", 8) ||
                !strncmp(words[count], "--help=", 7))
                return 1;
        }
    if (count == 2 && (!strcmp(words[1], "-v") || !strcmp(words[1], "-t")))
        return 1;
    /* The search of `ctypes.util.find_library`. */
    return count > 2 && !strcmp(words[1], "-t") && !strcmp(base_name(words[0]), "ld");
}

static const char* role_of(const char* path, char* const words[]) {
    int found = is_compiler(base_name(path)) || (words && words[0] && is_compiler(base_name(words[0])));
    return !found ? "" : is_probe(words) ? "probe" : "compiler";
}

/* Programs that are started */

/* Return the value of a variable in `env`, or NULL. */
static const char* variable(char* const env[], const char* name) {
    size_t length = strlen(name);
    for (int i = 0; env && env[i]; i++)
        if (!strncmp(env[i], name, length) && env[i][length] == '=')
            return env[i] + length + 1;
    return NULL;
}

/* Return why this library will not be loaded into a program; NULL if it will be. */
static const char* hidden_because(const char* path, char* const env[]) {
    const char* preload = variable(env, "LD_PRELOAD");
    if (!preload || !strstr(preload, audit_library))
        return "it is started without the LD_PRELOAD of the audit";
    if (!variable(env, "PREHEAT_AUDIT"))
        return "it is started without the environment of the audit";
    struct stat status;
    if (!stat(path, &status) && (status.st_mode & (S_ISUID | S_ISGID)) && getuid())
        return "it runs with the rights of another user";
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return NULL;
    const char* why = NULL;
    Elf64_Ehdr header;
    if (read(file, &header, sizeof header) == sizeof header && !memcmp(header.e_ident, ELFMAG, SELFMAG) &&
        header.e_ident[EI_CLASS] == ELFCLASS64 && header.e_phnum) {
        why = "it is statically linked";
        for (int i = 0; i < header.e_phnum && why; i++) {
            Elf64_Phdr part;
            off_t at = (off_t)(header.e_phoff + (size_t)i * header.e_phentsize);
            if (pread(file, &part, sizeof part, at) != sizeof part || part.p_type == PT_INTERP)
                why = NULL;
        }
    }
    close(file);
    return why;
}

typedef struct {
    const char* call;
    const char* path;
    char* const* words;
    char* const* env;
    const void* caller;
} Start;

/* Report a program that is about to be executed, in this process if `child` is 0. */
static void report_start(const Start* start, pid_t child, const char* role, const char* site) {
    Line line;
    char object[PATH_BYTES];
    line_begin(&line, "exec");
    line_text(&line, "call", start->call);
    line_text(&line, "path", start->path);
    line_text(&line, "role", role);
    line_integer(&line, "parent", child ? getpid() : getppid());
    if (child)
        line_integer(&line, "child", child);
    line_words(&line, "argv", start->words);
    line_text(&line, "hidden", hidden_because(start->path, start->env));
    if (getpid() == self) /* A forked child must not wait for a lock of the loader. */
        line_text(&line, "caller", object_of(start->caller, object, sizeof object));
    if (site[0])
        line_text(&line, "site", site);
    line_write(&line);
}

/* Return whether a program may be started. `path` is an executable file. */
static int permit_start(const Start* start, const char* role, const char* site) {
    if (audit_seal == SEAL_OFF || strcmp(role, "compiler"))
        return 1;
    char object[PATH_BYTES];
    int known = getpid() == self;
    audit_complain("start a compiler", start->path, site[0] ? site : NULL,
                   known ? object_of(start->caller, object, sizeof object) : NULL);
    return audit_seal != SEAL_ERROR;
}

static int is_executable(const char* path) {
    struct stat status;
    return !stat(path, &status) && S_ISREG(status.st_mode) && !access(path, X_OK);
}

/* Find a program as `execvp` does. Return `name` itself if it has a slash or is not found. */
static const char* search_path(const char* name, char* out, size_t size) {
    const char* path = getenv("PATH");
    if (strchr(name, '/') || !path)
        return name;
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

/* Report a start by one of the exec functions, and return whether it may go on. */
static int before_exec(const Start* start) {
    if (!audit_directory[0])
        return 1;
    int error = errno, permitted = 1;
    if (start->path && is_executable(start->path)) {
        char site[SITE_BYTES];
        audit_site(site, sizeof site);
        const char* role = role_of(start->path, start->words);
        permitted = permit_start(start, role, site);
        if (permitted)
            report_start(start, 0, role, site);
    }
    errno = permitted ? error : EPERM;
    return permitted;
}

EXPORT int execve(const char* path, char* const words[], char* const env[]) {
    resolve();
    Start start = {"execve", path, words, env, CALLER};
    return before_exec(&start) ? real_execve(path, words, env) : -1;
}

EXPORT int execv(const char* path, char* const words[]) {
    resolve();
    Start start = {"execv", path, words, environ, CALLER};
    return before_exec(&start) ? real_execv(path, words) : -1;
}

EXPORT int execvp(const char* name, char* const words[]) {
    resolve();
    char found[PATH_BYTES];
    Start start = {"execvp", search_path(name, found, sizeof found), words, environ, CALLER};
    return before_exec(&start) ? real_execvp(name, words) : -1;
}

EXPORT int execvpe(const char* name, char* const words[], char* const env[]) {
    resolve();
    char found[PATH_BYTES];
    Start start = {"execvpe", search_path(name, found, sizeof found), words, env, CALLER};
    return before_exec(&start) ? real_execvpe(name, words, env) : -1;
}

/* Collect the arguments of `execl` into an array on the stack; for `execle`, the environment follows. */
#define COLLECT(words, first, arguments) \
    va_list arguments, counted_; \
    va_start(arguments, first); \
    va_copy(counted_, arguments); \
    size_t count_ = 1; \
    for (const char* word_ = (first); word_; word_ = va_arg(counted_, const char*)) \
        count_++; \
    va_end(counted_); \
    char* words[count_]; \
    words[0] = (char*)(first); \
    for (size_t i_ = 1; i_ < count_; i_++) \
        words[i_] = va_arg(arguments, char*)

EXPORT int execl(const char* path, const char* first, ...) {
    COLLECT(words, first, arguments);
    va_end(arguments);
    return execv(path, words);
}

EXPORT int execlp(const char* name, const char* first, ...) {
    COLLECT(words, first, arguments);
    va_end(arguments);
    return execvp(name, words);
}

EXPORT int execle(const char* path, const char* first, ...) {
    COLLECT(words, first, arguments);
    char** env = va_arg(arguments, char**);
    va_end(arguments);
    return execve(path, words, env);
}

/* Start a program by one of the spawn functions, and report it. */
static int spawn(Spawn real, const Start* start, pid_t* pid, const char* name,
                 const posix_spawn_file_actions_t* actions, const posix_spawnattr_t* attributes) {
    char site[SITE_BYTES];
    pid_t child = 0;
    if (!audit_directory[0] || !is_executable(start->path))
        return real(pid, name, actions, attributes, start->words, start->env);
    audit_site(site, sizeof site);
    const char* role = role_of(start->path, start->words);
    if (!permit_start(start, role, site))
        return EPERM;
    int result = real(&child, name, actions, attributes, start->words, start->env);
    if (pid && !result)
        *pid = child;
    if (!result)
        report_start(start, child, role, site);
    return result;
}

EXPORT int posix_spawn(pid_t* pid, const char* path, const posix_spawn_file_actions_t* actions,
                       const posix_spawnattr_t* attributes, char* const words[], char* const env[]) {
    resolve();
    Start start = {"posix_spawn", path, words, env, CALLER};
    return spawn(real_posix_spawn, &start, pid, path, actions, attributes);
}

EXPORT int posix_spawnp(pid_t* pid, const char* name, const posix_spawn_file_actions_t* actions,
                        const posix_spawnattr_t* attributes, char* const words[], char* const env[]) {
    resolve();
    char found[PATH_BYTES];
    Start start = {"posix_spawnp", search_path(name, found, sizeof found), words, env, CALLER};
    return spawn(real_posix_spawnp, &start, pid, name, actions, attributes);
}

/* Report a command for a shell. The C library starts the shell without any of the functions above. */
static void report_shell(const char* call, const char* command, const void* caller) {
    if (!audit_directory[0] || !command)
        return;
    int error = errno;
    Line line;
    char site[SITE_BYTES], object[PATH_BYTES];
    line_begin(&line, "shell");
    line_text(&line, "call", call);
    line_text(&line, "command", command);
    line_text(&line, "caller", object_of(caller, object, sizeof object));
    if (audit_site(site, sizeof site))
        line_text(&line, "site", site);
    line_write(&line);
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

/* The ends of programs: the parent sees also those of programs that do not load this library. */
static void report_end(pid_t child, int status) {
    if (!audit_directory[0] || !audit_reports || child <= 0 || WIFSTOPPED(status) || WIFCONTINUED(status))
        return;
    Line line;
    line_begin(&line, "reaped");
    line_integer(&line, "child", child);
    line_integer(&line, "status", WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status));
    line_write(&line);
}

EXPORT pid_t waitpid(pid_t pid, int* status, int options) {
    resolve();
    int mine = 0;
    pid_t child = real_waitpid(pid, &mine, options);
    if (status && child > 0)
        *status = mine;
    report_end(child, mine);
    return child;
}

EXPORT pid_t wait4(pid_t pid, int* status, int options, struct rusage* usage) {
    resolve();
    int mine = 0;
    pid_t child = real_wait4(pid, &mine, options, usage);
    if (status && child > 0)
        *status = mine;
    report_end(child, mine);
    return child;
}

/* The start and the end of this process */

static const char* role = "";

static void report_process(char* const words[]) {
    char program[PATH_BYTES];
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    program[length > 0 ? length : 0] = 0;
    role = role_of(program, words);
    Line line;
    line_begin(&line, "process");
    line_integer(&line, "parent", getppid());
    line_text(&line, "path", program);
    line_text(&line, "role", role);
    line_words(&line, "argv", words);
    line_write(&line);
    if (!strcmp(role, "compiler") && audit_seal != SEAL_OFF) {
        audit_complain("run a compiler", program, NULL, NULL);
        if (audit_seal == SEAL_ERROR)
            _exit(126);
    }
}

__attribute__((constructor)) static void begin(int count, char** words, char** env) {
    (void)count, (void)env;
    resolve();
    self = getpid();
    const char* directory = getenv("PREHEAT_AUDIT");
    const char* seal = getenv("PREHEAT_AUDIT_SEAL");
    Dl_info self;
    if (!directory || directory[0] != '/' || strlen(directory) >= PATH_BYTES)
        return;
    if (dladdr((void*)begin, &self) && self.dli_fname && !realpath(self.dli_fname, audit_library))
        snprintf(audit_library, sizeof audit_library, "%s", self.dli_fname);
    audit_reports = !getenv("PREHEAT_AUDIT_ONLY");
    if (seal)
        audit_seal = !strcmp(seal, "error") ? SEAL_ERROR : !strcmp(seal, "warn") ? SEAL_WARN : SEAL_OFF;
    snprintf(audit_directory, sizeof audit_directory, "%s", directory);
    report_process(words);
}

static void report_exit(void) {
    if (!audit_directory[0] || !audit_reports || !role[0])
        return;
    Line line;
    line_begin(&line, "exit");
    line_write(&line);
}

__attribute__((destructor)) static void end(void) { report_exit(); }

EXPORT void _exit(int status) {
    resolve();
    report_exit();
    real__exit(status);
    __builtin_unreachable();
}

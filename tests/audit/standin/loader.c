// A program without Python: it loads modules and starts compilers as C++ libraries do.
//
//     loader call ROUTE FILE     load FILE by the symbol, by dlsym, or by cuGetProcAddress
//     loader embedded            load a fat binary that is a part of this program, in its wrapper
//     loader popen COMMAND       run a command by popen
//     loader spawn PROGRAM ARG   start a program by posix_spawn
//     loader exec PROGRAM ARG    execute a program by an instruction
//     loader syscall PROGRAM ARG execute a program by syscall(SYS_execve); with `at`, by SYS_execveat
//     loader raw PROGRAM ARG     start a program by syscall alone
//     loader versions DIR        find the compile function of five copies of a compiler library
//     loader stack               wait for a child on a stack of 16 KiB
//     loader fork                run a command in a child while another thread holds the loader
//     loader sandbox             load PTX at the end of a page, without process_vm_readv
//     loader nofiles             wait for a child in a sandbox that ends a process which opens a file
//     loader execlp PROGRAM ARG  start a program by execlp
//     loader execveat PROGRAM    start a program by execveat
//     loader unset PROGRAM       start a program by execlp, without PATH
//     loader change DIR PROGRAM  start a program by posix_spawn in another directory
//     loader memory PROGRAM      start a program when no more memory can be mapped
//     loader space PROGRAM       start a program when files must not grow
//     loader init                initialize the driver, and load nothing
//     loader end                 end by _Exit, which runs no handlers
//     loader next                fail if a search after the driver finds the driver
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <link.h>
#include <pthread.h>
#include <spawn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
extern int cuInit(unsigned);
extern int standin_next(void);
extern int cuModuleLoadData(void **, const void *);
extern int cuLibraryLoadData(void **, const void *, int *, void **, unsigned, int *, void **, unsigned);
extern int cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *);

// A fat binary with one entry: the header of PTX for sm_90, and no content.
static const struct {
    uint32_t magic;
    uint16_t version, header;
    uint64_t size;
    uint16_t kind, entry_version;
    uint32_t entry_header;
    uint64_t content;
    uint32_t packed, unknown;
    uint16_t minor, major;
    uint32_t arch, name, length;
    uint64_t flags, zero, unpacked;
} fatbin = {0xba55ed50u, 1, 16, 64, 1, 0x101, 64, 0, 0, 64, 0, 9, 90, 0, 0, 0x11, 0, 0};
static const struct {
    uint32_t magic, version;
    const void *data;
    void *more;
} wrapper = {0x466243b1u, 1, &fatbin, NULL};

static char *read_file(const char *path) {
    FILE *file = fopen(path, "rb");
    static char data[1 << 20];
    if (!file) exit(9);
    size_t count = fread(data, 1, sizeof data - 1, file);
    data[count] = 0;
    fclose(file);
    return data;
}

// Find the compile function in five copies of a library, which a test has made.
static int load_versions(const char *place) {
    for (int i = 0; i < 5; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/libnvrtc-%d.so", place, i);
        void *library = dlopen(path, RTLD_NOW);
        if (!library || !dlsym(library, "nvrtcCompileProgram")) return 9;
    }
    return 0;
}

static void *wait_for_child(void *status) {
    waitpid(-1, status, 0);
    return NULL;
}
static int wait_on_small_stack(void) {
    pthread_attr_t attributes;
    pthread_t thread;
    int status = 1;
    if (!fork()) _exit(0);
    pthread_attr_init(&attributes);
    if (pthread_attr_setstacksize(&attributes, 16384)) return 9;
    if (pthread_create(&thread, &attributes, wait_for_child, &status)) return 9;
    pthread_join(thread, NULL);
    return status;
}

static volatile int holding;
static int hold(struct dl_phdr_info *info, size_t size, void *data) {
    (void)info, (void)size, (void)data;
    holding = 1;
    usleep(1000000);
    return 1;
}
static void *hold_loader(void *data) {
    dl_iterate_phdr(hold, NULL);
    return data;
}
static int fork_while_held(void) {
    pthread_t thread;
    int status = 0;
    pthread_create(&thread, NULL, hold_loader, NULL);
    while (!holding) usleep(1000);
    pid_t child = fork();
    if (!child) {
        alarm(5);  // ends a child that waits for the lock
        void *module;
        int result = system("true");
        _exit(result || cuModuleLoadData(&module, ".version 8.0"));
    }
    waitpid(child, &status, 0);
    pthread_join(thread, NULL);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 9;
}

// Enter a sandbox that forbids one system call. Return 77 if there is no seccomp.
static int forbid(unsigned call, unsigned result) {
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, result),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {4, rules};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
        return 77;
    return 0;
}

static int load_in_sandbox(void) {
    static const char ptx[] = ".version 8.0\n.target sm_90\n.address_size 64\n";
    if (forbid(SYS_process_vm_readv, SECCOMP_RET_ERRNO | EPERM)) return 77;
    char *page = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    munmap(page + 4096, 4096);
    void *module;
    cuInit(0);
    return cuModuleLoadData(&module, memcpy(page + 4096 - sizeof ptx, ptx, sizeof ptx));
}

static int wait_without_files(void) {
    int status = 9;
    if (forbid(SYS_openat, SECCOMP_RET_KILL_PROCESS)) return 77;
    pid_t child = fork();
    if (!child) _exit(4);
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 9;
}

static int start_elsewhere(const char *place, char **words) {
    posix_spawn_file_actions_t actions;
    pid_t child;
    int status = 0;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addchdir_np(&actions, place);
    if (posix_spawn(&child, words[0], &actions, NULL, words, environ)) return 9;
    waitpid(child, &status, 0);
    return status != 0;
}

static int start_with_limit(int resource, rlim_t most, char **words) {
    struct rlimit limit = {most, most};
    int status = 0;
    pid_t child = fork();
    if (!child) {
        setrlimit(resource, &limit);
        execv(words[0], words);
        _exit(9);
    }
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Execute a program by an instruction, which no library sees.
static int execute(char **words) {
    long result = SYS_execve;
#if defined(__x86_64__)
    __asm__ volatile("syscall" : "+a"(result) : "D"(words[0]), "S"(words), "d"(environ) : "rcx", "r11", "memory");
#elif defined(__aarch64__)
    register long number __asm__("x8") = SYS_execve;
    register long path __asm__("x0") = (long)words[0];
    register char **arguments __asm__("x1") = words, **env __asm__("x2") = environ;
    __asm__ volatile("svc 0" : "+r"(path) : "r"(number), "r"(arguments), "r"(env) : "memory");
    result = path;
#endif
    return (int)result;
}

#ifdef SYS_fork
// Start a program by the function `syscall` alone, and wait for it.
static int start_by_number(char **words) {
    int status = 0;
    long child = syscall(SYS_fork);
    if (!child) {
        syscall(SYS_execve, words[0], words, environ);
        syscall(SYS_exit_group, 99);
    }
    syscall(SYS_wait4, child, &status, 0, NULL);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 9;
}
#endif

int main(int count, char **words) {
    void *module;
    if (count < 2) return 9;
    if (!strcmp(words[1], "call")) {
        int (*load)(void **, const void *) = cuModuleLoadData;
        cuInit(0);
        if (!strcmp(words[2], "dlsym"))
            *(void **)&load = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuModuleLoadData");
        if (!strcmp(words[2], "cuGetProcAddress"))
            cuGetProcAddress_v2("cuModuleLoadData", (void **)&load, 12000, 0, NULL);
        return load(&module, read_file(words[3])) != 0;
    }
    if (!strcmp(words[1], "embedded")) {
        cuInit(0);
        return cuLibraryLoadData(&module, &wrapper, NULL, NULL, 0, NULL, NULL, 0) != 0;
    }
    if (!strcmp(words[1], "popen")) {
        FILE *pipe = popen(words[2], "r");
        return pipe ? pclose(pipe) != 0 : 9;
    }
    if (!strcmp(words[1], "spawn")) {
        pid_t child;
        int status = 0, error = posix_spawnp(&child, words[2], NULL, NULL, words + 2, environ);
        if (error) return 100 + error;
        waitpid(child, &status, 0);
        return WEXITSTATUS(status);
    }
    if (!strcmp(words[1], "exec")) return execute(words + 2);
    if (!strcmp(words[1], "syscall")) return (int)syscall(SYS_execve, words[2], words + 2, environ);
    if (!strcmp(words[1], "at")) return (int)syscall(SYS_execveat, AT_FDCWD, words[2], words + 2, environ, 0);
#ifdef SYS_fork
    if (!strcmp(words[1], "raw")) return start_by_number(words + 2);
#endif
    if (!strcmp(words[1], "execlp")) return execlp(words[2], words[2], words[3], (char *)NULL);
    if (!strcmp(words[1], "execveat")) return execveat(AT_FDCWD, words[2], words + 2, environ, 0);
    if (!strcmp(words[1], "unset")) return unsetenv("PATH") || execlp(words[2], words[2], "a.c", (char *)NULL);
    if (!strcmp(words[1], "change")) return start_elsewhere(words[2], words + 3);
    if (!strcmp(words[1], "memory")) return start_with_limit(RLIMIT_AS, 1 << 20, words + 2);
    if (!strcmp(words[1], "space")) return start_with_limit(RLIMIT_FSIZE, 0, words + 2);
    if (!strcmp(words[1], "init")) return cuInit(0);
    if (!strcmp(words[1], "versions")) return load_versions(words[2]);
    if (!strcmp(words[1], "stack")) return wait_on_small_stack();
    if (!strcmp(words[1], "fork")) return fork_while_held();
    if (!strcmp(words[1], "sandbox")) return load_in_sandbox();
    if (!strcmp(words[1], "nofiles")) return wait_without_files();
    if (!strcmp(words[1], "end")) _Exit(0);
    if (!strcmp(words[1], "next")) return standin_next();
    return 9;
}

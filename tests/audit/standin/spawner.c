// Starts a program in one of many ways: spawner WAY PROGRAM ARG
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

// A system call by an instruction, which no library sees.
static long instruction(long number, long a, long b, long c, long d) {
    long result = number;
#if defined(__x86_64__)
    register long fourth __asm__("r10") = d;
    __asm__ volatile("syscall" : "+a"(result) : "D"(a), "S"(b), "d"(c), "r"(fourth) : "rcx", "r11", "memory");
#elif defined(__aarch64__)
    register long which __asm__("x8") = number;
    register long first __asm__("x0") = a;
    register long second __asm__("x1") = b, third __asm__("x2") = c, fourth __asm__("x3") = d;
    __asm__ volatile("svc 0" : "+r"(first) : "r"(which), "r"(second), "r"(third), "r"(fourth) : "memory");
    result = first;
#endif
    return result;
}

static long fork_by_number(int by_instruction) {
    if (by_instruction) return instruction(SYS_clone, SIGCHLD, 0, 0, 0);
    return syscall(SYS_clone, (long)SIGCHLD, 0L, 0L, 0L, 0L);
}

int main(int count, char **words) {
    char *bare[] = {"PATH=/usr/bin:/bin", NULL};
    if (count < 3) return 9;
    const char *way = words[1];
    char **program = words + 2, **env = strstr(way, "bare") ? bare : environ;
    int by_instruction = strstr(way, "instruction") != NULL, status = 0;
    pid_t child = 0;
    if (!strncmp(way, "vfork", 5)) {
        child = vfork();
        if (!child) {
            execve(program[0], program, env);
            _exit(99);
        }
    } else if (!strncmp(way, "fork", 4)) {
        child = fork();
        if (!child) {
            execve(program[0], program, env);
            _exit(99);
        }
    } else if (!strncmp(way, "spawn", 5)) {
        if (posix_spawn(&child, program[0], NULL, NULL, program, env)) return 99;
    } else {
        child = (pid_t)fork_by_number(by_instruction);
        if (!child) {
            if (strstr(way, "orphan") && fork_by_number(by_instruction)) instruction(SYS_exit_group, 0, 0, 0, 0);
            if (by_instruction)
                instruction(SYS_execve, (long)program[0], (long)program, (long)env, 0);
            else
                syscall(SYS_execve, program[0], program, env);
            instruction(SYS_exit_group, 99, 0, 0, 0);
        }
        if (strstr(way, "unwaited")) return 0;
        if (by_instruction)
            instruction(SYS_wait4, child, (long)&status, 0, 0);
        else
            syscall(SYS_wait4, child, &status, 0, NULL);
        return WIFEXITED(status) ? WEXITSTATUS(status) : 9;
    }
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 9;
}

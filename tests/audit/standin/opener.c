/* Loads a library in one of several ways, and ends. Nothing is looked up, unless the way is `lookup`. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static void* open_it(void* path) { return dlopen(path, RTLD_NOW); }

/* End without any function of the C library. */
static void vanish(void) { syscall(SYS_exit_group, 0); }

int main(int count, char** words) {
    const char* way = words[1];
    char* path = count > 2 ? words[2] : NULL;
    char* next[] = {"true", NULL};
    if (!strcmp(way, "linked")) {
        vanish(); /* The program was linked against it. */
    } else if (!strcmp(way, "list")) {
        return !dlmopen(LM_ID_NEWLM, path, RTLD_NOW);
    } else if (!strcmp(way, "thread")) {
        pthread_t thread;
        void* opened = NULL;
        pthread_create(&thread, NULL, open_it, path);
        pthread_join(thread, &opened);
        return !opened;
    } else if (!strcmp(way, "fork")) {
        int status = 1;
        if (!fork())
            _exit(!open_it(path));
        wait(&status);
        return status != 0;
    }
    void* opened = open_it(path);
    if (!opened)
        return 1;
    if (!strcmp(way, "lookup")) {
        dlsym(opened, "anything");
        vanish();
    } else if (!strcmp(way, "close")) {
        dlclose(opened);
        vanish();
    } else if (!strcmp(way, "exec")) {
        execv("/bin/true", next);
    } else if (!strcmp(way, "kill")) {
        dlsym(opened, "anything");
        raise(SIGKILL);
    } else if (!strcmp(way, "_exit")) {
        _exit(0);
    }
    return 0;
}

/* Calls that release something. Destructors make them, also while an exception of Python is raised.

   Python code must not start to run then, so that the exception is put aside for the time of the call. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

#include "driver.h"

/* The functions of Python, as far as they are needed here. */
static struct {
    int (*ensure)(void);
    void (*release)(int);
    void (*fetch)(void** type, void** value, void** traceback);
    void (*restore)(void* type, void* value, void* traceback);
} python;

static int (*functions[SLOTS])(long, long, long, long, long, long);

/* Return whether a function releases something. It then succeeds when there is no Python any more. */
EXPORT int preheat_driver_releases(const char* name) {
    static const char* const words[] = {"Destroy", "Free", "Unload", "Release", "Unregister", "Synchronize"};
    for (unsigned i = 0; i < sizeof words / sizeof *words; i++)
        if (strstr(name, words[i])) return 1;
    return 0;
}

void driver_set_release(int slot, void* function) {
    *(void**)&python.ensure = dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
    *(void**)&python.release = dlsym(RTLD_DEFAULT, "PyGILState_Release");
    *(void**)&python.fetch = dlsym(RTLD_DEFAULT, "PyErr_Fetch");
    *(void**)&python.restore = dlsym(RTLD_DEFAULT, "PyErr_Restore");
    *(void**)&functions[slot] = function;
    driver_table[slot] = (void*)driver_release;
}

/* `driver_release` passes the arguments on, of which there are at most six, and adds the slot. */
__attribute__((visibility("hidden"))) int driver_call_release(long a, long b, long c, long d, long e, long f,
                                                              long slot) {
    void *type, *value, *traceback;
    int state = python.ensure();
    python.fetch(&type, &value, &traceback);
    int status = functions[slot](a, b, c, d, e, f);
    python.restore(type, value, traceback);
    python.release(state);
    return status;
}

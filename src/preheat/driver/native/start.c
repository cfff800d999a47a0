/* The start of the driver in the Python of the process. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "driver.h"

/* Imports preheat, from the directory that this library is installed in if the program has none. */
static const char start_code[] =
    "def start(library):\n"
    "    import os, sys\n"
    "    try:\n"
    "        import preheat\n"
    "    except ImportError:\n"
    "        sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(library))))\n"
    "    from preheat.driver.bootstrap import install\n"
    "    install(library)\n"
    "start(%s)\n";

static int complain(const char* what) {
    fprintf(stderr, "preheat: the CPU driver cannot start in %s: %s\n", program_invocation_short_name, what);
    return NO_DEVICE;
}

/* Writes a path as a literal of Python. Returns 0 if it does not fit. */
static int quote(const char* path, char* out, size_t size) {
    size_t at = 0;
    if (size < 3) return 0;
    out[at++] = '"';
    for (; *path; path++) {
        if (at + 6 > size) return 0;
        at += (size_t)sprintf(out + at, strchr("\"\\", *path) || *path < ' ' ? "\\x%02x" : "%c", (unsigned char)*path);
    }
    out[at++] = '"';
    out[at] = 0;
    return 1;
}

/* Every thread that calls too early arrives here, and `install` lets them wait for the first one. A lock
   in C would be held while this thread waits for the interpreter lock, whose owner may want it. */
int driver_start(void) {
    static int failed;
    int (*initialized)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "Py_IsInitialized");
    if (failed) return failed;
    if (!initialized || !initialized())
        return failed = complain("it executes kernels in processes of Python, and this is none");
    int (*ensure)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
    void (*release)(int) = (void (*)(int))dlsym(RTLD_DEFAULT, "PyGILState_Release");
    int (*run)(const char*) = (int (*)(const char*))dlsym(RTLD_DEFAULT, "PyRun_SimpleString");
    Dl_info self;
    char path[4200], code[5000];
    if (!ensure || !release || !run || !dladdr((void*)driver_start, &self) ||
        !quote(self.dli_fname, path, sizeof path))
        return failed = complain("it cannot use this Python");
    snprintf(code, sizeof code, start_code, path);
    int state = ensure();
    int status = run(code);
    release(state);
    return status ? (failed = complain("the error of Python is above")) : SUCCESS;
}

/* Loads of modules: an audit that is under way is told of each, before and after, as CUPTI tells it of
   loads by NVIDIA's driver. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>

#include "driver.h"

enum { NO_KIND = -1 }; /* of an input; others have a CUjitInputType */

/* The functions of the audit library */
static struct {
    int (*starts)(void);
    void (*load_begins)(const char* call, const void* image, size_t size, int input, const char* path);
    void (*load_ends)(int status);
} audit;

/* No load has more than eight arguments. Those that a function does not have are not looked at. */
typedef int (*Load)(long, long, long, long, long, long, long, long);
static Load loads[SLOTS];

#define LOAD(symbol, image, size, input, path)                                                       \
    static int load_by_##symbol(long a, long b, long c, long d, long e, long f, long g, long h) {    \
        audit.load_begins(#symbol, (const void*)(image), (size_t)(size), (int)(input), (const char*)(path)); \
        int status = loads[SLOT_##symbol](a, b, c, d, e, f, g, h);                                   \
        audit.load_ends(status);                                                                     \
        return status;                                                                               \
    }
LOAD(cuModuleLoad, 0, 0, NO_KIND, b)
LOAD(cuModuleLoadData, b, 0, NO_KIND, 0)
LOAD(cuModuleLoadDataEx, b, 0, NO_KIND, 0)
LOAD(cuModuleLoadFatBinary, b, 0, NO_KIND, 0)
LOAD(cuLibraryLoadData, b, 0, NO_KIND, 0)
LOAD(cuLibraryLoadFromFile, 0, 0, NO_KIND, b)
LOAD(cuLinkAddData_v2, c, d, b, 0)
LOAD(cuLinkAddFile_v2, 0, 0, b, c)
LOAD(cuLinkComplete, 0, 0, NO_KIND, 0)

static const struct {
    int slot;
    Load function;
} reported[] = {
#define ROW(symbol) {SLOT_##symbol, load_by_##symbol}
    ROW(cuModuleLoad),          ROW(cuModuleLoadData),  ROW(cuModuleLoadDataEx),
    ROW(cuModuleLoadFatBinary), ROW(cuLibraryLoadData), ROW(cuLibraryLoadFromFile),
    ROW(cuLinkAddData_v2),      ROW(cuLinkAddFile_v2),  ROW(cuLinkComplete),
#undef ROW
};

/* Return whether the audit library of this process wants to know of loads. It is preloaded, or the start of
   Python has loaded it. */
static int find_audit(void) {
    const char* path = getenv("PREHEAT_AUDIT_LIBRARY");
    void* library = path && path[0] ? dlopen(path, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    if (!library) return 0;
    *(void**)&audit.starts = dlsym(library, "preheat_audit_cpu_driver");
    *(void**)&audit.load_begins = dlsym(library, "preheat_audit_load_begins");
    *(void**)&audit.load_ends = dlsym(library, "preheat_audit_load_ends");
    return audit.starts && audit.load_begins && audit.load_ends && audit.starts();
}

void driver_report_loads(void) {
    if (!find_audit()) return;
    for (unsigned i = 0; i < sizeof reported / sizeof *reported; i++) {
        void** entry = &driver_table[reported[i].slot];
        *(void**)&loads[reported[i].slot] = *entry;
        *(Load*)entry = reported[i].function;
    }
}

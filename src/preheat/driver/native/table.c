/* What the entry points jump to, and `cuGetProcAddress`, which finds them by name and version. */
#define _GNU_SOURCE
#include <ctype.h>
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "driver.h"

#define E(name, version, per_thread, symbol, kinds) extern void symbol(void);
#include "entry_points.def"
#undef E

typedef struct {
    const char* name;
    int version, per_thread;
    void* address;
} EntryPoint;

static const EntryPoint entry_points[SLOTS] = {
#define E(name, version, per_thread, symbol, kinds) {#name, version, per_thread, (void*)symbol},
#include "entry_points.def"
#undef E
};

void* driver_table[SLOTS];
static unsigned char refused[SLOTS]; /* 1: a program has called it, and it is not supported */
int driver_initialized;              /* by cuInit: a forked child cannot use the driver */

/* Errors */

static struct {
    int code;
    const char* name;
    char text[64]; /* the words of the name */
} errors[] = {
#define E(name, code) {code, #name, ""},
#include "errors.def"
#undef E
};

static void write_error_texts(void) {
    for (unsigned i = 0; i < sizeof errors / sizeof *errors; i++) {
        const char* word = errors[i].name + strlen("CUDA_");
        if (!strncmp(word, "ERROR_", 6)) word += 6;
        for (unsigned at = 0; word[at] && at < sizeof errors[i].text - 1; at++)
            errors[i].text[at] = word[at] == '_' ? ' ' : (char)tolower((unsigned char)word[at]);
    }
}

static int error_name(int code, const char** out) {
    if (!out) return INVALID_VALUE;
    *out = NULL;
    for (unsigned i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) *out = errors[i].name;
    return *out ? SUCCESS : INVALID_VALUE;
}

static int error_text(int code, const char** out) {
    if (!out) return INVALID_VALUE;
    *out = NULL;
    for (unsigned i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) *out = errors[i].text;
    return *out ? SUCCESS : INVALID_VALUE;
}

/* Functions by name */

enum { PER_THREAD = 2 }; /* the flag of cuGetProcAddress for the per-thread default stream */

/* The newest version of a function that is not newer than `version`. `*status` is 1 for an unknown name,
   and 2 for a function that is newer. */
static void* find(const char* name, int version, uint64_t flags, int* status) {
    const EntryPoint* best = NULL;
    *status = 1;
    for (int i = 0; i < SLOTS; i++) {
        const EntryPoint* each = &entry_points[i];
        if (strcmp(each->name, name)) continue;
        if (*status) *status = 2;
        if (each->version > version || (each->per_thread && !(flags & PER_THREAD))) continue;
        *status = 0;
        if (!best || each->per_thread > best->per_thread ||
            (each->per_thread == best->per_thread && each->version > best->version))
            best = each;
    }
    return best ? best->address : NULL;
}

static int get_proc_address(const char* name, void** out, int version, uint64_t flags, int* status) {
    int found;
    if (!name || !out) return INVALID_VALUE;
    *out = find(name, version, flags, &found);
    if (status) {
        *status = found;
        return SUCCESS;
    }
    return *out ? SUCCESS : NOT_FOUND;
}

static int get_proc_address_11030(const char* name, void** out, int version, uint64_t flags) {
    return get_proc_address(name, out, version, flags, NULL);
}

/* NVRTC and nvJitLink ask for a private table as well, and work without it. */
static int is_compiler(const void* address) {
    Dl_info info;
    if (!dladdr(address, &info) || !info.dli_fname) return 0;
    const char* name = strrchr(info.dli_fname, '/');
    name = name ? name + 1 : info.dli_fname;
    return !strncmp(name, "libnvrtc", 8) || !strncmp(name, "libnvJitLink", 12);
}

/* The private tables of NVIDIA's driver are no part of its documented interface: there is none here. */
EXPORT int preheat_driver_wants_tables;
static int get_export_table(const void** out, const void* id) {
    (void)id;
    if (out) *out = NULL;
    if (!is_compiler(__builtin_return_address(0)) && !preheat_driver_wants_tables) {
        preheat_driver_wants_tables = 1;
        driver_start(); /* It says so when the process ends. The runtime may call nothing else. */
    }
    return NOT_FOUND;
}

/* The table */

static int not_initialized(void) { return NOT_INITIALIZED; }
static int deinitialized(void) { return DEINITIALIZED; }
static int success(void) { return SUCCESS; }
static int no_device(void) { return NO_DEVICE; }

/* These need no Python, also before its start. */
static void fill_own(void) {
    driver_table[SLOT_cuGetErrorName] = (void*)error_name;
    driver_table[SLOT_cuGetErrorString] = (void*)error_text;
    driver_table[SLOT_cuGetProcAddress] = (void*)get_proc_address_11030;
    driver_table[SLOT_cuGetProcAddress_v2] = (void*)get_proc_address;
    driver_table[SLOT_cuGetExportTable] = (void*)get_export_table;
}

void driver_fill(void* function) {
    for (int i = 0; i < SLOTS; i++) driver_table[i] = function;
    fill_own();
}

__attribute__((visibility("hidden"))) void* driver_resolve(int slot) {
    int status = driver_start();
    if (status == NO_DEVICE) return (void*)no_device;
    if (status) return (void*)not_initialized;
    return driver_table[slot];
}

__attribute__((visibility("hidden"))) int driver_count_refused(int slot) {
    refused[slot] = 1;
    return NOT_SUPPORTED;
}

static void after_fork_in_child(void) {
    if (driver_initialized) driver_fill((void*)not_initialized);
}

__attribute__((constructor)) static void prepare(void) {
    write_error_texts();
    driver_fill((void*)driver_first_call);
    pthread_atfork(NULL, NULL, after_fork_in_child);
}

/* For Python. A slot that is not installed is refused. */

EXPORT void preheat_driver_install(void* const* functions) {
    for (int i = 0; i < SLOTS; i++) {
        driver_table[i] = functions[i] ? functions[i] : (void*)driver_refuse;
        if (functions[i] && preheat_driver_releases(entry_points[i].name)) driver_set_release(i, functions[i]);
    }
    fill_own();
    driver_report_loads();
    driver_table[SLOT_cuCtxSetCurrent] = (void*)driver_set_current;
    driver_table[SLOT_cuCtxGetCurrent] = (void*)driver_get_current;
    driver_table[SLOT_cuCtxPushCurrent_v2] = (void*)driver_push_current;
    driver_table[SLOT_cuCtxPopCurrent_v2] = (void*)driver_pop_current;
    driver_table[SLOT_cuThreadExchangeStreamCaptureMode] = (void*)driver_exchange_capture_mode;
}

EXPORT void preheat_driver_initialized(void) { driver_initialized = 1; }
EXPORT int preheat_driver_is_initialized(void) { return driver_initialized; }

EXPORT int preheat_driver_refused(int slot) { return refused[slot]; }

/* Called when the interpreter has ended: what libraries written in C still release is accepted. */
EXPORT void preheat_driver_end(void) {
    for (int i = 0; i < SLOTS; i++)
        driver_table[i] = preheat_driver_releases(entry_points[i].name) ? (void*)success : (void*)deinitialized;
    fill_own();
}

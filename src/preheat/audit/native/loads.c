/* Loads of the driver. Callers reach it by its symbols, by `dlsym`, or by `cuGetProcAddress`; all three lead
   here. */
#define _GNU_SOURCE
#include "audit.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { JIT_DISABLED = 223, NOT_FOUND = 500 }; /* CUresult */

/* The loads of the driver */

_Thread_local const void* load_caller;

static pid_t injected_elsewhere; /* the process that was told that CUPTI does not see its modules */

/* Say once in each process that CUPTI was asked for and does not run. */
static void say_without_cupti(void) {
    if (!getenv("PREHEAT_AUDIT_CUPTI") || injected_elsewhere == getpid())
        return;
    injected_elsewhere = getpid();
    const char* path = getenv("CUDA_INJECTION64_PATH");
    if (!path || strcmp(path, audit_library))
        report_unseen("modules", "the program has another CUDA_INJECTION64_PATH than the audit");
}

void* find_driver(const char* name) {
    void* found = real_dlsym(RTLD_NEXT, name);
    if (found)
        return found;
    void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    return driver ? real_dlsym(driver, name) : NULL;
}

/* What a wrapped load does around the call of the driver. */
typedef struct {
    Scratch scratch;
    Image image;
    Load load;
} Wrapped;

typedef struct {
    Wrapped* wrapped; /* NULL: nothing is reported after the call */
    int permitted;
} Decision;

static void forget(Decision* decision) {
    unmap_memory(decision->wrapped, sizeof *decision->wrapped);
    decision->wrapped = NULL;
}

/* Describe a load, and decide if it is permitted. `path` is NULL for images in memory. */
static Decision before_load(const char* call, const void* address, size_t size, int input,
                            const char* path, const void* caller) {
    int reported = audit_reports && !loads_reported;
    Decision decision = {NULL, 1};
    if (!reported && audit_seal == SEAL_OFF)
        return decision;
    Wrapped* wrapped = decision.wrapped = map_memory(sizeof *wrapped);
    if (!wrapped)
        return decision;
    if (reported)
        say_without_cupti();
    prepare_device();
    if (path)
        describe_file(&wrapped->image, path, input);
    else
        describe_image(&wrapped->image, address, size, input, reported);
    int refused = audit_seal != SEAL_OFF && needs_compiler(&wrapped->image);
    if (reported || refused) {
        calling_library(caller, wrapped->scratch.object, sizeof wrapped->scratch.object);
        audit_site(wrapped->scratch.site, sizeof wrapped->scratch.site);
        wrapped->load = (Load){call, "preload", audit_now(), 0, wrapped->scratch.object};
    }
    if (refused) {
        report_refusal(&wrapped->scratch, REFUSED_LOAD, image_name(&wrapped->image),
                       wrapped->scratch.object);
        decision.permitted = audit_seal != SEAL_ERROR;
        wrapped->load.result = JIT_DISABLED;
        if (!decision.permitted && audit_reports)
            report_load(&wrapped->scratch, &wrapped->image, &wrapped->load);
    }
    if (!reported || !decision.permitted)
        forget(&decision);
    return decision;
}

static int after_load(Decision* decision, int result) {
    if (decision->wrapped && !loads_reported) { /* The driver may have started in this call. */
        decision->wrapped->load.result = result;
        report_load(&decision->wrapped->scratch, &decision->wrapped->image, &decision->wrapped->load);
        report_device();
    }
    forget(decision);
    return result;
}

#define LOAD(name, parameters, arguments, address, size, input, path) \
    static int(*real_##name) parameters; \
    EXPORT int name parameters { \
        if (!real_##name) \
            *(void**)&real_##name = find_driver(#name); \
        if (!real_##name) \
            return NOT_FOUND; \
        if (!audit_directory[0]) \
            return real_##name arguments; \
        Decision decision = before_load(#name, address, size, input, path, CALLER); \
        if (!decision.permitted) \
            return JIT_DISABLED; \
        const void* outer = load_caller; \
        load_caller = outer ? outer : CALLER; \
        int result = real_##name arguments; \
        load_caller = outer; \
        return after_load(&decision, result); \
    }

LOAD(cuModuleLoad, (void** module, const char* path), (module, path), NULL, 0, -1, path)
LOAD(cuModuleLoadData, (void** module, const void* image), (module, image), image, 0, -1, NULL)
LOAD(cuModuleLoadDataEx, (void** module, const void* image, unsigned n, int* options, void** values),
     (module, image, n, options, values), image, 0, -1, NULL)
LOAD(cuModuleLoadFatBinary, (void** module, const void* image), (module, image), image, 0, -1, NULL)
LOAD(cuLibraryLoadData,
     (void** library, const void* code, int* options, void** values, unsigned n, int* more, void** others,
      unsigned m),
     (library, code, options, values, n, more, others, m), code, 0, -1, NULL)
LOAD(cuLibraryLoadFromFile,
     (void** library, const char* path, int* options, void** values, unsigned n, int* more, void** others,
      unsigned m),
     (library, path, options, values, n, more, others, m), NULL, 0, -1, path)
LOAD(cuLinkAddData_v2,
     (void* state, int type, void* data, size_t size, const char* name, unsigned n, int* options,
      void** values),
     (state, type, data, size, name, n, options, values), data, size, type, NULL)
LOAD(cuLinkAddFile_v2,
     (void* state, int type, const char* path, unsigned n, int* options, void** values),
     (state, type, path, n, options, values), NULL, 0, type, path)

/* The driver compiles the PTX of a link when the link is completed. */
static int (*real_cuLinkComplete)(void*, void**, size_t*);
EXPORT int cuLinkComplete(void* state, void** cubin, size_t* size) {
    if (!real_cuLinkComplete)
        *(void**)&real_cuLinkComplete = find_driver("cuLinkComplete");
    if (!real_cuLinkComplete)
        return NOT_FOUND;
    double started = audit_now();
    int result = real_cuLinkComplete(state, cubin, size);
    Wrapped* wrapped = NULL;
    if (audit_directory[0] && audit_reports && !loads_reported)
        wrapped = map_memory(sizeof *wrapped);
    if (wrapped) {
        wrapped->image.kind = "linked";
        calling_library(CALLER, wrapped->scratch.object, sizeof wrapped->scratch.object);
        audit_site(wrapped->scratch.site, sizeof wrapped->scratch.site);
        wrapped->load = (Load){"cuLinkComplete", "preload", started, result, wrapped->scratch.object};
        report_load(&wrapped->scratch, &wrapped->image, &wrapped->load);
        unmap_memory(wrapped, sizeof *wrapped);
    }
    return result;
}

/* The driver loads CUPTI in this call. A process without it may have modules that no call here shows. */
static int (*real_cuInit)(unsigned);
EXPORT int cuInit(unsigned flags) {
    static pid_t reported;
    if (!real_cuInit)
        *(void**)&real_cuInit = find_driver("cuInit");
    if (!real_cuInit)
        return NOT_FOUND;
    int result = real_cuInit(flags);
    if (result || loads_reported || !audit_directory[0] || !audit_reports || reported == getpid())
        return result;
    reported = getpid();
    char buffer[512];
    Line line;
    say_without_cupti();
    line_begin(&line, buffer, sizeof buffer, "driver", audit_now());
    line_write(&line);
    return result;
}

EXPORT int cuGetProcAddress(const char* name, void** found, int version, uint64_t flags);
EXPORT int cuGetProcAddress_v2(const char* name, void** found, int version, uint64_t flags, int* status);
static int (*real_cuGetProcAddress)(const char*, void**, int, uint64_t);
static int (*real_cuGetProcAddress_v2)(const char*, void**, int, uint64_t, int*);

/* The driver's functions that are wrapped: their wrappers, and where the real ones are kept. */
static const struct {
    const char* name;
    void* wrapper;
    void* real;
} wrapped_calls[] = {
#define ROW(name) {#name, (void*)name, (void*)&real_##name}
    ROW(cuModuleLoad),          ROW(cuModuleLoadData),      ROW(cuModuleLoadDataEx),
    ROW(cuModuleLoadFatBinary), ROW(cuLibraryLoadData),     ROW(cuLibraryLoadFromFile),
    ROW(cuLinkAddData_v2),      ROW(cuLinkAddFile_v2),      ROW(cuLinkComplete),
    ROW(cuGetProcAddress),      ROW(cuGetProcAddress_v2),   ROW(cuInit),
#undef ROW
};

/* Return the wrapper of a function, and keep the function that it calls. */
static void* wrapper_of(const char* name, void* real) {
    prepare_backtraces();
    for (size_t i = 0; i < sizeof wrapped_calls / sizeof *wrapped_calls; i++)
        if (!strcmp(name, wrapped_calls[i].name)) {
            if (real != wrapped_calls[i].wrapper)
                *(void**)wrapped_calls[i].real = real;
            return wrapped_calls[i].wrapper;
        }
    return real;
}

/* The driver returns the newest version of a function under its plain name. */
static void* wrapper_of_symbol(const char* name, void* real, int version) {
    if (!strcmp(name, "cuLinkAddData"))
        return version >= 6050 ? wrapper_of("cuLinkAddData_v2", real) : real;
    if (!strcmp(name, "cuLinkAddFile"))
        return version >= 6050 ? wrapper_of("cuLinkAddFile_v2", real) : real;
    if (!strcmp(name, "cuGetProcAddress"))
        return version >= 12000 ? wrapper_of("cuGetProcAddress_v2", real) : wrapper_of(name, real);
    return wrapper_of(name, real);
}

EXPORT int cuGetProcAddress(const char* name, void** found, int version, uint64_t flags) {
    if (!real_cuGetProcAddress)
        *(void**)&real_cuGetProcAddress = find_driver("cuGetProcAddress");
    if (!real_cuGetProcAddress)
        return NOT_FOUND;
    int result = real_cuGetProcAddress(name, found, version, flags);
    if (!result && found && *found && audit_directory[0])
        *found = wrapper_of_symbol(name, *found, version);
    return result;
}

EXPORT int cuGetProcAddress_v2(const char* name, void** found, int version, uint64_t flags, int* status) {
    if (!real_cuGetProcAddress_v2)
        *(void**)&real_cuGetProcAddress_v2 = find_driver("cuGetProcAddress_v2");
    if (!real_cuGetProcAddress_v2)
        return NOT_FOUND;
    int result = real_cuGetProcAddress_v2(name, found, version, flags, status);
    if (!result && found && *found && audit_directory[0])
        *found = wrapper_of_symbol(name, *found, version);
    return result;
}

/* Lookups by `dlsym` */

int is_driver_call(const char* name) {
    for (size_t i = 0; i < sizeof wrapped_calls / sizeof *wrapped_calls; i++)
        if (!strcmp(name, wrapped_calls[i].name))
            return 1;
    return 0;
}

static int is_own(const void* function) {
    for (size_t i = 0; i < sizeof wrapped_calls / sizeof *wrapped_calls; i++)
        if (function == wrapped_calls[i].wrapper)
            return 1;
    return 0;
}

void* find_driver_call(void* handle, const char* name) {
    void* real = handle == RTLD_DEFAULT ? NULL : real_dlsym(handle, name);
    if (handle == RTLD_DEFAULT || is_own(real)) {
        real = find_driver(name);
        if (!real)
            real = real_dlsym(RTLD_NEXT, name); /* It sets the error that the caller reads by `dlerror`. */
    }
    return real ? wrapper_of(name, real) : NULL;
}

/* The subscriber of CUPTI: it sees every module, also those that the CUDA runtime loads by itself.

   The driver loads this library at cuInit, because CUDA_INJECTION64_PATH names it, and calls
   `InitializeInjection`. CUPTI is loaded here at run time. Its few types are declared as its headers
   document them; they have been the same since CUDA 11. */
#define _GNU_SOURCE
#include "audit.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { DOMAIN_DRIVER = 1, DOMAIN_RESOURCE = 3, MODULE_LOADED = 6, API_ENTER = 0, API_EXIT = 1 };
enum { OLDEST_API = 14, ALREADY_SUBSCRIBED = 12, SUBSCRIBED_ELSEWHERE = 39 };
enum { /* of cupti_driver_cbid.h, which keeps its numbers */
    ID_MODULE_LOAD = 18, ID_MODULE_LOAD_DATA = 19, ID_MODULE_LOAD_DATA_EX = 20, ID_MODULE_LOAD_FAT = 21,
    ID_LINK_COMPLETE = 365, ID_LINK_ADD_DATA = 382, ID_LINK_ADD_FILE = 383, ID_LIBRARY_LOAD_DATA = 678,
    ID_LIBRARY_LOAD_FILE = 679,
};

typedef struct { /* CUpti_CallbackData */
    int site;
    const char* function;
    const void* parameters;
    void* result;
    const char* symbol;
    void* context;
    uint32_t context_id;
    uint64_t* shared;
    uint32_t correlation;
} CallbackData;

typedef struct { /* CUpti_ResourceData */
    void* context;
    void* handle;
    void* descriptor;
} ResourceData;

typedef struct { /* CUpti_ModuleResourceData */
    uint32_t id;
    size_t bytes;
    const char* cubin;
} ModuleData;

/* The parameters of the calls: all loads have the image or the path second. */
typedef struct {
    void** made;
    const void* image;
} LoadParameters;

typedef struct { /* cuLinkAddData_v2_params */
    void* state;
    int type;
    void* data;
    size_t size;
} LinkDataParameters;

typedef struct { /* cuLinkAddFile_v2_params */
    void* state;
    int type;
    const char* path;
} LinkFileParameters;

typedef void (*Callback)(void*, int, uint32_t, const void*);
static struct {
    int (*subscribe)(void**, Callback, void*);
    int (*enable)(uint32_t, void*, int, uint32_t);
    int (*version)(uint32_t*);
} cupti;

static void on_enter(uint32_t id, const CallbackData* call) {
    const LoadParameters* load = call->parameters;
    const LinkDataParameters* data = call->parameters;
    const LinkFileParameters* file = call->parameters;
    const char* name = call->function;
    switch (id) {
    case ID_MODULE_LOAD:
    case ID_LIBRARY_LOAD_FILE: begin_load(name, "cupti", NULL, 0, -1, load->image); break;
    case ID_LINK_ADD_FILE: begin_load(name, "cupti", NULL, 0, file->type, file->path); break;
    case ID_LINK_ADD_DATA: begin_load(name, "cupti", data->data, data->size, data->type, NULL); break;
    case ID_LINK_COMPLETE: begin_load(name, "cupti", NULL, 0, -1, NULL); break;
    default: begin_load(name, "cupti", load->image, 0, -1, NULL);
    }
}

static void on_exit_call(const CallbackData* call) {
    end_load(call->result ? *(const int*)call->result : -1);
}

/* A module is on a device now. With lazy loading that may be long after its image was loaded. */
static void on_module_loaded(const ResourceData* resource) {
    const ModuleData* module = resource->descriptor;
    char buffer[512];
    Line line;
    line_begin(&line, buffer, sizeof buffer, "resident", audit_now());
    if (module) {
        line_integer(&line, "module", module->id);
        line_integer(&line, "bytes", (long long)module->bytes);
    }
    line_integer(&line, "during_load", is_loading());
    line_write(&line);
}

static void on_callback(void* unused, int domain, uint32_t id, const void* data) {
    (void)unused;
    if (!data)
        return;
    const CallbackData* call = data;
    if (domain == DOMAIN_RESOURCE)
        on_module_loaded(data);
    else if (domain == DOMAIN_DRIVER && call->site == API_ENTER)
        on_enter(id, call);
    else if (domain == DOMAIN_DRIVER && call->site == API_EXIT)
        on_exit_call(call);
}

/* Open CUPTI: the one that the program has, those that the audit found, and what the loader finds. */
static void* open_cupti(char* name, size_t size) {
    static const char* const names[] = {"libcupti.so.13", "libcupti.so.12", "libcupti.so", NULL};
    for (int i = 0; names[i]; i++) {
        void* library = dlopen(names[i], RTLD_LAZY | RTLD_NOLOAD);
        snprintf(name, size, "%s", names[i]);
        if (library)
            return library;
    }
    const char* list = getenv("PREHEAT_AUDIT_CUPTI");
    for (const char* at = list ? list : ""; *at;) {
        size_t length = strcspn(at, ":");
        snprintf(name, size, "%.*s", (int)length, at);
        void* library = length ? dlopen(name, RTLD_LAZY) : NULL;
        if (library)
            return library;
        audit_debug("CUPTI: %s: %s", name, length ? dlerror() : "an empty path");
        at += length + (at[length] == ':');
    }
    for (int i = 0; names[i]; i++) {
        void* library = dlopen(names[i], RTLD_LAZY);
        snprintf(name, size, "%s", names[i]);
        if (library)
            return library;
    }
    return NULL;
}

static int subscribe(void) {
    static const uint32_t ids[] = {ID_MODULE_LOAD,     ID_MODULE_LOAD_DATA, ID_MODULE_LOAD_DATA_EX,
                                   ID_MODULE_LOAD_FAT, ID_LINK_COMPLETE,    ID_LINK_ADD_DATA,
                                   ID_LINK_ADD_FILE,   ID_LIBRARY_LOAD_DATA, ID_LIBRARY_LOAD_FILE};
    void* subscriber = NULL;
    int result = cupti.subscribe(&subscriber, on_callback, NULL);
    if (result)
        return result;
    int enabled = 0;
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) {
        int one = cupti.enable(1, subscriber, DOMAIN_DRIVER, ids[i]);
        audit_debug("CUPTI: callback %u: %d", ids[i], one);
        enabled += !one;
    }
    result = cupti.enable(1, subscriber, DOMAIN_RESOURCE, MODULE_LOADED);
    audit_debug("CUPTI: modules: %d", result);
    return enabled ? 0 : -1;
}

/* Say why CUPTI does not see the modules of this process. */
static void fail(const char* why) {
    audit_debug("CUPTI: %s", why);
    report_unseen("modules", why);
}

EXPORT int InitializeInjection(void) {
    char name[PATH_BYTES] = "", why[256];
    uint32_t version = 0;
    if (!audit_directory[0] || loads_reported)
        return 1;
    void* library = open_cupti(name, sizeof name);
    if (!library) {
        fail("the library of CUPTI was not found");
        return 1;
    }
    *(void**)&cupti.subscribe = dlsym(library, "cuptiSubscribe");
    *(void**)&cupti.enable = dlsym(library, "cuptiEnableCallback");
    *(void**)&cupti.version = dlsym(library, "cuptiGetVersion");
    audit_debug("CUPTI: %s", name);
    /* CUPTI that cannot tell its version, while the driver is being initialized, may still work. */
    int told = cupti.version && !cupti.version(&version);
    if (!cupti.subscribe || !cupti.enable || !cupti.version || (told && version < OLDEST_API)) {
        snprintf(why, sizeof why, "CUPTI is too old: its API has version %u", version);
        fail(why);
        return 1;
    }
    if (!prepare_loads()) {
        fail("the process has no key for its threads left");
        return 1;
    }
    int result = subscribe();
    if (result == ALREADY_SUBSCRIBED || result == SUBSCRIBED_ELSEWHERE) {
        fail("a profiler holds CUPTI, which has room for one subscriber");
    } else if (result) {
        snprintf(why, sizeof why, "CUPTI %u refuses a subscriber with error %d", version, result);
        fail(why);
    } else {
        loads_reported = 1;
        Line line;
        char buffer[PATH_BYTES + 512];
        line_begin(&line, buffer, sizeof buffer, "cupti", audit_now());
        line_text(&line, "path", name);
        line_integer(&line, "version", version);
        line_write(&line);
    }
    return 1;
}

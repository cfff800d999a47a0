// A stand-in for libcuda.so.1 that accepts every module, and that loads injection libraries.
//
// The CPU driver reports its modules to an audit itself (tests/driver/test_audits.py). NVIDIA's driver does so
// through CUPTI, which this one has, and it loads damaged images, in programs that are not Python as well.
//
// cuInit loads CUDA_INJECTION64_PATH, as the driver does. The stand-in for CUPTI (cupti.c) subscribes by
// `standin_subscribe`, and is called before and after each load with the structures of CUPTI. With
// CUDA_DISABLE_PTX_JIT=1 it refuses PTX, as the driver does.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int site;
    const char *function;
    const void *parameters;
    void *result;
    const char *symbol;
    void *context;
    uint32_t context_id;
    uint64_t *shared;
    uint32_t correlation;
} CallbackData;
typedef struct { void *context, *handle, *descriptor; } ResourceData;
typedef struct { uint32_t id; size_t bytes; const char *cubin; } ModuleData;
typedef struct { void **made; const void *image; } LoadParameters;
typedef struct { void *state; int type; void *data; size_t size; } LinkParameters;
typedef struct { void *state; int type; const char *path; } LinkFileParameters;
typedef void (*Callback)(void *, int, uint32_t, const void *);

static Callback subscriber;
static int modules;

void standin_subscribe(Callback callback) { subscriber = callback; }

static int around(uint32_t id, const char *name, const void *parameters, int result) {
    CallbackData data = {.site = 0, .function = name, .parameters = parameters, .result = &result};
    if (subscriber) subscriber(NULL, 1, id, &data);
    if (subscriber && !result) {
        ModuleData module = {(uint32_t)++modules, 100, NULL};
        ResourceData resource = {NULL, NULL, &module};
        subscriber(NULL, 3, 6, &resource);
    }
    data.site = 1;
    if (subscriber) subscriber(NULL, 1, id, &data);
    return result;
}

int cuInit(unsigned flags) {
    (void)flags;
    const char *path = getenv("CUDA_INJECTION64_PATH");
    void *library = path ? dlopen(path, RTLD_NOW) : NULL;
    int (*initialize)(void) = NULL;
    if (library) *(void **)&initialize = dlsym(library, "InitializeInjection");
    if (initialize) initialize();
    return 0;
}
// Whether a search after this library finds its own function, which comes before.
int standin_next(void) { return dlsym(RTLD_NEXT, "cuInit") != NULL; }
int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; *context = (void *)0x2000; return 0; }
int cuCtxSetCurrent(void *context) { (void)context; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    const char *capability = getenv("STANDIN_CAPABILITY"); /* such as 90; 0 without a device */
    int number = capability ? atoi(capability) : 90;
    *value = attribute == 75 ? number / 10 : number % 10;
    return number ? 0 : 100;
}
static int load(uint32_t id, const char *name, void **made, const void *image) {
    LoadParameters parameters = {made, image};
    const char *disabled = getenv("CUDA_DISABLE_PTX_JIT"), *text = image;
    int refused = disabled && *disabled == '1' && text && strchr("/.", text[strspn(text, "\n ")]);
    *made = (void *)0x1000;
    return around(id, name, &parameters, refused ? 223 : 0);
}
int cuModuleLoad(void **m, const char *path) { return load(18, "cuModuleLoad", m, path); }
int cuModuleLoadData(void **m, const void *i) { return load(19, "cuModuleLoadData", m, i); }
int cuModuleLoadDataEx(void **m, const void *i, unsigned n, int *o, void **v) {
    (void)n, (void)o, (void)v;
    return load(20, "cuModuleLoadDataEx", m, i);
}
int cuModuleLoadFatBinary(void **m, const void *i) { return load(21, "cuModuleLoadFatBinary", m, i); }
int cuLibraryLoadData(void **l, const void *i, int *o, void **v, unsigned n, int *p, void **w, unsigned k) {
    (void)o, (void)v, (void)n, (void)p, (void)w, (void)k;
    return load(678, "cuLibraryLoadData", l, i);
}
int cuLinkAddData_v2(void *s, int type, void *data, size_t size, const char *name, unsigned n, int *o, void **v) {
    (void)name, (void)n, (void)o, (void)v;
    LinkParameters parameters = {s, type, data, size};
    return around(382, "cuLinkAddData_v2", &parameters, 0);
}
int cuLinkAddFile_v2(void *s, int type, const char *path, unsigned n, int *o, void **v) {
    (void)n, (void)o, (void)v;
    LinkFileParameters parameters = {s, type, path};
    return around(383, "cuLinkAddFile_v2", &parameters, 0);
}
int cuLinkComplete(void *s, void **cubin, size_t *size) {
    (void)s;
    *cubin = NULL, *size = 0;
    return around(365, "cuLinkComplete", &s, 0);
}
int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status) {
    (void)version, (void)flags;
    char full[64];
    snprintf(full, sizeof full, "%s%s", name, strcmp(name, "cuLinkAddData") ? "" : "_v2");
    void *self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    *found = self ? dlsym(self, full) : NULL;
    if (status) *status = *found ? 0 : 1;
    return *found ? 0 : 500;
}

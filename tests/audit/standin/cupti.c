// A stand-in for libcupti: it has room for one subscriber, which the stand-in driver calls.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

typedef void (*Callback)(void *, int, uint32_t, const void *);

// A compiler library, of which a test loads several copies.
int nvrtcCompileProgram(void *program, int count, const char *const *options) {
    (void)program, (void)count, (void)options;
    return 0;
}
int cuptiGetVersion(uint32_t *version) {
    const char *text = getenv("STANDIN_CUPTI");
    *version = text ? (uint32_t)atoi(text) : 130001;
    return 0;
}
int cuptiSubscribe(void **subscriber, Callback callback, void *data) {
    (void)data;
    if (getenv("STANDIN_PROFILER")) return 39;  // CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    void (*subscribe)(Callback) = NULL;
    if (driver) *(void **)&subscribe = dlsym(driver, "standin_subscribe");
    if (!subscribe) return 15;
    subscribe(callback);
    *subscriber = (void *)0x1;
    return 0;
}
int cuptiEnableCallback(uint32_t enable, void *subscriber, int domain, uint32_t id) {
    (void)enable, (void)subscriber, (void)domain, (void)id;
    return 0;
}

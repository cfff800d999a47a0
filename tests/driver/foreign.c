/* A library that calls the driver from threads of its own, and after the end of the interpreter. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>

typedef int (*Call)();

static Call find(const char* name) { return (Call)dlsym(RTLD_DEFAULT, name); }

typedef struct {
    void *context, *function;
    int statuses[8];
} Work;

/* Sums 1, 2, 3 into memory, by launches in the default stream of this thread. */
static void* launch(void* argument) {
    Work* work = argument;
    uint64_t memory = 0;
    int count = 1, value, sum = 0, at = 0;
    work->statuses[at++] = find("cuCtxSetCurrent")(work->context);
    work->statuses[at++] = find("cuMemAlloc_v2")(&memory, (size_t)4);
    work->statuses[at++] = find("cuMemsetD32_v2")(memory, 0u, (size_t)1);
    void* parameters[] = {&memory, &count, &value};
    for (value = 1; value < 4; value++)
        work->statuses[at] |= find("cuLaunchKernel")(work->function, 1, 1, 1, 32, 1, 1, 0, (void*)2, parameters, NULL);
    at++;
    work->statuses[at++] = find("cuMemcpyDtoH_v2")(&sum, memory, (size_t)4);
    work->statuses[at++] = sum;
    return NULL;
}

/* Calls that need no interpreter lock, while the thread that waits for this one holds it. */
static void* without_lock(void* argument) {
    Work* work = argument;
    void* current = NULL;
    int mode = 2;
    const char* name = NULL;
    work->statuses[0] = find("cuCtxPushCurrent_v2")(work->context);
    work->statuses[1] = find("cuCtxGetCurrent")(&current) || current != work->context;
    work->statuses[2] = find("cuThreadExchangeStreamCaptureMode")(&mode);
    work->statuses[3] = find("cuGetErrorName")(700, &name) || !name;
    work->statuses[4] = find("cuCtxPopCurrent_v2")(&current);
    return NULL;
}

static void run(void* (*start)(void*), Work* work) {
    pthread_t thread;
    pthread_create(&thread, NULL, start, work);
    pthread_join(thread, NULL);
}

void run_launches(Work* work) { run(launch, work); }
void run_without_lock(Work* work) { run(without_lock, work); }

/* Releases memory while a KeyError is raised, as destructors do. */
int status_of_release;
void release_while_raising(uint64_t memory) {
    void (*raise)(void*, const char*) = (void (*)(void*, const char*))find("PyErr_SetString");
    raise(*(void**)dlsym(RTLD_DEFAULT, "PyExc_KeyError"), "raised before");
    status_of_release = find("cuMemFree_v2")(memory);
}

static uint64_t kept;
void keep(uint64_t memory) { kept = memory; }

__attribute__((destructor)) static void end(void) {
    uint64_t more;
    const char* name = "";
    if (!kept) return;
    fprintf(stderr, "freed at exit: %d, allocated: %d\n", find("cuMemFree_v2")(kept),
            find("cuMemAlloc_v2")(&more, (size_t)4));
    find("cuGetErrorName")(700, &name);
    fprintf(stderr, "an error at exit: %s\n", name);
}

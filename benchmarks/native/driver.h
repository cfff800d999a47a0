/* The driver, opened by its name, so that no development package of it is needed to link. */
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define NAME(symbol) #symbol
#define FIND(symbol) ((typeof(symbol)*)find(NAME(symbol)))
#define CALL(symbol, ...) check(FIND(symbol)(__VA_ARGS__), NAME(symbol))

static void* driver;

static void open_driver(void) {
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
}

static void* find(const char* name) {
    void* found = dlsym(driver, name);
    if (!found) {
        fprintf(stderr, "the driver has no %s\n", name);
        exit(1);
    }
    return found;
}

static void check(CUresult status, const char* doing) {
    if (status != CUDA_SUCCESS) {
        fprintf(stderr, "%s failed with %d\n", doing, status);
        exit(1);
    }
}

static void* contents(const char* path) {
    FILE* file = fopen(path, "rb");
    if (!file) {
        perror(path);
        exit(1);
    }
    fseek(file, 0, SEEK_END);
    long size = ftell(file);
    rewind(file);
    void* data = malloc(size);
    if (fread(data, 1, size, file) != (size_t)size) {
        perror(path);
        exit(1);
    }
    fclose(file);
    return data;
}

static double microseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e6 + now.tv_nsec * 1e-3;
}

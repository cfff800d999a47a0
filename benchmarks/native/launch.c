/* What a launch costs without Python: cuLaunchKernel in a loop, arguments packed once.

   launch CUBIN KERNEL ROUNDS BATCH: for each round one line with the microseconds a launch took and the
   microseconds a launch that the device was behind at the end. The driver is opened by its name, so
   that no development package of it is needed to link. */
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { N = 1000, GRID = 4, BLOCK = 256 };

#define NAME(symbol) #symbol
#define CALL(symbol, ...) check(((typeof(symbol)*)find(NAME(symbol)))(__VA_ARGS__), NAME(symbol))

static void* driver;

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

int main(int argc, char** argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: launch CUBIN KERNEL ROUNDS BATCH\n");
        return 2;
    }
    int rounds = atoi(argv[3]), batch = atoi(argv[4]);
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }

    CUdevice device;
    CUcontext context;
    CUmodule module;
    CUfunction function;
    CUstream stream;
    CUdeviceptr x, y;
    CALL(cuInit, 0);
    CALL(cuDeviceGet, &device, 0);
    CALL(cuDevicePrimaryCtxRetain, &context, device);
    CALL(cuCtxSetCurrent, context);
    CALL(cuModuleLoadData, &module, contents(argv[1]));
    CALL(cuModuleGetFunction, &function, module, argv[2]);
    CALL(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    CALL(cuMemAlloc, &x, N * sizeof(float));
    CALL(cuMemAlloc, &y, N * sizeof(float));

    float xs[N], ys[N], before[N], a = 2;
    int n = N;
    for (int i = 0; i < N; i++) {
        xs[i] = i % 37 + 1;
        before[i] = i % 11;
    }
    CALL(cuMemcpyHtoD, x, xs, sizeof xs);
    CALL(cuMemcpyHtoD, y, before, sizeof before);
    void* args[] = {&a, &x, &y, &n};
    typeof(cuLaunchKernel)* launch = (typeof(cuLaunchKernel)*)find(NAME(cuLaunchKernel));
    typeof(cuStreamSynchronize)* wait = (typeof(cuStreamSynchronize)*)find(NAME(cuStreamSynchronize));

    check(launch(function, GRID, 1, 1, BLOCK, 1, 1, 0, stream, args, 0), "launch");
    check(wait(stream), "wait");
    CALL(cuMemcpyDtoH, ys, y, sizeof ys);
    for (int i = 0; i < N; i++)
        if (ys[i] != a * xs[i] + before[i]) {
            fprintf(stderr, "element %d is wrong\n", i);
            return 1;
        }

    for (int round = -1; round < rounds; round++) { /* the first warms up */
        double started = microseconds();
        for (int i = 0; i < batch; i++)
            check(launch(function, GRID, 1, 1, BLOCK, 1, 1, 0, stream, args, 0), "launch");
        double launched = microseconds();
        check(wait(stream), "wait");
        if (round >= 0)
            printf("%.4f %.4f\n", (launched - started) / batch, (microseconds() - launched) / batch);
    }
    return 0;
}

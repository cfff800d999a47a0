/* What a launch costs without Python: cuLaunchKernel in a loop, arguments packed once.

   launch CUBIN KERNEL ROUNDS BATCH: for each round one line with the microseconds a launch took and the
   microseconds a launch that the device was behind at the end. */
#include "driver.h"

enum { N = 1000, GRID = 4, BLOCK = 256 };

int main(int argc, char** argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: launch CUBIN KERNEL ROUNDS BATCH\n");
        return 2;
    }
    int rounds = atoi(argv[3]), batch = atoi(argv[4]);
    open_driver();

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

/* What a graph costs without Python: captured, instantiated, uploaded, replayed, and the same done eagerly.

   replay CUBIN NODES CYCLES ROUNDS BURST RUNS: for each round one line of microseconds: the capture, its
   instantiation, the upload, the first replay call, a replay call in a burst that the device need not
   keep up with, a replay from end to end over RUNS of them, and the same work launched eagerly. */
#include "driver.h"

enum { N = 1000, GRID = 4, BLOCK = 256 };

static typeof(cuLaunchKernel)* launch;
static typeof(cuGraphLaunch)* replay;
static typeof(cuStreamSynchronize)* synchronize;

static CUstream stream;
static CUfunction function;
static void** args;

static void step(int nodes) {
    for (int i = 0; i < nodes; i++)
        check(launch(function, GRID, 1, 1, BLOCK, 1, 1, 0, stream, args, 0), "launch");
}

static void wait(void) { check(synchronize(stream), "wait"); }

/* Microseconds of `count` replays, or of `count` eager steps where there is no graph. */
static double several(CUgraphExec graph, int nodes, int count, int waiting) {
    double started = microseconds();
    for (int i = 0; i < count; i++)
        if (graph)
            check(replay(graph, stream), "replay");
        else
            step(nodes);
    if (waiting)
        wait();
    double taken = microseconds() - started;
    wait();
    return taken / count;
}

static void measure(int nodes, int burst, int runs, int shown) {
    CUgraph captured;
    CUgraphExec graph;
    double begun = microseconds();
    CALL(cuStreamBeginCapture, stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    step(nodes);
    CALL(cuStreamEndCapture, stream, &captured);
    double ended = microseconds();
    CALL(cuGraphInstantiate, &graph, captured, 0);
    double ready = microseconds();
    CALL(cuGraphUpload, graph, stream);
    double uploaded = microseconds();
    wait();
    double first = several(graph, nodes, 1, 0);
    double host = several(graph, nodes, burst, 0);
    double end = several(graph, nodes, runs, 1);
    double eager = several(NULL, nodes, runs, 1);
    if (shown) {
        printf("%.4f %.4f %.4f ", ended - begun, ready - ended, uploaded - ready);
        printf("%.4f %.4f %.4f %.4f\n", first, host, end, eager);
    }
    CALL(cuGraphExecDestroy, graph);
    CALL(cuGraphDestroy, captured);
}

int main(int argc, char** argv) {
    if (argc != 7) {
        fprintf(stderr, "usage: replay CUBIN NODES CYCLES ROUNDS BURST RUNS\n");
        return 2;
    }
    int nodes = atoi(argv[2]), cycles = atoi(argv[3]), rounds = atoi(argv[4]);
    int burst = atoi(argv[5]), runs = atoi(argv[6]);
    open_driver();

    CUdevice device;
    CUcontext context;
    CUmodule module;
    CUdeviceptr x, y;
    CALL(cuInit, 0);
    CALL(cuDeviceGet, &device, 0);
    CALL(cuDevicePrimaryCtxRetain, &context, device);
    CALL(cuCtxSetCurrent, context);
    CALL(cuModuleLoadData, &module, contents(argv[1]));
    CALL(cuModuleGetFunction, &function, module, "tick");
    CALL(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    CALL(cuMemAlloc, &x, N * sizeof(int));
    CALL(cuMemAlloc, &y, N * sizeof(int));
    launch = FIND(cuLaunchKernel);
    replay = FIND(cuGraphLaunch);
    synchronize = FIND(cuStreamSynchronize);

    unsigned xs[N], ys[N];
    int n = N;
    for (int i = 0; i < N; i++)
        xs[i] = i % 37 + 1;
    CALL(cuMemcpyHtoD, x, xs, sizeof xs);
    CALL(cuMemsetD32, y, 0, N);
    CALL(cuCtxSynchronize);
    args = (void*[]){&y, &x, &n, &cycles};

    for (int round = -1; round < rounds; round++) /* the first warms up */
        measure(nodes, burst, runs, round >= 0);

    CALL(cuMemcpyDtoH, ys, y, sizeof ys);
    unsigned steps = (rounds + 1) * (1 + burst + 2 * runs);
    for (int i = 0; i < N; i++)
        if (ys[i] != steps * nodes * xs[i]) {
            fprintf(stderr, "element %d is wrong\n", i);
            return 1;
        }
    return 0;
}

/* The loops of native C, for a process that has the work already: any kernel or graph in any stream. */
#include "driver.h"

static typeof(cuLaunchKernel)* launch;
static typeof(cuGraphLaunch)* replay;

static void find_calls(void) {
    if (!driver) {
        open_driver();
        launch = FIND(cuLaunchKernel);
        replay = FIND(cuGraphLaunch);
    }
}

/* Microseconds of one of `count` replays that are submitted one after another, without a wait. */
double burst(CUgraphExec graph, CUstream stream, int count) {
    find_calls();
    double started = microseconds();
    for (int i = 0; i < count; i++)
        check(replay(graph, stream), "replay");
    return (microseconds() - started) / count;
}

/* Microseconds of one of `count` launches of four blocks of 256 threads, with packed arguments. */
double launches(CUfunction function, CUstream stream, void** args, int count) {
    find_calls();
    double started = microseconds();
    for (int i = 0; i < count; i++)
        check(launch(function, 4, 1, 1, 256, 1, 1, 0, stream, args, 0), "launch");
    return (microseconds() - started) / count;
}

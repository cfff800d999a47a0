/* The loop of native C, for a process that has graphs already: any graph executable in any stream. */
#include "driver.h"

static typeof(cuGraphLaunch)* replay;

/* Microseconds of one of `count` launches that are submitted one after another, without a wait. */
double burst(CUgraphExec graph, CUstream stream, int count) {
    if (!replay) {
        open_driver();
        replay = FIND(cuGraphLaunch);
    }
    double started = microseconds();
    for (int i = 0; i < count; i++)
        check(replay(graph, stream), "replay");
    return (microseconds() - started) / count;
}

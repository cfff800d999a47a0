// Keys sorted block by block with CUB: a program of hundreds of header files.
#include <cub/block/block_radix_sort.cuh>

constexpr int THREADS = 128, PER_THREAD = 4;

extern "C" __global__ void __launch_bounds__(THREADS) block_sort(unsigned* keys) {
    using Sort = cub::BlockRadixSort<unsigned, THREADS, PER_THREAD>;
    __shared__ typename Sort::TempStorage storage;
    unsigned mine[PER_THREAD];
    unsigned* base = keys + (blockIdx.x * THREADS + threadIdx.x) * PER_THREAD;
    for (int i = 0; i < PER_THREAD; ++i) mine[i] = base[i];
    Sort(storage).Sort(mine);
    for (int i = 0; i < PER_THREAD; ++i) base[i] = mine[i];
}

#include <cuda_fp16.h>  // a header of CUDA: the extra cu13 brings it

#include "row.h"  // a header beside this file

// One block normalizes one row. The width is known to the compiler, which unrolls the loops.
template <class T, int WIDTH>
__global__ void rms_norm(const T* x, T* out) {
    Row<T, WIDTH> row{x + blockIdx.x * WIDTH};
    float factor = rsqrtf(row.mean_square() + EPSILON);
    for (int i = threadIdx.x; i < WIDTH; i += blockDim.x) {
        out[blockIdx.x * WIDTH + i] = T(float(row.values[i]) * factor);
    }
}

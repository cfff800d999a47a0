// Softmax over rows of any length, one block a row.
__device__ float block_reduce(float value, bool want_max) {
    __shared__ float shared[32];
    for (int lane = 16; lane > 0; lane /= 2) {
        float other = __shfl_xor_sync(0xffffffffu, value, lane);
        value = want_max ? fmaxf(value, other) : value + other;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    value = shared[0];
    for (int warp = 1; warp < blockDim.x / 32; ++warp)
        value = want_max ? fmaxf(value, shared[warp]) : value + shared[warp];
    return value;
}

extern "C" __global__ void softmax(const float* x, float* y, int length) {
    x += (long long)blockIdx.x * length;
    y += (long long)blockIdx.x * length;
    float top = -3.4e38f, sum = 0.0f;
    for (int i = threadIdx.x; i < length; i += blockDim.x) top = fmaxf(top, x[i]);
    top = block_reduce(top, true);
    for (int i = threadIdx.x; i < length; i += blockDim.x) sum += expf(x[i] - top);
    sum = block_reduce(sum, false);
    for (int i = threadIdx.x; i < length; i += blockDim.x) y[i] = expf(x[i] - top) / sum;
}

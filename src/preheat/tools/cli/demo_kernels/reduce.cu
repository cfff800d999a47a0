// Block sums by warp shuffles: one partial result a block, added up in a fixed order by the caller.
template <class T>
__device__ T warp_sum(T value) {
    for (int lane = 16; lane > 0; lane /= 2) value += __shfl_down_sync(0xffffffffu, value, lane);
    return value;
}

extern "C" __global__ void reduce_sum(const float* in, float* partial, int n) {
    __shared__ float sums[32];
    float value = 0.0f;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) value += in[i];
    value = warp_sum(value);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
    __syncthreads();
    if (threadIdx.x < 32) {
        value = warp_sum(threadIdx.x < blockDim.x / 32 ? sums[threadIdx.x] : 0.0f);
        if (threadIdx.x == 0) partial[blockIdx.x] = value;
    }
}

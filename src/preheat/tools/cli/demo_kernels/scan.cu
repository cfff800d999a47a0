// Inclusive prefix sum of one block (Hillis and Steele), with the block's total for a second pass.
extern "C" __global__ void scan_block(const int* in, int* out, int* totals, int n) {
    extern __shared__ int values[];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    values[threadIdx.x] = i < n ? in[i] : 0;
    __syncthreads();
    for (int reach = 1; reach < blockDim.x; reach *= 2) {
        int below = threadIdx.x >= reach ? values[threadIdx.x - reach] : 0;
        __syncthreads();
        values[threadIdx.x] += below;
        __syncthreads();
    }
    if (i < n) out[i] = values[threadIdx.x];
    if (threadIdx.x == blockDim.x - 1) totals[blockIdx.x] = values[threadIdx.x];
}

extern "C" __global__ void scan_add(int* out, const int* before, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && blockIdx.x > 0) out[i] += before[blockIdx.x - 1];
}

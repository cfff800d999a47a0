// Counts how often each byte occurs. Each block counts in shared memory first.
extern "C" __global__ void histogram(const unsigned char* x, unsigned int* counts, int n) {
    __shared__ unsigned int mine[256];
    for (int i = threadIdx.x; i < 256; i += blockDim.x) mine[i] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        atomicAdd(&mine[x[i]], 1u);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 256; i += blockDim.x) atomicAdd(&counts[i], mine[i]);
}

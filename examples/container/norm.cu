// One block normalizes one row to length 1.
template <int WIDTH>
__global__ void normalize(const float* x, float* y) {
    const float* row = x + blockIdx.x * WIDTH;
    float sum = 0;
    for (int i = 0; i < WIDTH; ++i) sum += row[i] * row[i];
    for (int i = threadIdx.x; i < WIDTH; i += blockDim.x) {
        y[blockIdx.x * WIDTH + i] = row[i] * rsqrtf(sum);
    }
}

// C = A B in fp32: 64 x 64 tiles, each thread 4 x 4 results in registers. Any M, N, K.
constexpr int TILE = 64, DEPTH = 16, PER = 4;

extern "C" __global__ void __launch_bounds__(256)
gemm(const float* a, const float* b, float* c, int m, int n, int k) {
    __shared__ float as[DEPTH][TILE + 4], bs[DEPTH][TILE + 4];
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    int row0 = blockIdx.y * TILE, col0 = blockIdx.x * TILE;
    float sum[PER][PER] = {};
    for (int k0 = 0; k0 < k; k0 += DEPTH) {
        for (int i = threadIdx.x; i < TILE * DEPTH; i += 256) {
            int ar = i / DEPTH, ak = i % DEPTH, bk = i / TILE, bc = i % TILE;
            as[ak][ar] = row0 + ar < m && k0 + ak < k ? a[(row0 + ar) * k + k0 + ak] : 0.0f;
            bs[bk][bc] = k0 + bk < k && col0 + bc < n ? b[(k0 + bk) * n + col0 + bc] : 0.0f;
        }
        __syncthreads();
        for (int d = 0; d < DEPTH; ++d)
            for (int i = 0; i < PER; ++i)
                for (int j = 0; j < PER; ++j) sum[i][j] += as[d][ty * PER + i] * bs[d][tx * PER + j];
        __syncthreads();
    }
    for (int i = 0; i < PER; ++i)
        for (int j = 0; j < PER; ++j) {
            int row = row0 + ty * PER + i, col = col0 + tx * PER + j;
            if (row < m && col < n) c[row * n + col] = sum[i][j];
        }
}

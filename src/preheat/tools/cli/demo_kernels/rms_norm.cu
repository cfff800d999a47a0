// y = x / sqrt(mean(x^2) + eps) * weight, bf16 storage, fp32 arithmetic, one block a row.
#include <cuda_bf16.h>

extern "C" __global__ void rms_norm(
    const __nv_bfloat16* x, const __nv_bfloat16* weight, __nv_bfloat16* y, int width, float eps) {
    __shared__ float sums[32];
    x += (long long)blockIdx.x * width;
    y += (long long)blockIdx.x * width;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float value = __bfloat162float(x[i]);
        sum += value * value;
    }
    for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int warp = 0; warp < blockDim.x / 32; ++warp) sum += sums[warp];
    float scale = rsqrtf(sum / width + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        y[i] = __float2bfloat16(__bfloat162float(x[i]) * scale * __bfloat162float(weight[i]));
}

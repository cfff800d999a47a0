// One warp a row. The width of a row is the model's: model.h is made by whoever compiles this.
#include "model.h"

constexpr float EPSILON = 1e-5f;

__device__ float warp_sum(float value) {
    for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(0xffffffffu, value, lane);
    return value;
}

__device__ float warp_max(float value) {
    for (int lane = 16; lane > 0; lane /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, lane));
    return value;
}

// y = x / sqrt(mean(x^2) + epsilon)
extern "C" __global__ void rms_norm(const float* x, float* y) {
    x += blockIdx.x * WIDTH;
    y += blockIdx.x * WIDTH;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < WIDTH; i += 32) sum += x[i] * x[i];
    float scale = rsqrtf(warp_sum(sum) / WIDTH + EPSILON);
    for (int i = threadIdx.x; i < WIDTH; i += 32) y[i] = x[i] * scale;
}

// y = exp(x - max) / sum(exp(x - max))
extern "C" __global__ void softmax(const float* x, float* y, int length) {
    x += blockIdx.x * length;
    y += blockIdx.x * length;
    float top = -3.4e38f, sum = 0.0f;
    for (int i = threadIdx.x; i < length; i += 32) top = fmaxf(top, x[i]);
    top = warp_max(top);
    for (int i = threadIdx.x; i < length; i += 32) sum += expf(x[i] - top);
    sum = warp_sum(sum);
    for (int i = threadIdx.x; i < length; i += 32) y[i] = expf(x[i] - top) / sum;
}

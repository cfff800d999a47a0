// out = silu(gate) * up, two halves at a time.
#include <cuda_fp16.h>

__device__ float silu(float x) { return x / (1.0f + __expf(-x)); }

extern "C" __global__ void swiglu(const __half2* gate, const __half2* up, __half2* out, int pairs) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= pairs) return;
    float2 g = __half22float2(gate[i]), u = __half22float2(up[i]);
    out[i] = __floats2half2_rn(silu(g.x) * u.x, silu(g.y) * u.y);
}

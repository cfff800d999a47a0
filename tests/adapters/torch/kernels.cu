// The kernels of the operators that the tests register.

extern "C" __global__ void scale(const float* x, float a, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i];
}

extern "C" __global__ void scale_inplace(float* x, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= a;
}

// Two results, of which one has another type.
extern "C" __global__ void split(const float* x, float* magnitude, int* sign, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    magnitude[i] = fabsf(x[i]);
    sign[i] = (x[i] > 0) - (x[i] < 0);
}

// A tensor that may be absent, and every kind of number.
extern "C" __global__ void mix(const float* x, const float* bias, int shift, double a, bool negate,
                               float* y) {
    int i = threadIdx.x;
    float value = a * x[i] + shift + (bias ? bias[i] : 0.0f);
    y[i] = negate ? -value : value;
}

template <class T> __global__ void twice(const T* x, T* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] + x[i];
}

// y = x * sigmoid(x), and its gradient.
extern "C" __global__ void swish(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] / (1.0f + expf(-x[i]));
}

extern "C" __global__ void swish_backward(const float* gy, const float* x, float* gx, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float s = 1.0f / (1.0f + expf(-x[i]));
    gx[i] = gy[i] * s * (1.0f + x[i] * (1.0f - s));
}

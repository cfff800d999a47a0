// Rotary position embedding in place: pairs (i, i + half) of each head turned by position * theta^(-2i/d).
template <class T>
__global__ void rope(T* x, const int* positions, int heads, int dim, float theta) {
    int half = dim / 2, token = blockIdx.x;
    T* row = x + (long long)token * heads * dim;
    for (int j = threadIdx.x; j < heads * half; j += blockDim.x) {
        int head = j / half, i = j % half;
        float angle = positions[token] * __powf(theta, -2.0f * i / dim), s, c;
        __sincosf(angle, &s, &c);
        T* at = row + head * dim + i;
        float a = at[0], b = at[half];
        at[0] = a * c - b * s;
        at[half] = a * s + b * c;
    }
}

template __global__ void rope<float>(float*, const int*, int, int, float);

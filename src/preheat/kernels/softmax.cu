// The softmax y of each row of x, and its gradient gx = y (gy - sum_j gy_j y_j). A row that fits into
// the registers of its threads is read once, a wider one, a block each, twice. Threads read their
// elements before they write them, so that the result may take the place of any operand.

constexpr float LOWEST = -3.402823466e38f;  // not -inf: the difference of two of those is no number
constexpr int WIDE = 1024, PART = 2;  // threads of a wide row, and how many chunks each reads at a time

// exp(x). Below the smallest normal number it is zero.
INLINE float exponential(float x) {
    constexpr float LOG2_E = 1.4426950408889634f;
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * LOG2_E));
    return e;
}

// What is known of the exponentials of a row so far: their sum, scaled by exp(-most).
struct Seen { float most, sum; };

INLINE Seen shuffled(Seen s, int by) { return {shuffled(s.most, by), shuffled(s.sum, by)}; }

INLINE Seen merged(Seen s, Seen t) {
    float most = fmaxf(s.most, t.most);
    return {most, s.sum * exponential(s.most - most) + t.sum * exponential(t.most - most)};
}

// Minus infinity stands for what is beyond the end of a row: it has no part in any sum.
template <int STRIDE, int CHUNKS, class T>
INLINE void load_or_nothing(Chunk<T> (&to)[CHUNKS], const T* row, int width, int lane) {
    load<STRIDE>(to, row, width, lane, rounded<T>(__int_as_float(0xff800000)));
}

// The exponentials of this thread's chunks, each taken once, and scaled as `seen` of them says.
template <class T, int CHUNKS> struct Exponentials {
    static constexpr int SIZE = Chunk<T>::SIZE;
    Seen seen = {LOWEST, 0.0f};
    float e[CHUNKS][SIZE];

    INLINE Exponentials(const Chunk<T> (&x)[CHUNKS]) {
#pragma unroll
        for (int k = 0; k < CHUNKS; k++)
#pragma unroll
            for (int i = 0; i < SIZE; i++) seen.most = fmaxf(seen.most, x[k][i]);
#pragma unroll
        for (int k = 0; k < CHUNKS; k++)
#pragma unroll
            for (int i = 0; i < SIZE; i++) {
                e[k][i] = exponential(x[k][i] - seen.most);
                seen.sum += e[k][i];
            }
    }

    INLINE void normalise(Chunk<T> (&y)[CHUNKS], Seen row) const {
        float scale = exponential(seen.most - row.most) / row.sum;
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) y[k].fill([&](int i) { return e[k][i] * scale; });
    }
};

template <class T, int LANES, int CHUNKS>
__global__ void __launch_bounds__(THREADS<LANES>, RESIDENT<LANES>)
softmax(const T* x, T* y, int rows, int width) {
    __shared__ Seen scratch[32];
    long long row = (long long)blockIdx.x * ROWS<LANES> + threadIdx.x / LANES;
    int lane = threadIdx.x % LANES, length = row < rows ? width : 0;
    Chunk<T> v[CHUNKS];
    load_or_nothing<LANES>(v, x + row * width, length, lane);
    Exponentials<T, CHUNKS> mine(v);
    mine.normalise(v, across<LANES>(mine.seen, scratch, merged));
    store<LANES>(y + row * width, v, length, lane);
}

template <class T>
__global__ void __launch_bounds__(WIDE) softmax_wide(const T* x, T* y, int, int width) {
    constexpr int STEP = WIDE * PART, SIZE = Chunk<T>::SIZE;
    __shared__ Seen scratch[32];
    x += (long long)blockIdx.x * width;
    y += (long long)blockIdx.x * width;
    Chunk<T> v[PART];
    Seen s = {LOWEST, 0.0f};
    for (int at = threadIdx.x; at * SIZE < width; at += STEP) {
        load_or_nothing<WIDE>(v, x, width, at);
        s = merged(s, Exponentials<T, PART>(v).seen);
    }
    s = across<WIDE>(s, scratch, merged);
    for (int at = threadIdx.x; at * SIZE < width; at += STEP) {
        load_or_nothing<WIDE>(v, x, width, at);
        Exponentials<T, PART>(v).normalise(v, s);
        store<WIDE>(y, v, width, at);
    }
}

template <int CHUNKS, class T>
INLINE float dot(const Chunk<T> (&a)[CHUNKS], const Chunk<T> (&b)[CHUNKS]) {
    float d = 0.0f;
#pragma unroll
    for (int k = 0; k < CHUNKS; k++)
#pragma unroll
        for (int i = 0; i < Chunk<T>::SIZE; i++) d = fmaf(a[k][i], b[k][i], d);
    return d;
}

// gy becomes gx.
template <int CHUNKS, class T>
INLINE void pull_back(Chunk<T> (&gy)[CHUNKS], const Chunk<T> (&y)[CHUNKS], float d) {
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) gy[k].fill([&](int i) { return y[k][i] * (gy[k][i] - d); });
}

template <class T, int LANES, int CHUNKS>
__global__ void __launch_bounds__(THREADS<LANES>)
softmax_backward(const T* gy, const T* y, T* gx, int rows, int width) {
    __shared__ float scratch[32];
    long long row = (long long)blockIdx.x * ROWS<LANES> + threadIdx.x / LANES;
    int lane = threadIdx.x % LANES, length = row < rows ? width : 0;
    Chunk<T> g[CHUNKS], v[CHUNKS];
    load<LANES>(g, gy + row * width, length, lane);
    load<LANES>(v, y + row * width, length, lane);
    pull_back(g, v, across<LANES>(dot(g, v), scratch, sum));
    store<LANES>(gx + row * width, g, length, lane);
}

// Keeps gy alone and reads y again, mostly from the processor's own cache: with both in registers there
// would be no room for a second row, and nothing to do while the first waits for memory.
template <class T, int LANES, int CHUNKS>
__global__ void __launch_bounds__(LANES, 2)
softmax_backward_again(const T* gy, const T* y, T* gx, int, int width) {
    constexpr int AT_ONCE = 2, STEP = LANES * AT_ONCE, PARTS = CHUNKS / AT_ONCE;
    __shared__ float scratch[32];
    gy += (long long)blockIdx.x * width;
    y += (long long)blockIdx.x * width;
    gx += (long long)blockIdx.x * width;
    Chunk<T> g[PARTS][AT_ONCE], v[AT_ONCE];
    float d = 0.0f;
#pragma unroll
    for (int k = 0; k < PARTS; k++) load<LANES>(g[k], gy, width, threadIdx.x + k * STEP);
#pragma unroll
    for (int k = 0; k < PARTS; k++) {
        load<LANES>(v, y, width, threadIdx.x + k * STEP);
        d += dot(g[k], v);
    }
    d = across<LANES>(d, scratch, sum);
#pragma unroll
    for (int k = 0; k < PARTS; k++) {
        load<LANES>(v, y, width, threadIdx.x + k * STEP);
        pull_back(g[k], v, d);
        store<LANES>(gx, g[k], width, threadIdx.x + k * STEP);
    }
}

template <class T>
__global__ void __launch_bounds__(WIDE)
softmax_backward_wide(const T* gy, const T* y, T* gx, int, int width) {
    constexpr int STEP = WIDE * PART, SIZE = Chunk<T>::SIZE;
    __shared__ float scratch[32];
    gy += (long long)blockIdx.x * width;
    y += (long long)blockIdx.x * width;
    gx += (long long)blockIdx.x * width;
    Chunk<T> g[PART], v[PART];
    float d = 0.0f;
    for (int at = threadIdx.x; at * SIZE < width; at += STEP) {
        load<WIDE>(g, gy, width, at);
        load<WIDE>(v, y, width, at);
        d += dot(g, v);
    }
    d = across<WIDE>(d, scratch, sum);
    for (int at = threadIdx.x; at * SIZE < width; at += STEP) {
        load<WIDE>(g, gy, width, at);
        load<WIDE>(v, y, width, at);
        pull_back(g, v, d);
        store<WIDE>(gx, g, width, at);
    }
}

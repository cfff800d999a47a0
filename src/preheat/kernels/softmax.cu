// The softmax y of each row of x, and its gradient gx = y (gy - sum_j gy_j y_j). A row that fits into
// the registers of its threads is read once, a wider one, a block each, twice. Threads read their
// elements before they write them, so that the result may take the place of any operand.

constexpr float LOWEST = -3.402823466e38f;  // not -inf: the difference of two of those is no number
#define NOTHING __int_as_float(0xff800000)  // minus infinity, beyond the end of a row: no part of a sum
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

// The exponentials of this thread's chunks, each taken once, and scaled as `seen` of them says.
template <class C, int CHUNKS> struct Exponentials {
    static constexpr int SIZE = C::SIZE;
    Seen seen = {LOWEST, 0.0f};
    float e[CHUNKS][SIZE];

    INLINE Exponentials(const C (&x)[CHUNKS]) {
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

    INLINE void normalise(C (&y)[CHUNKS], Seen row) const {
        float scale = exponential(seen.most - row.most) / row.sum;
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) y[k].fill([&](int i) { return e[k][i] * scale; });
    }
};

template <int LANES, int CHUNKS> struct SoftmaxRow {
    template <class A, class T>
    static INLINE void run(A access, const T* x, T* y, int rows, int width) {
        using C = typename A::Item;
        __shared__ Seen scratch[32];
        long long row = (long long)blockIdx.x * ROWS<LANES> + threadIdx.x / LANES;
        int lane = threadIdx.x % LANES, length = row < rows ? width : 0;
        C v[CHUNKS];
        load<LANES>(access, v, x + row * width, length, lane, rounded<T>(NOTHING));
        Exponentials<C, CHUNKS> mine(v);
        mine.normalise(v, across<LANES>(mine.seen, scratch, merged, {LOWEST, 0.0f}));
        A::template store<LANES>(y + row * width, v, length, lane);
    }
};

template <class T, int LANES, int CHUNKS, bool SINGLES>
__global__ void __launch_bounds__(THREADS<LANES>, RESIDENT<LANES>)
softmax(const T* x, T* y, int rows, int width) {
    by_access<SoftmaxRow<LANES, CHUNKS>, T, SINGLES, LANES <= 32 && CHUNKS == 1>(width, aligned(x) && aligned(y), x, y, rows, width);
}

template <int LANES, int CHUNKS> struct SoftmaxSteps {
    template <class A, class T>
    static INLINE void run(A access, const T* x, T* y, int width) {
        using C = typename A::Item;
        __shared__ Seen scratch[32];
        Held<C, CHUNKS> held(dynamic_memory(), dynamic_bytes());
        int step = blockDim.x * CHUNKS;
        x += (long long)blockIdx.x * width;
        y += (long long)blockIdx.x * width;
        C v[CHUNKS];
        Seen s = {LOWEST, 0.0f};
        for (int start = 0; start * C::SIZE < width; start += step) {
            load<LANES>(access, v, x, width, start + threadIdx.x, rounded<T>(NOTHING));
            hold(held, start, v);
            s = merged(s, Exponentials<C, CHUNKS>(v).seen);
        }
        s = across<LANES>(s, scratch, merged, {LOWEST, 0.0f});
        for (int start = 0; start * C::SIZE < width; start += step) {
            recall<LANES>(access, held, start, v, x, width, rounded<T>(NOTHING));
            Exponentials<C, CHUNKS>(v).normalise(v, s);
            A::template store<LANES>(y, v, width, start + threadIdx.x);
        }
    }
};

template <class T, int LANES, int CHUNKS, bool SINGLES>
__global__ void __launch_bounds__(LANES, 1024 / LANES)
softmax_wide(const T* x, T* y, int, int width) {
    by_access<SoftmaxSteps<LANES, CHUNKS>, T, SINGLES>(width, aligned(x) && aligned(y), x, y, width);
}

template <int CHUNKS, class C> INLINE float dot(const C (&a)[CHUNKS], const C (&b)[CHUNKS]) {
    float d = 0.0f;
#pragma unroll
    for (int k = 0; k < CHUNKS; k++)
#pragma unroll
        for (int i = 0; i < C::SIZE; i++) d = fmaf(a[k][i], b[k][i], d);
    return d;
}

// gy becomes gx.
template <int CHUNKS, class C> INLINE void pull_back(C (&gy)[CHUNKS], const C (&y)[CHUNKS], float d) {
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) gy[k].fill([&](int i) { return y[k][i] * (gy[k][i] - d); });
}

template <int LANES, int CHUNKS> struct SoftmaxBackwardRow {
    template <class A, class T>
    static INLINE void run(A access, const T* gy, const T* y, T* gx, int rows, int width) {
        __shared__ float scratch[32];
        long long row = (long long)blockIdx.x * ROWS<LANES> + threadIdx.x / LANES;
        int lane = threadIdx.x % LANES, length = row < rows ? width : 0;
        typename A::Item g[CHUNKS], v[CHUNKS];
        A::template fetch<LANES>(g, gy + row * width, length, lane);
        A::template fetch<LANES>(v, y + row * width, length, lane);
        A::template finish<LANES>(g, gy + row * width, length, lane);
        A::template finish<LANES>(v, y + row * width, length, lane);
        pull_back(g, v, across<LANES>(dot(g, v), scratch, sum));
        A::template store<LANES>(gx + row * width, g, length, lane);
    }
};

template <class T, int LANES, int CHUNKS, bool SINGLES>
__global__ void __launch_bounds__(THREADS<LANES>)
softmax_backward(const T* gy, const T* y, T* gx, int rows, int width) {
    by_access<SoftmaxBackwardRow<LANES, CHUNKS>, T, SINGLES, LANES <= 32 && CHUNKS == 1>(width, aligned(gy) && aligned(y) && aligned(gx), gy, y, gx, rows, width);
}

template <int LANES, int CHUNKS> struct SoftmaxBackwardSteps {
    template <class A, class T>
    static INLINE void run(A access, const T* gy, const T* y, T* gx, int width) {
        using C = typename A::Item;
        __shared__ float scratch[32];
        int half = dynamic_bytes() / 2, step = blockDim.x * CHUNKS;
        Held<C, CHUNKS> held_g(dynamic_memory(), half), held_v(dynamic_memory() + half, half);
        gy += (long long)blockIdx.x * width;
        y += (long long)blockIdx.x * width;
        gx += (long long)blockIdx.x * width;
        C g[CHUNKS], v[CHUNKS];
        float d = 0.0f;
        for (int start = 0; start * C::SIZE < width; start += step) {
            A::template fetch<LANES>(g, gy, width, start + threadIdx.x);
            A::template fetch<LANES>(v, y, width, start + threadIdx.x);
            A::template finish<LANES>(g, gy, width, start + threadIdx.x);
            A::template finish<LANES>(v, y, width, start + threadIdx.x);
            hold(held_g, start, g);
            hold(held_v, start, v);
            d += dot(g, v);
        }
        d = across<LANES>(d, scratch, sum);
        for (int start = 0; start * C::SIZE < width; start += step) {
            recall<LANES>(access, held_g, start, g, gy, width);
            recall<LANES>(access, held_v, start, v, y, width);
            pull_back(g, v, d);
            A::template store<LANES>(gx, g, width, start + threadIdx.x);
        }
    }
};

template <class T, int LANES, int CHUNKS, bool SINGLES>
__global__ void __launch_bounds__(LANES, 1024 / LANES)
softmax_backward_wide(const T* gy, const T* y, T* gx, int, int width) {
    by_access<SoftmaxBackwardSteps<LANES, CHUNKS>, T, SINGLES>(width, aligned(gy) && aligned(y) && aligned(gx), gy, y, gx, width);
}

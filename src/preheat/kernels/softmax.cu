// The softmax y of each row of x, and its gradient gx = y (gy - sum_j gy_j y_j). A row that fits into the
// registers of a block, or a wider one that fits into the shared memory of a cluster, is read once, others
// twice. Threads read their elements before they write them, so that the result may take the place of any
// operand.

constexpr float LOWEST = -3.402823466e38f;  // not -inf: the difference of two of those is no number
#define NOTHING __int_as_float(0xff800000)  // minus infinity, beyond the end of a row: no part of a sum

// exp(x). Below the smallest normal number it is zero.
INLINE float exponential(float x) {
    constexpr float LOG2_E = 1.4426950408889634f;
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * LOG2_E));
    return e;
}

INLINE float reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

INLINE float larger(float a, float b) { return fmaxf(a, b); }

template <int CHUNKS, class C> INLINE float largest(const C (&x)[CHUNKS]) {
    float most = LOWEST;
#pragma unroll
    for (int k = 0; k < CHUNKS; k++)
#pragma unroll
        for (int i = 0; i < C::SIZE; i++) most = fmaxf(most, x[k][i]);
    return most;
}

// What is known of the exponentials of a row so far: their sum, scaled by exp(-most).
struct Seen { float most, sum; };

INLINE Seen shuffled(Seen s, int by) { return {shuffled(s.most, by), shuffled(s.sum, by)}; }

// The order of the two changes no bit: all threads of a row have the same result.
INLINE Seen merged(Seen s, Seen t) {
    float most = fmaxf(s.most, t.most);
    float first = __fmul_rn(s.sum, exponential(s.most - most));
    return {most, __fadd_rn(first, __fmul_rn(t.sum, exponential(t.most - most)))};
}

// The exponentials of this thread's chunks, each taken once and scaled by exp(-most), and their sum.
template <class C, int CHUNKS> struct Exponentials {
    float sum = 0.0f, e[CHUNKS][C::SIZE];

    INLINE Exponentials(const C (&x)[CHUNKS], float most) {
#pragma unroll
        for (int k = 0; k < CHUNKS; k++)
#pragma unroll
            for (int i = 0; i < C::SIZE; i++) {
                e[k][i] = exponential(x[k][i] - most);
                sum += e[k][i];
            }
    }

    INLINE void scale(C (&y)[CHUNKS], float by) const {
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) y[k].fill([&](int i) { return e[k][i] * by; });
    }
};

template <int LANES, int CHUNKS> struct SoftmaxRow {
    template <class A, class T>
    static INLINE void run(A access, const T* x, T* y, int rows, int width) {
        using C = typename A::Item;
        Span span = row_span((long long)blockIdx.x * ROWS<LANES> + threadIdx.x / LANES, rows, width);
        int lane = threadIdx.x % LANES;
        C v[CHUNKS];
        load<LANES>(access, v, x, span, lane, rounded<T>(NOTHING));
        float most = largest(v);
        if constexpr (ALONE<LANES>) {  // one barrier, for both the largest element and the sum
            __shared__ Seen scratch[32];
            Exponentials<C, CHUNKS> mine(v, most);
            Seen row = across<LANES>({most, mine.sum}, scratch, merged, {LOWEST, 0.0f});
            mine.scale(v, exponential(most - row.most) * reciprocal(row.sum));
        } else {
            Exponentials<C, CHUNKS> mine(v, across<LANES>(most, (float*)nullptr, larger));
            mine.scale(v, reciprocal(across<LANES>(mine.sum, (float*)nullptr, sum)));
        }
        A::template store<LANES>(y, v, span, lane);
    }
};

template <class T, int LANES, int CHUNKS, bool SINGLES>
__global__ void __launch_bounds__(THREADS<LANES>, RESIDENT<LANES>)
softmax(const T* x, T* y, int rows, int width) {
    bool all = aligned(x) && aligned(y);
    by_access<SoftmaxRow<LANES, CHUNKS>, T, SINGLES, ELEMENTWISE<T, LANES, CHUNKS>>(width, all, x, y, rows, width);
}

template <class T>
__global__ void __launch_bounds__(WIDE, 3)
softmax_wide(const T* x, T* y, int rows, int width) {
    using P = Pieces<T>;
    __shared__ Seen scratch[32], of_block;
    Span span = segment_span(rows, width);
    Staged<T> in(x, span, memory, dynamic_bytes());
    Seen row = {LOWEST, 0.0f};
    auto add = [&](int chunk) {
        Chunk<T> v[1] = {in[chunk * P::SIZE]};
        P::limit(v[0], span, chunk * P::SIZE, rounded<T>(NOTHING));
        float most = fmaxf(row.most, largest(v));
        row = {most, row.sum * exponential(row.most - most) + Exponentials<Chunk<T>, 1>(v, most).sum};
    };
    stage_in(P::chunks(span), add, in);
    row = across<WIDE>(row, scratch, merged, {LOWEST, 0.0f});
    row = across_cluster(row, &of_block, merged, {LOWEST, 0.0f});
    float scale = reciprocal(row.sum);
    for (int at = P::first(y, span); at < span.length; at += P::SIZE * blockDim.x) {
        Chunk<T> v = in[at];
        v.fill([&](int i) { return exponential(v[i] - row.most) * scale; });
        P::write(y, span, v, at);
    }
    end_cluster();
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
        Span span = row_span((long long)blockIdx.x * ROWS<LANES> + threadIdx.x / LANES, rows, width);
        int lane = threadIdx.x % LANES;
        typename A::Item g[CHUNKS], v[CHUNKS];
        A::template fetch<LANES>(g, gy, span, lane);
        A::template fetch<LANES>(v, y, span, lane);
        A::template finish<LANES>(g, gy, span, lane);
        A::template finish<LANES>(v, y, span, lane);
        pull_back(g, v, across<LANES>(dot(g, v), scratch, sum));
        A::template store<LANES>(gx, g, span, lane);
    }
};

template <class T, int LANES, int CHUNKS, bool SINGLES>
__global__ void __launch_bounds__(THREADS<LANES>, ALONE<LANES> ? RESIDENT<LANES> : 1)
softmax_backward(const T* gy, const T* y, T* gx, int rows, int width) {
    bool all = aligned(gy) && aligned(y) && aligned(gx);
    by_access<SoftmaxBackwardRow<LANES, CHUNKS>, T, SINGLES, ELEMENTWISE<T, LANES, CHUNKS>>(
        width, all, gy, y, gx, rows, width);
}

template <class T>
__global__ void __launch_bounds__(WIDE, 2)
softmax_backward_wide(const T* gy, const T* y, T* gx, int rows, int width) {
    using P = Pieces<T>;
    __shared__ float scratch[32], of_block;
    Span span = segment_span(rows, width);
    int half = dynamic_bytes() / 32 * 16;
    Staged<T> in_gy(gy, span, memory, half), in_y(y, span, memory + half, half);
    float d = 0.0f;
    auto add = [&](int chunk) {
        Chunk<T> g[1] = {in_gy[chunk * P::SIZE]}, v[1] = {in_y[chunk * P::SIZE]};
        P::limit(g[0], span, chunk * P::SIZE, {});
        P::limit(v[0], span, chunk * P::SIZE, {});
        d += dot(g, v);
    };
    stage_in(P::chunks(span), add, in_gy, in_y);
    d = across_cluster(across<WIDE>(d, scratch, sum), &of_block, sum);
    for (int at = P::first(gx, span); at < span.length; at += P::SIZE * blockDim.x) {
        Chunk<T> g[1] = {in_gy[at]}, v[1] = {in_y[at]};
        pull_back(g, v, d);
        P::write(gx, span, g[0], at);
    }
    end_cluster();
}

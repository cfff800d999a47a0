// The softmax y of each row of x, and its gradient gx = y (gy - sum_j gy_j y_j). A row is read once if it fits
// into the registers of a block or into the shared memory of a cluster, otherwise twice. Threads load their
// elements before they store them, so the result may be written in place of any operand.

constexpr float LOWEST = -3.402823466e38f;  // Not -inf: the difference of two infinities is NaN.
#define MINUS_INFINITY __int_as_float(0xff800000)  // The padding: exp(-inf) adds nothing to a sum.

// exp(x), flushed to zero below the smallest normal number.
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

INLINE float maximum(float a, float b) { return fmaxf(a, b); }

template <int CHUNKS, class C> INLINE float max_element(const C (&x)[CHUNKS]) {
    float max = LOWEST;
#pragma unroll
    for (int k = 0; k < CHUNKS; k++)
#pragma unroll
        for (int i = 0; i < C::SIZE; i++) max = fmaxf(max, x[k][i]);
    return max;
}

// The state of an online softmax: the maximum so far, and the sum of exp(x - max).
struct OnlineSum { float max, sum; };

INLINE OnlineSum shuffle_xor(OnlineSum s, int by) { return {shuffle_xor(s.max, by), shuffle_xor(s.sum, by)}; }

// Exactly commutative, so that all threads of a row get the same bits.
INLINE OnlineSum merge(OnlineSum s, OnlineSum t) {
    float max = fmaxf(s.max, t.max);
    float first = __fmul_rn(s.sum, exponential(s.max - max));
    return {max, __fadd_rn(first, __fmul_rn(t.sum, exponential(t.max - max)))};
}

// The exponentials exp(x - max) of this thread's chunks, each computed once, and their sum.
template <class C, int CHUNKS> struct Exponentials {
    float sum = 0.0f, e[CHUNKS][C::SIZE];

    INLINE Exponentials(const C (&x)[CHUNKS], float max) {
#pragma unroll
        for (int k = 0; k < CHUNKS; k++)
#pragma unroll
            for (int i = 0; i < C::SIZE; i++) {
                e[k][i] = exponential(x[k][i] - max);
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
        Span span = row_span((long long)blockIdx.x * ROWS_PER_BLOCK<LANES> + threadIdx.x / LANES, rows, width);
        int lane = threadIdx.x % LANES;
        C v[CHUNKS];
        load<LANES>(access, v, x, span, lane, from_float<T>(MINUS_INFINITY));
        float max = max_element(v);
        if constexpr (BLOCK_PER_ROW<LANES>) {  // One barrier serves both the maximum and the sum.
            __shared__ OnlineSum scratch[32];
            Exponentials<C, CHUNKS> mine(v, max);
            OnlineSum row = allreduce<LANES>({max, mine.sum}, scratch, merge, {LOWEST, 0.0f});
            mine.scale(v, exponential(max - row.max) * reciprocal(row.sum));
        } else {
            Exponentials<C, CHUNKS> mine(v, allreduce<LANES>(max, (float*)nullptr, maximum));
            mine.scale(v, reciprocal(allreduce<LANES>(mine.sum, (float*)nullptr, sum)));
        }
        A::template store<LANES>(y, v, span, lane);
    }
};

template <class T, int LANES, int CHUNKS, bool SCALARS>
__global__ void __launch_bounds__(MAX_THREADS<LANES>, MIN_BLOCKS_PER_SM<LANES>)
softmax(const T* x, T* y, int rows, int width) {
    bool all = aligned(x) && aligned(y);
    dispatch_access<SoftmaxRow<LANES, CHUNKS>, T, SCALARS, USE_ELEMENTWISE<T, LANES, CHUNKS>>(
        width, all, x, y, rows, width);
}

template <class T>
__global__ void __launch_bounds__(WIDE_THREADS, 3)
softmax_wide(const T* x, T* y, int rows, int width) {
    using P = AlignedPieces<T>;
    __shared__ OnlineSum scratch[32], block_value;
    Span span = segment_span(rows, width);
    StagedSpan<T> in(x, span, dynamic_shared, dynamic_shared_bytes());
    OnlineSum row = {LOWEST, 0.0f};
    auto add = [&](int chunk) {
        Chunk<T> v[1] = {in[chunk * P::SIZE]};
        P::pad_tail(v[0], span, chunk * P::SIZE, from_float<T>(MINUS_INFINITY));
        float max = fmaxf(row.max, max_element(v));
        row = {max, row.sum * exponential(row.max - max) + Exponentials<Chunk<T>, 1>(v, max).sum};
    };
    process_in_stages(P::num_chunks(span), add, in);
    row = allreduce<WIDE_THREADS>(row, scratch, merge, {LOWEST, 0.0f});
    row = cluster_allreduce(row, &block_value, merge, {LOWEST, 0.0f});
    float scale = reciprocal(row.sum);
    for (int at = P::first_of_thread(y, span); at < span.length; at += P::SIZE * blockDim.x) {
        Chunk<T> v = in[at];
        v.fill([&](int i) { return exponential(v[i] - row.max) * scale; });
        P::write(y, span, v, at);
    }
    cluster_finish();
}

template <int CHUNKS, class C> INLINE float dot(const C (&a)[CHUNKS], const C (&b)[CHUNKS]) {
    float d = 0.0f;
#pragma unroll
    for (int k = 0; k < CHUNKS; k++)
#pragma unroll
        for (int i = 0; i < C::SIZE; i++) d = fmaf(a[k][i], b[k][i], d);
    return d;
}

// Replace gy by gx.
template <int CHUNKS, class C> INLINE void input_gradient(C (&gy)[CHUNKS], const C (&y)[CHUNKS], float d) {
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) gy[k].fill([&](int i) { return y[k][i] * (gy[k][i] - d); });
}

template <int LANES, int CHUNKS> struct SoftmaxBackwardRow {
    template <class A, class T>
    static INLINE void run(A access, const T* gy, const T* y, T* gx, int rows, int width) {
        __shared__ float scratch[32];
        Span span = row_span((long long)blockIdx.x * ROWS_PER_BLOCK<LANES> + threadIdx.x / LANES, rows, width);
        int lane = threadIdx.x % LANES;
        typename A::Item g[CHUNKS], v[CHUNKS];
        A::template fetch<LANES>(g, gy, span, lane);
        A::template fetch<LANES>(v, y, span, lane);
        A::template finish<LANES>(g, gy, span, lane);
        A::template finish<LANES>(v, y, span, lane);
        input_gradient(g, v, allreduce<LANES>(dot(g, v), scratch, sum));
        A::template store<LANES>(gx, g, span, lane);
    }
};

template <class T, int LANES, int CHUNKS, bool SCALARS>
__global__ void __launch_bounds__(MAX_THREADS<LANES>, BLOCK_PER_ROW<LANES> ? MIN_BLOCKS_PER_SM<LANES> : 1)
softmax_backward(const T* gy, const T* y, T* gx, int rows, int width) {
    bool all = aligned(gy) && aligned(y) && aligned(gx);
    dispatch_access<SoftmaxBackwardRow<LANES, CHUNKS>, T, SCALARS, USE_ELEMENTWISE<T, LANES, CHUNKS>>(
        width, all, gy, y, gx, rows, width);
}

template <class T>
__global__ void __launch_bounds__(WIDE_THREADS, 2)
softmax_backward_wide(const T* gy, const T* y, T* gx, int rows, int width) {
    using P = AlignedPieces<T>;
    __shared__ float scratch[32], block_value;
    Span span = segment_span(rows, width);
    int half = dynamic_shared_bytes() / 32 * 16;
    StagedSpan<T> in_gy(gy, span, dynamic_shared, half), in_y(y, span, dynamic_shared + half, half);
    float d = 0.0f;
    auto add = [&](int chunk) {
        Chunk<T> g[1] = {in_gy[chunk * P::SIZE]}, v[1] = {in_y[chunk * P::SIZE]};
        P::pad_tail(g[0], span, chunk * P::SIZE, {});
        P::pad_tail(v[0], span, chunk * P::SIZE, {});
        d += dot(g, v);
    };
    process_in_stages(P::num_chunks(span), add, in_gy, in_y);
    d = cluster_allreduce(allreduce<WIDE_THREADS>(d, scratch, sum), &block_value, sum);
    for (int at = P::first_of_thread(gx, span); at < span.length; at += P::SIZE * blockDim.x) {
        Chunk<T> g[1] = {in_gy[at]}, v[1] = {in_y[at]};
        input_gradient(g, v, d);
        P::write(gx, span, g[0], at);
    }
    cluster_finish();
}

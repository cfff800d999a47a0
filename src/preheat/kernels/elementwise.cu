// silu(x) = x s(x) with s(x) = 1 / (1 + exp(-x)); swiglu(gate, up) = silu(gate) up. Each thread loads all of
// its elements before it stores any, so the result may be written in place of an operand.

constexpr int BLOCK = 128;  // Threads. Each processes one chunk of every operand.

INLINE float sigmoid(float x) {
    float s;  // A division would also handle divisors that cannot occur here: 1 + exp(-x) is at least 1.
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + expf(-x)));
    return s;
}

// The elements that one block processes. They are loaded and stored like a row.
template <class T> struct Tile {
    using Whole = AlignedAccess<Chunk<T>>;
    static constexpr int SIZE = BLOCK * Chunk<T>::SIZE;
    Span span;
    bool whole;

    INLINE Tile(long long n)
        : span((long long)blockIdx.x * SIZE, (int)min(n - (long long)blockIdx.x * SIZE, (long long)SIZE), n),
          whole(span.length % Chunk<T>::SIZE == 0) {}
    INLINE Chunk<T> load(const T* from) const {
        Chunk<T> mine[1];
        if (whole && aligned(from)) Whole::template fetch<BLOCK>(mine, from, span, threadIdx.x);
        else ::load<BLOCK>(ShiftedAccess<T>(), mine, from, span, threadIdx.x);
        return mine[0];
    }
    INLINE void store(T* to, const Chunk<T>& chunk) const {
        const Chunk<T> mine[1] = {chunk};
        if (whole && aligned(to)) Whole::template store<BLOCK>(to, mine, span, threadIdx.x);
        else ShiftedAccess<T>::template store<BLOCK>(to, mine, span, threadIdx.x);
    }
};

template <class T> __global__ void __launch_bounds__(BLOCK) silu(const T* x, T* y, long long n) {
    Tile<T> tile(n);
    Chunk<T> v = tile.load(x);
    v.fill([&](int i) { return v[i] * sigmoid(v[i]); });
    tile.store(y, v);
}

// d silu(x) / dx = s (1 + x - x s)
INLINE float slope(float x, float s) { return s * fmaf(x, 1.0f - s, 1.0f); }

template <class T>
__global__ void __launch_bounds__(BLOCK) silu_backward(const T* gy, const T* x, T* gx, long long n) {
    Tile<T> tile(n);
    Chunk<T> g = tile.load(gy), v = tile.load(x);
    g.fill([&](int i) { return g[i] * slope(v[i], sigmoid(v[i])); });
    tile.store(gx, g);
}

template <class T>
__global__ void __launch_bounds__(BLOCK) swiglu(const T* gate, const T* up, T* y, long long n) {
    Tile<T> tile(n);
    Chunk<T> a = tile.load(gate), b = tile.load(up);
    a.fill([&](int i) { return a[i] * sigmoid(a[i]) * b[i]; });
    tile.store(y, a);
}

template <class T>
__global__ void __launch_bounds__(BLOCK)
swiglu_backward(const T* gy, const T* gate, const T* up, T* g_gate, T* g_up, long long n) {
    Tile<T> tile(n);
    Chunk<T> g = tile.load(gy), a = tile.load(gate), b = tile.load(up), g_a, g_b;
    float s[g.SIZE];
#pragma unroll
    for (int i = 0; i < g.SIZE; i++) s[i] = sigmoid(a[i]);
    g_a.fill([&](int i) { return g[i] * b[i] * slope(a[i], s[i]); });
    g_b.fill([&](int i) { return g[i] * a[i] * s[i]; });
    tile.store(g_gate, g_a);
    tile.store(g_up, g_b);
}

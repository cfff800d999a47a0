// silu(x) = x s(x) with s(x) = 1 / (1 + exp(-x)); swiglu(gate, up) = silu(gate) up. Every thread reads
// all its elements before it writes them, so a result may take an operand's place.

constexpr int BLOCK = 256, CHUNKS = 2;  // threads, and what each has of every operand

INLINE float sigmoid(float x) {
    float s;  // what the compiler makes of a division also serves divisors that do not occur here
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + expf(-x)));
    return s;
}

// The elements of one block. They are loaded and stored like a row.
template <class T> struct Tile {
    static constexpr int SIZE = BLOCK * CHUNKS * Chunk<T>::SIZE;
    long long start;
    int width;

    INLINE Tile(long long n)
        : start((long long)blockIdx.x * SIZE), width((int)min(n - start, (long long)SIZE)) {}
    INLINE void load(Chunk<T> (&to)[CHUNKS], const T* from) const {
        ::load<BLOCK>(to, from + start, width, threadIdx.x);
    }
    INLINE void store(T* to, const Chunk<T> (&from)[CHUNKS]) const {
        ::store<BLOCK>(to + start, from, width, threadIdx.x);
    }
};

template <class T> __global__ void __launch_bounds__(BLOCK) silu(const T* x, T* y, long long n) {
    Tile<T> tile(n);
    Chunk<T> v[CHUNKS];
    tile.load(v, x);
#pragma unroll
    for (auto& chunk : v)
#pragma unroll
        for (int i = 0; i < chunk.SIZE; i++) chunk.put(i, chunk[i] * sigmoid(chunk[i]));
    tile.store(y, v);
}

// d silu(x) / dx = s (1 + x - x s)
INLINE float slope(float x, float s) { return s * fmaf(x, 1.0f - s, 1.0f); }

template <class T>
__global__ void __launch_bounds__(BLOCK) silu_backward(const T* gy, const T* x, T* gx, long long n) {
    Tile<T> tile(n);
    Chunk<T> g[CHUNKS], v[CHUNKS];
    tile.load(g, gy);
    tile.load(v, x);
#pragma unroll
    for (int k = 0; k < CHUNKS; k++)
#pragma unroll
        for (int i = 0; i < g[k].SIZE; i++) g[k].put(i, g[k][i] * slope(v[k][i], sigmoid(v[k][i])));
    tile.store(gx, g);
}

template <class T>
__global__ void __launch_bounds__(BLOCK) swiglu(const T* gate, const T* up, T* y, long long n) {
    Tile<T> tile(n);
    Chunk<T> a[CHUNKS], b[CHUNKS];
    tile.load(a, gate);
    tile.load(b, up);
#pragma unroll
    for (int k = 0; k < CHUNKS; k++)
#pragma unroll
        for (int i = 0; i < a[k].SIZE; i++) a[k].put(i, a[k][i] * sigmoid(a[k][i]) * b[k][i]);
    tile.store(y, a);
}

template <class T>
__global__ void __launch_bounds__(BLOCK)
swiglu_backward(const T* gy, const T* gate, const T* up, T* g_gate, T* g_up, long long n) {
    Tile<T> tile(n);
    Chunk<T> g[CHUNKS], a[CHUNKS], b[CHUNKS];
    tile.load(g, gy);
    tile.load(a, gate);
    tile.load(b, up);
#pragma unroll
    for (int k = 0; k < CHUNKS; k++)
#pragma unroll
        for (int i = 0; i < g[k].SIZE; i++) {
            float dy = g[k][i], x = a[k][i], s = sigmoid(x);
            a[k].put(i, dy * b[k][i] * slope(x, s));
            b[k].put(i, dy * x * s);
        }
    tile.store(g_gate, a);
    tile.store(g_up, b);
}

// What the families of rows and elements share: op.py puts it in front of their own text.
//
// Storage is float, __half or __nv_bfloat16; arithmetic is in float. The latter two are named like
// CUDA's own, because by these names arrays of float16 and bfloat16 are accepted as arguments.

#define INLINE __device__ __forceinline__

struct __half { unsigned short bits; };
struct __nv_bfloat16 { unsigned short bits; };

INLINE float to_float(float v) { return v; }
INLINE float to_float(__half v) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v.bits));
    return f;
}
INLINE float to_float(__nv_bfloat16 v) { return __uint_as_float((unsigned)v.bits << 16); }

template <class T> INLINE T rounded(float v);
template <> INLINE float rounded<float>(float v) { return v; }
template <> INLINE __half rounded<__half>(float v) {
    __half h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(v));
    return h;
}
template <> INLINE __nv_bfloat16 rounded<__nv_bfloat16>(float v) {
#if __CUDA_ARCH__ >= 800
    __nv_bfloat16 b;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(b.bits) : "f"(v));
    return b;
#else  // the same by hand
    unsigned bits = __float_as_uint(v);
    unsigned up = bits + 0x7fffu + ((bits >> 16) & 1u);
    return {(unsigned short)(v == v ? up >> 16 : 0x7fffu)};
#endif
}

// Sixteen bytes of elements: what one thread reads or writes at a time.
template <class T> struct Chunk;

template <> struct Chunk<float> {
    static constexpr int SIZE = 4;
    unsigned words[4] = {};

    INLINE float operator[](int i) const { return __uint_as_float(words[i]); }
    INLINE float raw(int i) const { return (*this)[i]; }
    INLINE void put_raw(int i, float v) { words[i] = __float_as_uint(v); }
    INLINE void put(int i, float v) { put_raw(i, v); }
};

template <class Half> struct Chunk {
    static constexpr int SIZE = 8;
    unsigned words[4] = {};

    INLINE Half raw(int i) const {
        return {(unsigned short)(words[i / 2] >> 16 * (i % 2))};
    }
    INLINE void put_raw(int i, Half v) {
        unsigned other = words[i / 2] & (i % 2 ? 0x0000ffffu : 0xffff0000u);
        words[i / 2] = other | (unsigned)v.bits << 16 * (i % 2);
    }
    INLINE float operator[](int i) const { return to_float(raw(i)); }
    INLINE void put(int i, float v) { put_raw(i, rounded<Half>(v)); }
};

// Whether every chunk of a row is whole and lies where sixteen bytes can be accessed at once.
template <class T> INLINE bool in_chunks(const T* row, int width) {
    return width % Chunk<T>::SIZE == 0 && (size_t)row % sizeof(uint4) == 0;
}

// The chunks of a row that are this thread's: number `lane` and every STRIDE-th from there on. Whose
// an element is depends on its place in the row alone, never on alignment, and so does every result.
// Beyond the end of the row all elements are `missing`.
template <int STRIDE, int CHUNKS, class T>
INLINE void load(Chunk<T> (&to)[CHUNKS], const T* row, int width, int lane, T missing = {}) {
    constexpr int SIZE = Chunk<T>::SIZE;
    if (in_chunks(row, width)) {
        Chunk<T> none;
#pragma unroll
        for (int i = 0; i < SIZE; i++) none.put_raw(i, missing);
        const unsigned* w = none.words;
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            int at = (lane + k * STRIDE) * SIZE;
            uint4 four = at < width ? *(const uint4*)(row + at) : uint4{w[0], w[1], w[2], w[3]};
            to[k].words[0] = four.x;
            to[k].words[1] = four.y;
            to[k].words[2] = four.z;
            to[k].words[3] = four.w;
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < CHUNKS; k++)
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            int at = (lane + k * STRIDE) * SIZE + i;
            to[k].put_raw(i, at < width ? row[at] : missing);
        }
}

template <int STRIDE, int CHUNKS, class T>
INLINE void store(T* row, const Chunk<T> (&from)[CHUNKS], int width, int lane) {
    constexpr int SIZE = Chunk<T>::SIZE;
    if (in_chunks(row, width)) {
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            int at = (lane + k * STRIDE) * SIZE;
            const unsigned* w = from[k].words;
            if (at < width) *(uint4*)(row + at) = uint4{w[0], w[1], w[2], w[3]};
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < CHUNKS; k++)
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            int at = (lane + k * STRIDE) * SIZE + i;
            if (at < width) row[at] = from[k].raw(i);
        }
}

// LANES threads, a power of two, work on one row. Warps and parts of warps share a block with others.
template <int LANES> constexpr int ROWS = LANES <= 32 ? 128 / LANES : 1;  // of a block
template <int LANES> constexpr int THREADS = LANES * ROWS<LANES>;
// Blocks that a processor shall hold at least: 1024 threads leave 64 registers to each.
template <int LANES> constexpr int RESIDENT = 1024 / THREADS<LANES>;

INLINE float shuffled(float v, int by) { return __shfl_xor_sync(0xffffffffu, v, by); }
INLINE float sum(float a, float b) { return a + b; }

// All values of a row's threads put together by `f`, in an order that LANES alone decides. `scratch`
// has room for 32. No barrier comes after it is read, so a block uses it once, or two of them in turn.
template <int LANES, class V, class F> INLINE V across(V v, V* scratch, F f) {
    constexpr int WARPS = LANES / 32;
#pragma unroll
    for (int by = (WARPS ? 32 : LANES) / 2; by; by /= 2) v = f(v, shuffled(v, by));
    if constexpr (WARPS > 1) {
        if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
        __syncthreads();
        v = scratch[threadIdx.x % WARPS];
#pragma unroll
        for (int by = WARPS / 2; by; by /= 2) v = f(v, shuffled(v, by));
    }
    return v;
}

// What all families share: op.py puts it in front of their own text.
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

// Two of them in a word, the first in its lower half.
template <class Half> INLINE unsigned both_rounded(float first, float second) {
    return rounded<Half>(first).bits | (unsigned)rounded<Half>(second).bits << 16;
}
#if __CUDA_ARCH__ >= 800  // at once
template <> INLINE unsigned both_rounded<__half>(float first, float second) {
    unsigned both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
}
template <> INLINE unsigned both_rounded<__nv_bfloat16>(float first, float second) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
}
#endif

// Neighbours that one thread reads or writes at a time: sixteen bytes of them, unless it is told
// otherwise. Two halves share a word until they are used: taking them apart would wait for memory.
template <class T, int WORDS = 4> struct Chunk;

template <int WORDS> struct alignas(4 * WORDS) Chunk<float, WORDS> {
    static constexpr int SIZE = WORDS;
    unsigned words[WORDS] = {};

    INLINE float operator[](int i) const { return __uint_as_float(words[i]); }
    INLINE float raw(int i) const { return (*this)[i]; }
    INLINE void put_raw(int i, float v) { words[i] = __float_as_uint(v); }
    // Every element becomes what `value` says of its number; it may read what is there.
    template <class F> INLINE void fill(F value) {
#pragma unroll
        for (int i = 0; i < SIZE; i++) put_raw(i, value(i));
    }
};

template <class Half, int WORDS> struct alignas(4 * WORDS) Chunk {
    static constexpr int SIZE = 2 * WORDS;
    unsigned words[WORDS] = {};

    INLINE Half raw(int i) const {
        return {(unsigned short)(words[i / 2] >> 16 * (i % 2))};
    }
    INLINE void put_raw(int i, Half v) {
        unsigned other = words[i / 2] & (i % 2 ? 0x0000ffffu : 0xffff0000u);
        words[i / 2] = other | (unsigned)v.bits << 16 * (i % 2);
    }
    INLINE float operator[](int i) const { return to_float(raw(i)); }
    template <class F> INLINE void fill(F value) {
#pragma unroll
        for (int i = 0; i < SIZE; i += 2) words[i / 2] = both_rounded<Half>(value(i), value(i + 1));
    }
};

// Whether every chunk of a row is whole and lies where sixteen bytes can be accessed at once.
template <class T> INLINE bool in_chunks(const T* row, int width) {
    return width % Chunk<T>::SIZE == 0 && (size_t)row % sizeof(Chunk<T>) == 0;
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
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            int at = (lane + k * STRIDE) * SIZE;
            to[k] = at < width ? *(const Chunk<T>*)(row + at) : none;
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
            if (at < width) *(Chunk<T>*)(row + at) = from[k];
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

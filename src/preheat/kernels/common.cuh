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

// A chunk in memory that is aligned to elements alone. Halves that share an aligned word are accessed
// together: all of them, or all but the first and the last.
template <int WORDS> INLINE void read_loose(Chunk<float, WORDS>& to, const float* from) {
#pragma unroll
    for (int i = 0; i < WORDS; i++) to.put_raw(i, from[i]);
}

template <int WORDS> INLINE void write_loose(float* to, const Chunk<float, WORDS>& from) {
#pragma unroll
    for (int i = 0; i < WORDS; i++) to[i] = from.raw(i);
}

template <class Half, int WORDS> INLINE void read_loose(Chunk<Half, WORDS>& to, const Half* from) {
    if ((size_t)from % 4 == 0) {
#pragma unroll
        for (int i = 0; i < WORDS; i++) to.words[i] = ((const unsigned*)from)[i];
        return;
    }
    unsigned across[WORDS + 1];  // from the element before the first to the one behind the last
    across[0] = (unsigned)from[0].bits << 16;
    across[WORDS] = from[2 * WORDS - 1].bits;
#pragma unroll
    for (int i = 1; i < WORDS; i++) across[i] = ((const unsigned*)(from + 1))[i - 1];
#pragma unroll
    for (int i = 0; i < WORDS; i++) to.words[i] = __funnelshift_r(across[i], across[i + 1], 16);
}

template <class Half, int WORDS> INLINE void write_loose(Half* to, const Chunk<Half, WORDS>& from) {
    if ((size_t)to % 4 == 0) {
#pragma unroll
        for (int i = 0; i < WORDS; i++) ((unsigned*)to)[i] = from.words[i];
        return;
    }
    to[0] = from.raw(0);
    to[2 * WORDS - 1] = from.raw(2 * WORDS - 1);
#pragma unroll
    for (int i = 1; i < WORDS; i++)
        ((unsigned*)(to + 1))[i - 1] = __funnelshift_r(from.words[i - 1], from.words[i], 16);
}

// LANES threads work on one row: a part of a warp or a warp, which share a block of 128 threads with
// others, or a block, which then has at most LANES threads.
template <int LANES> constexpr bool ALONE = LANES > 32;
template <int LANES> constexpr int ROWS = ALONE<LANES> ? 1 : 128 / LANES;  // of a block
template <int LANES> constexpr int THREADS = LANES * ROWS<LANES>;          // at most
template <int LANES> INLINE int lanes() { return ALONE<LANES> ? blockDim.x : LANES; }
// Blocks that a processor shall hold at least: 1024 threads leave 64 registers to each.
template <int LANES> constexpr int RESIDENT = 1024 / THREADS<LANES>;

// Whether every chunk of a row is whole and can be accessed at once.
template <class C, class T> INLINE bool in_chunks(const T* row, int width) {
    return width % C::SIZE == 0 && (size_t)row % sizeof(C) == 0;
}

// The chunks of a row that are this thread's: number `lane` and every one that is `lanes` further. Whose
// an element is depends on its place in the row alone, never on alignment, and so does every result.
// Beyond the end of the row all elements are `missing`.
template <int LANES, int CHUNKS, class T, int WORDS>
INLINE void load(Chunk<T, WORDS> (&to)[CHUNKS], const T* row, int width, int lane, T missing = {}) {
    using C = Chunk<T, WORDS>;
    C none;
#pragma unroll
    for (int i = 0; i < C::SIZE; i++) none.put_raw(i, missing);
    if (in_chunks<C>(row, width)) {
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            int at = (lane + k * lanes<LANES>()) * C::SIZE;
            to[k] = at < width ? *(const C*)(row + at) : none;
        }
        return;
    }
    // All of them are on their way before one is used: a thread that has no chunk reads the first.
    const T* from = width < C::SIZE ? nullptr : row;
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        int at = (lane + k * lanes<LANES>()) * C::SIZE;
        if (from) read_loose(to[k], at + C::SIZE <= width ? row + at : row);
    }
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        int at = (lane + k * lanes<LANES>()) * C::SIZE;
        if (at + C::SIZE <= width) continue;
        to[k] = none;
#pragma unroll
        for (int i = 0; i < C::SIZE - 1; i++)
            if (at + i < width) to[k].put_raw(i, row[at + i]);
    }
}

template <int LANES, int CHUNKS, class T, int WORDS>
INLINE void store(T* row, const Chunk<T, WORDS> (&from)[CHUNKS], int width, int lane) {
    using C = Chunk<T, WORDS>;
    bool pieces = in_chunks<C>(row, width);
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        int at = (lane + k * lanes<LANES>()) * C::SIZE;
        if (at >= width) continue;
        if (pieces) *(C*)(row + at) = from[k];
        else if (at + C::SIZE <= width) write_loose(row + at, from[k]);
        else
#pragma unroll
            for (int i = 0; i < C::SIZE - 1; i++)
                if (at + i < width) row[at + i] = from[k].raw(i);
    }
}

INLINE float shuffled(float v, int by) { return __shfl_xor_sync(0xffffffffu, v, by); }
INLINE float sum(float a, float b) { return a + b; }

// All values of a row's threads put together by `f`, in an order that the number of threads alone
// decides; `none` changes nothing. `scratch` has room for 32. No barrier comes after it is read, so a
// block uses it once, or two of them in turn.
template <int LANES, class V, class F> INLINE V across(V v, V* scratch, F f, V none = {}) {
#pragma unroll
    for (int by = (ALONE<LANES> ? 32 : LANES) / 2; by; by /= 2) v = f(v, shuffled(v, by));
    if constexpr (ALONE<LANES>) {
        if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
        __syncthreads();
        int warp = threadIdx.x % (LANES / 32);
        v = warp < blockDim.x / 32 ? scratch[warp] : none;
#pragma unroll
        for (int by = LANES / 64; by; by /= 2) v = f(v, shuffled(v, by));
    }
    return v;
}

// Shared memory of the launch, for what a row that is too wide for registers leaves there: of every
// step of a block, in which each thread has ITEMS, as many as there is room for.
template <class Item, int ITEMS> struct Held {
    Item* room;
    int size;  // in items

    INLINE Held(char* from, int bytes) : room((Item*)from), size(bytes / (int)sizeof(Item)) {}
    INLINE bool has(int start) const { return start + ITEMS * (int)blockDim.x <= size; }
    INLINE Item& operator()(int start, int i) const { return room[start + threadIdx.x + i * blockDim.x]; }
};

INLINE char* dynamic_memory() {
    extern __shared__ uint4 memory[];
    return (char*)memory;
}

INLINE int dynamic_bytes() {
    int bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    return bytes;
}

template <class C, int CHUNKS>
INLINE void hold(const Held<C, CHUNKS>& held, int start, const C (&from)[CHUNKS]) {
    if (!held.has(start)) return;
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) held(start, k) = from[k];
}

// What was held, or else the row once more.
template <int LANES, class C, int CHUNKS, class T>
INLINE void recall(const Held<C, CHUNKS>& held, int start, C (&to)[CHUNKS], const T* row, int width,
                   T missing = {}) {
    if (!held.has(start)) return load<LANES>(to, row, width, start + threadIdx.x, missing);
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) to[k] = held(start, k);
}

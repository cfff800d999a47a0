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

// One element, with what chunks have.
template <class T> struct Single {
    static constexpr int SIZE = 1;
    T value = {};

    INLINE float operator[](int) const { return to_float(value); }
    INLINE T raw(int) const { return value; }
    INLINE void put_raw(int, T v) { value = v; }
    template <class F> INLINE void fill(F make) { value = rounded<T>(make(0)); }
};

// LANES threads work on one row: a part of a warp or a warp, which share a block of 128 threads with
// others, or a block, which then has at most LANES threads.
template <int LANES> constexpr bool ALONE = LANES > 32;
template <int LANES> constexpr int ROWS = ALONE<LANES> ? 1 : 128 / LANES;  // of a block
template <int LANES> constexpr int THREADS = LANES * ROWS<LANES>;          // at most
template <int LANES> INLINE int lanes() { return ALONE<LANES> ? blockDim.x : LANES; }
// Blocks that a processor shall hold at least: 1024 threads leave 64 registers to each.
template <int LANES> constexpr int RESIDENT = 1024 / THREADS<LANES>;

template <class C, class T> INLINE C filled(T value) {
    C chunk;
#pragma unroll
    for (int i = 0; i < C::SIZE; i++) chunk.put_raw(i, value);
    return chunk;
}

// How the threads of a row access it. The chunks of a thread are number `lane` and every one that is
// `lanes` further: whose an element is depends on its place in the row alone, never on alignment, and so
// does every result. Beyond the end of the row all elements are `missing`. A load has two halves, so
// that memory is busy with other rows between them: `fetch`, and `finish`.

// Rows whose chunks are whole and aligned, or single elements.
template <class C> struct Direct {
    using Item = C;
    template <int LANES, int CHUNKS, class T>
    static INLINE void fetch(C (&to)[CHUNKS], const T* row, int width, int lane, T missing = {}) {
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            int at = (lane + k * lanes<LANES>()) * C::SIZE;
            to[k] = at < width ? *(const C*)(row + at) : filled<C>(missing);
        }
    }
    template <int LANES, int CHUNKS, class T>
    static INLINE void finish(C (&)[CHUNKS], const T*, int, int, T = {}) {}
    template <int LANES, int CHUNKS, class T>
    static INLINE void store(T* row, const C (&from)[CHUNKS], int width, int lane) {
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            int at = (lane + k * lanes<LANES>()) * C::SIZE;
            if (at < width) *(C*)(row + at) = from[k];
        }
    }
};

// Rows of chunks at any address, element by element: as good as any other way for floats.
template <class T> struct Loose {
    using Item = Chunk<T>;
    template <int LANES, int CHUNKS>
    static INLINE void fetch(Item (&to)[CHUNKS], const T* row, int width, int lane, T missing = {}) {
#pragma unroll
        for (int k = 0; k < CHUNKS; k++)
#pragma unroll
            for (int i = 0; i < Item::SIZE; i++) {
                int at = (lane + k * lanes<LANES>()) * Item::SIZE + i;
                to[k].put_raw(i, at < width ? row[at] : missing);
            }
    }
    template <int LANES, int CHUNKS>
    static INLINE void finish(Item (&)[CHUNKS], const T*, int, int, T = {}) {}
    template <int LANES, int CHUNKS>
    static INLINE void store(T* row, const Item (&from)[CHUNKS], int width, int lane) {
#pragma unroll
        for (int k = 0; k < CHUNKS; k++)
#pragma unroll
            for (int i = 0; i < Item::SIZE; i++) {
                int at = (lane + k * lanes<LANES>()) * Item::SIZE + i;
                if (at < width) row[at] = from[k].raw(i);
            }
    }
};

// Rows of halves at any address and of any width. Memory is accessed in pieces, the elements of aligned
// sixteen bytes. The `phase` of a row is the place of its first element in one, so that a chunk lies
// across two of them.
template <class T> struct Shifted {
    using Item = Chunk<T>;
    static constexpr int SIZE = Item::SIZE;

    static INLINE int phase_of(const T* row) { return (size_t)row / sizeof(T) % SIZE; }
    // Whether all elements of the piece at the element `at`, which may be negative, are in the row, or
    // only some.
    static INLINE bool whole(int at, int width) { return at >= 0 && at + SIZE <= width; }
    static INLINE bool partly(int at, int width) {
        return !whole(at, width) && at < width && at + SIZE > 0;
    }
    static INLINE Item read(const T* row, int width, int at, T missing) {
        return whole(at, width) ? *(const Item*)(row + at) : filled<Item>(missing);
    }
    static INLINE void read_part(Item& piece, const T* row, int width, int at) {
        if (partly(at, width))
#pragma unroll
            for (int i = 0; i < SIZE; i++)
                if (at + i >= 0 && at + i < width) piece.put_raw(i, row[at + i]);
    }
    // The elements of `chunk`, at `at` in the row, that are in the part from `begin` to `end`.
    static INLINE void write_part(T* row, const Item& chunk, int at, int begin, int end) {
#pragma unroll
        for (int i = 0; i < SIZE; i++)
            if (at + i >= begin && at + i < end) row[at + i] = chunk.raw(i);
    }
    static INLINE void write(T* row, const Item& piece, int width, int at) {
        if (whole(at, width)) *(Item*)(row + at) = piece;
        else write_part(row, piece, at, 0, width);
    }
    // As many elements as a chunk has, from the element `by` of `low` on; `high` follows `low`.
    static INLINE Item between(const Item& low, const Item& high, int by) {
        int bytes = by * sizeof(T);
        unsigned words[8];
#pragma unroll
        for (int i = 0; i < 8; i++) words[i] = i < 4 ? low.words[i] : high.words[i - 4];
#pragma unroll
        for (int i = 0; i < 6; i++) words[i] = bytes & 8 ? words[i + 2] : words[i];
#pragma unroll
        for (int i = 0; i < 5; i++) words[i] = bytes & 4 ? words[i + 1] : words[i];
        Item chunk;
#pragma unroll
        for (int i = 0; i < 4; i++)
            chunk.words[i] = sizeof(T) == 2 && bytes & 2 ? __funnelshift_r(words[i], words[i + 1], 16) : words[i];
        return chunk;
    }

    // Whole pieces alone: what takes several accesses would keep the others waiting.
    template <int LANES, int CHUNKS>
    static INLINE void fetch(Item (&to)[CHUNKS], const T* row, int width, int lane, T missing = {}) {
        int phase = phase_of(row);
#pragma unroll
        for (int k = 0; k < CHUNKS; k++)
            to[k] = read(row, width, (lane + k * lanes<LANES>()) * SIZE - phase, missing);
    }
    // The second piece of a chunk is the first one of its neighbour, and so in the cache by now.
    template <int LANES, int CHUNKS>
    static INLINE void finish(Item (&to)[CHUNKS], const T* row, int width, int lane, T missing = {}) {
        constexpr int BATCH = CHUNKS < 2 ? 1 : 2;
        int phase = phase_of(row), stride = lanes<LANES>() * SIZE, first = lane * SIZE - phase;
        Item next[BATCH];
#pragma unroll
        for (int start = 0; start < CHUNKS; start += BATCH) {
#pragma unroll
            for (int k = 0; k < BATCH; k++)
                next[k] = read(row, width, first + (start + k) * stride + SIZE, missing);
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                int at = first + (start + k) * stride;
                read_part(to[start + k], row, width, at);
                read_part(next[k], row, width, at + SIZE);
                to[start + k] = between(to[start + k], next[k], phase);
            }
        }
    }
    // Every thread of a warp comes here. Neighbours hand on what is missing in a piece; the first and
    // the last of a warp write the rest of theirs element by element.
    template <int LANES, int CHUNKS>
    static INLINE void store(T* row, const Item (&from)[CHUNKS], int width, int lane) {
        constexpr int GROUP = LANES < 32 ? LANES : 32;
        int phase = phase_of(row);
        bool first = lane % GROUP == 0, last = lane % GROUP == GROUP - 1;
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            int at = (lane + k * lanes<LANES>()) * SIZE, end = at + SIZE - phase;  // of the first piece
            Item before;
#pragma unroll
            for (int i = 0; i < 4; i++)
                before.words[i] = __shfl_up_sync(0xffffffffu, from[k].words[i], 1);
            if (phase == 0) write(row, from[k], width, at);
            else if (first) write_part(row, from[k], at, 0, min(end, width));
            else write(row, between(before, from[k], SIZE - phase), width, at - phase);
            if (last) write_part(row, from[k], at, end, width);
        }
    }
};
template <int LANES, class A, int CHUNKS, class T>
INLINE void load(A, typename A::Item (&to)[CHUNKS], const T* row, int width, int lane, T missing = {}) {
    A::template fetch<LANES>(to, row, width, lane, missing);
    A::template finish<LANES>(to, row, width, lane, missing);
}

template <class T> INLINE bool aligned(const T* p) { return (size_t)p % sizeof(Chunk<T>) == 0; }

// Run `Work` by a way to access rows: single elements, chunks of rows that all are whole and `aligned`, or
// chunks of any others. All threads of a launch take the same one.
template <class Work, class T, bool SINGLES, bool FEW = false, class... Args>
INLINE void by_access(int width, bool aligned, Args... args) {
    if constexpr (SINGLES) Work::run(Direct<Single<T>>(), args...);
    else if (aligned && width % Chunk<T>::SIZE == 0) Work::run(Direct<Chunk<T>>(), args...);
    else if constexpr (FEW) Work::run(Loose<T>(), args...);
    else Work::run(Shifted<T>(), args...);
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
template <int LANES, class A, int CHUNKS, class T>
INLINE void recall(A access, const Held<typename A::Item, CHUNKS>& held, int start,
                   typename A::Item (&to)[CHUNKS], const T* row, int width, T missing = {}) {
    if (!held.has(start)) return load<LANES>(access, to, row, width, start + threadIdx.x, missing);
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) to[k] = held(start, k);
}

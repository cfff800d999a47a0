// Code that all kernel families share. op.py prepends this file to the source of each family.
//
// Elements are stored as float, __half or __nv_bfloat16; arithmetic is in float. The two 16-bit types have
// the names of CUDA's own types, because preheat accepts arrays of float16 and bfloat16 for parameters of
// these names.

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

template <class T> INLINE T from_float(float v);
template <> INLINE float from_float<float>(float v) { return v; }
template <> INLINE __half from_float<__half>(float v) {
    __half h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(v));
    return h;
}
template <> INLINE __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
#if __CUDA_ARCH__ >= 800
    __nv_bfloat16 b;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(b.bits) : "f"(v));
    return b;
#else  // Round to nearest even by hand: the instruction exists since sm_80.
    unsigned bits = __float_as_uint(v);
    unsigned up = bits + 0x7fffu + ((bits >> 16) & 1u);
    return {(unsigned short)(v == v ? up >> 16 : 0x7fffu)};
#endif
}

// Round two floats and pack them into one word, the first in the lower 16 bits.
template <class T16> INLINE unsigned pack_pair(float first, float second) {
    return from_float<T16>(first).bits | (unsigned)from_float<T16>(second).bits << 16;
}
#if __CUDA_ARCH__ >= 800  // One instruction converts and packs both.
template <> INLINE unsigned pack_pair<__half>(float first, float second) {
    unsigned both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
}
template <> INLINE unsigned pack_pair<__nv_bfloat16>(float first, float second) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
}
#endif

// Consecutive elements that a thread loads or stores with one instruction: 16 bytes by default. Two 16-bit
// elements stay packed in one register until they are used, because unpacking would wait for the load.
template <class T, int WORDS = 4> struct Chunk;

template <int WORDS> struct alignas(4 * WORDS) Chunk<float, WORDS> {
    static constexpr int SIZE = WORDS;
    unsigned words[WORDS] = {};

    INLINE float operator[](int i) const { return __uint_as_float(words[i]); }
    INLINE float raw(int i) const { return (*this)[i]; }
    INLINE void set_raw(int i, float v) { words[i] = __float_as_uint(v); }
    // Set every element i to value(i). `value` may read the element that it replaces.
    template <class F> INLINE void fill(F value) {
#pragma unroll
        for (int i = 0; i < SIZE; i++) set_raw(i, value(i));
    }
};

template <class T16, int WORDS> struct alignas(4 * WORDS) Chunk {
    static constexpr int SIZE = 2 * WORDS;
    unsigned words[WORDS] = {};

    INLINE T16 raw(int i) const {
        return {(unsigned short)(words[i / 2] >> 16 * (i % 2))};
    }
    INLINE void set_raw(int i, T16 v) {
        unsigned other = words[i / 2] & (i % 2 ? 0x0000ffffu : 0xffff0000u);
        words[i / 2] = other | (unsigned)v.bits << 16 * (i % 2);
    }
    INLINE float operator[](int i) const { return to_float(raw(i)); }
    template <class F> INLINE void fill(F value) {
#pragma unroll
        for (int i = 0; i < SIZE; i += 2) words[i / 2] = pack_pair<T16>(value(i), value(i + 1));
    }
};

// A single element with the interface of Chunk.
template <class T> struct Scalar {
    static constexpr int SIZE = 1;
    T value = {};

    INLINE float operator[](int) const { return to_float(value); }
    INLINE T raw(int) const { return value; }
    INLINE void set_raw(int, T v) { value = v; }
    template <class F> INLINE void fill(F make) { value = from_float<T>(make(0)); }
};

// LANES threads process one row. Up to 32 lanes are (a part of) a warp, and a block of 128 threads processes
// several rows. With more lanes, a block processes one row and has at most LANES threads.
template <int LANES> constexpr bool BLOCK_PER_ROW = LANES > 32;
template <int LANES> constexpr int ROWS_PER_BLOCK = BLOCK_PER_ROW<LANES> ? 1 : 128 / LANES;
template <int LANES> constexpr int MAX_THREADS = LANES * ROWS_PER_BLOCK<LANES>;
// For __launch_bounds__: 1024 resident threads leave 64 registers to each.
template <int LANES> constexpr int MIN_BLOCKS_PER_SM = 1024 / MAX_THREADS<LANES>;

template <class C, class T> INLINE C filled_chunk(T value) {
    C chunk;
#pragma unroll
    for (int i = 0; i < C::SIZE; i++) chunk.set_raw(i, value);
    return chunk;
}

// A row or a part of one: `length` elements of an operand, beginning at its element `first`. `before` and
// `after` count the elements of the operand on either side, up to eight: those may be read as well.
struct Span {
    long long first;
    int length, before, after;

    INLINE Span(long long first, int length, long long total)
        : first(first), length(length), before((int)min(first, 8ll)),
          after((int)min(total - first - length, 8ll)) {}
};

// The span of a row, which is empty for row >= rows, and the span of a part of a row.
INLINE Span row_span(long long row, int rows, int width) {
    return {row * width, row < rows ? width : 0, (long long)rows * width};
}
INLINE Span part_span(long long row, int rows, int width, int start, int length) {
    return {row * width + start, length, (long long)rows * width};
}

// Access policies: how the threads of a row load and store it. The lanes of a warp access consecutive chunks,
// and the chunks of one thread are SHUFFLE_WIDTH chunks apart. Which thread processes an element depends only
// on the position in the row, never on alignment, so results do not depend on alignment either. Elements
// beyond the end of a row read as `padding`. A load has two steps, `fetch` and `finish`, so that loads of
// other rows can be issued between them.
template <int LANES> constexpr int SHUFFLE_WIDTH = LANES < 32 ? LANES : 32;
template <int LANES, int CHUNKS> INLINE int chunk_index(int lane, int k) {
    constexpr int WIDTH = SHUFFLE_WIDTH<LANES>;
    return lane / WIDTH * WIDTH * CHUNKS + k * WIDTH + lane % WIDTH;
}

// For rows of whole, aligned chunks (C = Chunk), and for single elements at any address (C = Scalar).
template <class C> struct AlignedAccess {
    using Item = C;
    template <int LANES, int CHUNKS, class T>
    static INLINE void fetch(C (&to)[CHUNKS], const T* from, Span span, int lane, T padding = {}) {
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            int at = chunk_index<LANES, CHUNKS>(lane, k) * C::SIZE;
            to[k] = at < span.length ? *(const C*)(from + span.first + at) : filled_chunk<C>(padding);
        }
    }
    template <int LANES, int CHUNKS, class T>
    static INLINE void finish(C (&)[CHUNKS], const T*, Span, int, T = {}) {}
    template <int LANES, int CHUNKS, class T>
    static INLINE void store(T* to, const C (&from)[CHUNKS], Span span, int lane) {
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            int at = chunk_index<LANES, CHUNKS>(lane, k) * C::SIZE;
            if (at < span.length) *(C*)(to + span.first + at) = from[k];
        }
    }
};

// For chunks at any address, which are loaded and stored element by element.
template <class T> struct ElementwiseAccess {
    using Item = Chunk<T>;
    template <int LANES, int CHUNKS>
    static INLINE void fetch(Item (&to)[CHUNKS], const T* from, Span span, int lane, T padding = {}) {
#pragma unroll
        for (int k = 0; k < CHUNKS; k++)
#pragma unroll
            for (int i = 0; i < Item::SIZE; i++) {
                int at = chunk_index<LANES, CHUNKS>(lane, k) * Item::SIZE + i;
                to[k].set_raw(i, at < span.length ? from[span.first + at] : padding);
            }
    }
    template <int LANES, int CHUNKS>
    static INLINE void finish(Item (&)[CHUNKS], const T*, Span, int, T = {}) {}
    template <int LANES, int CHUNKS>
    static INLINE void store(T* to, const Item (&from)[CHUNKS], Span span, int lane) {
#pragma unroll
        for (int k = 0; k < CHUNKS; k++)
#pragma unroll
            for (int i = 0; i < Item::SIZE; i++) {
                int at = chunk_index<LANES, CHUNKS>(lane, k) * Item::SIZE + i;
                if (at < span.length) to[span.first + at] = from[k].raw(i);
            }
    }
};

// Views memory as pieces: the elements of 16 aligned bytes. A span at any address begins at element `phase` of
// a piece, and unless `phase` is 0, each chunk of the span straddles two pieces.
template <class T> struct AlignedPieces {
    using Item = Chunk<T>;
    static constexpr int SIZE = Item::SIZE;

    static INLINE int phase_at(const T* data, Span span) {
        return span.length ? (size_t)(data + span.first) / sizeof(T) % SIZE : 0;
    }
    // Return whether the piece at element `at` of a span (which may be negative) lies inside the operand, so
    // that one load can read it. Its elements outside the span are read but never used.
    static INLINE bool is_readable(int at, Span span) {
        return at >= -span.before && at + SIZE <= span.length + span.after;
    }
    static INLINE Item read(const T* data, Span span, int at) {
        return at < span.length && is_readable(at, span) ? *(const Item*)(data + span.first + at) : Item();
    }
    // Read a piece that reaches over an end of the operand, element by element. `read` left zeros in it.
    static INLINE void read_partial(Item& piece, const T* data, Span span, int at) {
        if (at >= span.length || is_readable(at, span)) return;
        Item part;
#pragma unroll
        for (int i = 0; i < SIZE; i++)
            if (at + i >= 0 && at + i < span.length) part.set_raw(i, data[span.first + at + i]);
#pragma unroll
        for (int i = 0; i < 4; i++) piece.words[i] |= part.words[i];
    }
    // Store the elements from `begin` up to `end` of a chunk that lies at element `at` of a span.
    static INLINE void write_part(T* data, Span span, const Item& chunk, int at, int begin, int end) {
#pragma unroll
        for (int i = 0; i < SIZE; i++)
            if (at + i >= begin && at + i < end) data[span.first + at + i] = chunk.raw(i);
    }
    static INLINE void write(T* data, Span span, const Item& piece, int at) {
        if (at >= 0 && at + SIZE <= span.length) *(Item*)(data + span.first + at) = piece;
        else write_part(data, span, piece, at, 0, span.length);
    }
    // Return the chunk that begins at element `by` of `low` and continues in `high`, the piece after it.
    static INLINE Item extract(const Item& low, const Item& high, int by) {
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
        for (int i = 0; i < 4; i++) {
            unsigned shifted = __funnelshift_r(words[i], words[i + 1], 16);
            chunk.words[i] = sizeof(T) == 2 && bytes & 2 ? shifted : words[i];
        }
        return chunk;
    }
    // The number of chunks in a span, and the offset of this thread's first piece where a block stores it all.
    static INLINE int num_chunks(Span span) { return (span.length + SIZE - 1) / SIZE; }
    static INLINE int first_of_thread(const T* data, Span span) {
        return threadIdx.x * SIZE - phase_at(data, span);
    }
    // Replace the elements of the chunk at element `at` that lie beyond the end of the span by `padding`.
    static INLINE void pad_tail(Item& chunk, Span span, int at, T padding) {
        if (at + SIZE > span.length)
#pragma unroll
            for (int i = 0; i < SIZE; i++)
                if (at + i >= span.length) chunk.set_raw(i, padding);
    }
};

// Return `b` if `second`, else `a`, word by word: a reference to either would move both to local memory.
template <class C> INLINE C select(bool second, const C& a, const C& b) {
    C chunk;
#pragma unroll
    for (int i = 0; i < 4; i++) chunk.words[i] = second ? b.words[i] : a.words[i];
    return chunk;
}

// Return the chunk `sent` by lane `source` of each group of WIDTH lanes.
template <int WIDTH, class C> INLINE C shuffle_chunk(const C& sent, int source) {
    C chunk;
#pragma unroll
    for (int i = 0; i < 4; i++) chunk.words[i] = __shfl_sync(0xffffffffu, sent.words[i], source, WIDTH);
    return chunk;
}

// For rows at any address and of any width. All threads of a warp must call together: each thread loads the
// aligned piece in which its chunk begins, and gets the piece in which the chunk ends from the next lane.
template <class T> struct ShiftedAccess {
    using Item = Chunk<T>;
    using P = AlignedPieces<T>;
    static constexpr int SIZE = Item::SIZE;

    template <int LANES, int CHUNKS>
    static INLINE void fetch(Item (&to)[CHUNKS], const T* from, Span span, int lane, T = {}) {
        int phase = P::phase_at(from, span);
#pragma unroll
        for (int k = 0; k < CHUNKS; k++)
            to[k] = P::read(from, span, chunk_index<LANES, CHUNKS>(lane, k) * SIZE - phase);
    }
    template <int LANES, int CHUNKS>
    static INLINE void finish(Item (&to)[CHUNKS], const T* from, Span span, int lane, T padding = {}) {
        constexpr int WIDTH = SHUFFLE_WIDTH<LANES>;
        int phase = P::phase_at(from, span), first = lane % WIDTH == 0, last = lane % WIDTH == WIDTH - 1;
        int end = (chunk_index<LANES, CHUNKS>(lane, CHUNKS - 1) + 1) * SIZE - phase;
        Item beyond = last && phase ? P::read(from, span, end) : Item();
        if (span.before < SIZE || span.after < SIZE) {
#pragma unroll
            for (int k = 0; k < CHUNKS; k++)
                P::read_partial(to[k], from, span, chunk_index<LANES, CHUNKS>(lane, k) * SIZE - phase);
            if (last && phase) P::read_partial(beyond, from, span, end);
        }
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            bool more = k + 1 < CHUNKS;
            Item sent = select(more && first, to[k], to[more ? k + 1 : k]);
            Item next = shuffle_chunk<WIDTH>(sent, (lane + 1) % WIDTH);
            if (!more && last) next = beyond;
            to[k] = P::extract(to[k], next, phase);
            P::pad_tail(to[k], span, chunk_index<LANES, CHUNKS>(lane, k) * SIZE, padding);
        }
    }
    // Each thread stores the aligned piece in which its chunk begins. Pieces that two warps share, and the
    // piece in which the span ends, are stored element by element.
    template <int LANES, int CHUNKS>
    static INLINE void store(T* to, const Item (&from)[CHUNKS], Span span, int lane) {
        constexpr int WIDTH = SHUFFLE_WIDTH<LANES>;
        int phase = P::phase_at(to, span), first = lane % WIDTH == 0, last = lane % WIDTH == WIDTH - 1;
        Item tail;
        int tail_at = span.length;
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            int at = chunk_index<LANES, CHUNKS>(lane, k) * SIZE - phase;
            Item sent = select(k && last, from[k], from[k ? k - 1 : 0]);
            Item before = shuffle_chunk<WIDTH>(sent, (lane + WIDTH - 1) % WIDTH);
            Item piece = P::extract(select(phase == 0, before, from[k]), from[k], (SIZE - phase) % SIZE);
            if (k == 0 && first && phase) continue;
            if (at + SIZE <= span.length) *(Item*)(to + span.first + at) = piece;
            else if (at < span.length) tail = piece, tail_at = at;
        }
        if (tail_at < span.length) P::write_part(to, span, tail, tail_at, 0, span.length);
        if (phase == 0 || !(first || last)) return;
        int at = chunk_index<LANES, CHUNKS>(lane, last ? CHUNKS - 1 : 0) * SIZE, cut = at + SIZE - phase;
        int end = last ? span.length : min(cut, span.length);
        P::write_part(to, span, select(last, from[0], from[CHUNKS - 1]), at, last ? cut : at, end);
    }
};

template <int LANES, class A, int CHUNKS, class T>
INLINE void load(A, typename A::Item (&to)[CHUNKS], const T* from, Span span, int lane, T padding = {}) {
    A::template fetch<LANES>(to, from, span, lane, padding);
    A::template finish<LANES>(to, from, span, lane, padding);
}

template <class T> INLINE bool aligned(const T* p) { return (size_t)p % sizeof(Chunk<T>) == 0; }

// Which unaligned rows use ElementwiseAccess: none, those of a launch with few small blocks (whose time is the
// latency of their loads), or all.
enum class UseElementwise { NEVER, IF_FEW, ALWAYS };
template <class T, int LANES, int CHUNKS>
constexpr UseElementwise USE_ELEMENTWISE =
    LANES <= 32 && CHUNKS == 1 && (sizeof(T) == 4 || LANES < 16) ? UseElementwise::ALWAYS
    : LANES <= 512 && (CHUNKS == 1 || sizeof(T) == 4)            ? UseElementwise::IF_FEW
                                                                 : UseElementwise::NEVER;

// Run `Body` with the access policy of the launch. All threads of a launch choose the same one: it depends on
// the template arguments, the alignment of the operands, the width and the size of the launch.
template <class Body, class T, bool SCALARS, UseElementwise WHEN, class... Args>
INLINE void dispatch_access(int width, bool aligned, Args... args) {
    constexpr int FEW = 64, SMALL = 128;  // Blocks of the launch; threads of a block.
    if constexpr (SCALARS) return Body::run(AlignedAccess<Scalar<T>>(), args...);
    if (aligned && width % Chunk<T>::SIZE == 0) return Body::run(AlignedAccess<Chunk<T>>(), args...);
    if constexpr (WHEN == UseElementwise::ALWAYS) return Body::run(ElementwiseAccess<T>(), args...);
    if constexpr (WHEN == UseElementwise::IF_FEW)
        if (gridDim.x < FEW && blockDim.x <= SMALL) return Body::run(ElementwiseAccess<T>(), args...);
    Body::run(ShiftedAccess<T>(), args...);
}

INLINE float shuffle_xor(float v, int by) { return __shfl_xor_sync(0xffffffffu, v, by); }
INLINE float sum(float a, float b) { return a + b; }

// Reduce the values of all threads of a row by `f` and return the result to each of them. The order depends on
// the number of threads alone. `identity` is the neutral element of `f`. `scratch` has 32 elements of shared
// memory. No barrier follows the last read of it, so a block uses it once, or alternates between two.
template <int LANES, class V, class F> INLINE V allreduce(V v, V* scratch, F f, V identity = {}) {
#pragma unroll
    for (int by = (BLOCK_PER_ROW<LANES> ? 32 : LANES) / 2; by; by /= 2) v = f(v, shuffle_xor(v, by));
    if constexpr (BLOCK_PER_ROW<LANES>) {
        if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
        __syncthreads();
        constexpr int WARPS = LANES > 512 ? 32 : LANES / 32;  // A power of two.
        int warp = threadIdx.x % WARPS;
        v = warp < blockDim.x / 32 ? scratch[warp] : identity;
#pragma unroll
        for (int by = WARPS / 2; by; by /= 2) v = f(v, shuffle_xor(v, by));
    }
    return v;
}

// Wide rows: a cluster of blocks processes each row, and each block one segment of it. On devices without
// clusters, one block processes the whole row.
constexpr int WIDE_THREADS = 512;  // The most threads of such a block.

INLINE int cluster_rank() {
    int rank = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}
INLINE int cluster_size() {
    int blocks = 1;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
#endif
    return blocks;
}
INLINE void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
INLINE void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

INLINE unsigned shared_address(const void* shared) { return (unsigned)__cvta_generic_to_shared(shared); }

// Load a word from the shared memory of another block of the cluster. `mine` is its address in this block.
INLINE unsigned remote_word(const void* mine, int block) {
    unsigned word = 0;
#if __CUDA_ARCH__ >= 900
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(mine)), "r"(block));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(word) : "r"(there) : "memory");
#endif
    return word;
}

// Reduce the values of the blocks of a cluster, as `allreduce` does for threads. All threads of a block pass
// the same `v`; `shared` is one element of shared memory. A block that has called this calls `cluster_finish`
// before it exits, because other blocks may still read its shared memory.
template <class V, class F> INLINE V cluster_allreduce(V v, V* shared, F f, V identity = {}) {
    int blocks = cluster_size(), block = threadIdx.x % 8;
    if (blocks == 1) return v;
    if (threadIdx.x == 0) *shared = v;
    cluster_arrive();
    cluster_wait();
    union { V value; unsigned words[sizeof(V) / 4]; } other = {identity};
    if (block < blocks)
#pragma unroll
        for (int i = 0; i < sizeof(V) / 4; i++)
            other.words[i] = remote_word((const char*)shared + 4 * i, block);
    cluster_arrive();
    v = other.value;
#pragma unroll
    for (int by = 4; by; by /= 2) v = f(v, shuffle_xor(v, by));
    return v;
}
INLINE void cluster_finish() {
    if (cluster_size() > 1) cluster_wait();
}

// The segment of the row that this block processes: a multiple of LINE elements, except for the last one.
INLINE Span segment_span(int rows, int width) {
    constexpr int LINE = 64;
    int blocks = cluster_size(), segment = ((width - 1) / blocks / LINE + 1) * LINE;
    int start = min(cluster_rank() * segment, width);
    return part_span(blockIdx.x / blocks, rows, width, start, min(segment, width - start));
}

// The dynamic shared memory of the block.
extern __shared__ __align__(128) unsigned char dynamic_shared[];

INLINE int dynamic_shared_bytes() {
    int bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    return bytes;
}

// Copy 16 bytes into shared memory, or zeros unless `valid`; asynchronously since sm_80. `async_commit` closes
// a group of copies; `async_wait` returns when at most the PENDING last groups are incomplete.
INLINE void copy_async(void* to, const void* from, bool valid = true) {
#if __CUDA_ARCH__ >= 800
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
#else
    *(uint4*)to = valid ? *(const uint4*)from : uint4{};
#endif
}
INLINE void async_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int PENDING> INLINE void async_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
#endif
}

// A span of an operand whose pieces are staged in shared memory, as far as they fit; the rest is read from
// global memory.
constexpr int STAGES = 4;
template <class T> struct StagedSpan {
    using Item = Chunk<T>;
    using P = AlignedPieces<T>;
    static constexpr int SIZE = Item::SIZE;

    const T* data;
    Span span;
    int phase, staged;  // The number of pieces in shared memory.
    Item* buffer;

    INLINE StagedSpan(const T* data, Span span, unsigned char* shared, int bytes)
        : data(data), span(span), phase(P::phase_at(data, span)),
          staged(min((span.length + phase + SIZE - 1) / SIZE, bytes / (int)sizeof(Item))),
          buffer((Item*)shared) {}

    // The index of the first piece after a stage.
    INLINE int end(int stage) const { return ((staged - 1) / STAGES + 1) * (stage + 1); }

    INLINE void copy(int stage) const {
        for (int i = end(stage - 1) + threadIdx.x; i < min(staged, end(stage)); i += blockDim.x) {
            int at = i * SIZE - phase;
            if (P::is_readable(at, span)) copy_async(buffer + i, data + span.first + at);
            else {
                buffer[i] = Item();
                P::read_partial(buffer[i], data, span, at);
            }
        }
    }

    INLINE Item piece(int i) const {
        if (i < staged) return i < 0 ? Item() : buffer[i];
        Item piece = P::read(data, span, i * SIZE - phase);
        P::read_partial(piece, data, span, i * SIZE - phase);
        return piece;
    }
    // Return the chunk that begins at element `at`, which may be negative.
    INLINE Item operator[](int at) const {
        int low = (at + phase) >> (SIZE == 4 ? 2 : 3), by = (at + phase) & (SIZE - 1);
        return by ? P::extract(piece(low), piece(low + 1), by) : piece(low);
    }
};

// Copy the operands to shared memory in stages, and call work(chunk) for each chunk of this thread as soon as
// its pieces have arrived. The chunks of a thread are blockDim.x apart.
template <int STAGE, class F, class... Operands>
INLINE void process_stages(int chunk, int chunks, F work, const Operands&... operands) {
    async_wait<STAGES - 1 - STAGE>();
    __syncthreads();
    int end = chunks;
    if (STAGE < STAGES - 1) ((end = min(end, operands.end(STAGE) - 1)), ...);
    for (; chunk < end; chunk += blockDim.x) work(chunk);
    if constexpr (STAGE < STAGES - 1) process_stages<STAGE + 1>(chunk, chunks, work, operands...);
}
template <class F, class... Operands>
INLINE void process_in_stages(int chunks, F work, const Operands&... operands) {
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) {
        (operands.copy(stage), ...);
        async_commit();
    }
    process_stages<0>(threadIdx.x, chunks, work, operands...);
}

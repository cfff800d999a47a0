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
// Blocks that a processor shall hold at least: 1024 threads leave 64 registers to each.
template <int LANES> constexpr int RESIDENT = 1024 / THREADS<LANES>;

template <class C, class T> INLINE C filled(T value) {
    C chunk;
#pragma unroll
    for (int i = 0; i < C::SIZE; i++) chunk.put_raw(i, value);
    return chunk;
}

// `length` elements of an operand from its element `first` on: a row, or a part of one. Of the elements on
// either side of them, up to eight count: they belong to the operand as well, so that they may be read.
struct Span {
    long long first;
    int length, before, after;

    INLINE Span(long long first, int length, long long total)
        : first(first), length(length), before((int)min(first, 8ll)),
          after((int)min(total - first - length, 8ll)) {}
};

// A row, which is empty beyond the last one, and a part of it.
INLINE Span row_span(long long row, int rows, int width) {
    return {row * width, row < rows ? width : 0, (long long)rows * width};
}
INLINE Span part_span(long long row, int rows, int width, int start, int length) {
    return {row * width + start, length, (long long)rows * width};
}

// How the threads of a row access it. A warp has neighbouring chunks, and those of a thread are as far
// apart as the warp is wide. The thread of an element depends on its place in the row alone, never on
// alignment, and therefore every result does. Beyond the end of a row, all elements are `missing`. A load
// has two steps, so that memory is busy with other rows between them: `fetch` and `finish`.
template <int LANES> constexpr int GROUP = LANES < 32 ? LANES : 32;
template <int LANES, int CHUNKS> INLINE int place(int lane, int k) {
    return lane / GROUP<LANES> * GROUP<LANES> * CHUNKS + k * GROUP<LANES> + lane % GROUP<LANES>;
}

// Rows whose chunks are whole and aligned, or single elements.
template <class C> struct Direct {
    using Item = C;
    template <int LANES, int CHUNKS, class T>
    static INLINE void fetch(C (&to)[CHUNKS], const T* from, Span span, int lane, T missing = {}) {
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            int at = place<LANES, CHUNKS>(lane, k) * C::SIZE;
            to[k] = at < span.length ? *(const C*)(from + span.first + at) : filled<C>(missing);
        }
    }
    template <int LANES, int CHUNKS, class T>
    static INLINE void finish(C (&)[CHUNKS], const T*, Span, int, T = {}) {}
    template <int LANES, int CHUNKS, class T>
    static INLINE void store(T* to, const C (&from)[CHUNKS], Span span, int lane) {
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            int at = place<LANES, CHUNKS>(lane, k) * C::SIZE;
            if (at < span.length) *(C*)(to + span.first + at) = from[k];
        }
    }
};

// Chunks at any address, element by element.
template <class T> struct Loose {
    using Item = Chunk<T>;
    template <int LANES, int CHUNKS>
    static INLINE void fetch(Item (&to)[CHUNKS], const T* from, Span span, int lane, T missing = {}) {
#pragma unroll
        for (int k = 0; k < CHUNKS; k++)
#pragma unroll
            for (int i = 0; i < Item::SIZE; i++) {
                int at = place<LANES, CHUNKS>(lane, k) * Item::SIZE + i;
                to[k].put_raw(i, at < span.length ? from[span.first + at] : missing);
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
                int at = place<LANES, CHUNKS>(lane, k) * Item::SIZE + i;
                if (at < span.length) to[span.first + at] = from[k].raw(i);
            }
    }
};

// Memory in pieces: the elements of sixteen aligned bytes. A span at any address begins within a piece, at
// the element `phase` of it, and each of its chunks lies across two pieces.
template <class T> struct Pieces {
    using Item = Chunk<T>;
    static constexpr int SIZE = Item::SIZE;

    static INLINE int phase_of(const T* data, Span span) {
        return span.length ? (size_t)(data + span.first) / sizeof(T) % SIZE : 0;
    }
    // Whether the piece at the element `at` of a span, which may be negative, is inside of the operand. It
    // may have elements that are beside the span: those are read, but never used.
    static INLINE bool inside(int at, Span span) {
        return at >= -span.before && at + SIZE <= span.length + span.after;
    }
    static INLINE Item read(const T* data, Span span, int at) {
        return at < span.length && inside(at, span) ? *(const Item*)(data + span.first + at) : Item();
    }
    // Read a piece at one of the ends of the operand element by element. Until then it is zero.
    static INLINE void complete(Item& piece, const T* data, Span span, int at) {
        if (at >= span.length || inside(at, span)) return;
        Item part;
#pragma unroll
        for (int i = 0; i < SIZE; i++)
            if (at + i >= 0 && at + i < span.length) part.put_raw(i, data[span.first + at + i]);
#pragma unroll
        for (int i = 0; i < 4; i++) piece.words[i] |= part.words[i];
    }
    // The elements of `chunk`, which is at the element `at` of a span, from `begin` up to `end`.
    static INLINE void write_part(T* data, Span span, const Item& chunk, int at, int begin, int end) {
#pragma unroll
        for (int i = 0; i < SIZE; i++)
            if (at + i >= begin && at + i < end) data[span.first + at + i] = chunk.raw(i);
    }
    static INLINE void write(T* data, Span span, const Item& piece, int at) {
        if (at >= 0 && at + SIZE <= span.length) *(Item*)(data + span.first + at) = piece;
        else write_part(data, span, piece, at, 0, span.length);
    }
    // A chunk of elements, from the element `by` of `low` on; `high` follows `low`.
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
        for (int i = 0; i < 4; i++) {
            unsigned shifted = __funnelshift_r(words[i], words[i + 1], 16);
            chunk.words[i] = sizeof(T) == 2 && bytes & 2 ? shifted : words[i];
        }
        return chunk;
    }
    // The chunks of a span, and the first piece of this thread where a block has every piece of it.
    static INLINE int chunks(Span span) { return (span.length + SIZE - 1) / SIZE; }
    static INLINE int first(const T* data, Span span) { return threadIdx.x * SIZE - phase_of(data, span); }
    // What the chunk at the element `at` has beyond the end of the span becomes `missing`.
    static INLINE void limit(Item& chunk, Span span, int at, T missing) {
        if (at + SIZE > span.length)
#pragma unroll
            for (int i = 0; i < SIZE; i++)
                if (at + i >= span.length) chunk.put_raw(i, missing);
    }
};

// A copy of `a` or of `b`, word by word: a reference to one of them would move both out of registers.
template <class C> INLINE C either(bool second, const C& a, const C& b) {
    C chunk;
#pragma unroll
    for (int i = 0; i < 4; i++) chunk.words[i] = second ? b.words[i] : a.words[i];
    return chunk;
}

// The chunk that the thread `source` of every WIDTH sends.
template <int WIDTH, class C> INLINE C received(const C& sent, int source) {
    C chunk;
#pragma unroll
    for (int i = 0; i < 4; i++) chunk.words[i] = __shfl_sync(0xffffffffu, sent.words[i], source, WIDTH);
    return chunk;
}

// Rows at any address and of any width. All threads of a warp come here together: a thread reads the piece
// in which its chunk begins, and its neighbour has the piece in which the chunk ends.
template <class T> struct Shifted {
    using Item = Chunk<T>;
    using P = Pieces<T>;
    static constexpr int SIZE = Item::SIZE;

    template <int LANES, int CHUNKS>
    static INLINE void fetch(Item (&to)[CHUNKS], const T* from, Span span, int lane, T = {}) {
        int phase = P::phase_of(from, span);
#pragma unroll
        for (int k = 0; k < CHUNKS; k++)
            to[k] = P::read(from, span, place<LANES, CHUNKS>(lane, k) * SIZE - phase);
    }
    template <int LANES, int CHUNKS>
    static INLINE void finish(Item (&to)[CHUNKS], const T* from, Span span, int lane, T missing = {}) {
        constexpr int WIDTH = GROUP<LANES>;
        int phase = P::phase_of(from, span), first = lane % WIDTH == 0, last = lane % WIDTH == WIDTH - 1;
        int end = (place<LANES, CHUNKS>(lane, CHUNKS - 1) + 1) * SIZE - phase;
        Item beyond = last && phase ? P::read(from, span, end) : Item();
        if (span.before < SIZE || span.after < SIZE) {
#pragma unroll
            for (int k = 0; k < CHUNKS; k++)
                P::complete(to[k], from, span, place<LANES, CHUNKS>(lane, k) * SIZE - phase);
            if (last && phase) P::complete(beyond, from, span, end);
        }
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            bool more = k + 1 < CHUNKS;
            Item sent = either(more && first, to[k], to[more ? k + 1 : k]);
            Item next = received<WIDTH>(sent, (lane + 1) % WIDTH);
            if (!more && last) next = beyond;
            to[k] = P::between(to[k], next, phase);
            P::limit(to[k], span, place<LANES, CHUNKS>(lane, k) * SIZE, missing);
        }
    }
    // A thread writes the piece in which its chunk begins. What the first and the last chunk of a warp have
    // in pieces that they share with other warps, and the piece in which the span ends, are written element
    // by element.
    template <int LANES, int CHUNKS>
    static INLINE void store(T* to, const Item (&from)[CHUNKS], Span span, int lane) {
        constexpr int WIDTH = GROUP<LANES>;
        int phase = P::phase_of(to, span), first = lane % WIDTH == 0, last = lane % WIDTH == WIDTH - 1;
        Item tail;
        int tail_at = span.length;
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            int at = place<LANES, CHUNKS>(lane, k) * SIZE - phase;
            Item sent = either(k && last, from[k], from[k ? k - 1 : 0]);
            Item before = received<WIDTH>(sent, (lane + WIDTH - 1) % WIDTH);
            Item piece = P::between(either(phase == 0, before, from[k]), from[k], (SIZE - phase) % SIZE);
            if (k == 0 && first && phase) continue;
            if (at + SIZE <= span.length) *(Item*)(to + span.first + at) = piece;
            else if (at < span.length) tail = piece, tail_at = at;
        }
        if (tail_at < span.length) P::write_part(to, span, tail, tail_at, 0, span.length);
        if (phase == 0 || !(first || last)) return;
        int at = place<LANES, CHUNKS>(lane, last ? CHUNKS - 1 : 0) * SIZE, cut = at + SIZE - phase;
        int end = last ? span.length : min(cut, span.length);
        P::write_part(to, span, either(last, from[0], from[CHUNKS - 1]), at, last ? cut : at, end);
    }
};

template <int LANES, class A, int CHUNKS, class T>
INLINE void load(A, typename A::Item (&to)[CHUNKS], const T* from, Span span, int lane, T missing = {}) {
    A::template fetch<LANES>(to, from, span, lane, missing);
    A::template finish<LANES>(to, from, span, lane, missing);
}

template <class T> INLINE bool aligned(const T* p) { return (size_t)p % sizeof(Chunk<T>) == 0; }

// Which rows that are not aligned are accessed element by element: none, those of a launch of few small
// blocks, whose time is the latency of their loads, or all.
enum class Elementwise { NEVER, IF_FEW, ALWAYS };
template <class T, int LANES, int CHUNKS>
constexpr Elementwise ELEMENTWISE =
    LANES <= 32 && CHUNKS == 1 && (sizeof(T) == 4 || LANES < 16) ? Elementwise::ALWAYS
    : LANES <= 512 && (CHUNKS == 1 || sizeof(T) == 4)            ? Elementwise::IF_FEW
                                                                 : Elementwise::NEVER;

// Run `Work` with the access policy of the launch, which is the same for all of its threads: single
// elements, chunks of rows that all are whole and `aligned`, or chunks of other rows.
template <class Work, class T, bool SINGLES, Elementwise WHEN, class... Args>
INLINE void by_access(int width, bool aligned, Args... args) {
    constexpr int FEW = 64, SMALL = 128;  // blocks, and threads of a block
    if constexpr (SINGLES) return Work::run(Direct<Single<T>>(), args...);
    if (aligned && width % Chunk<T>::SIZE == 0) return Work::run(Direct<Chunk<T>>(), args...);
    if constexpr (WHEN == Elementwise::ALWAYS) return Work::run(Loose<T>(), args...);
    if constexpr (WHEN == Elementwise::IF_FEW)
        if (gridDim.x < FEW && blockDim.x <= SMALL) return Work::run(Loose<T>(), args...);
    Work::run(Shifted<T>(), args...);
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
        constexpr int WARPS = LANES > 512 ? 32 : LANES / 32;  // a power of two
        int warp = threadIdx.x % WARPS;
        v = warp < blockDim.x / 32 ? scratch[warp] : none;
#pragma unroll
        for (int by = WARPS / 2; by; by /= 2) v = f(v, shuffled(v, by));
    }
    return v;
}

// Wide rows: a cluster of blocks works on each of them, and every block has a segment of it. Where there are
// no clusters, one block has the whole row.
constexpr int WIDE = 512;  // threads of such a block, at most

INLINE int cluster_rank() {
    int rank = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}
INLINE int cluster_blocks() {
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

INLINE unsigned address_of(const void* shared) { return (unsigned)__cvta_generic_to_shared(shared); }

// A word of the shared memory of another block of the cluster, which has it at the address `mine` here.
INLINE unsigned remote_word(const void* mine, int block) {
    unsigned word = 0;
#if __CUDA_ARCH__ >= 900
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address_of(mine)), "r"(block));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(word) : "r"(there) : "memory");
#endif
    return word;
}

// The same as `across`, for the blocks of a cluster: `v` is the value of a block, which all of its threads
// have, and `shared` has room for one. A block that called this waits for the cluster before it ends.
template <class V, class F> INLINE V across_cluster(V v, V* shared, F f, V none = {}) {
    int blocks = cluster_blocks(), block = threadIdx.x % 8;
    if (blocks == 1) return v;
    if (threadIdx.x == 0) *shared = v;
    cluster_arrive();
    cluster_wait();
    union { V value; unsigned words[sizeof(V) / 4]; } other = {none};
    if (block < blocks)
#pragma unroll
        for (int i = 0; i < sizeof(V) / 4; i++) other.words[i] = remote_word((const char*)shared + 4 * i, block);
    cluster_arrive();
    v = other.value;
#pragma unroll
    for (int by = 4; by; by /= 2) v = f(v, shuffled(v, by));
    return v;
}
INLINE void end_cluster() {
    if (cluster_blocks() > 1) cluster_wait();
}

// This block's segment of its row: whole lines of memory, but for the last one.
INLINE Span segment_span(int rows, int width) {
    constexpr int LINE = 64;
    int blocks = cluster_blocks(), segment = ((width - 1) / blocks / LINE + 1) * LINE;
    int start = min(cluster_rank() * segment, width);
    return part_span(blockIdx.x / blocks, rows, width, start, min(segment, width - start));
}

// The dynamic shared memory of the block.
extern __shared__ __align__(128) unsigned char memory[];

INLINE int dynamic_bytes() {
    int bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    return bytes;
}

// Copy sixteen bytes into shared memory, or fill them with zeros: asynchronously, where the chip can.
// Copies that were committed together are waited for together, while the LEFT last ones go on.
INLINE void copy_async(void* to, const void* from, bool there = true) {
#if __CUDA_ARCH__ >= 800
    int bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(address_of(to)), "l"(from), "r"(bytes) : "memory");
#else
    *(uint4*)to = there ? *(const uint4*)from : uint4{};
#endif
}
INLINE void commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int LEFT> INLINE void wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
#endif
}

// A span of an operand in shared memory, as far as there is room for it: its pieces, whatever their phase.
constexpr int STAGES = 4;
template <class T> struct Staged {
    using Item = Chunk<T>;
    using P = Pieces<T>;
    static constexpr int SIZE = Item::SIZE;

    const T* data;
    Span span;
    int phase, held;  // pieces in shared memory
    Item* room;

    INLINE Staged(const T* data, Span span, unsigned char* memory, int bytes)
        : data(data), span(span), phase(P::phase_of(data, span)),
          held(min((span.length + phase + SIZE - 1) / SIZE, bytes / (int)sizeof(Item))), room((Item*)memory) {}

    // The piece that follows those of a stage.
    INLINE int end(int stage) const { return ((held - 1) / STAGES + 1) * (stage + 1); }

    INLINE void copy(int stage) const {
        for (int i = end(stage - 1) + threadIdx.x; i < min(held, end(stage)); i += blockDim.x) {
            int at = i * SIZE - phase;
            if (P::inside(at, span)) copy_async(room + i, data + span.first + at);
            else {
                room[i] = Item();
                P::complete(room[i], data, span, at);
            }
        }
    }

    INLINE Item piece(int i) const {
        if (i < held) return i < 0 ? Item() : room[i];
        Item piece = P::read(data, span, i * SIZE - phase);
        P::complete(piece, data, span, i * SIZE - phase);
        return piece;
    }
    // A chunk of elements, from `at` on, which may be negative.
    INLINE Item operator[](int at) const {
        int low = (at + phase) >> (SIZE == 4 ? 2 : 3), by = (at + phase) & (SIZE - 1);
        return by ? P::between(piece(low), piece(low + 1), by) : piece(low);
    }
};

// Copy all of the operands to shared memory, in stages. As soon as the pieces of a chunk are there, `work`
// has its number; the chunks of a thread are as many apart as there are threads.
template <int STAGE, class F, class... Operands>
INLINE void work_on_stages(int chunk, int chunks, F work, const Operands&... operands) {
    wait<STAGES - 1 - STAGE>();
    __syncthreads();
    int end = chunks;
    if (STAGE < STAGES - 1) ((end = min(end, operands.end(STAGE) - 1)), ...);
    for (; chunk < end; chunk += blockDim.x) work(chunk);
    if constexpr (STAGE < STAGES - 1) work_on_stages<STAGE + 1>(chunk, chunks, work, operands...);
}
template <class F, class... Operands> INLINE void stage_in(int chunks, F work, const Operands&... operands) {
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) {
        (operands.copy(stage), ...);
        commit();
    }
    work_on_stages<0>(threadIdx.x, chunks, work, operands...);
}

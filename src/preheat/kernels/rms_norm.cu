// y = gamma x / r of each row, where v = mean(x^2) + eps and r = sqrt(v), and its gradients:
//
//     gx      = (gamma gy - (x / v) mean(x gy gamma)) / r
//     g_gamma = sum of gy x / r over the rows
//
// The latter in two launches: group g of LANES threads adds up the rows g, g + groups, ..., and
// rms_norm_gamma adds up those sums; number and order follow from the shape alone. Threads read their
// elements before they write them, so that gx may take the place of gy or x.

// Of one row: the sums of x^2 and of x gy gamma.
struct Sums { float squares, dot; };

INLINE Sums shuffled(Sums s, int by) { return {shuffled(s.squares, by), shuffled(s.dot, by)}; }
INLINE Sums both(Sums s, Sums t) { return {s.squares + t.squares, s.dot + t.dot}; }

template <int CHUNKS, class C> INLINE float squares(const C (&x)[CHUNKS]) {
    float s = 0.0f;
#pragma unroll
    for (int k = 0; k < CHUNKS; k++)
#pragma unroll
        for (int i = 0; i < C::SIZE; i++) s = fmaf(x[k][i], x[k][i], s);
    return s;
}

// x becomes y.
template <int CHUNKS, class C>
INLINE void scale(C (&x)[CHUNKS], const C (&gamma)[CHUNKS], float by) {
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) x[k].fill([&](int i) { return x[k][i] * by * gamma[k][i]; });
}

template <int LANES, int CHUNKS> struct RmsNormRow {
    template <class A, class T>
    static INLINE void run(A access, const T* x, const T* gamma, T* y, float eps, int rows, int width) {
        constexpr bool EARLY = sizeof(T) == 2 && ALONE<LANES>;  // registers have room for gamma
        __shared__ float scratch[32];
        Span span = row_span((long long)blockIdx.x * ROWS<LANES> + threadIdx.x / LANES, rows, width);
        int lane = threadIdx.x % LANES;
        typename A::Item v[CHUNKS], g[CHUNKS];
        load<LANES>(access, v, x, span, lane);
        Span weights(0, width, width);
        if constexpr (EARLY) A::template fetch<LANES>(g, gamma, weights, lane);
        float mean = across<LANES>(squares(v), scratch, sum) / width;
        if constexpr (!EARLY) A::template fetch<LANES>(g, gamma, weights, lane);
        A::template finish<LANES>(g, gamma, weights, lane);
        scale(v, g, rsqrtf(mean + eps));
        A::template store<LANES>(y, v, span, lane);
    }
};

template <class T, int LANES, int CHUNKS, bool SINGLES>
__global__ void __launch_bounds__(THREADS<LANES>, RESIDENT<LANES>)
rms_norm(const T* x, const T* gamma, T* y, float eps, int rows, int width) {
    bool all = aligned(x) && aligned(gamma) && aligned(y);
    by_access<RmsNormRow<LANES, CHUNKS>, T, SINGLES, ELEMENTWISE<T, LANES, CHUNKS>>(
        width, all, x, gamma, y, eps, rows, width);
}

template <class T>
__global__ void __launch_bounds__(WIDE, 3)
rms_norm_wide(const T* x, const T* gamma, T* y, float eps, int rows, int width) {
    using P = Pieces<T>;
    constexpr int WEIGHTS = 2;  // chunks of gamma that are on their way together
    __shared__ float scratch[32], of_block;
    Span span = segment_span(rows, width), columns(span.first % width, span.length, width);
    Staged<T> in(x, span, memory, dynamic_bytes()), weight(gamma, columns, nullptr, 0);
    float s = 0.0f;
    auto add = [&](int chunk) {
        Chunk<T> v[1] = {in[chunk * P::SIZE]};
        P::limit(v[0], span, chunk * P::SIZE, {});
        s += squares(v);
    };
    stage_in(P::chunks(span), add, in);
    s = across_cluster(across<WIDE>(s, scratch, sum), &of_block, sum);
    float by = rsqrtf(s / width + eps);
    int step = P::SIZE * blockDim.x;
    for (int start = P::first(y, span); start < span.length; start += WEIGHTS * step) {
        Chunk<T> v[1], g[WEIGHTS][1];
#pragma unroll
        for (int k = 0; k < WEIGHTS; k++) g[k][0] = weight[start + k * step];
#pragma unroll
        for (int k = 0; k < WEIGHTS; k++) {
            int at = start + k * step;
            if (at >= span.length) break;
            v[0] = in[at];
            scale(v, g[k], by);
            P::write(y, span, v[0], at);
        }
    }
    end_cluster();
}

template <int CHUNKS, class C>
INLINE Sums sums_of(const C (&gy)[CHUNKS], const C (&x)[CHUNKS], const C (&gamma)[CHUNKS]) {
    Sums s = {};
#pragma unroll
    for (int k = 0; k < CHUNKS; k++)
#pragma unroll
        for (int i = 0; i < C::SIZE; i++) {
            s.squares = fmaf(x[k][i], x[k][i], s.squares);
            s.dot = fmaf(x[k][i] * gamma[k][i], gy[k][i], s.dot);
        }
    return s;
}

// What the gradient needs of a row: 1 / r, and mean(x gy gamma) / (v r). `inverse` is 1 / width.
struct Factors {
    float by, pull;

    INLINE Factors(Sums s, float eps, float inverse)
        : by(rsqrtf(fmaf(s.squares, inverse, eps))), pull(s.dot * inverse * by * by * by) {}
};

// gy becomes gx; what the row adds to the gradient of gamma goes into `columns`.
template <int CHUNKS, class C>
INLINE void pull_back(C (&gy)[CHUNKS], const C (&x)[CHUNKS], const C (&gamma)[CHUNKS], Factors row,
                      float (&columns)[CHUNKS][C::SIZE]) {
#pragma unroll
    for (int k = 0; k < CHUNKS; k++)
        gy[k].fill([&](int i) {
            float dy = gy[k][i] * row.by, v = x[k][i];
            columns[k][i] = fmaf(dy, v, columns[k][i]);
            return fmaf(gamma[k][i], dy, -v * row.pull);
        });
}

// Floats from one row of sums in the workspace to the next one, so that all of them are aligned.
INLINE long long stride_of(int width) { return ((long long)width + 7) / 8 * 8; }

// The sums of columns: floats in the workspace or, where one group has all rows, the gradient itself.
template <int LANES, int CHUNKS, int SIZE, class T>
INLINE void store_sums(T* to, const float (&columns)[CHUNKS][SIZE], int width, int lane) {
    constexpr int WORDS = SIZE * sizeof(T) / 4;
    bool whole = SIZE > 1 && width % SIZE == 0 && (size_t)to % (4 * WORDS) == 0;
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        int at = place<LANES, CHUNKS>(lane, k) * SIZE;
        if constexpr (SIZE > 1)
            if (whole) {
                Chunk<T, WORDS> chunk;
                chunk.fill([&](int i) { return columns[k][i]; });
                if (at < width) *(Chunk<T, WORDS>*)(to + at) = chunk;
                continue;
            }
#pragma unroll
        for (int i = 0; i < SIZE; i++)
            if (at + i < width) to[at + i] = rounded<T>(columns[k][i]);
    }
}

// Rows that a thread has in registers: the one it works on and those on their way. With three of them, few
// threads keep memory busy.
template <class T, int LANES, int ELEMENTS>
constexpr int AHEAD = ELEMENTS > 8 || (sizeof(T) == 4 && LANES == 1024) ? 2 : 3;
// Blocks that a processor holds at least. Floats need more registers than the 64 that 1024 threads have.
template <class T, int LANES>
constexpr int HELD = !ALONE<LANES> ? 4 : LANES > 576 ? 1 : LANES > 512 ? 2 : 1024 / LANES * 2 / sizeof(T);

// What all groups read at a time lies together. While one row is worked on, others are on their way. The
// threads of a warp go round equally often, since they meet in `across`: rows beyond the last are empty.
template <int LANES, int CHUNKS> struct RmsNormBackwardRows {
    template <class A, class T>
    static INLINE void run(A access, const T* gy, const T* x, const T* gamma, T* gx, float* partial,
                           T* g_gamma, float eps, int rows, int width, int groups) {
        using C = typename A::Item;
        constexpr int SLOTS = AHEAD<T, LANES, CHUNKS * C::SIZE>;
        __shared__ Sums scratch[SLOTS][32];  // in turn, so that one barrier a row is enough
        int lane = threadIdx.x % LANES;
        int group = ROWS<LANES> == 1 ? blockIdx.x : blockIdx.x * ROWS<LANES> + threadIdx.x / LANES;
        unsigned row = group;
        int end = group < groups ? rows : 0;
        float inverse = 1.0f / width;
        Span gammas(0, width, width);
        C weight[CHUNKS], g[SLOTS][CHUNKS], v[SLOTS][CHUNKS];
        float columns[CHUNKS][C::SIZE] = {};
        auto begin = [&](int slot, unsigned row) {
            A::template fetch<LANES>(g[slot], gy, row_span(row, end, width), lane);
            A::template fetch<LANES>(v[slot], x, row_span(row, end, width), lane);
        };
#pragma unroll
        for (int slot = 0; slot < SLOTS; slot++) begin(slot, row + slot * groups);
        load<LANES>(access, weight, gamma, gammas, lane);
        bool more = true;
        while (more)
#pragma unroll
            for (int slot = 0; slot < SLOTS; slot++, row += groups) {
                bool mine = row < end;
                more = LANES < 32 ? __any_sync(0xffffffffu, mine) : mine;
                if (!more) break;
                Span span = row_span(row, end, width);
                A::template finish<LANES>(g[slot], gy, span, lane);
                A::template finish<LANES>(v[slot], x, span, lane);
                Sums s = across<LANES>(sums_of(g[slot], v[slot], weight), scratch[slot], both);
                if (mine) pull_back(g[slot], v[slot], weight, Factors(s, eps, inverse), columns);
                A::template store<LANES>(gx, g[slot], span, lane);
                begin(slot, row + SLOTS * groups);
            }
        if constexpr (!ALONE<LANES>)
            if (gridDim.x == 1) {  // then nothing is left to add up behind this block
                __shared__ float all[CHUNKS * C::SIZE][THREADS<LANES>];
#pragma unroll
                for (int i = 0; i < CHUNKS * C::SIZE; i++) all[i][threadIdx.x] = columns[i / C::SIZE][i % C::SIZE];
                __syncthreads();
#pragma unroll 1
                for (int other = 1; other < groups; other++)
#pragma unroll
                    for (int i = 0; i < CHUNKS * C::SIZE; i++)
                        columns[i / C::SIZE][i % C::SIZE] += all[i][other * LANES + lane];
            }
        if (gridDim.x == 1) store_sums<LANES>(g_gamma, columns, group ? 0 : width, lane);
        else if (group < groups) store_sums<LANES>(partial + group * stride_of(width), columns, (int)stride_of(width), lane);
    }
};

template <class T, int LANES, int CHUNKS, bool SINGLES>
__global__ void __launch_bounds__(THREADS<LANES>, (HELD<T, LANES>))
rms_norm_backward(const T* gy, const T* x, const T* gamma, T* gx, float* partial, T* g_gamma, float eps,
                  int rows, int width, int groups) {
    bool all = aligned(gy) && aligned(x) && aligned(gamma) && aligned(gx);
    by_access<RmsNormBackwardRows<LANES, CHUNKS>, T, SINGLES, ELEMENTWISE<T, LANES, CHUNKS>>(
        width, all, gy, x, gamma, gx, partial, g_gamma, eps, rows, width, groups);
}

// Wider rows are cut into strips. One launch leaves the sums of each strip in the workspace, behind those
// of the columns. Another has a block for every strip of a group of rows: it adds up the sums of a row,
// always in the same order, and goes down the rows as above.
constexpr int STRIP_THREADS = 256, STRIP_AHEAD = 2;
template <class T> constexpr int STRIP = sizeof(T) == 2 ? 4096 : 2048;

INLINE Sums* strip_sums(float* room, int width, int groups) {
    return (Sums*)(room + groups * stride_of(width));
}

struct SumStrip {
    template <class A, class T>
    static INLINE void run(A access, const T* gy, const T* x, const T* gamma, float* room, int rows, int width, int groups) {
        using C = typename A::Item;
        constexpr int CHUNKS = STRIP<T> / STRIP_THREADS / C::SIZE;
        __shared__ Sums scratch[32];
        int strips = (width - 1) / STRIP<T> + 1, strip = gridDim.x - 1 - blockIdx.x;  // the first rows last:
        int start = strip % strips * STRIP<T>, length = min(STRIP<T>, width - start), lane = threadIdx.x;
        Span span = part_span(strip / strips, rows, width, start, length);  // the next launch begins there
        C g[CHUNKS], v[CHUNKS], weight[CHUNKS];
        A::template fetch<STRIP_THREADS>(g, gy, span, lane);
        A::template fetch<STRIP_THREADS>(v, x, span, lane);
        load<STRIP_THREADS>(access, weight, gamma, Span(start, length, width), lane);
        A::template finish<STRIP_THREADS>(g, gy, span, lane);
        A::template finish<STRIP_THREADS>(v, x, span, lane);
        Sums s = across<STRIP_THREADS>(sums_of(g, v, weight), scratch, both);
        if (threadIdx.x == 0) strip_sums(room, width, groups)[strip] = s;
    }
};

template <class T>
__global__ void __launch_bounds__(STRIP_THREADS)
rms_norm_strips(const T* gy, const T* x, const T* gamma, float* room, int rows, int width, int groups) {
    bool all = aligned(gy) && aligned(x) && aligned(gamma);
    by_access<SumStrip, T, false, Elementwise::NEVER>(width, all, gy, x, gamma, room, rows, width, groups);
}

struct GoDownStrip {
    template <class A, class T>
    static INLINE void run(A access, const T* gy, const T* x, const T* gamma, T* gx, float* room,
                           T* g_gamma, float eps, int rows, int width, int groups) {
        using C = typename A::Item;
        constexpr int CHUNKS = STRIP<T> / STRIP_THREADS / C::SIZE;
        int strips = (width - 1) / STRIP<T> + 1, group = blockIdx.x / strips;
        int start = blockIdx.x % strips * STRIP<T>, length = min(STRIP<T>, width - start), lane = threadIdx.x;
        const Sums* sums = strip_sums(room, width, groups);
        float inverse = 1.0f / width;
        C weight[CHUNKS], g[STRIP_AHEAD][CHUNKS], v[STRIP_AHEAD][CHUNKS];
        float columns[CHUNKS][C::SIZE] = {};
        auto begin = [&](int slot, unsigned row) {
            Span span = part_span(row, rows, width, start, row < rows ? length : 0);
            A::template fetch<STRIP_THREADS>(g[slot], gy, span, lane);
            A::template fetch<STRIP_THREADS>(v[slot], x, span, lane);
        };
        unsigned row = group;
#pragma unroll
        for (int slot = 0; slot < STRIP_AHEAD; slot++) begin(slot, row + slot * groups);
        load<STRIP_THREADS>(access, weight, gamma, Span(start, length, width), lane);
        while (row < rows)
#pragma unroll
            for (int slot = 0; slot < STRIP_AHEAD; slot++, row += groups) {
                if (row >= rows) break;
                Sums s = {};
                for (int i = lane % 32; i < strips; i += 32) s = both(s, sums[(long long)row * strips + i]);
                Factors factors(across<32>(s, (Sums*)nullptr, both), eps, inverse);
                Span span = part_span(row, rows, width, start, length);
                A::template finish<STRIP_THREADS>(g[slot], gy, span, lane);
                A::template finish<STRIP_THREADS>(v[slot], x, span, lane);
                pull_back(g[slot], v[slot], weight, factors, columns);
                A::template store<STRIP_THREADS>(gx, g[slot], span, lane);
                begin(slot, row + STRIP_AHEAD * groups);
            }
        if (groups == 1) store_sums<STRIP_THREADS>(g_gamma + start, columns, length, lane);
        else store_sums<STRIP_THREADS>(room + group * stride_of(width) + start, columns, length, lane);
    }
};

template <class T>
__global__ void __launch_bounds__(STRIP_THREADS, 2)
rms_norm_backward_strips(const T* gy, const T* x, const T* gamma, T* gx, float* room, T* g_gamma,
                         float eps, int rows, int width, int groups) {
    bool all = aligned(gy) && aligned(x) && aligned(gamma) && aligned(gx);
    by_access<GoDownStrip, T, false, Elementwise::NEVER>(width, all, gy, x, gamma, gx, room, g_gamma, eps, rows, width, groups);
}

// The sums of all groups. A block has 4 COLUMNS of them, each with LINES threads at every LINES-th
// group; a thread has BATCH groups on their way.
constexpr int COLUMNS = 4, LINES = 128, BATCH = 4;

template <class T>
__global__ void __launch_bounds__(COLUMNS * LINES)
rms_norm_gamma(const float* partial, T* g_gamma, int groups, int width) {
    constexpr int WARPS = COLUMNS * LINES / 32;
    __shared__ float sums[WARPS][4 * COLUMNS];
    int column = threadIdx.x % COLUMNS, line = threadIdx.x / COLUMNS;
    float s[4] = {};
    for (int group = line; group < groups; group += LINES * BATCH) {
        Chunk<float> part[BATCH][1];
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            long long at = group + k * LINES;
            int mine = blockIdx.x * COLUMNS + column;
            Span span(at * stride_of(width), at < groups ? (int)stride_of(width) : 0, 0);
            if (aligned(partial)) Direct<Chunk<float>>::fetch<1>(part[k], partial, span, mine);
            else Loose<float>::fetch<1>(part[k], partial, span, mine);
        }
#pragma unroll
        for (int k = 0; k < BATCH; k++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[i] += part[k][0][i];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int by = COLUMNS; by < 32; by *= 2) s[i] += shuffled(s[i], by);
        if (threadIdx.x % 32 < COLUMNS) sums[threadIdx.x / 32][4 * column + i] = s[i];
    }
    __syncthreads();
    int at = blockIdx.x * 4 * COLUMNS + threadIdx.x;
    if (threadIdx.x >= 4 * COLUMNS || at >= width) return;
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) total += sums[warp][threadIdx.x];
    g_gamma[at] = rounded<T>(total);
}

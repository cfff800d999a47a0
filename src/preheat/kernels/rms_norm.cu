// y = gamma x / r for each row, where v = mean(x^2) + eps and r = sqrt(v), and its gradients:
//
//     gx      = (gamma gy - (x / v) mean(x gy gamma)) / r
//     g_gamma = sum of gy x / r over the rows
//
// g_gamma takes two launches: group g of LANES threads adds the rows g, g + groups, ..., and rms_norm_gamma
// adds the sums of all groups. The number of groups and the order of additions depend on the shape alone.
// Threads load their elements before they store them, so gx may be written in place of gy or x.

// The sums of x^2 and of x gy gamma over one row.
struct RowSums { float squares, dot; };

INLINE RowSums shuffle_xor(RowSums s, int by) { return {shuffle_xor(s.squares, by), shuffle_xor(s.dot, by)}; }
INLINE RowSums add(RowSums s, RowSums t) { return {s.squares + t.squares, s.dot + t.dot}; }

template <int CHUNKS, class C> INLINE float sum_of_squares(const C (&x)[CHUNKS]) {
    float s = 0.0f;
#pragma unroll
    for (int k = 0; k < CHUNKS; k++)
#pragma unroll
        for (int i = 0; i < C::SIZE; i++) s = fmaf(x[k][i], x[k][i], s);
    return s;
}

// Replace x by y.
template <int CHUNKS, class C>
INLINE void scale(C (&x)[CHUNKS], const C (&gamma)[CHUNKS], float by) {
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) x[k].fill([&](int i) { return x[k][i] * by * gamma[k][i]; });
}

template <int LANES, int CHUNKS> struct RmsNormRow {
    template <class A, class T>
    static INLINE void run(A access, const T* x, const T* gamma, T* y, float eps, int rows, int width) {
        constexpr bool PREFETCH_GAMMA = sizeof(T) == 2 && BLOCK_PER_ROW<LANES>;  // Registers are left for it.
        __shared__ float scratch[32];
        Span span = row_span((long long)blockIdx.x * ROWS_PER_BLOCK<LANES> + threadIdx.x / LANES, rows, width);
        int lane = threadIdx.x % LANES;
        typename A::Item v[CHUNKS], g[CHUNKS];
        load<LANES>(access, v, x, span, lane);
        Span gamma_span(0, width, width);
        if constexpr (PREFETCH_GAMMA) A::template fetch<LANES>(g, gamma, gamma_span, lane);
        float mean = allreduce<LANES>(sum_of_squares(v), scratch, sum) / width;
        if constexpr (!PREFETCH_GAMMA) A::template fetch<LANES>(g, gamma, gamma_span, lane);
        A::template finish<LANES>(g, gamma, gamma_span, lane);
        scale(v, g, rsqrtf(mean + eps));
        A::template store<LANES>(y, v, span, lane);
    }
};

template <class T, int LANES, int CHUNKS, bool SCALARS>
__global__ void __launch_bounds__(MAX_THREADS<LANES>, MIN_BLOCKS_PER_SM<LANES>)
rms_norm(const T* x, const T* gamma, T* y, float eps, int rows, int width) {
    bool all = aligned(x) && aligned(gamma) && aligned(y);
    dispatch_access<RmsNormRow<LANES, CHUNKS>, T, SCALARS, USE_ELEMENTWISE<T, LANES, CHUNKS>>(
        width, all, x, gamma, y, eps, rows, width);
}

template <class T>
__global__ void __launch_bounds__(WIDE_THREADS, 3)
rms_norm_wide(const T* x, const T* gamma, T* y, float eps, int rows, int width) {
    using P = AlignedPieces<T>;
    constexpr int WEIGHTS = 2;  // Chunks of gamma that a thread loads at the same time.
    __shared__ float scratch[32], block_value;
    Span span = segment_span(rows, width), columns(span.first % width, span.length, width);
    StagedSpan<T> in(x, span, dynamic_shared, dynamic_shared_bytes()), weight(gamma, columns, nullptr, 0);
    float s = 0.0f;
    auto accumulate = [&](int chunk) {
        Chunk<T> v[1] = {in[chunk * P::SIZE]};
        P::pad_tail(v[0], span, chunk * P::SIZE, {});
        s += sum_of_squares(v);
    };
    process_in_stages(P::num_chunks(span), accumulate, in);
    s = cluster_allreduce(allreduce<WIDE_THREADS>(s, scratch, sum), &block_value, sum);
    float rstd = rsqrtf(s / width + eps);
    int step = P::SIZE * blockDim.x;
    for (int start = P::first_of_thread(y, span); start < span.length; start += WEIGHTS * step) {
        Chunk<T> v[1], g[WEIGHTS][1];
#pragma unroll
        for (int k = 0; k < WEIGHTS; k++) g[k][0] = weight[start + k * step];
#pragma unroll
        for (int k = 0; k < WEIGHTS; k++) {
            int at = start + k * step;
            if (at >= span.length) break;
            v[0] = in[at];
            scale(v, g[k], rstd);
            P::write(y, span, v[0], at);
        }
    }
    cluster_finish();
}

template <int CHUNKS, class C>
INLINE RowSums row_sums(const C (&gy)[CHUNKS], const C (&x)[CHUNKS], const C (&gamma)[CHUNKS]) {
    RowSums s = {};
#pragma unroll
    for (int k = 0; k < CHUNKS; k++)
#pragma unroll
        for (int i = 0; i < C::SIZE; i++) {
            s.squares = fmaf(x[k][i], x[k][i], s.squares);
            s.dot = fmaf(x[k][i] * gamma[k][i], gy[k][i], s.dot);
        }
    return s;
}

// The factors of a row in its gradient: rstd = 1 / r and correction = mean(x gy gamma) / (v r).
struct RowFactors {
    float rstd, correction;

    INLINE RowFactors(RowSums s, float eps, float inverse_width)
        : rstd(rsqrtf(fmaf(s.squares, inverse_width, eps))),
          correction(s.dot * inverse_width * rstd * rstd * rstd) {}
};

// Replace gy by gx, and add the row's contribution to the gradient of gamma to `columns`.
template <int CHUNKS, class C>
INLINE void input_gradient(C (&gy)[CHUNKS], const C (&x)[CHUNKS], const C (&gamma)[CHUNKS], RowFactors row,
                      float (&columns)[CHUNKS][C::SIZE]) {
#pragma unroll
    for (int k = 0; k < CHUNKS; k++)
        gy[k].fill([&](int i) {
            float dy = gy[k][i] * row.rstd, v = x[k][i];
            columns[k][i] = fmaf(dy, v, columns[k][i]);
            return fmaf(gamma[k][i], dy, -v * row.correction);
        });
}

// The distance in floats between two rows of sums in the workspace, chosen so that every row is aligned.
INLINE long long workspace_stride(int width) { return ((long long)width + 7) / 8 * 8; }

// Store the sums of columns: as floats in the workspace, or as the gradient itself if one group has all rows.
template <int LANES, int CHUNKS, int SIZE, class T>
INLINE void store_column_sums(T* to, const float (&columns)[CHUNKS][SIZE], int width, int lane) {
    constexpr int WORDS = SIZE * sizeof(T) / 4;
    bool whole = SIZE > 1 && width % SIZE == 0 && (size_t)to % (4 * WORDS) == 0;
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        int at = chunk_index<LANES, CHUNKS>(lane, k) * SIZE;
        if constexpr (SIZE > 1)
            if (whole) {
                Chunk<T, WORDS> chunk;
                chunk.fill([&](int i) { return columns[k][i]; });
                if (at < width) *(Chunk<T, WORDS>*)(to + at) = chunk;
                continue;
            }
#pragma unroll
        for (int i = 0; i < SIZE; i++)
            if (at + i < width) to[at + i] = from_float<T>(columns[k][i]);
    }
}

// Rows that a thread holds in registers: the one it processes and those it has begun to load. With three rows
// in flight, fewer threads saturate the memory bandwidth.
template <class T, int LANES, int ELEMENTS>
constexpr int ROWS_IN_FLIGHT = ELEMENTS > 8 || (sizeof(T) == 4 && LANES == 1024) ? 2 : 3;
// Minimum blocks per multiprocessor. Floats need more than the 64 registers that 1024 threads have each.
template <class T, int LANES>
constexpr int BACKWARD_BLOCKS_PER_SM =
    !BLOCK_PER_ROW<LANES> ? 4 : LANES > 576 ? 1 : LANES > 512 ? 2 : 1024 / LANES * 2 / sizeof(T);

// All groups read adjacent rows at a time. While a group processes one row, it loads the next ones. The threads
// of a warp make the same number of iterations, because they meet in `allreduce`: rows beyond the last are
// empty.
template <int LANES, int CHUNKS> struct RmsNormBackwardRows {
    template <class A, class T>
    static INLINE void run(A access, const T* gy, const T* x, const T* gamma, T* gx, float* partial,
                           T* g_gamma, float eps, int rows, int width, int groups) {
        using C = typename A::Item;
        constexpr int SLOTS = ROWS_IN_FLIGHT<T, LANES, CHUNKS * C::SIZE>;
        __shared__ RowSums scratch[SLOTS][32];  // One for each slot, so that one barrier per row suffices.
        int lane = threadIdx.x % LANES;
        constexpr int GROUPS = ROWS_PER_BLOCK<LANES>;  // Of a block.
        int group = GROUPS == 1 ? blockIdx.x : blockIdx.x * GROUPS + threadIdx.x / LANES;
        unsigned row = group;
        int end = group < groups ? rows : 0;
        float inverse_width = 1.0f / width;
        Span gamma_span(0, width, width);
        C weight[CHUNKS], g[SLOTS][CHUNKS], v[SLOTS][CHUNKS];
        float columns[CHUNKS][C::SIZE] = {};
        auto fetch_row = [&](int slot, unsigned row) {
            A::template fetch<LANES>(g[slot], gy, row_span(row, end, width), lane);
            A::template fetch<LANES>(v[slot], x, row_span(row, end, width), lane);
        };
#pragma unroll
        for (int slot = 0; slot < SLOTS; slot++) fetch_row(slot, row + slot * groups);
        load<LANES>(access, weight, gamma, gamma_span, lane);
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
                RowSums s = allreduce<LANES>(row_sums(g[slot], v[slot], weight), scratch[slot], add);
                if (mine) input_gradient(g[slot], v[slot], weight, RowFactors(s, eps, inverse_width), columns);
                A::template store<LANES>(gx, g[slot], span, lane);
                fetch_row(slot, row + SLOTS * groups);
            }
        if constexpr (!BLOCK_PER_ROW<LANES>)
            if (gridDim.x == 1) {  // Then this block adds its groups, and no second launch follows.
                __shared__ float all[CHUNKS * C::SIZE][MAX_THREADS<LANES>];
#pragma unroll
                for (int i = 0; i < CHUNKS * C::SIZE; i++)
                    all[i][threadIdx.x] = columns[i / C::SIZE][i % C::SIZE];
                __syncthreads();
#pragma unroll 1
                for (int other = 1; other < groups; other++)
#pragma unroll
                    for (int i = 0; i < CHUNKS * C::SIZE; i++)
                        columns[i / C::SIZE][i % C::SIZE] += all[i][other * LANES + lane];
            }
        if (gridDim.x == 1) store_column_sums<LANES>(g_gamma, columns, group ? 0 : width, lane);
        else if (group < groups)
            store_column_sums<LANES>(partial + group * workspace_stride(width), columns,
                                     (int)workspace_stride(width), lane);
    }
};

template <class T, int LANES, int CHUNKS, bool SCALARS>
__global__ void __launch_bounds__(MAX_THREADS<LANES>, (BACKWARD_BLOCKS_PER_SM<T, LANES>))
rms_norm_backward(const T* gy, const T* x, const T* gamma, T* gx, float* partial, T* g_gamma, float eps,
                  int rows, int width, int groups) {
    bool all = aligned(gy) && aligned(x) && aligned(gamma) && aligned(gx);
    dispatch_access<RmsNormBackwardRows<LANES, CHUNKS>, T, SCALARS, USE_ELEMENTWISE<T, LANES, CHUNKS>>(
        width, all, gy, x, gamma, gx, partial, g_gamma, eps, rows, width, groups);
}

// Wider rows are divided into strips. A first launch stores the sums of each strip in the workspace, after the
// sums of columns. A second launch has one block for each strip and group of rows: for each row it adds the
// sums of the strips, always in the same order, and then computes the gradients of its strip.
constexpr int STRIP_THREADS = 256, STRIP_ROWS_IN_FLIGHT = 2;
template <class T> constexpr int STRIP = sizeof(T) == 2 ? 4096 : 2048;

INLINE RowSums* strip_sums(float* workspace, int width, int groups) {
    return (RowSums*)(workspace + groups * workspace_stride(width));
}

struct StripSums {
    template <class A, class T>
    static INLINE void run(A access, const T* gy, const T* x, const T* gamma, float* workspace, int rows,
                           int width, int groups) {
        using C = typename A::Item;
        constexpr int CHUNKS = STRIP<T> / STRIP_THREADS / C::SIZE;
        __shared__ RowSums scratch[32];
        // Process the first rows last: the next launch begins there, and finds them in the L2 cache.
        int strips = (width - 1) / STRIP<T> + 1, strip = gridDim.x - 1 - blockIdx.x;
        int start = strip % strips * STRIP<T>, length = min(STRIP<T>, width - start), lane = threadIdx.x;
        Span span = part_span(strip / strips, rows, width, start, length);
        C g[CHUNKS], v[CHUNKS], weight[CHUNKS];
        A::template fetch<STRIP_THREADS>(g, gy, span, lane);
        A::template fetch<STRIP_THREADS>(v, x, span, lane);
        load<STRIP_THREADS>(access, weight, gamma, Span(start, length, width), lane);
        A::template finish<STRIP_THREADS>(g, gy, span, lane);
        A::template finish<STRIP_THREADS>(v, x, span, lane);
        RowSums s = allreduce<STRIP_THREADS>(row_sums(g, v, weight), scratch, add);
        if (threadIdx.x == 0) strip_sums(workspace, width, groups)[strip] = s;
    }
};

template <class T>
__global__ void __launch_bounds__(STRIP_THREADS)
rms_norm_strips(const T* gy, const T* x, const T* gamma, float* workspace, int rows, int width, int groups) {
    bool all = aligned(gy) && aligned(x) && aligned(gamma);
    dispatch_access<StripSums, T, false, UseElementwise::NEVER>(
        width, all, gy, x, gamma, workspace, rows, width, groups);
}

struct StripBackward {
    template <class A, class T>
    static INLINE void run(A access, const T* gy, const T* x, const T* gamma, T* gx, float* workspace,
                           T* g_gamma, float eps, int rows, int width, int groups) {
        using C = typename A::Item;
        constexpr int CHUNKS = STRIP<T> / STRIP_THREADS / C::SIZE;
        int strips = (width - 1) / STRIP<T> + 1, group = blockIdx.x / strips;
        int start = blockIdx.x % strips * STRIP<T>, length = min(STRIP<T>, width - start), lane = threadIdx.x;
        const RowSums* sums = strip_sums(workspace, width, groups);
        float inverse_width = 1.0f / width;
        C weight[CHUNKS], g[STRIP_ROWS_IN_FLIGHT][CHUNKS], v[STRIP_ROWS_IN_FLIGHT][CHUNKS];
        float columns[CHUNKS][C::SIZE] = {};
        auto fetch_row = [&](int slot, unsigned row) {
            Span span = part_span(row, rows, width, start, row < rows ? length : 0);
            A::template fetch<STRIP_THREADS>(g[slot], gy, span, lane);
            A::template fetch<STRIP_THREADS>(v[slot], x, span, lane);
        };
        unsigned row = group;
#pragma unroll
        for (int slot = 0; slot < STRIP_ROWS_IN_FLIGHT; slot++) fetch_row(slot, row + slot * groups);
        load<STRIP_THREADS>(access, weight, gamma, Span(start, length, width), lane);
        while (row < rows)
#pragma unroll
            for (int slot = 0; slot < STRIP_ROWS_IN_FLIGHT; slot++, row += groups) {
                if (row >= rows) break;
                RowSums s = {};
                for (int i = lane % 32; i < strips; i += 32) s = add(s, sums[(long long)row * strips + i]);
                RowFactors factors(allreduce<32>(s, (RowSums*)nullptr, add), eps, inverse_width);
                Span span = part_span(row, rows, width, start, length);
                A::template finish<STRIP_THREADS>(g[slot], gy, span, lane);
                A::template finish<STRIP_THREADS>(v[slot], x, span, lane);
                input_gradient(g[slot], v[slot], weight, factors, columns);
                A::template store<STRIP_THREADS>(gx, g[slot], span, lane);
                fetch_row(slot, row + STRIP_ROWS_IN_FLIGHT * groups);
            }
        if (groups == 1) store_column_sums<STRIP_THREADS>(g_gamma + start, columns, length, lane);
        else {
            int padded = min((long long)STRIP<T>, workspace_stride(width) - start);
            store_column_sums<STRIP_THREADS>(workspace + group * workspace_stride(width) + start, columns,
                                             padded, lane);
        }
    }
};

template <class T>
__global__ void __launch_bounds__(STRIP_THREADS, 2)
rms_norm_backward_strips(const T* gy, const T* x, const T* gamma, T* gx, float* workspace, T* g_gamma,
                         float eps, int rows, int width, int groups) {
    bool all = aligned(gy) && aligned(x) && aligned(gamma) && aligned(gx);
    dispatch_access<StripBackward, T, false, UseElementwise::NEVER>(
        width, all, gy, x, gamma, gx, workspace, g_gamma, eps, rows, width, groups);
}

// Add the sums of all groups. A block handles 4 COLUMNS columns. LINES threads share four columns, each adds
// every LINES-th group, and loads BATCH groups at a time.
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
            Span span(at * workspace_stride(width), at < groups ? (int)workspace_stride(width) : 0, 0);
            if (aligned(partial)) AlignedAccess<Chunk<float>>::fetch<1>(part[k], partial, span, mine);
            else ElementwiseAccess<float>::fetch<1>(part[k], partial, span, mine);
        }
#pragma unroll
        for (int k = 0; k < BATCH; k++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[i] += part[k][0][i];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int by = COLUMNS; by < 32; by *= 2) s[i] += shuffle_xor(s[i], by);
        if (threadIdx.x % 32 < COLUMNS) sums[threadIdx.x / 32][4 * column + i] = s[i];
    }
    __syncthreads();
    int at = blockIdx.x * 4 * COLUMNS + threadIdx.x;
    if (threadIdx.x >= 4 * COLUMNS || at >= width) return;
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) total += sums[warp][threadIdx.x];
    g_gamma[at] = from_float<T>(total);
}

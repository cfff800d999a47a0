// y = gamma x / r of each row, where v = mean(x^2) + eps and r = sqrt(v), and its gradients:
//
//     gx      = (gamma gy - (x / v) mean(x gy gamma)) / r
//     g_gamma = sum of gy x / r over the rows
//
// The latter in two launches: group g of LANES threads adds up the rows g, g + groups, ..., and
// rms_norm_gamma adds up those sums; number and order follow from the shape alone. Threads read their
// elements before they write them, so that gx may take the place of gy or x.

constexpr int WIDE = 1024, PART = 2;  // threads of a wide row, and how many chunks each reads at a time

// Of one row: the sums of x^2 and of x gy gamma.
struct Sums { float squares, dot; };

INLINE Sums shuffled(Sums s, int by) { return {shuffled(s.squares, by), shuffled(s.dot, by)}; }
INLINE Sums both(Sums s, Sums t) { return {s.squares + t.squares, s.dot + t.dot}; }

template <int CHUNKS, class T> INLINE float squares(const Chunk<T> (&x)[CHUNKS]) {
    float s = 0.0f;
#pragma unroll
    for (int k = 0; k < CHUNKS; k++)
#pragma unroll
        for (int i = 0; i < Chunk<T>::SIZE; i++) s = fmaf(x[k][i], x[k][i], s);
    return s;
}

// x becomes y.
template <int CHUNKS, class T>
INLINE void scale(Chunk<T> (&x)[CHUNKS], const Chunk<T> (&gamma)[CHUNKS], float by) {
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) x[k].fill([&](int i) { return x[k][i] * by * gamma[k][i]; });
}

template <class T, int LANES, int CHUNKS>
__global__ void __launch_bounds__(THREADS<LANES>, RESIDENT<LANES>)
rms_norm(const T* x, const T* gamma, T* y, float eps, int rows, int width) {
    __shared__ float scratch[32];
    long long row = (long long)blockIdx.x * ROWS<LANES> + threadIdx.x / LANES;
    int lane = threadIdx.x % LANES, length = row < rows ? width : 0;
    Chunk<T> v[CHUNKS], g[CHUNKS];
    load<LANES>(v, x + row * width, length, lane);
    float mean = across<LANES>(squares(v), scratch, sum) / width;
    load<LANES>(g, gamma, length, lane);
    scale(v, g, rsqrtf(mean + eps));
    store<LANES>(y + row * width, v, length, lane);
}

template <class T>
__global__ void __launch_bounds__(WIDE)
rms_norm_wide(const T* x, const T* gamma, T* y, float eps, int, int width) {
    constexpr int STEP = WIDE * PART, SIZE = Chunk<T>::SIZE;
    __shared__ float scratch[32];
    x += (long long)blockIdx.x * width;
    y += (long long)blockIdx.x * width;
    Chunk<T> v[PART], g[PART];
    float s = 0.0f;
    for (int at = threadIdx.x; at * SIZE < width; at += STEP) {
        load<WIDE>(v, x, width, at);
        s += squares(v);
    }
    float by = rsqrtf(across<WIDE>(s, scratch, sum) / width + eps);
    for (int at = threadIdx.x; at * SIZE < width; at += STEP) {
        load<WIDE>(v, x, width, at);
        load<WIDE>(g, gamma, width, at);
        scale(v, g, by);
        store<WIDE>(y, v, width, at);
    }
}

template <int CHUNKS, class T>
INLINE Sums sums_of(const Chunk<T> (&gy)[CHUNKS], const Chunk<T> (&x)[CHUNKS],
                    const Chunk<T> (&gamma)[CHUNKS]) {
    Sums s = {};
#pragma unroll
    for (int k = 0; k < CHUNKS; k++)
#pragma unroll
        for (int i = 0; i < Chunk<T>::SIZE; i++) {
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
template <int CHUNKS, class T>
INLINE void pull_back(Chunk<T> (&gy)[CHUNKS], const Chunk<T> (&x)[CHUNKS],
                      const Chunk<T> (&gamma)[CHUNKS], Factors row,
                      float (&columns)[CHUNKS][Chunk<T>::SIZE]) {
#pragma unroll
    for (int k = 0; k < CHUNKS; k++)
        gy[k].fill([&](int i) {
            float dy = gy[k][i] * row.by, v = x[k][i];
            columns[k][i] = fmaf(dy, v, columns[k][i]);
            return fmaf(gamma[k][i], dy, -v * row.pull);
        });
}

// Sums of columns are floats, whatever the chunks that they belong to.
template <int STRIDE, int CHUNKS, int SIZE>
INLINE void store(float* to, const float (&columns)[CHUNKS][SIZE], int width, int lane) {
    constexpr int FOURS = SIZE / 4;
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        Chunk<float> fours[FOURS];
#pragma unroll
        for (int f = 0; f < FOURS; f++) fours[f].fill([&](int i) { return columns[k][4 * f + i]; });
        store<1>(to, fours, width, (lane + k * STRIDE) * FOURS);
    }
}

template <int STRIDE, int CHUNKS, int SIZE>
INLINE void load(float (&columns)[CHUNKS][SIZE], const float* from, int width, int lane) {
    constexpr int FOURS = SIZE / 4;
#pragma unroll
    for (int k = 0; k < CHUNKS; k++) {
        Chunk<float> fours[FOURS];
        load<1>(fours, from, width, (lane + k * STRIDE) * FOURS);
#pragma unroll
        for (int i = 0; i < SIZE; i++) columns[k][i] = fours[i / 4][i % 4];
    }
}

// Rows in registers. With three of them fewer threads keep memory busy; those of floats need more
// registers for that than the 64 that 1024 threads would leave to each.
constexpr int AHEAD = 3;
template <class T, int LANES>
constexpr int HELD = sizeof(T) == 2 ? RESIDENT<LANES> : RESIDENT<LANES> > 1 ? RESIDENT<LANES> / 2 : 1;

// What all groups read at a time lies together. While one row is worked on, others are on their way. The
// threads of a warp go round equally often, since they meet in `across`: rows beyond the last are empty.
template <class T, int LANES, int CHUNKS>
__global__ void __launch_bounds__(THREADS<LANES>, (HELD<T, LANES>))
rms_norm_backward(const T* gy, const T* x, const T* gamma, T* gx, float* partial, float eps, int rows,
                  int width, int groups) {
    __shared__ Sums scratch[AHEAD][32];  // in turn, so that one barrier a row is enough
    int lane = threadIdx.x % LANES;
    int group = ROWS<LANES> == 1 ? blockIdx.x : blockIdx.x * ROWS<LANES> + threadIdx.x / LANES;
    unsigned row = group, end = group < groups ? rows : 0;
    float inverse = 1.0f / width;
    Chunk<T> weight[CHUNKS], g[AHEAD][CHUNKS], v[AHEAD][CHUNKS];
    float columns[CHUNKS][Chunk<T>::SIZE] = {};
    auto fetch = [&](int slot, unsigned row) {
        load<LANES>(g[slot], gy + (long long)row * width, row < end ? width : 0, lane);
        load<LANES>(v[slot], x + (long long)row * width, row < end ? width : 0, lane);
    };
#pragma unroll
    for (int slot = 0; slot < AHEAD; slot++) fetch(slot, row + slot * groups);
    load<LANES>(weight, gamma, width, lane);
    bool more = true;
    while (more)
#pragma unroll
        for (int slot = 0; slot < AHEAD; slot++, row += groups) {
            bool mine = row < end;
            more = LANES < 32 ? __any_sync(0xffffffffu, mine) : mine;
            if (!more) break;
            Sums s = across<LANES>(sums_of(g[slot], v[slot], weight), scratch[slot], both);
            if (mine) {
                pull_back(g[slot], v[slot], weight, Factors(s, eps, inverse), columns);
                store<LANES>(gx + (long long)row * width, g[slot], width, lane);
            }
            fetch(slot, row + AHEAD * groups);
        }
    if (group < groups) store<LANES>(partial + (long long)group * width, columns, width, lane);
}

// Rows too wide for registers are read twice, and the sums of their columns stay in the workspace.
template <class T>
__global__ void __launch_bounds__(WIDE)
rms_norm_backward_wide(const T* gy, const T* x, const T* gamma, T* gx, float* partial, float eps,
                       int rows, int width, int groups) {
    constexpr int STEP = WIDE * PART, SIZE = Chunk<T>::SIZE;
    __shared__ Sums scratch[2][32];
    partial += (long long)blockIdx.x * width;
    float inverse = 1.0f / width;
    Chunk<T> g[PART], v[PART], weight[PART];
    int turn = 0;
    for (unsigned row = blockIdx.x; row < rows; row += groups, turn++) {
        long long start = (long long)row * width;
        const T *from_g = gy + start, *from_v = x + start;
        Sums s = {};
        for (int at = threadIdx.x; at * SIZE < width; at += STEP) {
            load<WIDE>(g, from_g, width, at);
            load<WIDE>(v, from_v, width, at);
            load<WIDE>(weight, gamma, width, at);
            s = both(s, sums_of(g, v, weight));
        }
        Factors factors(across<WIDE>(s, scratch[turn % 2], both), eps, inverse);
        for (int at = threadIdx.x; at * SIZE < width; at += STEP) {
            float columns[PART][SIZE] = {};
            if (turn) load<WIDE>(columns, partial, width, at);
            load<WIDE>(g, from_g, width, at);
            load<WIDE>(v, from_v, width, at);
            load<WIDE>(weight, gamma, width, at);
            pull_back(g, v, weight, factors, columns);
            store<WIDE>(gx + start, g, width, at);
            store<WIDE>(partial, columns, width, at);
        }
    }
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
            int length = at < groups ? width : 0;
            load<1>(part[k], partial + at * width, length, blockIdx.x * COLUMNS + column);
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

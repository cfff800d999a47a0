// Products of row-major matrices of any size and alignment, summed in fp32 whatever they are stored in.
//
//     gemm               c[m, n] = a[m, k] b[k, n]
//     gemm_backward_a   ga[m, k] = gc[m, n] b[k, n]^T
//     gemm_backward_b   gb[k, n] = a[m, k]^T gc[m, n]
//
// A block makes a square tile of c. While its threads multiply the part of a and b that is in shared
// memory, as floats with k first, they already fetch the next part into registers. Each adds up 8 rows
// by 8 or 4 columns. Small tiles have too few threads for that: there, several slices of the block
// share out every part by k, and add up what they have in the end, in an order that is always the same.

// Matrices in memory, read four neighbours of a row at a time; beyond the edges there are zeros. Where
// rows are a whole number of fours and aligned, one access reads all four: found out at run time.

template <typename T> struct Dense {
    using Quad = Chunk<T, sizeof(T)>;

    const T* data;
    int rows, width;
    bool aligned;

    __device__ Dense(const T* data, int rows, int width)
        : data(data), rows(rows), width(width),
          aligned(width % 4 == 0 && (unsigned long long)data % sizeof(Quad) == 0) {}

    __device__ Quad read(int row, int column) const {
        Quad quad;
        if (row >= rows) return quad;
        const T* from = data + (long long)row * width + column;
        if (aligned) return column < width ? *(const Quad*)from : quad;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (column + i < width) quad.put_raw(i, from[i]);
        return quad;
    }
};

// The values of NF4, from QLoRA: quantiles of the normal distribution.
__constant__ float nf4[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

// Two codes a byte, the upper half first, and a scale for every 64 elements, across the ends of rows.
struct Nf4 {
    struct Quad {
        unsigned codes;     // from the highest bits down
        float scale, next;  // up to the end of a block, and behind it
        int end;            // where that is
        const float* table;
        __device__ float operator[](int i) const {
            return table[codes >> 28 - 4 * i & 15] * (i < end ? scale : next);
        }
    };

    const unsigned char* data;
    const float* scales;
    const float* table;  // in shared memory: constants are slow where every thread reads another one
    int rows, width;

    __device__ Quad read(int row, int column) const {
        Quad quad = {0, 0, 0, 4, table};
        if (row >= rows || column >= width) return quad;
        long long first = (long long)row * width + column;
        // Beyond the row a quad has codes of the next one, which meet zeros of the other matrix.
        long long last = first + min(3, width - 1 - column);
#pragma unroll
        for (int i = 0; i < 3; ++i)
            if (first / 2 + i <= last / 2) quad.codes |= (unsigned)data[first / 2 + i] << 24 - 8 * i;
        quad.codes <<= first % 2 * 4;
        quad.scale = scales[first / 64];
        quad.next = first / 64 < last / 64 ? scales[last / 64] : 0;
        quad.end = 64 - first % 64;
        return quad;
    }
};

constexpr int BLOCK = 256, QUADS = 2;  // threads, and what each fetches of either matrix at a time

// N floats from shared memory: fours that lie STRIDE apart.
template <int N, int STRIDE> __device__ void take(const float* from, float (&to)[N]) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) *(float4*)&to[4 * i] = *(const float4*)(from + i * STRIDE);
}

// The tile of a block, and what one thread adds up of it: 8 rows by COLUMNS.
template <int SIZE> struct Tile {
    static constexpr int DEPTH = BLOCK * QUADS * 4 / SIZE;    // of the parts
    static constexpr int COLUMNS = SIZE == 128 ? 8 : 4;
    static constexpr int TEAM = SIZE / 8 * (SIZE / COLUMNS);  // threads that have the whole tile
    static constexpr int SLICES = BLOCK / TEAM, SLICE = DEPTH / SLICES;
    static constexpr int HANDED = SLICES / 2 * TEAM * 8 * COLUMNS;  // sums that change hands at once
    using Part = float[DEPTH][SIZE + 4];  // of a matrix: k first, padded so that columns can be stored

    int top, left;           // of the tile in the result
    int slice, row, column;  // of the thread, the latter in the tile
    float sums[8][COLUMNS] = {};

    // A warp is 4 by 8 threads. Each has quads of rows and columns that lie 16 and 32 apart, so that
    // together they read whole lines of shared memory.
    __device__ Tile(int width) {
        constexpr int WARPS = SIZE / (8 * COLUMNS);  // side by side
        int across = (width - 1) / SIZE + 1, warp = threadIdx.x % TEAM / 32, lane = threadIdx.x % 32;
        top = blockIdx.x / across * SIZE;
        left = blockIdx.x % across * SIZE;
        slice = threadIdx.x / TEAM;
        row = warp / WARPS * 32 + lane / 8 * 4;
        column = warp % WARPS * 8 * COLUMNS + lane % 8 * 4;
    }

    // Multiply this thread's slice of a part of a and of b.
    __device__ void multiply(const Part (&parts)[2]) {
#pragma unroll
        for (int i = 0; i < SLICE; ++i) {
            float x[8], y[COLUMNS];
            take<8, 16>(&parts[0][slice * SLICE + i][row], x);
            take<COLUMNS, 32>(&parts[1][slice * SLICE + i][column], y);
#pragma unroll
            for (int r = 0; r < 8; ++r)
#pragma unroll
                for (int s = 0; s < COLUMNS; ++s) sums[r][s] = fmaf(x[r], y[s], sums[r][s]);
        }
    }

    // Leave the sums of all slices in the first: half of them hand theirs to the other half, and so on.
    __device__ void join(float* room) {
#pragma unroll
        for (int half = SLICES / 2; half > 0; half /= 2) {
            float* mine = room + threadIdx.x % (half * TEAM);
            __syncthreads();  // nobody reads what was there
            if (slice >= half && slice < 2 * half)
#pragma unroll
                for (int i = 0; i < 8 * COLUMNS; ++i)
                    mine[i * half * TEAM] = sums[i / COLUMNS][i % COLUMNS];
            __syncthreads();
            if (slice < half)
#pragma unroll
                for (int i = 0; i < 8 * COLUMNS; ++i)
                    sums[i / COLUMNS][i % COLUMNS] += mine[i * half * TEAM];
        }
    }

    template <typename T> __device__ void write(T* c, int m, int n, bool add) const {
        using Quad = typename Dense<T>::Quad;
        Dense<T> result(c, m, n);
#pragma unroll
        for (int r = 0; r < 8; ++r)
#pragma unroll
            for (int s = 0; s < COLUMNS; s += 4) {
                int y = top + row + r / 4 * 16 + r % 4, x = left + column + s / 4 * 32;
                if (y >= m || x >= n) continue;
                Quad quad = add ? result.read(y, x) : Quad();
                quad.fill([&](int i) { return add ? quad[i] + sums[r][s + i] : sums[r][s + i]; });
                T* to = c + (long long)y * n + x;
                if (result.aligned) {
                    *(Quad*)to = quad;
                    continue;
                }
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (x + i < n) to[i] = quad.raw(i);
            }
    }
};

// What a matrix has of the part that comes next: on its way from memory, then put into shared memory.
// ALONG says that k runs along its rows, which then become columns.
template <typename Matrix, bool ALONG, int SIZE> struct Next {
    typename Matrix::Quad quads[QUADS];

    // Where a quad of this thread's is in the part, as memory has it. A warp reads whole lines or,
    // where it has to store columns, 16 elements of 8 rows: then no more than two threads share a bank.
    static __device__ int row(int i) {
        int quad = threadIdx.x + i * BLOCK;
        return ALONG ? quad / 4 % SIZE : quad / (SIZE / 4);
    }
    static __device__ int column(int i) {
        int quad = threadIdx.x + i * BLOCK;
        return ALONG ? quad % 4 * 4 + quad / (4 * SIZE) * 16 : quad % (SIZE / 4) * 4;
    }

    __device__ void fetch(const Matrix& from, int start, int k) {
#pragma unroll
        for (int i = 0; i < QUADS; ++i)
            quads[i] = ALONG ? from.read(start + row(i), k + column(i))
                             : from.read(k + row(i), start + column(i));
    }

    __device__ void put(typename Tile<SIZE>::Part& part) const {
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            const auto& quad = quads[i];
            if (ALONG)
#pragma unroll
                for (int j = 0; j < 4; ++j) part[column(i) + j][row(i)] = quad[j];
            else
                *(float4*)&part[row(i)][column(i)] =
                    float4{quad[0], quad[1], quad[2], quad[3]};
        }
    }
};

// c[m, n] becomes the product of a and b, summed over k; with `add` it is added to what c holds.
template <int SIZE, bool A_ALONG, bool B_ALONG, typename A, typename B, typename T>
__device__ void product(const A& a, const B& b, T* c, int m, int n, int k, bool add) {
    using Part = typename Tile<SIZE>::Part;
    constexpr int DEPTH = Tile<SIZE>::DEPTH;
    __shared__ alignas(16) Part parts[2][2];  // of a and b: one of each to multiply, one to fill
    static_assert(Tile<SIZE>::HANDED * sizeof(float) <= sizeof(parts), "room for slices to join");

    Tile<SIZE> tile(n);
    Next<A, A_ALONG, SIZE> next_a;
    Next<B, B_ALONG, SIZE> next_b;
    next_a.fetch(a, tile.top, 0);
    next_b.fetch(b, tile.left, 0);
    for (int start = 0; start < k; start += DEPTH) {
        auto& stage = parts[start / DEPTH % 2];
        next_a.put(stage[0]);
        next_b.put(stage[1]);
        __syncthreads();  // by now all have multiplied the other stage
        next_a.fetch(a, tile.top, start + DEPTH);  // zeros in the end
        next_b.fetch(b, tile.left, start + DEPTH);
        tile.multiply(stage);
    }
    tile.join(&parts[0][0][0][0]);
    if (tile.slice == 0) tile.write(c, m, n, add);
}

// Two blocks share a processor: one computes while the other waits for memory.
#define KERNEL template <typename T, int SIZE> __global__ void __launch_bounds__(BLOCK, 2)

KERNEL gemm(const T* a, const T* b, T* c, int m, int n, int k, bool add) {
    product<SIZE, true, false>(Dense<T>(a, m, k), Dense<T>(b, k, n), c, m, n, k, add);
}

KERNEL gemm_backward_a(const T* gc, const T* b, T* ga, int m, int n, int k, bool add) {
    product<SIZE, true, true>(Dense<T>(gc, m, n), Dense<T>(b, k, n), ga, m, k, n, add);
}

KERNEL gemm_backward_a_nf4(
    const T* gc, const unsigned char* codes, const float* scales, T* ga, int m, int n, int k, bool add
) {
    __shared__ float table[16];
    if (threadIdx.x < 16) table[threadIdx.x] = nf4[threadIdx.x];
    __syncthreads();
    product<SIZE, true, true>(Dense<T>(gc, m, n), Nf4{codes, scales, table, k, n}, ga, m, k, n, add);
}

KERNEL gemm_backward_b(const T* a, const T* gc, T* gb, int m, int n, int k, bool add) {
    product<SIZE, false, false>(Dense<T>(a, m, k), Dense<T>(gc, m, n), gb, k, n, m, add);
}

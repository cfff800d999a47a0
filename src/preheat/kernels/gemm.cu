// Matrix products of row-major matrices of any size and alignment, accumulated in fp32 for every storage type.
//
//     gemm               c[m, n] = a[m, k] b[k, n]
//     gemm_backward_a   ga[m, k] = gc[m, n] b[k, n]^T
//     gemm_backward_b   gb[k, n] = a[m, k]^T gc[m, n]
//
// A block computes one tile of the result: SIZE by SIZE, or 128 by 256 where SIZE is 256. It iterates over k in
// parts of DEPTH, which it copies into shared memory. Products of 16-bit types use tensor cores (`Mma`) since
// sm_80; all others use fused multiply-adds in fp32 (`Simt`). A small tile does not need all warps of a block.
// There, the warps form SLICES groups that divide the k of every part among them (split-k within the block),
// and their sums are added at the end, always in the same order.

constexpr int BLOCK = 256;  // Threads.
template <int SIZE> constexpr int TILE_ROWS = SIZE < 128 ? SIZE : 128;

#if __CUDA_ARCH__ >= 800
template <class T> constexpr bool TENSOR_CORES = sizeof(T) == 2;
#else
template <class T> constexpr bool TENSOR_CORES = false;
#endif

// Consecutive elements of a row that a thread loads or stores at a time.
template <class T> constexpr int VECTOR_SIZE = TENSOR_CORES<T> ? 8 : 4;

// K_CONTIGUOUS says that consecutive elements of an operand in memory have consecutive k.

// A matrix in memory. Elements beyond its edges read as zeros. Where all rows are whole, aligned chunks, one
// instruction loads or stores a chunk. This is checked at run time.
template <class T> struct Dense {
    static constexpr bool QUANTIZED = false;
    static constexpr int SIZE = VECTOR_SIZE<T>;
    using Piece = Chunk<T, SIZE * sizeof(T) / 4>;

    T* data;
    int rows, width;
    bool aligned;

    INLINE Dense(const T* from, int rows, int width)
        : data(const_cast<T*>(from)), rows(rows), width(width),
          aligned(width % SIZE == 0 && (size_t)from % sizeof(Piece) == 0) {}

    INLINE bool contains(int row, int column) const { return row < rows && column < width; }
    INLINE T* at(int row, int column) const { return data + (long long)row * width + column; }

    // Element `i` of a piece, and the whole piece in the storage type.
    INLINE float value(const Piece& piece, int i) const { return piece[i]; }
    INLINE Piece to_storage(const Piece& piece) const { return piece; }

    INLINE Piece read(int row, int column) const {
        Piece piece;
        if (row >= rows) return piece;
        const T* from = at(row, column);
        if (aligned) return column < width ? *(const Piece*)from : piece;
#pragma unroll
        for (int i = 0; i < SIZE; i++)
            if (column + i < width) piece.set_raw(i, from[i]);
        return piece;
    }

    INLINE void write(int row, int column, const Piece& piece) const {
        if (!contains(row, column)) return;
        T* to = at(row, column);
        if (aligned) {
            *(Piece*)to = piece;
            return;
        }
#pragma unroll
        for (int i = 0; i < SIZE; i++)
            if (column + i < width) to[i] = piece.raw(i);
    }
};

// The values of NF4 (from QLoRA): quantiles of the normal distribution.
__constant__ float nf4[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

// A matrix in NF4: two codes per byte, the first in the upper four bits, and a scale for every 64 elements
// in row-major order, regardless of row ends. Values are rounded to T, so the product equals that with a
// dequantized matrix of T.
template <class T> struct Nf4 {
    static constexpr bool QUANTIZED = true;
    static constexpr int SIZE = VECTOR_SIZE<T>;

    struct Piece {
        unsigned codes;     // As in memory.
        float scale, next;  // Of the elements before `end`, and of the others.
        int end;
        INLINE float value(int i, const float* table) const {
            return table[codes >> (i / 2 * 8 + (1 - i % 2) * 4) & 15] * (i < end ? scale : next);
        }
    };

    const unsigned char* data;
    const float* scales;
    const float* table;  // In shared memory: constant memory is slow when threads read different addresses.
    int rows, width;
    bool aligned;

    INLINE Nf4(const unsigned char* data, const float* scales, const float* table, int rows, int width)
        : data(data), scales(scales), table(table), rows(rows), width(width),
          aligned(SIZE == 8 && width % 8 == 0 && (size_t)data % 4 == 0) {}

    INLINE bool contains(int row, int column) const { return row < rows && column < width; }

    // For aligned matrices: one load reads all codes of a piece, and they share a scale.
    INLINE Piece read_aligned(int row, int column) const {
        if (!contains(row, column)) return {0, 0, 0, SIZE};
        long long first = (long long)row * width + column;
        return {*(const unsigned*)(data + first / 2), scales[first / 64], 0, SIZE};
    }

    INLINE Piece read(int row, int column) const {
        if (!contains(row, column)) return {0, 0, 0, SIZE};
        long long first = (long long)row * width + column;
        // Elements beyond the end of the row have code 7, which is zero.
        long long last = first + min(SIZE, width - column) - 1;
        Piece piece = {0x77777777, scales[first / 64], scales[last / 64], 64 - (int)(first % 64)};
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            long long at = first + i;
            if (at <= last) {
                unsigned code = data[at / 2] >> (1 - at % 2) * 4 & 15;
                piece.codes ^= (code ^ 7) << (i / 2 * 8 + (1 - i % 2) * 4);
            }
        }
        return piece;
    }

    INLINE float value(const Piece& piece, int i) const {
        return to_float(from_float<T>(piece.value(i, table)));
    }
    INLINE Chunk<T> to_storage(const Piece& piece) const {
        Chunk<T> chunk;
        chunk.fill([&](int i) { return piece.value(i, table); });
        return chunk;
    }
};

// Add the sums of all slices into the first slice, pairwise: in each round the upper half of the slices passes
// its sums to the lower half. A slice has SLICE_THREADS threads, which cover the whole tile.
template <int SLICE_THREADS, int COUNT> INLINE void reduce_slices(float (&sums)[COUNT], int slice) {
#pragma unroll
    for (int half = BLOCK / SLICE_THREADS / 2; half > 0; half /= 2) {
        float* mine = (float*)dynamic_shared + threadIdx.x % (half * SLICE_THREADS);
        __syncthreads();  // All threads have finished reading the previous contents.
        if (slice >= half && slice < 2 * half)
#pragma unroll
            for (int i = 0; i < COUNT; i++) mine[i * half * SLICE_THREADS] = sums[i];
        __syncthreads();
        if (slice < half)
#pragma unroll
            for (int i = 0; i < COUNT; i++) sums[i] += mine[i * half * SLICE_THREADS];
    }
}

// A square tile by fused multiply-adds in fp32. While the threads multiply the parts of a and b in shared
// memory (floats, k-major), they load the next parts into registers.

// Load N floats from shared memory: vectors of four, STRIDE floats apart.
template <int N, int STRIDE> INLINE void load_shared(const float* from, float (&to)[N]) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) *(float4*)&to[4 * i] = *(const float4*)(from + i * STRIDE);
}

template <class A, bool A_K_CONTIGUOUS, class B, bool B_K_CONTIGUOUS, int SIZE> struct Simt {
    static constexpr int VECTORS = 2;  // Vectors of four that a thread loads from each matrix at a time.
    static constexpr int DEPTH = BLOCK * VECTORS * 4 / SIZE;
    static constexpr int COLUMNS = SIZE == 128 ? 8 : 4;       // A thread computes 8 rows by COLUMNS.
    static constexpr int SLICE_THREADS = SIZE / 8 * (SIZE / COLUMNS);  // Threads that cover the whole tile.
    static constexpr int SLICE = DEPTH / (BLOCK / SLICE_THREADS);
    using Part = float[DEPTH][SIZE + 4];  // Padded against bank conflicts when columns are stored.

    int top, left;           // Position of the tile in the result.
    int slice, row, column;  // Slice of the thread; its position in the tile.
    float sums[8 * COLUMNS] = {};

    // A warp is 4 by 8 threads. Each thread has groups of four rows, 16 apart, and of four columns, 32 apart,
    // so that a warp reads contiguous shared memory.
    INLINE Simt(int top, int left) : top(top), left(left) {
        constexpr int WARPS = SIZE / (8 * COLUMNS);  // Side by side.
        int warp = threadIdx.x % SLICE_THREADS / 32, lane = threadIdx.x % 32;
        slice = threadIdx.x / SLICE_THREADS;
        row = warp / WARPS * 32 + lane / 8 * 4;
        column = warp % WARPS * 8 * COLUMNS + lane % 8 * 4;
    }

    // Loads the next part of a matrix into registers (fetch), then stores it to shared memory (put).
    template <class Matrix, bool K_CONTIGUOUS> struct PartLoader {
        typename Matrix::Piece pieces[VECTORS];

        // The position of this thread's piece i within the part in global memory. A warp reads contiguous
        // rows or, where it transposes, 16 elements of 8 rows: then at most two threads conflict on a bank.
        static INLINE int row(int i) {
            int piece = threadIdx.x + i * BLOCK;
            return K_CONTIGUOUS ? piece / 4 % SIZE : piece / (SIZE / 4);
        }
        static INLINE int column(int i) {
            int piece = threadIdx.x + i * BLOCK;
            return K_CONTIGUOUS ? piece % 4 * 4 + piece / (4 * SIZE) * 16 : piece % (SIZE / 4) * 4;
        }

        INLINE void fetch(const Matrix& from, int start, int k) {
#pragma unroll
            for (int i = 0; i < VECTORS; i++)
                pieces[i] = K_CONTIGUOUS ? from.read(start + row(i), k + column(i))
                                  : from.read(k + row(i), start + column(i));
        }

        INLINE void put(Part& part, const Matrix& from) const {
#pragma unroll
            for (int i = 0; i < VECTORS; i++) {
                float4 four = {from.value(pieces[i], 0), from.value(pieces[i], 1),
                               from.value(pieces[i], 2), from.value(pieces[i], 3)};
                if (K_CONTIGUOUS) {
                    part[column(i)][row(i)] = four.x;
                    part[column(i) + 1][row(i)] = four.y;
                    part[column(i) + 2][row(i)] = four.z;
                    part[column(i) + 3][row(i)] = four.w;
                } else {
                    *(float4*)&part[row(i)][column(i)] = four;
                }
            }
        }
    };

    // Multiply this thread's slice of the parts of a and b.
    INLINE void multiply(const Part (&parts)[2]) {
#pragma unroll
        for (int i = 0; i < SLICE; i++) {
            float x[8], y[COLUMNS];
            load_shared<8, 16>(&parts[0][slice * SLICE + i][row], x);
            load_shared<COLUMNS, 32>(&parts[1][slice * SLICE + i][column], y);
#pragma unroll
            for (int r = 0; r < 8; r++)
#pragma unroll
                for (int s = 0; s < COLUMNS; s++)
                    sums[r * COLUMNS + s] = fmaf(x[r], y[s], sums[r * COLUMNS + s]);
        }
    }

    INLINE void run(const A& a, const B& b, int k) {
        Part(*parts)[2] = (Part(*)[2])dynamic_shared;  // Double-buffered parts of a and b.
        PartLoader<A, A_K_CONTIGUOUS> next_a;
        PartLoader<B, B_K_CONTIGUOUS> next_b;
        next_a.fetch(a, top, 0);
        next_b.fetch(b, left, 0);
        for (int start = 0; start < k; start += DEPTH) {
            auto& stage = parts[start / DEPTH % 2];
            next_a.put(stage[0], a);
            next_b.put(stage[1], b);
            __syncthreads();  // All threads have finished multiplying the other stage.
            next_a.fetch(a, top, start + DEPTH);  // Zeros beyond k.
            next_b.fetch(b, left, start + DEPTH);
            multiply(stage);
        }
        reduce_slices<SLICE_THREADS>(sums, slice);
    }

    template <class T> INLINE void write(const Dense<T>& c, bool add) const {
        if (slice != 0) return;
#pragma unroll
        for (int r = 0; r < 8; r++)
#pragma unroll
            for (int s = 0; s < COLUMNS; s += 4) {
                const float* four = &sums[r * COLUMNS + s];
                int y = top + row + r / 4 * 16 + r % 4, x = left + column + s / 4 * 32;
                typename Dense<T>::Piece piece;
                if (add) piece = c.read(y, x);
                piece.fill([&](int i) { return add ? piece[i] + four[i] : four[i]; });
                c.write(y, x, piece);
            }
    }
};

// Tensor cores, for 16-bit types.

#if __CUDA_ARCH__ >= 800

// The stages of the widest tile take 144 KiB of shared memory, or 96 KiB where the limit of a block is lower.
// Code for sm_80 also runs on sm_86 and sm_89, whose limit is 99 KiB.
constexpr bool LARGE_SHARED = __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200;
constexpr int LARGE_BYTES = 144 << 10;

// Load four matrices of 8 by 8; `from` is the address of one row of one of them.
template <bool TRANSPOSED> INLINE void load_matrices(unsigned (&to)[4], unsigned from) {
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from));
}

#define MULTIPLY(TYPE)                                                                             \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "                             \
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                          \
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
template <class T> INLINE void multiply_add(float* sums, const unsigned* a, const unsigned* b);
template <> INLINE void multiply_add<__half>(float* sums, const unsigned* a, const unsigned* b) {
    MULTIPLY("f16");
}
template <> INLINE void multiply_add<__nv_bfloat16>(float* sums, const unsigned* a, const unsigned* b) {
    MULTIPLY("bf16");
}

// Transpose 4 by 4 words over each group of four threads: thread i gets word i of all four, in order.
INLINE void transpose(unsigned (&words)[4]) {
#pragma unroll
    for (int by = 1; by <= 2; by *= 2)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (!(i & by)) {
                bool upper = threadIdx.x & by;
                unsigned other = __shfl_xor_sync(0xffffffffu, upper ? words[i] : words[i + by], by);
                if (upper) words[i] = other;
                else words[i + by] = other;
            }
}

// One operand of a tile: SIZE of its rows or columns. In shared memory a part has the same rows as in global
// memory, in chunks of eight elements. The chunks of a row are swizzled, so that the eight rows of a chunk
// that ldmatrix reads together lie in different banks. `to` and `part` are offsets into shared memory.
template <class Matrix, bool K_CONTIGUOUS, int SIZE, int DEPTH, bool FIRST, bool ALIGNED> struct Operand {
    static constexpr int STORED_ROWS = K_CONTIGUOUS ? SIZE : DEPTH, CHUNKS = (K_CONTIGUOUS ? DEPTH : SIZE) / 8;
    static constexpr int BYTES = STORED_ROWS * CHUNKS * 16;
    static constexpr int COUNT = STORED_ROWS * CHUNKS / BLOCK, STEP = BLOCK / CHUNKS;
    static constexpr bool ASYNC = ALIGNED && !Matrix::QUANTIZED;
    static_assert(COUNT * STEP == STORED_ROWS && STEP % 8 == 0, "the chunks of a thread are swizzled alike");

    const Matrix& matrix;
    int start;  // First row or column of the tile in the matrix.
    typename Matrix::Piece pieces[ASYNC ? 1 : COUNT];

    static INLINE int offset(int row, int chunk) {
        int swizzle = CHUNKS >= 8 ? row % 8 : row / (8 / CHUNKS) % CHUNKS;
        return (row * CHUNKS + (chunk ^ swizzle)) * 16;
    }

    // The chunks of a thread lie STEP rows apart. fetch() copies them asynchronously, or loads them into
    // registers from which put() stores them.
    INLINE void fetch(int to, int k) {
        int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
        int y = (K_CONTIGUOUS ? start : k) + row, x = (K_CONTIGUOUS ? k : start) + chunk * 8;
        if constexpr (ASYNC) {
            auto* at = matrix.at(y, x);
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                int place = to + offset(row, chunk) + i * BLOCK * 16;
                copy_async(dynamic_shared + place, at, matrix.contains(y + i * STEP, x));
                at += (long long)STEP * matrix.width;
            }
        } else {
#pragma unroll
            for (int i = 0; i < COUNT; i++)
                if constexpr (ALIGNED) pieces[i] = matrix.read_aligned(y + i * STEP, x);
                else pieces[i] = matrix.read(y + i * STEP, x);
        }
    }
    INLINE void put(int to) const {
        if constexpr (!ASYNC) {
            int place = to + offset(threadIdx.x / CHUNKS, threadIdx.x % CHUNKS);
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                auto chunk = matrix.to_storage(pieces[i]);
                *(decltype(chunk)*)(dynamic_shared + place + i * BLOCK * 16) = chunk;
            }
        }
    }

    // Load the fragment of 16 rows of a, or of 16 columns of b, that begins at `at`, for 16 values of k.
    // ldmatrix returns the four matrices of 8 by 8 in the order that mma expects: for a, matrices of the same
    // k are adjacent, for b those of the same columns.
    static INLINE void load(unsigned (&to)[4], int part, int at, int k) {
        int lane = threadIdx.x % 32;
        constexpr bool ROWS_FIRST = FIRST == K_CONTIGUOUS;
        int row = ROWS_FIRST ? lane % 16 : lane % 8 + lane / 16 * 8;
        int chunk = ROWS_FIRST ? lane / 16 : lane / 8 % 2;
        row += K_CONTIGUOUS ? at : k;
        chunk += (K_CONTIGUOUS ? k : at) / 8;
        load_matrices<!K_CONTIGUOUS>(to, shared_address(dynamic_shared) + part + offset(row, chunk));
    }
};

// A multi-stage pipeline: while the tensor cores multiply one part, the next parts are copied into the other
// stages, and the fragments for the next 16 values of k are loaded from shared memory.
template <class T, class A, bool A_K_CONTIGUOUS, class B, bool B_K_CONTIGUOUS, int SIZE> struct Mma {
    static constexpr bool WIDEST = SIZE == 256, LARGE_STAGES = LARGE_SHARED && !B::QUANTIZED;
    static constexpr int ROWS = TILE_ROWS<SIZE>, COLUMNS = SIZE, GROUP = 8;
    static constexpr int WARP_ROWS = SIZE >= 128 ? 64 : 32, WARP_COLUMNS = WIDEST ? 64 : 32;
    static constexpr int SLICE_THREADS = ROWS / WARP_ROWS * (COLUMNS / WARP_COLUMNS) * 32;
    static constexpr int SLICES = BLOCK / SLICE_THREADS;
    static constexpr int DEPTH = WIDEST && LARGE_STAGES ? 64 : SIZE >= 128 ? 32 : SIZE == 64 ? 64 : 128;
    static constexpr int STAGES = WIDEST && LARGE_STAGES ? 3 : 4;
    static constexpr int BUFFERS = WIDEST ? 2 : 1;  // For fragments.

    struct Fragments {
        unsigned a[WARP_ROWS / 16][4], b[WARP_COLUMNS / 16][4];
    };

    int top, left;           // Position of the tile in the result.
    int slice, row, column;  // Slice of the warp; its position in the tile.
    float sums[WARP_ROWS / 16 * WARP_COLUMNS / 8 * 4] = {};

    // Blocks with consecutive indices compute tiles within GROUP rows of tiles, so that concurrent blocks
    // share rows and columns of the operands in the L2 cache.
    INLINE Mma(int m, int n) {
        int tile_rows = (m - 1) / ROWS + 1, tile_columns = (n - 1) / COLUMNS + 1;
        int first = blockIdx.x / (GROUP * tile_columns) * GROUP, number = blockIdx.x % (GROUP * tile_columns);
        int high = min(GROUP, tile_rows - first), warp = threadIdx.x % SLICE_THREADS / 32;
        top = (first + number % high) * ROWS;
        left = number / high * COLUMNS;
        slice = threadIdx.x / SLICE_THREADS;
        row = warp / (COLUMNS / WARP_COLUMNS) * WARP_ROWS;
        column = warp % (COLUMNS / WARP_COLUMNS) * WARP_COLUMNS;
    }

    template <class Left, class Right> INLINE void load(Fragments& to, int stage, int k) {
#pragma unroll
        for (int i = 0; i < WARP_ROWS / 16; i++) Left::load(to.a[i], stage, row + i * 16, k);
#pragma unroll
        for (int i = 0; i < WARP_COLUMNS / 16; i++)
            Right::load(to.b[i], stage + Left::BYTES, column + i * 16, k);
    }

    INLINE void multiply(const Fragments& of) {
#pragma unroll
        for (int i = 0; i < WARP_ROWS / 16; i++)
#pragma unroll
            for (int j = 0; j < WARP_COLUMNS / 8; j++) {
                // Back and forth, so that consecutive mma instructions share an operand.
                int n_tile = i % 2 ? WARP_COLUMNS / 8 - 1 - j : j;
                float* to = &sums[(i * WARP_COLUMNS / 8 + n_tile) * 4];
                multiply_add<T>(to, of.a[i], &of.b[n_tile / 2][n_tile % 2 * 2]);
            }
    }

    // Slices alternate in steps of 16 k, so that their sums do not depend on LENGTH. If both operands are
    // ALIGNED, the loop has no branches, and the compiler can schedule its instructions freely. Otherwise the
    // elements of a part stay in registers while another part is multiplied, and parts are shorter. Both
    // instances of this loop have the same form: next to a simpler one, ptxas (13.0 and 13.4) schedules the
    // first one worse, which costs up to 8 %.
    template <bool ALIGNED> INLINE void run(const A& a, const B& b, int k) {
        constexpr int LENGTH = ALIGNED ? DEPTH : 16 * BUFFERS * SLICES, STEPS = LENGTH / SLICES / 16;
        using Left = Operand<A, A_K_CONTIGUOUS, ROWS, LENGTH, true, ALIGNED>;
        using Right = Operand<B, B_K_CONTIGUOUS, COLUMNS, LENGTH, false, ALIGNED>;
        constexpr int SECOND = Left::BYTES, STAGE = SECOND + Right::BYTES, LAST = (STAGES - 1) * STAGE;
        Left from_a = {a, top};
        Right from_b = {b, left};
#pragma unroll 1
        for (int i = 0; i < STAGES - 1; i++) {
            from_a.fetch(i * STAGE, i * LENGTH);  // Zeros beyond k.
            from_b.fetch(i * STAGE + SECOND, i * LENGTH);
            from_a.put(i * STAGE);
            from_b.put(i * STAGE + SECOND);
            async_commit();
        }
        async_wait<STAGES - 2>();
        __syncthreads();
        Fragments fragments[BUFFERS];
        load<Left, Right>(fragments[0], 0, slice * 16);
        int before = LAST, stage = 0;  // Offsets of the previous and the current stage.
#pragma unroll 1
        for (int start = 0; start < k; start += LENGTH) {
            int after = stage < LAST ? stage + STAGE : 0, next = start + (STAGES - 1) * LENGTH;
            from_a.fetch(before, next);  // Zeros beyond k.
            from_b.fetch(before + SECOND, next);
            async_commit();
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                bool last = step == STEPS - 1;
                if (last) {
                    async_wait<STAGES - 2>();
                    __syncthreads();  // The next stage has arrived, and no thread reads this one any more.
                }
                if (BUFFERS == 1) multiply(fragments[0]);
                int at = ((step + 1) % STEPS * SLICES + slice) * 16;
                load<Left, Right>(fragments[(step + 1) % BUFFERS], last ? after : stage, at);
                if (BUFFERS == 2) multiply(fragments[step % 2]);
            }
            from_a.put(before);
            from_b.put(before + SECOND);
            before = stage;
            stage = after;
        }
        async_wait<0>();
    }

    // Four threads hold adjacent pairs of a row, in four groups of eight columns. They exchange pairs, so that
    // each stores eight consecutive elements. With `add`, several rows of c are loaded before the first store.
    INLINE void write(const Dense<T>& c, bool add) const {
        if (slice != 0) return;
        int lane = threadIdx.x % 32, y = top + row + lane / 4, x = left + column + lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < WARP_ROWS / 8; i += 4) {
            Chunk<T> chunks[4][WARP_COLUMNS / 32];
            if (add)
#pragma unroll
                for (int r = 0; r < 4; r++)
#pragma unroll
                    for (int s = 0; s < WARP_COLUMNS / 32; s++)
                        chunks[r][s] = c.read(y + (i + r) * 8, x + s * 32);
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int s = 0; s < WARP_COLUMNS / 32; s++) {
                    const float* pairs = &sums[((i + r) / 2 * WARP_COLUMNS / 8 + s * 4) * 4 + r % 2 * 2];
                    Chunk<T>& chunk = chunks[r][s];
                    if (add) transpose(chunk.words);
                    chunk.fill([&](int e) {
                        float sum = pairs[e / 2 * 4 + e % 2];
                        return add ? chunk[e] + sum : sum;
                    });
                    transpose(chunk.words);
                    c.write(y + (i + r) * 8, x + s * 32, chunk);
                }
        }
    }
};

#endif

// Store the product of a and b to c[m, n], or with `add` add it to c.
template <int SIZE, bool A_K_CONTIGUOUS, bool B_K_CONTIGUOUS, class A, class B, class T>
INLINE void product(const A& a, const B& b, T* c, int m, int n, int k, bool add) {
    if constexpr (TENSOR_CORES<T>) {
#if __CUDA_ARCH__ >= 800
        Mma<T, A, A_K_CONTIGUOUS, B, B_K_CONTIGUOUS, SIZE> tile(m, n);
        // The driver may compile PTX for sm_90 for a later device with less shared memory per block.
        if (tile.WIDEST && tile.LARGE_STAGES && dynamic_shared_bytes() < LARGE_BYTES) __trap();
        if (a.aligned && b.aligned) tile.template run<true>(a, b, k);
        else tile.template run<false>(a, b, k);
        reduce_slices<decltype(tile)::SLICE_THREADS>(tile.sums, tile.slice);
        tile.write(Dense<T>(c, m, n), add);
#endif
    } else {
        constexpr int SIDE = TILE_ROWS<SIZE>;
        int tile_columns = (n - 1) / SIZE + 1;
        int top = blockIdx.x / tile_columns * SIDE, left = blockIdx.x % tile_columns * SIZE;
#pragma unroll 1
        for (int i = 0; i < SIZE / SIDE; i++) {
            Simt<A, A_K_CONTIGUOUS, B, B_K_CONTIGUOUS, SIDE> tile(top, left + i * SIDE);
            tile.run(a, b, k);
            tile.write(Dense<T>(c, m, n), add);
            if (SIZE > SIDE) __syncthreads();  // No thread reads the contents of shared memory any more.
        }
    }
}

// Two blocks share a multiprocessor, so that one computes while the other waits for memory. The largest tile of
// tensor cores needs all registers.
#define KERNEL                                \
    template <class T, int SIZE> __global__ void \
    __launch_bounds__(BLOCK, SIZE == 256 && TENSOR_CORES<T> ? 1 : 2)

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
    product<SIZE, true, true>(Dense<T>(gc, m, n), Nf4<T>(codes, scales, table, k, n), ga, m, k, n, add);
}

KERNEL gemm_backward_b(const T* a, const T* gc, T* gb, int m, int n, int k, bool add) {
    product<SIZE, false, false>(Dense<T>(a, m, k), Dense<T>(gc, m, n), gb, k, n, m, add);
}

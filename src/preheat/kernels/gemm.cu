// Products of row-major matrices of any size and alignment, summed in fp32 whatever they are stored in.
//
//     gemm               c[m, n] = a[m, k] b[k, n]
//     gemm_backward_a   ga[m, k] = gc[m, n] b[k, n]^T
//     gemm_backward_b   gb[k, n] = a[m, k]^T gc[m, n]
//
// A block computes one tile of the result: SIZE by SIZE, or 128 by 256 where SIZE is 256. It goes over
// k in parts of DEPTH, which it copies into shared memory. Products of 16-bit types use tensor cores
// (`Mma`), where there are any since sm_80; all others use fused multiply-adds in fp32 (`Simt`). In
// small tiles there are more warps than are needed for the tile. There, SLICES groups of warps divide
// every part by k, and their sums are added in the end, always in the same order.

constexpr int BLOCK = 256;  // threads
template <int SIZE> constexpr int HEIGHT = SIZE < 128 ? SIZE : 128;  // of a tile

#if __CUDA_ARCH__ >= 800
template <class T> constexpr bool TENSOR_CORES = sizeof(T) == 2;
#else
template <class T> constexpr bool TENSOR_CORES = false;
#endif

// Elements of a row that a thread reads or writes at a time.
template <class T> constexpr int NEIGHBOURS = TENSOR_CORES<T> ? 8 : 4;

// ALONG says that k runs along the rows of an operand in memory.

// A matrix in memory. Elements beyond its edges read as zeros. Where rows are whole chunks and aligned,
// one access reads or writes a chunk. This is checked at run time.
template <class T> struct Dense {
    static constexpr bool PACKED = false;
    static constexpr int SIZE = NEIGHBOURS<T>;
    using Piece = Chunk<T, SIZE * sizeof(T) / 4>;

    T* data;
    int rows, width;
    bool aligned;

    INLINE Dense(const T* from, int rows, int width)
        : data(const_cast<T*>(from)), rows(rows), width(width),
          aligned(width % SIZE == 0 && (size_t)from % sizeof(Piece) == 0) {}

    INLINE bool has(int row, int column) const { return row < rows && column < width; }
    INLINE T* at(int row, int column) const { return data + (long long)row * width + column; }

    // The number at place `i` of a piece, and all of them in the type that is stored.
    INLINE float value(const Piece& piece, int i) const { return piece[i]; }
    INLINE Piece stored(const Piece& piece) const { return piece; }

    INLINE Piece read(int row, int column) const {
        Piece piece;
        if (row >= rows) return piece;
        const T* from = at(row, column);
        if (aligned) return column < width ? *(const Piece*)from : piece;
#pragma unroll
        for (int i = 0; i < SIZE; i++)
            if (column + i < width) piece.put_raw(i, from[i]);
        return piece;
    }

    INLINE void write(int row, int column, const Piece& piece) const {
        if (!has(row, column)) return;
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

// The values of NF4, from QLoRA: quantiles of the normal distribution.
__constant__ float nf4[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

// Two codes a byte, the upper half first, and a scale for every 64 elements, across the ends of rows.
// A value is rounded to T, so that the product is that with a matrix of T.
template <class T> struct Nf4 {
    static constexpr bool PACKED = true;
    static constexpr int SIZE = NEIGHBOURS<T>;

    struct Piece {
        unsigned codes;     // as in memory
        float scale, next;  // of the elements before `end`, and of the others
        int end;
        INLINE float value(int i, const float* table) const {
            return table[codes >> (i / 2 * 8 + (1 - i % 2) * 4) & 15] * (i < end ? scale : next);
        }
    };

    const unsigned char* data;
    const float* scales;
    const float* table;  // in shared memory: constants are slow where every thread reads another one
    int rows, width;
    bool aligned;

    INLINE Nf4(const unsigned char* data, const float* scales, const float* table, int rows, int width)
        : data(data), scales(scales), table(table), rows(rows), width(width),
          aligned(SIZE == 8 && width % 8 == 0 && (size_t)data % 4 == 0) {}

    INLINE bool has(int row, int column) const { return row < rows && column < width; }

    // Where a piece is aligned, one access reads all codes, and they have one scale.
    INLINE Piece read_aligned(int row, int column) const {
        if (!has(row, column)) return {0, 0, 0, SIZE};
        long long first = (long long)row * width + column;
        return {*(const unsigned*)(data + first / 2), scales[first / 64], 0, SIZE};
    }

    INLINE Piece read(int row, int column) const {
        if (!has(row, column)) return {0, 0, 0, SIZE};
        long long first = (long long)row * width + column;
        // What a piece has beyond the end of its row is zero.
        long long last = first + min(SIZE, width - column) - 1;
        Piece piece = {0x77777777, scales[first / 64], scales[last / 64], 64 - (int)(first % 64)};  // zeros
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
        return to_float(rounded<T>(piece.value(i, table)));
    }
    INLINE Chunk<T> stored(const Piece& piece) const {
        Chunk<T> chunk;
        chunk.fill([&](int i) { return piece.value(i, table); });
        return chunk;
    }
};

// Leave the sums of all slices in the first one: half of them hand theirs to the other half, and so on.
// TEAM threads have the whole tile.
template <int TEAM, int COUNT> INLINE void join(float (&sums)[COUNT], int slice) {
#pragma unroll
    for (int half = BLOCK / TEAM / 2; half > 0; half /= 2) {
        float* mine = (float*)memory + threadIdx.x % (half * TEAM);
        __syncthreads();  // nobody reads what was there
        if (slice >= half && slice < 2 * half)
#pragma unroll
            for (int i = 0; i < COUNT; i++) mine[i * half * TEAM] = sums[i];
        __syncthreads();
        if (slice < half)
#pragma unroll
            for (int i = 0; i < COUNT; i++) sums[i] += mine[i * half * TEAM];
    }
}

// Fused multiply-adds in fp32, of a square tile. While the threads multiply the part of a and b that is
// in shared memory, as floats with k first, they already fetch the next part into registers.

// N floats from shared memory: fours that lie STRIDE apart.
template <int N, int STRIDE> INLINE void take(const float* from, float (&to)[N]) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) *(float4*)&to[4 * i] = *(const float4*)(from + i * STRIDE);
}

template <class A, bool A_ALONG, class B, bool B_ALONG, int SIZE> struct Simt {
    static constexpr int FOURS = 2;  // that a thread fetches of either matrix at a time
    static constexpr int DEPTH = BLOCK * FOURS * 4 / SIZE;
    static constexpr int COLUMNS = SIZE == 128 ? 8 : 4;       // a thread adds up 8 rows by as many
    static constexpr int TEAM = SIZE / 8 * (SIZE / COLUMNS);  // threads that have the whole tile
    static constexpr int SLICE = DEPTH / (BLOCK / TEAM);
    using Part = float[DEPTH][SIZE + 4];  // of a matrix: k first, padded so that columns can be stored

    int top, left;           // of the tile in the result
    int slice, row, column;  // of the thread, the latter in the tile
    float sums[8 * COLUMNS] = {};

    // A warp is 4 by 8 threads. Each has fours of rows and columns that lie 16 and 32 apart, so that
    // together they read whole lines of shared memory.
    INLINE Simt(int top, int left) : top(top), left(left) {
        constexpr int WARPS = SIZE / (8 * COLUMNS);  // side by side
        int warp = threadIdx.x % TEAM / 32, lane = threadIdx.x % 32;
        slice = threadIdx.x / TEAM;
        row = warp / WARPS * 32 + lane / 8 * 4;
        column = warp % WARPS * 8 * COLUMNS + lane % 8 * 4;
    }

    // What a matrix has of the part that comes next: on its way from memory, then put into shared
    // memory.
    template <class Matrix, bool ALONG> struct Next {
        typename Matrix::Piece pieces[FOURS];

        // Where a piece of this thread's is in the part, as memory has it. A warp reads whole lines or,
        // where it has to store columns, 16 elements of 8 rows: then at most two threads share a bank.
        static INLINE int row(int i) {
            int piece = threadIdx.x + i * BLOCK;
            return ALONG ? piece / 4 % SIZE : piece / (SIZE / 4);
        }
        static INLINE int column(int i) {
            int piece = threadIdx.x + i * BLOCK;
            return ALONG ? piece % 4 * 4 + piece / (4 * SIZE) * 16 : piece % (SIZE / 4) * 4;
        }

        INLINE void fetch(const Matrix& from, int start, int k) {
#pragma unroll
            for (int i = 0; i < FOURS; i++)
                pieces[i] = ALONG ? from.read(start + row(i), k + column(i))
                                  : from.read(k + row(i), start + column(i));
        }

        INLINE void put(Part& part, const Matrix& from) const {
#pragma unroll
            for (int i = 0; i < FOURS; i++) {
                float4 four = {from.value(pieces[i], 0), from.value(pieces[i], 1),
                               from.value(pieces[i], 2), from.value(pieces[i], 3)};
                if (ALONG) {
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

    // Multiply this thread's slice of a part of a and of b.
    INLINE void multiply(const Part (&parts)[2]) {
#pragma unroll
        for (int i = 0; i < SLICE; i++) {
            float x[8], y[COLUMNS];
            take<8, 16>(&parts[0][slice * SLICE + i][row], x);
            take<COLUMNS, 32>(&parts[1][slice * SLICE + i][column], y);
#pragma unroll
            for (int r = 0; r < 8; r++)
#pragma unroll
                for (int s = 0; s < COLUMNS; s++)
                    sums[r * COLUMNS + s] = fmaf(x[r], y[s], sums[r * COLUMNS + s]);
        }
    }

    INLINE void run(const A& a, const B& b, int k) {
        Part(*parts)[2] = (Part(*)[2])memory;  // of a and b: one of each to multiply, one to fill
        Next<A, A_ALONG> next_a;
        Next<B, B_ALONG> next_b;
        next_a.fetch(a, top, 0);
        next_b.fetch(b, left, 0);
        for (int start = 0; start < k; start += DEPTH) {
            auto& stage = parts[start / DEPTH % 2];
            next_a.put(stage[0], a);
            next_b.put(stage[1], b);
            __syncthreads();  // by now all have multiplied the other stage
            next_a.fetch(a, top, start + DEPTH);  // zeros in the end
            next_b.fetch(b, left, start + DEPTH);
            multiply(stage);
        }
        join<TEAM>(sums, slice);
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

// The stages of the widest tile take 144 KB of shared memory, or 96 KB where a block cannot have more. Code
// for sm_80 also runs on sm_86 and sm_89, whose blocks have 99 KB.
constexpr bool LARGE_SHARED = __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200;
constexpr int LARGE_BYTES = 144 << 10;

// Four matrices of 8 by 8, each thread pointing to a row of one of them.
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

// Of four threads, number i gets the word number i of all four, in order.
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

// One operand of a tile: SIZE of its rows or columns. A part of it has the same rows in shared memory
// as in memory, in chunks of eight elements. The chunks of a row are swizzled, so that eight rows of
// one chunk, which ldmatrix reads at once, lie in different banks. `to` and `part` are offsets there.
template <class Matrix, bool ALONG, int SIZE, int DEPTH, bool FIRST, bool ALIGNED> struct Operand {
    static constexpr int HIGH = ALONG ? SIZE : DEPTH, CHUNKS = (ALONG ? DEPTH : SIZE) / 8;
    static constexpr int BYTES = HIGH * CHUNKS * 16;
    static constexpr int COUNT = HIGH * CHUNKS / BLOCK, STEP = BLOCK / CHUNKS;
    static constexpr bool ASYNC = ALIGNED && !Matrix::PACKED;
    static_assert(COUNT * STEP == HIGH && STEP % 8 == 0, "the chunks of a thread are swizzled alike");

    const Matrix& matrix;
    int start;  // of the tile in the matrix
    typename Matrix::Piece pieces[ASYNC ? 1 : COUNT];

    static INLINE int offset(int row, int chunk) {
        int swizzle = CHUNKS >= 8 ? row % 8 : row / (8 / CHUNKS) % CHUNKS;
        return (row * CHUNKS + (chunk ^ swizzle)) * 16;
    }

    // A thread has chunks that lie STEP rows apart. They are copied asynchronously, or fetch() reads
    // them into registers and put() writes them.
    INLINE void fetch(int to, int k) {
        int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
        int y = (ALONG ? start : k) + row, x = (ALONG ? k : start) + chunk * 8;
        if constexpr (ASYNC) {
            auto* at = matrix.at(y, x);
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                int place = to + offset(row, chunk) + i * BLOCK * 16;
                copy_async(memory + place, at, matrix.has(y + i * STEP, x));
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
                auto chunk = matrix.stored(pieces[i]);
                *(decltype(chunk)*)(memory + place + i * BLOCK * 16) = chunk;
            }
        }
    }

    // The fragment of 16 rows of a, or of 16 columns of b, from `at` on, by 16 of k. ldmatrix gives the
    // four matrices of 8 by 8 in the order that `mma` wants: of a those of the same k follow one
    // another, of b those of the same columns.
    static INLINE void load(unsigned (&to)[4], int part, int at, int k) {
        int lane = threadIdx.x % 32;
        constexpr bool ROWS_FIRST = FIRST == ALONG;
        int row = ROWS_FIRST ? lane % 16 : lane % 8 + lane / 16 * 8;
        int chunk = ROWS_FIRST ? lane / 16 : lane / 8 % 2;
        row += ALONG ? at : k;
        chunk += (ALONG ? k : at) / 8;
        load_matrices<!ALONG>(to, address_of(memory) + part + offset(row, chunk));
    }
};

// While the tensor cores multiply one part, the next ones are on their way into the other stages, and
// the fragments of the next 16 of k are read from shared memory.
template <class T, class A, bool A_ALONG, class B, bool B_ALONG, int SIZE> struct Mma {
    static constexpr bool WIDEST = SIZE == 256, ROOMY = LARGE_SHARED && !B::PACKED;
    static constexpr int ROWS = HEIGHT<SIZE>, COLUMNS = SIZE, GROUP = 8;
    static constexpr int HIGH = SIZE >= 128 ? 64 : 32, WIDE = WIDEST ? 64 : 32;  // of a warp's part
    static constexpr int TEAM = ROWS / HIGH * (COLUMNS / WIDE) * 32, SLICES = BLOCK / TEAM;
    static constexpr int DEPTH = WIDEST && ROOMY ? 64 : SIZE >= 128 ? 32 : SIZE == 64 ? 64 : 128;
    static constexpr int STAGES = WIDEST && ROOMY ? 3 : 4;
    static constexpr int BUFFERS = WIDEST ? 2 : 1;  // for fragments

    struct Fragments {
        unsigned a[HIGH / 16][4], b[WIDE / 16][4];
    };

    int top, left;           // of the tile in the result
    int slice, row, column;  // of the warp, the latter in the tile
    float sums[HIGH / 16 * WIDE / 8 * 4] = {};

    // Blocks with neighbouring numbers have tiles in GROUP rows of tiles, so that those which run at
    // the same time need few rows and columns of the operands.
    INLINE Mma(int m, int n) {
        int down = (m - 1) / ROWS + 1, across = (n - 1) / COLUMNS + 1;
        int first = blockIdx.x / (GROUP * across) * GROUP, number = blockIdx.x % (GROUP * across);
        int high = min(GROUP, down - first), warp = threadIdx.x % TEAM / 32;
        top = (first + number % high) * ROWS;
        left = number / high * COLUMNS;
        slice = threadIdx.x / TEAM;
        row = warp / (COLUMNS / WIDE) * HIGH;
        column = warp % (COLUMNS / WIDE) * WIDE;
    }

    template <class Left, class Right> INLINE void load(Fragments& to, int stage, int k) {
#pragma unroll
        for (int i = 0; i < HIGH / 16; i++) Left::load(to.a[i], stage, row + i * 16, k);
#pragma unroll
        for (int i = 0; i < WIDE / 16; i++)
            Right::load(to.b[i], stage + Left::BYTES, column + i * 16, k);
    }

    INLINE void multiply(const Fragments& of) {
#pragma unroll
        for (int i = 0; i < HIGH / 16; i++)
#pragma unroll
            for (int j = 0; j < WIDE / 8; j++) {
                int turn = i % 2 ? WIDE / 8 - 1 - j : j;  // back and forth: one operand stays the same
                float* to = &sums[(i * WIDE / 8 + turn) * 4];
                multiply_add<T>(to, of.a[i], &of.b[turn / 2][turn % 2 * 2]);
            }
    }

    // Slices take turns with 16 of k each, so that their sums do not depend on the length of the parts.
    // ALIGNED says that both operands are. Then the loop has no branches, and the compiler can order
    // its instructions freely. Else the elements of a part are in registers while another one is
    // multiplied, and parts are shorter. Both loops have the same form: beside a simpler one, ptxas
    // (13.0 and 13.4) orders the first one worse, which costs up to 8 %.
    template <bool ALIGNED> INLINE void run(const A& a, const B& b, int k) {
        constexpr int LENGTH = ALIGNED ? DEPTH : 16 * BUFFERS * SLICES, STEPS = LENGTH / SLICES / 16;
        using Left = Operand<A, A_ALONG, ROWS, LENGTH, true, ALIGNED>;
        using Right = Operand<B, B_ALONG, COLUMNS, LENGTH, false, ALIGNED>;
        constexpr int SECOND = Left::BYTES, STAGE = SECOND + Right::BYTES, LAST = (STAGES - 1) * STAGE;
        Left from_a = {a, top};
        Right from_b = {b, left};
#pragma unroll 1
        for (int i = 0; i < STAGES - 1; i++) {
            from_a.fetch(i * STAGE, i * LENGTH);  // zeros beyond k
            from_b.fetch(i * STAGE + SECOND, i * LENGTH);
            from_a.put(i * STAGE);
            from_b.put(i * STAGE + SECOND);
            commit();
        }
        wait<STAGES - 2>();
        __syncthreads();
        Fragments fragments[BUFFERS];
        load<Left, Right>(fragments[0], 0, slice * 16);
        int before = LAST, stage = 0;  // the stage that was multiplied last, and the one that is now
#pragma unroll 1
        for (int start = 0; start < k; start += LENGTH) {
            int after = stage < LAST ? stage + STAGE : 0, next = start + (STAGES - 1) * LENGTH;
            from_a.fetch(before, next);  // zeros in the end
            from_b.fetch(before + SECOND, next);
            commit();
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                bool last = step == STEPS - 1;
                if (last) {
                    wait<STAGES - 2>();
                    __syncthreads();  // the next stage is there, and nobody reads this one any more
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
        wait<0>();
    }

    // Four threads have neighbouring pairs of a row, in four times eight columns. They exchange them,
    // so that each has eight neighbours. What is there already is read eight rows and more at a time.
    INLINE void write(const Dense<T>& c, bool add) const {
        if (slice != 0) return;
        int lane = threadIdx.x % 32, y = top + row + lane / 4, x = left + column + lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < HIGH / 8; i += 4) {
            Chunk<T> chunks[4][WIDE / 32];
            if (add)
#pragma unroll
                for (int r = 0; r < 4; r++)
#pragma unroll
                    for (int s = 0; s < WIDE / 32; s++)
                        chunks[r][s] = c.read(y + (i + r) * 8, x + s * 32);
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int s = 0; s < WIDE / 32; s++) {
                    const float* pairs = &sums[((i + r) / 2 * WIDE / 8 + s * 4) * 4 + r % 2 * 2];
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

// c[m, n] becomes the product of a and b, summed over k; with `add` it is added to what c holds.
template <int SIZE, bool A_ALONG, bool B_ALONG, class A, class B, class T>
INLINE void product(const A& a, const B& b, T* c, int m, int n, int k, bool add) {
    if constexpr (TENSOR_CORES<T>) {
#if __CUDA_ARCH__ >= 800
        Mma<T, A, A_ALONG, B, B_ALONG, SIZE> tile(m, n);
        // PTX for sm_90 can be compiled for a chip whose blocks have less.
        if (tile.WIDEST && tile.ROOMY && dynamic_bytes() < LARGE_BYTES) __trap();
        if (a.aligned && b.aligned) tile.template run<true>(a, b, k);
        else tile.template run<false>(a, b, k);
        join<decltype(tile)::TEAM>(tile.sums, tile.slice);
        tile.write(Dense<T>(c, m, n), add);
#endif
    } else {
        constexpr int SIDE = HEIGHT<SIZE>;
        int across = (n - 1) / SIZE + 1;
        int top = blockIdx.x / across * SIDE, left = blockIdx.x % across * SIZE;
#pragma unroll 1
        for (int i = 0; i < SIZE / SIDE; i++) {
            Simt<A, A_ALONG, B, B_ALONG, SIDE> tile(top, left + i * SIDE);
            tile.run(a, b, k);
            tile.write(Dense<T>(c, m, n), add);
            if (SIZE > SIDE) __syncthreads();  // nobody reads what is in shared memory any more
        }
    }
}

// Two blocks share a processor, so that one computes while the other waits for memory. The largest tile
// of tensor cores needs all registers.
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

// y[c, r, :] = scale x[r, c, :], or with `add` y[c, r, :] += scale x[r, c, :]. With one column this adds one
// array to another.

constexpr int BLOCK = 256;

template <class A, class T>
INLINE void copy_chunk(const T* from, T* to, float scale, int width, int lane, bool add) {
    Chunk<T> v[1], old[1];
    Span span(0, width, width);
    A::template fetch<1>(v, from, span, lane);
    if (add) A::template fetch<1>(old, (const T*)to, span, lane);
    v[0].fill([&](int i) { return fmaf(scale, v[0][i], add ? old[0][i] : 0.0f); });
    A::template store<1>(to, v, span, lane);
}

template <class T>
__global__ void __launch_bounds__(BLOCK)
swap_axes(const T* x, T* y, float scale, int rows, int columns, int width, bool add) {
    // There are rows * columns lines of `width` elements. Each thread copies one chunk of one line.
    int chunks = (width + Chunk<T>::SIZE - 1) / Chunk<T>::SIZE;
    long long at = (long long)blockIdx.x * BLOCK + threadIdx.x;
    int line = (int)(at / chunks), lane = (int)(at % chunks);
    if (line >= rows * columns) return;
    const T* from = x + (long long)line * width;
    T* to = y + ((long long)(line % columns) * rows + line / columns) * width;
    bool whole = width % Chunk<T>::SIZE == 0 && aligned(x) && aligned(y);
    if (whole) copy_chunk<AlignedAccess<Chunk<T>>>(from, to, scale, width, lane, add);
    else copy_chunk<ElementwiseAccess<T>>(from, to, scale, width, lane, add);
}

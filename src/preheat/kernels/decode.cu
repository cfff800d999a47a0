// Advance every sequence of a decode state by one step. The state has four rows of `batch` integers: token,
// position, length (position + 1) and overrun. A sequence that has reached `limit` keeps its token and
// position, so that repeating its last step changes nothing; `overrun` counts the steps it did not take.
extern "C" __global__ void advance(int* state, const int* sampled, int limit, int batch) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= batch) return;
    int* token = state + i;
    int* position = token + batch;
    int* length = position + batch;
    int* overrun = length + batch;
    if (*length >= limit) {
        ++*overrun;
        return;
    }
    if (sampled) *token = sampled[i];
    ++*position;
    ++*length;
}

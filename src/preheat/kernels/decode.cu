// Moves every sequence of a decode state on by one step. The state has four rows of `batch` numbers:
// token, position, length (position + 1), and how often a sequence at its limit was to be moved on.
// Such a sequence stays as it is, so that doing its last step once more changes nothing.
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

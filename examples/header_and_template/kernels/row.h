// A header of our own. preheat notes the content of every header that the compiler has read:
// after an edit, the programs that include it are compiled again, and no others.
#pragma once

constexpr float EPSILON = 1e-6f;

template <class T, int WIDTH>
struct Row {
    const T* values;

    __device__ float mean_square() const {
        float sum = 0;
        for (int i = 0; i < WIDTH; ++i) sum += float(values[i]) * float(values[i]);
        return sum / WIDTH;
    }
};

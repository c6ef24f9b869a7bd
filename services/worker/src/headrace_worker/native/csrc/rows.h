// What happens to single rows of activations between the large operations.
#pragma once

#include <cmath>

#include "numeric.h"

namespace headrace {

// Vectors of `size` elements whose last one may be cut off.
template <class T>
Floats load_part(const T* source, std::int64_t count) {
    if (count >= kLanes) return load(source);
    T padded[kLanes] = {};
    std::memcpy(padded, source, static_cast<std::size_t>(count) * sizeof(T));
    return load(padded);
}
template <class T>
void store_part(T* target, Floats value, std::int64_t count) {
    if (count >= kLanes) return store(target, value);
    T padded[kLanes];
    store(padded, value);
    std::memcpy(target, padded, static_cast<std::size_t>(count) * sizeof(T));
}

// RMSNorm: target = source / sqrt(mean(source^2) + epsilon) * weight (null: 1).
template <class Source, class Target>
void normalize_row(const Source* source, std::int64_t size, float epsilon, Target* target, const float* weight = nullptr) {
    Floats even = {}, odd = {};
    for (std::int64_t i = 0; i < size; i += 2 * kLanes) {
        const Floats first = load_part(source + i, size - i);
        even += first * first;
        if (i + kLanes >= size) break;
        const Floats second = load_part(source + i + kLanes, size - i - kLanes);
        odd += second * second;
    }
    const float scale = 1.0f / std::sqrt(sum(even + odd) / static_cast<float>(size) + epsilon);
    for (std::int64_t i = 0; i < size; i += kLanes) {
        Floats value = load_part(source + i, size - i) * scale;
        if (weight) value *= load_part(weight + i, size - i);
        store_part(target + i, value, size - i);
    }
}

// row += added, rounded as a tensor operation would round it.
template <class T>
void add_row(T* row, const T* added, std::int64_t size) {
    for (std::int64_t i = 0; i < size; i += kLanes)
        store_part(row + i, load_part(row + i, size - i) + load_part(added + i, size - i), size - i);
}

// Pairs of neighbours as complex numbers times rotations (cosine, sine).
inline Floats rotated(Floats pairs, Floats rotations) {
    const Floats swapped =
        __builtin_shufflevector(pairs, pairs, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    const Floats cosines =
        __builtin_shufflevector(rotations, rotations, 0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14);
    const Floats sines =
        __builtin_shufflevector(rotations, rotations, 1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11, 13, 13, 15, 15);
    const Floats signs = {-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1};
    return pairs * cosines + swapped * (sines * signs);
}

template <class T>
Floats silu_mul(Floats gate, Floats up) {
    return rounded<T>(silu<T>(gate)) * up;
}

// First index of the greatest of logits[begin, end); NaN counts as greatest.
template <class T>
std::int64_t argmax_range(const T* logits, std::int64_t begin, std::int64_t end) {
    std::int64_t best = begin;
    for (std::int64_t first = begin; first < end; first += kLanes) {
        const Floats values = load_part(logits + first, end - first);
        constexpr float kInfinity = std::numeric_limits<float>::infinity();
        const float greatest_here = maximum(values != values ? splat(kInfinity) : values);
        if (!(greatest_here > to_float(logits[best])) && greatest_here != kInfinity) continue;
        const auto last = end - first < kLanes ? end : first + kLanes;
        for (auto i = first; i < last; ++i) {
            const float value = to_float(logits[i]);
            const float greatest = to_float(logits[best]);
            if (greatest == greatest && (value > greatest || value != value)) best = i;
        }
    }
    return best;
}

}  // namespace headrace

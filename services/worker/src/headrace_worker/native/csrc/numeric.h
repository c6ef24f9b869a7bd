// Element types and the few vector operations that every kernel needs. Vectors are compiler vectors of 16 floats, which
// the compiler lowers to whatever the processor has.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

#if !defined(HEADRACE_PORTABLE) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512BF16__)
#define HEADRACE_BF16_DOT 1
#include <immintrin.h>
#endif

// What Python calls. Everything else is hidden, so that two builds in one process share nothing.
#define HEADRACE_EXPORT extern "C" __attribute__((visibility("default")))

namespace headrace {

using bf16 = std::uint16_t;

constexpr int kLanes = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef std::int32_t Ints __attribute__((vector_size(64)));
typedef std::uint32_t Words __attribute__((vector_size(64)));
typedef std::uint16_t Halves __attribute__((vector_size(32)));

inline Floats splat(float value) { return Floats{} + value; }

inline float to_float(float value) { return value; }
inline float to_float(bf16 value) { return std::bit_cast<float>(static_cast<std::uint32_t>(value) << 16); }

template <class T>
T from_float(float value);
template <>
inline float from_float<float>(float value) {
    return value;
}
template <>
inline bf16 from_float<bf16>(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    if (value != value) return static_cast<bf16>((bits >> 16) | 0x40);
    return static_cast<bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline Floats load(const float* source) {
    Floats value;
    std::memcpy(&value, source, sizeof value);
    return value;
}
inline Floats load(const bf16* source) {
    Halves halves;
    std::memcpy(&halves, source, sizeof halves);
#ifdef HEADRACE_BF16_DOT
    // The compiler would do it in two halves.
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)halves), 16);
#else
    return std::bit_cast<Floats>(__builtin_convertvector(halves, Words) << 16);
#endif
}

inline void store(float* target, Floats value) { std::memcpy(target, &value, sizeof value); }
inline void store(bf16* target, Floats value) {
#ifdef HEADRACE_BF16_DOT
    const auto halves = _mm512_cvtneps_pbh((__m512)value);
    std::memcpy(target, &halves, sizeof halves);
#else
    const Words bits = std::bit_cast<Words>(value);
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words quiet = (bits >> 16) | 0x40;
    const Halves halves = __builtin_convertvector(value != value ? quiet : rounded, Halves);
    std::memcpy(target, &halves, sizeof halves);
#endif
}

// Into every second of 32 elements: the first of each pair, or the second.
inline void store_alternate(bf16* target, bool is_second, Floats value) {
#ifdef HEADRACE_BF16_DOT
    const auto words = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)value));
    if (is_second)
        _mm512_mask_storeu_epi16(target, 0xaaaaaaaa, _mm512_slli_epi32(words, 16));
    else
        _mm512_mask_storeu_epi16(target, 0x55555555, words);
#else
    bf16 halves[kLanes];
    store(halves, value);
    for (int lane = 0; lane < kLanes; ++lane) target[2 * lane + is_second] = halves[lane];
#endif
}

// What `value` becomes when it is stored as T and read back.
template <class T>
Floats rounded(Floats value) {
    T stored[kLanes];
    store(stored, value);
    return load(stored);
}
template <>
inline Floats rounded<float>(Floats value) {
    return value;
}
#ifdef HEADRACE_BF16_DOT
template <>
inline Floats rounded<bf16>(Floats value) {
    const auto halves = (__m256i)_mm512_cvtneps_pbh((__m512)value);
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
}
#endif

// Sums and maxima by a fixed tree, so that they do not depend on how the compiler vectorizes.
inline Floats folded(Floats value, int width) {
    switch (width) {
        case 8:
            return __builtin_shufflevector(value, value, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
        case 4:
            return __builtin_shufflevector(value, value, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
        case 2:
            return __builtin_shufflevector(value, value, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
        default:
            return __builtin_shufflevector(value, value, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    }
}
inline float sum(Floats value) {
    for (int width = kLanes / 2; width > 0; width /= 2) value += folded(value, width);
    return value[0];
}
inline float maximum(Floats value) {
    for (int width = kLanes / 2; width > 0; width /= 2) {
        const Floats other = folded(value, width);
        value = other > value ? other : value;
    }
    return value[0];
}

// x, or `low` or `high` if it is beyond; NaN stays.
inline Floats clamped(Floats x, float low, float high) {
#ifdef HEADRACE_BF16_DOT
    return (Floats)_mm512_min_ps((__m512)splat(high), _mm512_max_ps((__m512)splat(low), (__m512)x));
#else
    x = x < splat(low) ? splat(low) : x;
    return x > splat(high) ? splat(high) : x;
#endif
}

// 2^x to within 4e-7 of it, or 2e-5 where bfloat16 is enough. Below 2^-126 it is 2^-126, above 2^127 it is 2^127.
template <class T = float>
Floats exp2(Floats x) {
    x = clamped(x, -126.0f, 127.0f);
    const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    const Floats shifted = x + magic;
    const Floats part = x - (shifted - magic);
    Floats power;
    if constexpr (sizeof(T) == sizeof(float)) {
        power = splat(1.2639867e-3f);
        power = power * part + 9.6596554e-3f;
        power = power * part + 5.5525940e-2f;
        power = power * part + 2.4022549e-1f;
        power = power * part + 6.9314593e-1f;
        power = power * part + 9.9999988e-1f;
    } else {
        power = splat(8.9842537e-3f);
        power = power * part + 5.5731285e-2f;
        power = power * part + 2.4036302e-1f;
        power = power * part + 6.9315791e-1f;
        power = power * part + 1.0f;
    }
    // The integer's low bits become the exponent; magic's own bits leave at the top.
    return std::bit_cast<Floats>(std::bit_cast<Words>(power) + (std::bit_cast<Words>(shifted) << 23));
}

constexpr float kLog2E = 1.4426950408889634f;

// 1 / x, where bfloat16 is enough without a division, which takes longer than all else of an activation.
template <class T>
Floats reciprocal(Floats x) {
#ifdef HEADRACE_BF16_DOT
    if constexpr (sizeof(T) == sizeof(bf16)) {
        const auto guess = (Floats)_mm512_rcp14_ps((__m512)x);
        return guess * (2.0f - x * guess);
    }
#endif
    return 1.0f / x;
}

template <class T>
Floats silu(Floats x) {
    return x * reciprocal<T>(exp2<T>(x * -kLog2E) + 1.0f);
}

}  // namespace headrace

// A split by the dot-product instruction for pairs of bfloat16 (attention_chunk.h says what it has to do), and what it has in
// common with the matrix unit's way.
#pragma once

#include "attention_chunk.h"

#ifdef HEADRACE_BF16_DOT

namespace headrace {

// 16 x 16 words, rows[i] lane j -> rows[j] lane i.
inline void transpose(__m512i (&rows)[16]) {
    __m512i pairs[16], quads[16];
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            quads[i + 2 * j] = _mm512_unpacklo_epi64(pairs[i + j], pairs[i + j + 2]);
            quads[i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[i + j], pairs[i + j + 2]);
        }
    for (int j = 0; j < 4; ++j) {
        const auto low02 = _mm512_shuffle_i32x4(quads[j], quads[j + 4], 0x88);
        const auto low13 = _mm512_shuffle_i32x4(quads[j], quads[j + 4], 0xdd);
        const auto high02 = _mm512_shuffle_i32x4(quads[j + 8], quads[j + 12], 0x88);
        const auto high13 = _mm512_shuffle_i32x4(quads[j + 8], quads[j + 12], 0xdd);
        rows[j] = _mm512_shuffle_i32x4(low02, high02, 0x88);
        rows[j + 8] = _mm512_shuffle_i32x4(low02, high02, 0xdd);
        rows[j + 4] = _mm512_shuffle_i32x4(low13, high13, 0x88);
        rows[j + 12] = _mm512_shuffle_i32x4(low13, high13, 0xdd);
    }
}

// Keys of 16 positions from `first` on, component pairs by position: target[pair * stride + position]. Zeros beyond the last.
inline void pack_keys(const KeysValues<bf16>& split, int first, int head_dim, std::uint32_t* target, int stride) {
    for (int d = 0; d < head_dim; d += 2 * kLanes) {
        __m512i block[kLanes];
        for (int i = 0; i < kLanes; ++i)
            block[i] =
                first + i < split.count ? _mm512_loadu_si512(split.key(first + i) + d) : _mm512_setzero_si512();
        transpose(block);
        for (int i = 0; i < kLanes; ++i) _mm512_storeu_si512(target + (d / 2 + i) * stride, block[i]);
    }
}

// Values of positions [first, end), of components [begin, begin + width), as pairs of positions: [pairs][width][2]. Zeros
// beyond the last. `first` is even.
inline void pack_values(const KeysValues<bf16>& split, int first, int end, int begin, int width, std::uint32_t* target) {
    const auto low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36,
                                      4, 35, 3, 34, 2, 33, 1, 32, 0);
    const auto high = _mm512_set_epi16(63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24, 55, 23, 54, 22, 53,
                                       21, 52, 20, 51, 19, 50, 18, 49, 17, 48, 16);
    if (split.paired) {
        for (int position = first; position < end; position += 2) {
            const __mmask32 known = position + 1 < split.count ? 0xffffffff : position < split.count ? 0x55555555 : 0;
            const bf16* pairs = known ? split.value(position) + 2 * begin : split.value(0);
            for (int d = 0; d < width; d += kLanes, target += kLanes)
                _mm512_storeu_si512(target, _mm512_maskz_loadu_epi16(known, pairs + 2 * d));
        }
        return;
    }
    for (int position = first; position < end; position += 2)
        for (int d = begin; d < begin + width; d += 2 * kLanes, target += 2 * kLanes) {
            const auto even =
                position < split.count ? _mm512_loadu_si512(split.value(position) + d) : _mm512_setzero_si512();
            const auto odd =
                position + 1 < split.count ? _mm512_loadu_si512(split.value(position + 1) + d) : _mm512_setzero_si512();
            _mm512_storeu_si512(target, _mm512_permutex2var_epi16(even, low, odd));
            _mm512_storeu_si512(target + kLanes, _mm512_permutex2var_epi16(even, high, odd));
        }
}

// Weights are rounded to bfloat16, as the results are; `MatrixChunk` keeps what the rounding takes off, which costs it little.
// Since the total is that of the rounded ones, results are as near to float32's.
struct PairChunk {
    using Query = bf16;
    using Packed = std::uint32_t;
    static constexpr bool kInPlace = true;  // of weights of bfloat16, which take the first half of a row of scores

    static std::size_t query_size(int num_rows, int head_dim) { return static_cast<std::size_t>(num_rows) * head_dim; }
    static std::size_t packed_size(int head_dim) { return static_cast<std::size_t>(head_dim / 2) * kSplit; }

    static void load_queries(const bf16* const* rows, int num_rows, int head_dim, Query* target) {
        for (int row = 0; row < num_rows; ++row)
            std::memcpy(target + row * head_dim, rows[row], static_cast<std::size_t>(head_dim) * sizeof(bf16));
    }
    static void score(const Query* queries, const Rows& rows, const KeysValues<bf16>& split, Ahead<bf16>& ahead,
                      int head_dim, Packed* packed, float* scores) {
        for (int start = 0; start < split.count; start += kChunk) {
            const auto chunk = split.chunk(start);
            for (int position = 0; position < chunk.count; position += kLanes) {
                ahead.use_rows(kLanes);
                pack_keys(chunk, position, head_dim, packed + position, kChunk);
            }
            in_groups(rows.first_row(start), rows.count, [&]<int Count>(int row) {
                const auto* own = queries + row * head_dim;
                float* target = scores + row * kScoreStride + start;
                const int seen = rows.visible(row + Count - 1, split.count) - start;
                if (seen > 3 * kLanes) return score_rows<Count, 4>(own, head_dim, packed, target);
                if (seen > 2 * kLanes) return score_rows<Count, 3>(own, head_dim, packed, target);
                if (seen > kLanes) return score_rows<Count, 2>(own, head_dim, packed, target);
                score_rows<Count, 1>(own, head_dim, packed, target);
            });
        }
    }
    static Floats kept(Floats weights) { return rounded<bf16>(weights); }
    static void put(Floats first, Floats second, float* row, int at) {
        const auto pairs = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
        std::memcpy(reinterpret_cast<bf16*>(row) + at, &pairs, sizeof pairs);
    }
    static void mix(const float* weights, const Rows& rows, const KeysValues<bf16>& split, Ahead<bf16>& ahead, int head_dim,
                    Packed* packed, float* mixed) {
        // Only what does not lie in pairs, and the last positions if they do not fill their place, is packed.
        const int whole = split.paired ? split.count / kLanes * kLanes : 0;
        for (int position = whole; position < split.count; position += kAheadStep) {
            ahead.use_rows(kAheadStep);
            pack_values(split, position, std::min(position + kAheadStep, split.count), 0, head_dim,
                        packed + position / 2 * head_dim);
        }
        int used = 0;
        const auto values_at = [&](int position) {
            if (position < whole && position >= used) {
                ahead.use_rows(kLanes);
                used = position + kLanes;
            }
            return position < whole ? reinterpret_cast<const Packed*>(split.value(position)) : packed + position / 2 * head_dim;
        };
        // By parts of the split that stay in the first-level cache.
        for (int start = 0; start < split.count; start += kChunk)
            in_groups(rows.first_row(start), rows.count, [&]<int Count>(int row) {
                const auto* own = reinterpret_cast<const bf16*>(weights + row * kScoreStride);
                const int seen = rows.visible(row + Count - 1, split.count);
                const int end = std::min(start + kChunk, seen);
                float* target = mixed + row * head_dim;
                int d = 0;
                for (; d + 64 <= head_dim; d += 64) mix_rows<Count, 4>(own, start, end, head_dim, values_at, d, target + d);
                for (; d < head_dim; d += 32) mix_rows<Count, 2>(own, start, end, head_dim, values_at, d, target + d);
            });
    }

  private:
    static constexpr int kWeightStride = 2 * kScoreStride;  // in bfloat16
    static constexpr int kMostRows = 6;                     // 24 sums, 4 columns and a pair fit the 32 registers

    template <class Body>
    static void in_groups(int first, int last, Body&& body) {
        for (; first + kMostRows <= last; first += kMostRows) body.template operator()<kMostRows>(first);
        switch (last - first) {
            case 5:
                return body.template operator()<5>(first);
            case 4:
                return body.template operator()<4>(first);
            case 3:
                return body.template operator()<3>(first);
            case 2:
                return body.template operator()<2>(first);
            case 1:
                return body.template operator()<1>(first);
        }
    }
    static __m512bh pair_of(const bf16* values) {
        std::int32_t pair;
        std::memcpy(&pair, values, sizeof pair);
        return (__m512bh)_mm512_set1_epi32(pair);
    }
    // To be kept in a register: the compiler had rather load it again for each row.
    static __m512bh loaded(const Packed* from) {
        auto words = _mm512_loadu_si512(from);
        asm("" : "+v"(words));
        return (__m512bh)words;
    }
    template <int Rows, int Parts>
    static void score_rows(const Query* queries, int head_dim, const Packed* keys, float* scores) {
        __m512 sums[Rows][Parts] = {};
        for (int d = 0; d < head_dim; d += 2) {
            __m512bh columns[Parts];
            for (int part = 0; part < Parts; ++part) columns[part] = loaded(keys + d / 2 * kChunk + part * kLanes);
            for (int row = 0; row < Rows; ++row) {
                const auto pair = pair_of(queries + row * head_dim + d);
                for (int part = 0; part < Parts; ++part) sums[row][part] = _mm512_dpbf16_ps(sums[row][part], pair, columns[part]);
            }
        }
        for (int row = 0; row < Rows; ++row)
            for (int part = 0; part < Parts; ++part) _mm512_storeu_ps(scores + row * kScoreStride + part * kLanes, sums[row][part]);
    }
    // Positions [start, end) of components [d, d + 16 * Parts).
    template <int Rows, int Parts, class ValuesAt>
    static void mix_rows(const bf16* weights, int start, int end, int head_dim, ValuesAt&& values_at, int d, float* mixed) {
        __m512 totals[Rows][Parts];
        for (int row = 0; row < Rows; ++row)
            for (int part = 0; part < Parts; ++part)
                totals[row][part] = start == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(mixed + row * head_dim + part * kLanes);
        for (int first = start; first < end; first += kLanes) {
            const auto* values = values_at(first) + d;
            const bf16* own = weights + first;
            const int count = std::min(kLanes, end - first);
            for (int position = 0; position < count; position += 2, values += head_dim, own += 2) {
                __m512bh columns[Parts];
                for (int part = 0; part < Parts; ++part) columns[part] = loaded(values + part * kLanes);
                for (int row = 0; row < Rows; ++row) {
                    const auto pair = pair_of(own + row * kWeightStride);
                    for (int part = 0; part < Parts; ++part)
                        totals[row][part] = _mm512_dpbf16_ps(totals[row][part], pair, columns[part]);
                }
            }
        }
        for (int row = 0; row < Rows; ++row)
            for (int part = 0; part < Parts; ++part)
                _mm512_storeu_ps(mixed + row * head_dim + part * kLanes, totals[row][part]);
    }
};

}  // namespace headrace

#endif

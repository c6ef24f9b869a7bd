// One chunk of at most 64 positions against some rows, in three ways: float32 anywhere; bfloat16 pairs with the dot-product
// instruction; bfloat16 tiles with the matrix unit. Each has
//   load_queries  rows of head_dim -> its own layout, once for all chunks
//   score         scores[row][kChunk] = query . keys, of positions [0, count); the rest is anything
//   mix           mixed[row][head_dim] = mixed * scales[row] + weights[row] . values; weights are 0 where nothing is seen
// Both fetch what the next chunk needs into the second-level cache, bit by bit between their sums: all at once would make the
// sums wait for the memory, and afterwards the memory for the sums.
// Rows run from `first` to `last`. Positions beyond `count` are never read into a result: they may hold NaN.
#pragma once

#include "attention.h"
#include "numeric.h"
#include "tiles.h"

namespace headrace {

template <class T>
struct ChunkRows {
    const T* keys[kChunk];  // of each position
    const T* values[kChunk];
    int count;
    bool tiled;  // 16 neighbours (from a multiple of 16 on) lie one after the other, and may be read even beyond `count`
};

// Rows [begin, end) of a chunk's keys or values, as far as there are any. Blocks are too short for the processor to foresee
// the next one.
template <class T>
void fetch(const T* const* rows, int begin, int end, int count, int head_dim) {
    for (int position = begin; position < end && position < count; ++position)
        for (int d = 0; d < head_dim; d += 64 / static_cast<int>(sizeof(T))) __builtin_prefetch(rows[position] + d, 0, 2);
}

template <class T>
struct FloatChunk {
    using Query = float;
    using Weight = float;
    using Packed = float;
    static constexpr int kWeightParts = 1;

    static std::size_t query_size(int num_rows, int head_dim) { return static_cast<std::size_t>(num_rows) * head_dim; }
    static std::size_t packed_size(int head_dim) { return static_cast<std::size_t>(head_dim) * kChunk; }

    static void load_queries(const T* const* rows, int num_rows, int head_dim, Query* target) {
        for (int row = 0; row < num_rows; ++row)
            for (int d = 0; d < head_dim; d += kLanes) store(target + row * head_dim + d, load(rows[row] + d));
    }
    static void score(const Query* queries, int first, int last, const ChunkRows<T>& chunk, const ChunkRows<T>& next,
                      int head_dim, Packed* packed, float* scores) {
        fetch(next.keys, 0, kChunk, next.count, head_dim);
        for (int position = 0; position < kChunk; ++position)
            for (int d = 0; d < head_dim; ++d)
                packed[d * kChunk + position] = position < chunk.count ? to_float(chunk.keys[position][d]) : 0.0f;
        for (int row = first; row < last; ++row) {
            Floats sums[kChunk / kLanes] = {};
            for (int d = 0; d < head_dim; ++d)
                for (int part = 0; part < kChunk / kLanes; ++part)
                    sums[part] += load(packed + d * kChunk + part * kLanes) * queries[row * head_dim + d];
            for (int part = 0; part < kChunk / kLanes; ++part) store(scores + row * kChunk + part * kLanes, sums[part]);
        }
    }
    static void mix(const Weight* weights, const float* scales, int first, int last, const ChunkRows<T>& chunk,
                    const ChunkRows<T>& next, int head_dim, Packed* packed, float* mixed) {
        fetch(next.values, 0, kChunk, next.count, head_dim);
        for (int position = 0; position < chunk.count; ++position)
            for (int d = 0; d < head_dim; d += kLanes)
                store(packed + position * head_dim + d, load(chunk.values[position] + d));
        for (int row = first; row < last; ++row)
            for (int d = 0; d < head_dim; d += kLanes) {
                Floats total = load(mixed + row * head_dim + d) * scales[row];
                for (int position = 0; position < chunk.count; ++position)
                    total += load(packed + position * head_dim + d) * weights[row * kChunk + position];
                store(mixed + row * head_dim + d, total);
            }
    }
};

#ifdef HEADRACE_BF16_DOT

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

// Values as pairs of positions: [kChunk / 2][head_dim][2], zeros from `count` up to the next multiple of `step`.
inline void pack_values(const ChunkRows<bf16>& chunk, const ChunkRows<bf16>& next, int step, int head_dim,
                        std::uint32_t* packed) {
    const auto low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36,
                                      4, 35, 3, 34, 2, 33, 1, 32, 0);
    const auto high = _mm512_set_epi16(63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24, 55, 23, 54, 22, 53,
                                       21, 52, 20, 51, 19, 50, 18, 49, 17, 48, 16);
    const int end = (chunk.count + step - 1) / step * step;
    fetch(next.values, end, kChunk, next.count, head_dim);
    for (int position = 0; position < end; position += 2) {
        fetch(next.values, position, position + 2, next.count, head_dim);
        for (int d = 0; d < head_dim; d += 2 * kLanes) {
            const auto even =
                position < chunk.count ? _mm512_loadu_si512(chunk.values[position] + d) : _mm512_setzero_si512();
            const auto odd =
                position + 1 < chunk.count ? _mm512_loadu_si512(chunk.values[position + 1] + d) : _mm512_setzero_si512();
            std::uint32_t* target = packed + position / 2 * head_dim + d;
            _mm512_storeu_si512(target, _mm512_permutex2var_epi16(even, low, odd));
            _mm512_storeu_si512(target + kLanes, _mm512_permutex2var_epi16(even, high, odd));
        }
    }
}

struct PairChunk {
    using Query = bf16;
    using Weight = bf16;
    using Packed = std::uint32_t;
    // A weight is rounded and what the rounding took off: one bfloat16 number alone would be the least exact step of all.
    static constexpr int kWeightParts = 2;
    static constexpr int kWeightStride = kWeightParts * kChunk;

    static std::size_t query_size(int num_rows, int head_dim) { return static_cast<std::size_t>(num_rows) * head_dim; }
    static std::size_t packed_size(int head_dim) { return static_cast<std::size_t>(head_dim / 2) * kChunk; }

    static void load_queries(const bf16* const* rows, int num_rows, int head_dim, Query* target) {
        for (int row = 0; row < num_rows; ++row)
            std::memcpy(target + row * head_dim, rows[row], static_cast<std::size_t>(head_dim) * sizeof(bf16));
    }
    static void score(const Query* queries, int first, int last, const ChunkRows<bf16>& chunk, const ChunkRows<bf16>& next,
                      int head_dim, Packed* packed, float* scores) {
        for (int position = 0; position < kChunk; position += kLanes) {
            fetch(next.keys, position, position + kLanes, next.count, head_dim);
            for (int d = 0; position < chunk.count && d < head_dim; d += 2 * kLanes) {
                __m512i block[kLanes];
                for (int i = 0; i < kLanes; ++i)
                    block[i] = position + i < chunk.count ? _mm512_loadu_si512(chunk.keys[position + i] + d)
                                                          : _mm512_setzero_si512();
                transpose(block);
                for (int i = 0; i < kLanes; ++i)
                    _mm512_storeu_si512(packed + (d / 2 + i) * kChunk + position, block[i]);
            }
        }
        in_groups(first, last, [&]<int Rows>(int row) {
            score_rows<Rows>(queries + row * head_dim, head_dim, packed, scores + row * kChunk);
        });
    }
    static void mix(const Weight* weights, const float* scales, int first, int last, const ChunkRows<bf16>& chunk,
                    const ChunkRows<bf16>& next, int head_dim, Packed* packed, float* mixed) {
        pack_values(chunk, next, 2, head_dim, packed);
        in_groups(first, last, [&]<int Rows>(int row) {
            const bf16* own = weights + row * kWeightStride;
            float* target = mixed + row * head_dim;
            int d = 0;
            for (; d + 64 <= head_dim; d += 64)
                mix_rows<Rows, 4>(own, scales + row, chunk.count, head_dim, packed + d, target + d);
            for (; d < head_dim; d += 32)
                mix_rows<Rows, 2>(own, scales + row, chunk.count, head_dim, packed + d, target + d);
        });
    }

  private:
    template <class Body>
    static void in_groups(int first, int last, Body&& body) {
        for (; first + 4 <= last; first += 4) body.template operator()<4>(first);
        if (last - first == 3) return body.template operator()<3>(first);
        if (last - first == 2) return body.template operator()<2>(first);
        if (last - first == 1) return body.template operator()<1>(first);
    }
    static __m512bh pair_of(const bf16* values) {
        std::int32_t pair;
        std::memcpy(&pair, values, sizeof pair);
        return (__m512bh)_mm512_set1_epi32(pair);
    }
    template <int Rows>
    static void score_rows(const Query* queries, int head_dim, const Packed* keys, float* scores) {
        __m512 sums[Rows][4] = {};
        for (int d = 0; d < head_dim; d += 2) {
            __m512bh columns[4];
            for (int part = 0; part < 4; ++part)
                columns[part] = (__m512bh)_mm512_loadu_si512(keys + d / 2 * kChunk + part * kLanes);
            for (int row = 0; row < Rows; ++row) {
                const auto pair = pair_of(queries + row * head_dim + d);
                for (int part = 0; part < 4; ++part) sums[row][part] = _mm512_dpbf16_ps(sums[row][part], pair, columns[part]);
            }
        }
        for (int row = 0; row < Rows; ++row)
            for (int part = 0; part < 4; ++part) _mm512_storeu_ps(scores + row * kChunk + part * kLanes, sums[row][part]);
    }
    template <int Rows, int Parts>
    static void mix_rows(const Weight* weights, const float* scales, int count, int head_dim, const Packed* values,
                         float* mixed) {
        __m512 totals[Rows][Parts];
        for (int row = 0; row < Rows; ++row)
            for (int part = 0; part < Parts; ++part)
                totals[row][part] =
                    _mm512_mul_ps(_mm512_loadu_ps(mixed + row * head_dim + part * kLanes), _mm512_set1_ps(scales[row]));
        for (int position = 0; position < count; position += 2) {
            __m512bh columns[Parts];
            for (int part = 0; part < Parts; ++part)
                columns[part] = (__m512bh)_mm512_loadu_si512(values + position / 2 * head_dim + part * kLanes);
            for (int row = 0; row < Rows; ++row) {
                const auto pair = pair_of(weights + row * kWeightStride + position);
                const auto rest = pair_of(weights + row * kWeightStride + kChunk + position);
                for (int part = 0; part < Parts; ++part) {
                    totals[row][part] = _mm512_dpbf16_ps(totals[row][part], pair, columns[part]);
                    totals[row][part] = _mm512_dpbf16_ps(totals[row][part], rest, columns[part]);
                }
            }
        }
        for (int row = 0; row < Rows; ++row)
            for (int part = 0; part < Parts; ++part)
                _mm512_storeu_ps(mixed + row * head_dim + part * kLanes, totals[row][part]);
    }
};

#endif

#ifdef HEADRACE_AMX

// Scores are computed transposed, keys times queries: keys then are read as they lie in the cache.
struct MatrixChunk {
    using Query = bf16;  // [16 rows][head_dim / 2][16][2]: pairs of components
    using Weight = bf16;
    using Packed = std::uint32_t;
    // A weight is rounded and what the rounding took off: one bfloat16 number alone would be the least exact step of all.
    static constexpr int kWeightParts = 2;
    static constexpr int kWeightStride = kWeightParts * kChunk;

    static std::size_t query_size(int num_rows, int head_dim) {
        return static_cast<std::size_t>(num_rows + 15) / 16 * 16 * head_dim;
    }
    static std::size_t packed_size(int head_dim) { return static_cast<std::size_t>(head_dim / 2) * kChunk; }

    static void load_queries(const bf16* const* rows, int num_rows, int head_dim, Query* target) {
        for (int first = 0; first < num_rows; first += 16)
            for (int d = 0; d < head_dim; d += 2 * kLanes) {
                __m512i block[kLanes];
                for (int i = 0; i < kLanes; ++i)
                    block[i] = first + i < num_rows ? _mm512_loadu_si512(rows[first + i] + d) : _mm512_setzero_si512();
                transpose(block);
                for (int i = 0; i < kLanes; ++i)
                    _mm512_storeu_si512(target + first * head_dim + (d / 2 + i) * 2 * kLanes, block[i]);
            }
    }
    static void score(const Query* queries, int first, int last, const ChunkRows<bf16>& chunk, const ChunkRows<bf16>& next,
                      int head_dim, Packed* packed, float* scores) {
        bf16* copied = reinterpret_cast<bf16*>(packed);
        if (!chunk.tiled)
            for (int position = 0; position < chunk.count; ++position)
                std::memcpy(copied + position * head_dim, chunk.keys[position],
                            static_cast<std::size_t>(head_dim) * sizeof(bf16));
        for (int row = first / 16 * 16; row < last; row += 16) {
            const int num_rows = last - row < 16 ? last - row : 16;
            shape_tiles(num_rows);
            for (int position = 0; position < kChunk; position += 16) {
                if (row == first / 16 * 16) fetch(next.keys, position, position + 16, next.count, head_dim);
                if (position >= chunk.count) continue;
                const bf16* keys = chunk.tiled ? chunk.keys[position] : copied + position * head_dim;
                _tile_zero(0);
                for (int d = 0; d < head_dim; d += 32) {
                    _tile_loadd(1, keys + d, head_dim * 2);
                    _tile_loadd(2, queries + row * head_dim + d * 16, 64);
                    _tile_dpbf16ps(0, 1, 2);
                }
                alignas(64) float block[16][16];
                if (num_rows <= 4) {
                    _tile_stored(0, block, 16);
                    spread_four(block[0], scores + row * kChunk + position, num_rows);
                } else {
                    _tile_stored(0, block, 64);
                    __m512i words[16];
                    for (int i = 0; i < 16; ++i) words[i] = _mm512_load_si512(block[i]);
                    transpose(words);
                    for (int i = 0; i < num_rows; ++i)
                        _mm512_storeu_si512(scores + (row + i) * kChunk + position, words[i]);
                }
            }
        }
    }
    static void mix(const Weight* weights, const float* scales, int first, int last, const ChunkRows<bf16>& chunk,
                    const ChunkRows<bf16>& next, int head_dim, Packed* packed, float* mixed) {
        pack_values(chunk, next, 32, head_dim, packed);
        for (int row = first; row < last; ++row)
            for (int d = 0; d < head_dim; d += kLanes)
                store(mixed + row * head_dim + d, load(mixed + row * head_dim + d) * scales[row]);
        for (int row = first; row < last; row += 16) {
            shape_tiles(last - row < 16 ? last - row : 16);
            for (int d = 0; d < head_dim; d += 32) {
                float* target = mixed + row * head_dim + d;
                _tile_loadd(6, target, head_dim * 4);
                _tile_loadd(7, target + 16, head_dim * 4);
                for (int position = 0; position < chunk.count; position += 32) {
                    const auto* values = packed + position / 2 * head_dim + d;
                    const auto* own = weights + row * kWeightStride + position;
                    _tile_loadd(3, own, kWeightStride * 2);
                    _tile_loadd(4, values, head_dim * 4);
                    _tile_dpbf16ps(6, 3, 4);
                    _tile_loadd(5, values + 16, head_dim * 4);
                    _tile_dpbf16ps(7, 3, 5);
                    _tile_loadd(3, own + kChunk, kWeightStride * 2);
                    _tile_dpbf16ps(6, 3, 4);
                    _tile_dpbf16ps(7, 3, 5);
                }
                _tile_stored(6, target, head_dim * 4);
                _tile_stored(7, target + 16, head_dim * 4);
            }
        }
    }

  private:
    // Scores: 0 = 1 (keys) times 2 (queries). Mix: 6 and 7 += 3 (weights) times 4 and 5 (values).
    static void shape_tiles(int num_rows) {
        const int purpose = 1000 + num_rows;
        if (tiles_shaped_for == purpose) return;
        TileShape shape;
        shape.set(0, 16, num_rows * 4);
        shape.set(1, 16, 64);
        shape.set(2, 16, num_rows * 4);
        shape.set(3, num_rows, 64);
        shape.set(4, 16, 64);
        shape.set(5, 16, 64);
        shape.set(6, num_rows, 64);
        shape.set(7, num_rows, 64);
        _tile_loadconfig(&shape);
        tiles_shaped_for = purpose;
    }
    // block [16 positions][4 rows] -> scores[row][16 positions]
    static void spread_four(const float* block, float* scores, int num_rows) {
        const auto a = _mm512_load_ps(block), b = _mm512_load_ps(block + 16);
        const auto c = _mm512_load_ps(block + 32), d = _mm512_load_ps(block + 48);
        for (int row = 0; row < num_rows; ++row) {
            const auto picked = _mm512_add_epi32(
                _mm512_set_epi32(28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8, 4, 0), _mm512_set1_epi32(row));
            const auto low = _mm512_permutex2var_ps(a, picked, b);
            const auto high = _mm512_permutex2var_ps(c, picked, d);
            _mm512_storeu_ps(scores + row * kChunk, _mm512_mask_blend_ps(0xff00, low, high));
        }
    }
};

#endif

}  // namespace headrace

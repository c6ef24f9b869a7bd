// One split of at most 256 positions against some rows, in three ways: float32 anywhere; bfloat16 pairs with the dot-product
// instruction; bfloat16 tiles with the matrix unit. Each has
//   load_queries  rows of head_dim -> its own layout, once for all splits
//   score         scores[row][kScoreStride] = query . keys, of all positions; the rest is anything
//   put           weights of 32 positions from `at` on into what was a row of scores; kInPlace: not beyond the scores of the
//                 same positions
//   kept          what `put` keeps of weights; their total is of that, so that a large weight's rounding cancels out
//   mix           mixed[row][head_dim] = weights[row] . values; weights are 0 where nothing is seen
// Score and mix tell Ahead how many keys and values they use. Rows that see nothing of a split may get anything. Positions
// beyond the split's are never read into a result: they may hold NaN.
#pragma once

#include <algorithm>

#include "ahead.h"
#include "attention.h"
#include "numeric.h"

namespace headrace {

constexpr int kAheadStep = 4;  // Ahead is told of so many values at a time; of keys, of kLanes
constexpr int kScoreStride = kSplit + kLanes;  // not a power of 2, whose multiples share few places of the cache

// One head's keys and values.
template <class T>
struct KeysValues {
    const T* const* rows;  // of each position
    std::int64_t to_key;   // from there to the key and the value
    std::int64_t to_value;
    int count;
    bool tiled;  // 16 neighbours (from a multiple of 16 on) lie one after the other, and may be read even beyond `count`
    bool paired;  // values lie in pairs of positions (pages.h); `tiled` as well then

    const T* key(int position) const { return rows[position] + to_key; }
    // If values are paired, of an even position only: its pair.
    const T* value(int position) const { return rows[position] + to_value; }

    // At most kChunk positions.
    KeysValues chunk(int first) const {
        return {rows + first, to_key, to_value, count - first < kChunk ? count - first : kChunk, tiled, paired};
    }
};

// Rows of queries, and what they see of a split: query i positions up to and with `first` + i.
struct Rows {
    int count;
    int group;  // so many rows in a row are of the same query
    int first;  // may lie outside the split

    int visible(int row, int num_positions) const { return std::clamp(first + row / group + 1, 0, num_positions); }
    // Rows before it see nothing from the position on.
    int first_row(int position) const { return std::max(0, position - first) * group; }
    // So many weights of a row are read, or fewer: those that its neighbours in a tile see, in whole chunks.
    int weights(int row, int num_positions) const {
        const int seen = visible(std::min(row | (kLanes - 1), count - 1), num_positions);
        return std::min((seen + kChunk - 1) / kChunk * kChunk, num_positions);
    }
};

template <class T>
struct FloatChunk {
    using Query = float;
    using Packed = float;
    static constexpr bool kInPlace = true;

    static std::size_t query_size(int num_rows, int head_dim) { return static_cast<std::size_t>(num_rows) * head_dim; }
    static std::size_t packed_size(int head_dim) { return static_cast<std::size_t>(head_dim) * kChunk; }

    static void load_queries(const T* const* rows, int num_rows, int head_dim, Query* target) {
        for (int row = 0; row < num_rows; ++row)
            for (int d = 0; d < head_dim; d += kLanes) store(target + row * head_dim + d, load(rows[row] + d));
    }
    static void score(const Query* queries, const Rows& rows, const KeysValues<T>& split, Ahead<T>& ahead, int head_dim,
                      Packed* packed, float* scores) {
        for (int start = 0; start < split.count; start += kChunk) {
            const auto chunk = split.chunk(start);
            for (int position = 0; position < kChunk; ++position) {
                if (position % kLanes == 0 && position < chunk.count) ahead.use_rows(kLanes);
                for (int d = 0; d < head_dim; ++d)
                    packed[d * kChunk + position] = position < chunk.count ? to_float(chunk.key(position)[d]) : 0.0f;
            }
            for (int row = rows.first_row(start); row < rows.count; ++row) {
                Floats sums[kChunk / kLanes] = {};
                for (int d = 0; d < head_dim; ++d)
                    for (int part = 0; part < kChunk / kLanes; ++part)
                        sums[part] += load(packed + d * kChunk + part * kLanes) * queries[row * head_dim + d];
                for (int part = 0; part < kChunk / kLanes; ++part)
                    store(scores + row * kScoreStride + start + part * kLanes, sums[part]);
            }
        }
    }
    static Floats kept(Floats weights) { return weights; }
    static void put(Floats first, Floats second, float* row, int at) {
        store(row + at, first);
        store(row + at + kLanes, second);
    }
    static void mix(const float* weights, const Rows& rows, const KeysValues<T>& split, Ahead<T>& ahead, int head_dim,
                    Packed* packed, float* mixed) {
        for (int start = 0; start < split.count; start += kChunk) {
            const auto chunk = split.chunk(start);
            for (int position = 0; position < chunk.count; ++position) {
                if (position % kAheadStep == 0) ahead.use_rows(kAheadStep);
                float* target = packed + position * head_dim;
                if (chunk.paired) {
                    const T* pairs = chunk.value(position - position % 2) + position % 2;
                    for (int d = 0; d < head_dim; ++d) target[d] = to_float(pairs[2 * d]);
                } else {
                    for (int d = 0; d < head_dim; d += kLanes) store(target + d, load(chunk.value(position) + d));
                }
            }
            for (int row = rows.first_row(start); row < rows.count; ++row)
                for (int d = 0; d < head_dim; d += kLanes) {
                    const float* own = weights + row * kScoreStride + start;
                    Floats total = start == 0 ? splat(0.0f) : load(mixed + row * head_dim + d);
                    for (int position = 0; position < chunk.count; ++position)
                        total += load(packed + position * head_dim + d) * own[position];
                    store(mixed + row * head_dim + d, total);
                }
        }
    }
};

}  // namespace headrace

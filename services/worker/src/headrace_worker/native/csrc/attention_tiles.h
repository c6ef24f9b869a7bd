// A split by the matrix unit (attention_chunk.h says what it has to do).
#pragma once

#include "attention_pairs.h"
#include "tiles.h"

#ifdef HEADRACE_AMX

namespace headrace {

// Few rows, as when a sequence decodes: scores are computed transposed, keys times queries, since keys then are read as they
// lie in the cache. For many rows keys are transposed once, and scores come out as they are needed. Either way a score is the
// same sum, and so is what is mixed: of rounded weights and of what the rounding took off, which are added in the end.
struct MatrixChunk {
    using Query = bf16;  // few rows: [head_dim / 2][16][2], pairs of components; many: [rows][head_dim]
    using Packed = std::uint32_t;
    static constexpr bool kInPlace = false;

    static std::size_t query_size(int num_rows, int head_dim) {
        return static_cast<std::size_t>(num_rows + 15) / 16 * 16 * head_dim;
    }
    static std::size_t packed_size(int head_dim) {
        return std::max(static_cast<std::size_t>(head_dim / 2) * kChunk, static_cast<std::size_t>(kWidth / 2) * kSplit);
    }

    static void load_queries(const bf16* const* rows, int num_rows, int head_dim, Query* target) {
        if (num_rows > kFew) return PairChunk::load_queries(rows, num_rows, head_dim, target);
        for (int d = 0; d < head_dim; d += 2 * kLanes) {
            __m512i block[kLanes];
            for (int i = 0; i < kLanes; ++i)
                block[i] = i < num_rows ? _mm512_loadu_si512(rows[i] + d) : _mm512_setzero_si512();
            transpose(block);
            for (int i = 0; i < kLanes; ++i) _mm512_storeu_si512(target + (d / 2 + i) * 2 * kLanes, block[i]);
        }
    }

    static void score(const Query* queries, const Rows& rows, const KeysValues<bf16>& split, Ahead<bf16>& ahead,
                      int head_dim, Packed* packed, float* scores) {
        if (rows.count > kFew)
            score_many(queries, rows, split, ahead, head_dim, packed, scores);
        else
            score_few(queries, rows.count, split, ahead, head_dim, reinterpret_cast<bf16*>(packed), scores);
    }

    static Floats kept(Floats weights) { return weights; }
    // What each weight is rounded to, and what the rounding took off: one bfloat16 number alone would be the least exact step
    // of all.
    static void put(Floats first, Floats second, float* row, int at) {
        auto* halves = reinterpret_cast<bf16*>(row) + at;
        store(halves, first);
        store(halves + kLanes, second);
        store(halves + kToRest, first - rounded<bf16>(first));
        store(halves + kToRest + kLanes, second - rounded<bf16>(second));
    }

    static void mix(const float* weights, const Rows& rows, const KeysValues<bf16>& split, Ahead<bf16>& ahead, int head_dim,
                    Packed* packed, float* mixed) {
        const auto* halves = reinterpret_cast<const bf16*>(weights);
        for (int d = 0; d < head_dim; d += kWidth) {
            const int width = std::min(kWidth, head_dim - d);
            if (rows.count > kFew)
                mix_many(halves, rows, split, ahead, head_dim, d, width, packed, mixed + d);
            else
                mix_few(halves, rows.count, split, ahead, head_dim, d, width, packed, mixed + d);
        }
    }

  private:
    static constexpr int kFew = 8;  // with their rests the rows of a tile
    static constexpr int kWidth = 64;  // components that are mixed at a time
    static constexpr int kToRest = kScoreStride;  // of a row of weights, in bfloat16: the rows of a tile lie as far apart
    static constexpr int kStep = 2 * kLanes;  // positions of a tile of packed values

    static void score_few(const Query* queries, int num_rows, const KeysValues<bf16>& split, Ahead<bf16>& ahead, int head_dim,
                          bf16* copied, float* scores) {
        shape_tiles(-num_rows, [&](TileShape& shape) {
            for (int tile : {0, 1, 2}) shape.set(tile, 16, num_rows * 4);
            for (int tile : {6, 7}) shape.set(tile, 16, 64);
        });
        const bool is_small = head_dim == 64;
        if (is_small) {
            _tile_loadd(1, queries, 64);
            _tile_loadd(2, queries + 32 * 16, 64);
        }
        for (int position = 0; position < split.count; position += 16) {
            ahead.use_rows(16);
            const bf16* keys = split.key(position);
            if (!split.tiled) {
                for (int i = 0; i < 16 && position + i < split.count; ++i)
                    std::memcpy(copied + i * head_dim, split.key(position + i),
                                static_cast<std::size_t>(head_dim) * sizeof(bf16));
                keys = copied;
            }
            _tile_zero(0);
            if (is_small) {
                _tile_loadd(6, keys, 64 * 2);
                _tile_dpbf16ps(0, 6, 1);
                _tile_loadd(7, keys + 32, 64 * 2);
                _tile_dpbf16ps(0, 7, 2);
            } else {
                for (int d = 0; d < head_dim; d += 32) {
                    _tile_loadd(6, keys + d, head_dim * 2);
                    _tile_loadd(1, queries + d * 16, 64);
                    _tile_dpbf16ps(0, 6, 1);
                }
            }
            alignas(64) float block[16][16];
            if (num_rows <= 4) {
                _tile_stored(0, block, 16);
                spread_four(block[0], scores + position, num_rows);
            } else {
                _tile_stored(0, block, 64);
                __m512i words[16];
                for (int i = 0; i < 16; ++i) words[i] = _mm512_load_si512(block[i]);
                transpose(words);
                for (int i = 0; i < num_rows; ++i) _mm512_storeu_si512(scores + i * kScoreStride + position, words[i]);
            }
        }
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
            _mm512_storeu_ps(scores + row * kScoreStride, _mm512_mask_blend_ps(0xff00, low, high));
        }
    }

    static void score_many(const Query* queries, const Rows& rows, const KeysValues<bf16>& split, Ahead<bf16>& ahead,
                           int head_dim, Packed* packed, float* scores) {
        for (int start = 0; start < split.count; start += kChunk) {
            const auto chunk = split.chunk(start);
            for (int position = 0; position < chunk.count; position += 16) {
                ahead.use_rows(16);
                pack_keys(chunk, position, head_dim, packed + position * (head_dim / 2), 16);
            }
            for (int row = rows.first_row(start) / 16 * 16; row < rows.count; row += 16) {
                shape_for_many(rows.count - row);
                for (int position = 0; position < chunk.count; position += 16) {
                    _tile_zero(0);
                    for (int d = 0; d < head_dim; d += 32) {
                        _tile_loadd(4, queries + row * head_dim + d, head_dim * 2);
                        _tile_loadd(6, packed + position * (head_dim / 2) + d / 2 * 16, 64);
                        _tile_dpbf16ps(0, 4, 6);
                    }
                    _tile_stored(0, scores + row * kScoreStride + start + position, kScoreStride * 4);
                }
            }
        }
    }

    // Where a step's values lie in pairs, and how many bytes from one pair to the next.
    struct Pairs {
        const void* first;
        std::int64_t stride;
    };

    // Of a head whose values are paired in the cache; only where its positions end within a block they are packed.
    class CachedPairs {
      public:
        CachedPairs(const KeysValues<bf16>& split, int head_dim, int d, int width, Packed* packed)
            : split_(split), whole_(split.count / kLanes * kLanes), d_(d), stride_(head_dim * 4), rest_{packed, width * 4} {
            if (whole_ < split.count) pack_values(split, whole_, whole_ + kLanes, d, width, packed);
        }
        Pairs at(int position) const {
            return position < whole_ ? Pairs{split_.value(position) + 2 * d_, stride_} : rest_;
        }

      private:
        const KeysValues<bf16>& split_;
        int whole_;
        int d_;
        std::int64_t stride_;
        Pairs rest_;
    };

    // Rounded weights and rests are rows of one tile.
    static void mix_few(const bf16* weights, int num_rows, const KeysValues<bf16>& split, Ahead<bf16>& ahead, int head_dim,
                        int d, int width, Packed* packed, float* mixed) {
        const int step = step_of(split);
        shape_tiles(-100 - num_rows - step, [&](TileShape& shape) {
            for (int tile : {0, 1, 2, 3}) shape.set(tile, 2 * num_rows, 64);
            shape.set(4, 2 * num_rows, 2 * step);
            for (int tile : {6, 7}) shape.set(tile, step / 2, 64);
        });
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        const auto add = [&](int position, Pairs values) {
            const auto* first = static_cast<const std::uint32_t*>(values.first);
            _tile_loadd(4, weights + position, kToRest * 2);
            _tile_loadd(6, first, values.stride);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, first + 16, values.stride);
            _tile_dpbf16ps(1, 4, 7);
            if (width < kWidth) return;
            _tile_loadd(6, first + 32, values.stride);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, first + 48, values.stride);
            _tile_dpbf16ps(3, 4, 7);
        };
        if (split.paired) {
            const CachedPairs pairs(split, head_dim, d, width, packed);
            for (int position = 0; position < split.count; position += step) {
                ahead.use(step * width * 2);
                add(position, pairs.at(position));
            }
        } else {
            const auto pack = [&](int position, Packed* target) {
                ahead.use(step * width * 2);
                pack_values(split, position, position + step, d, width, target);
            };
            // A step early, into one of four places: what has just been stored cannot be loaded into a tile at once.
            const auto place = [&](int position) { return packed + position / kStep % 4 * (kStep / 2 * kWidth); };
            pack(0, place(0));
            for (int position = 0; position < split.count; position += step) {
                if (position + step < split.count) pack(position + step, place(position + step));
                add(position, {place(position), width * 4});
            }
        }
        alignas(64) float sums[2 * kFew][kWidth];
        _tile_stored(0, sums[0], kWidth * 4);
        _tile_stored(1, sums[0] + 16, kWidth * 4);
        if (width == kWidth) {
            _tile_stored(2, sums[0] + 32, kWidth * 4);
            _tile_stored(3, sums[0] + 48, kWidth * 4);
        }
        for (int row = 0; row < num_rows; ++row)
            for (int i = 0; i < width; i += kLanes)
                headrace::store(mixed + row * head_dim + i, load(sums[2 * row] + i) + load(sums[2 * row + 1] + i));
    }

    static void mix_many(const bf16* weights, const Rows& rows, const KeysValues<bf16>& split, Ahead<bf16>& ahead,
                         int head_dim, int d, int width, Packed* packed, float* mixed) {
        const int step = step_of(split);
        if (split.paired) {
            const CachedPairs pairs(split, head_dim, d, width, packed);
            int used = 0;
            return mix_tiles(weights, rows, split, head_dim, width, mixed, [&](int position) {
                if (position >= used) {
                    ahead.use(step * width * 2);
                    used = position + step;
                }
                return pairs.at(position);
            });
        }
        for (int position = 0; position < split.count; position += step) {
            ahead.use(step * width * 2);
            pack_values(split, position, position + step, d, width, packed + position / 2 * width);
        }
        mix_tiles(weights, rows, split, head_dim, width, mixed, [&](int position) {
            return Pairs{packed + position / 2 * width, width * 4};
        });
    }

    // values_at(position): the Pairs of a step.
    template <class ValuesAt>
    static void mix_tiles(const bf16* weights, const Rows& rows, const KeysValues<bf16>& split, int head_dim, int width,
                          float* mixed, ValuesAt&& values_at) {
        const int step = step_of(split);
        for (int row = 0; row < rows.count; row += 16) {
            const int num_rows = std::min(16, rows.count - row);
            const int seen = rows.visible(row + num_rows - 1, split.count);
            const bf16* own = weights + row * 2 * kScoreStride;
            shape_for_many(num_rows, step);
            for (int i = 0; i < width; i += 32) {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
                for (int position = 0; position < seen; position += step) {
                    const Pairs values = values_at(position);
                    const auto* first = static_cast<const std::uint32_t*>(values.first) + i;
                    _tile_loadd(4, own + position, kScoreStride * 4);
                    _tile_loadd(6, first, values.stride);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_loadd(7, first + 16, values.stride);
                    _tile_dpbf16ps(1, 4, 7);
                    _tile_loadd(5, own + kToRest + position, kScoreStride * 4);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
                alignas(64) float sums[2][16][32];
                for (int side = 0; side < 2; ++side) {
                    if (side == 0) {
                        _tile_stored(0, sums[0][0], 128);
                        _tile_stored(1, sums[0][0] + 16, 128);
                    } else {
                        _tile_stored(2, sums[1][0], 128);
                        _tile_stored(3, sums[1][0] + 16, 128);
                    }
                }
                for (int k = 0; k < num_rows; ++k)
                    for (int lane = 0; lane < 32; lane += kLanes)
                        headrace::store(mixed + (row + k) * head_dim + i + lane,
                                        load(sums[0][k] + lane) + load(sums[1][k] + lane));
            }
        }
    }

    // Positions of a tile: as many as lie one after the other. The same for few rows and for many, since a product of two
    // tiles is summed up before it is added.
    static int step_of(const KeysValues<bf16>& split) { return split.paired ? kLanes : kStep; }

    // Sums: 0 to 3; what is multiplied: 4 and 5 (rows) times 6 and 7.
    static void shape_for_many(int num_rows, int step = kStep) {
        const int count = std::min(num_rows, 16);
        shape_tiles(1000 * step + count, [&](TileShape& shape) {
            for (int tile : {0, 1, 2, 3}) shape.set(tile, count, 64);
            for (int tile : {4, 5}) shape.set(tile, count, 2 * step);
            for (int tile : {6, 7}) shape.set(tile, step / 2, 64);
        });
    }

    template <class Fill>
    static void shape_tiles(int purpose, Fill&& fill) {
        if (tiles_shaped_for == purpose) return;
        TileShape shape;
        fill(shape);
        _tile_loadconfig(&shape);
        tiles_shaped_for = purpose;
    }
};

}  // namespace headrace

#endif

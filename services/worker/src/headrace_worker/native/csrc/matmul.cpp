#include "matmul.h"

namespace headrace {
namespace {

// Weights are asked for this many inputs ahead of their use, in the next panel when this one ends: all streams of a panel
// start anew there, too soon for the processor to see them coming.
constexpr int kInputsAhead = 128;
constexpr int kInputsNear = 64;  // the same for weights that come from the second-level cache

// What to ask for when the weights of `input` are used: a distance from the tile's first weight.
inline std::int64_t ahead_of(int input, int num_inputs) {
    const int ahead = input + kInputsAhead;
    if (ahead < num_inputs) return static_cast<std::int64_t>(ahead) * kTile;
    return (static_cast<std::int64_t>(kPanelTiles) * num_inputs + ahead - num_inputs) * kTile;
}

inline std::uint32_t pair_at(const bf16* x) {
    std::uint32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    return pair;
}

template <int Rows, int Tiles>
void multiply_block(const bf16* x, std::int64_t stride, const bf16* weights, int num_inputs,
                    [[maybe_unused]] bool streamed, float* products) {
    const int num_pairs = num_inputs / 2;
#ifdef HEADRACE_BF16_DOT
    __m512 sums[Rows][Tiles];
    for (auto& row : sums)
        for (auto& value : row) value = _mm512_setzero_ps();
    for (int pair = 0; pair < num_pairs; ++pair) {
        __m512bh columns[Tiles];
        const auto ahead = ahead_of(2 * pair, num_inputs);
        for (int tile = 0; tile < Tiles; ++tile) {
            const bf16* column = weights + static_cast<std::int64_t>(tile) * num_inputs * kTile;
            if (streamed) __builtin_prefetch(column + ahead);
            columns[tile] = (__m512bh)_mm512_loadu_si512(column + pair * 2 * kTile);
        }
        for (int row = 0; row < Rows; ++row) {
            const auto inputs = (__m512bh)_mm512_set1_epi32(static_cast<int>(pair_at(x + row * stride + 2 * pair)));
            for (int tile = 0; tile < Tiles; ++tile)
                sums[row][tile] = _mm512_dpbf16_ps(sums[row][tile], inputs, columns[tile]);
        }
    }
    for (int row = 0; row < Rows; ++row)
        for (int tile = 0; tile < Tiles; ++tile)
            _mm512_storeu_ps(products + row * kPanel + tile * kTile, sums[row][tile]);
#else
    Floats sums[Rows][Tiles] = {};
    for (int pair = 0; pair < num_pairs; ++pair) {
        for (int tile = 0; tile < Tiles; ++tile) {
            Words columns;
            std::memcpy(&columns, weights + (static_cast<std::int64_t>(tile) * num_pairs + pair) * 2 * kTile,
                        sizeof columns);
            const Floats first = std::bit_cast<Floats>(columns << 16);
            const Floats second = std::bit_cast<Floats>(columns & 0xffff0000u);
            for (int row = 0; row < Rows; ++row) {
                const auto inputs = pair_at(x + row * stride + 2 * pair);
                sums[row][tile] += first * std::bit_cast<float>(inputs << 16);
                sums[row][tile] += second * std::bit_cast<float>(inputs & 0xffff0000u);
            }
        }
    }
    for (int row = 0; row < Rows; ++row)
        for (int tile = 0; tile < Tiles; ++tile) store(products + row * kPanel + tile * kTile, sums[row][tile]);
#endif
}

template <int Rows>
void multiply_rows(const bf16* x, std::int64_t stride, const bf16* weights, int num_inputs, int num_tiles,
                   bool streamed, float* products) {
    switch (num_tiles) {
        case 1:
            return multiply_block<Rows, 1>(x, stride, weights, num_inputs, streamed, products);
        case 2:
            return multiply_block<Rows, 2>(x, stride, weights, num_inputs, streamed, products);
        case 3:
            return multiply_block<Rows, 3>(x, stride, weights, num_inputs, streamed, products);
        default:
            return multiply_block<Rows, 4>(x, stride, weights, num_inputs, streamed, products);
    }
}

#ifdef HEADRACE_BF16_DOT
constexpr int kVectorRows = 6;  // 24 sums, 4 columns and a pair of inputs fit the 32 registers
#else
constexpr int kVectorRows = 2;
#endif

void multiply_vectors(const bf16* x, std::int64_t stride, int num_rows, const bf16* weights, int num_inputs,
                      int num_tiles, bool streamed, float* products) {
    switch (num_rows) {
        case 1:
            return multiply_rows<1>(x, stride, weights, num_inputs, num_tiles, streamed, products);
#ifdef HEADRACE_BF16_DOT
        case 2:
            return multiply_rows<2>(x, stride, weights, num_inputs, num_tiles, streamed, products);
        case 3:
            return multiply_rows<3>(x, stride, weights, num_inputs, num_tiles, streamed, products);
        case 4:
            return multiply_rows<4>(x, stride, weights, num_inputs, num_tiles, streamed, products);
        case 5:
            return multiply_rows<5>(x, stride, weights, num_inputs, num_tiles, streamed, products);
#endif
        default:
            return multiply_rows<kVectorRows>(x, stride, weights, num_inputs, num_tiles, streamed, products);
    }
}

#ifdef HEADRACE_AMX

// Tiles 0-3 hold sums: rows [0, 16) times columns 0 and 1, rows [16, 32) times columns 0 and 1; for at most 16 rows,
// columns 0-3. Tiles 4 and 5 hold inputs, 6 and 7 weights.
void shape_tiles(int num_rows) {
    if (tiles_shaped_for == num_rows) return;
    TileShape shape;
    const int upper = num_rows < 16 ? num_rows : 16;
    const int lower = num_rows > 16 ? num_rows - 16 : upper;
    const int rows[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
    for (int tile = 0; tile < 8; ++tile) shape.set(tile, rows[tile], 64);
    _tile_loadconfig(&shape);
    tiles_shaped_for = num_rows;
}

inline void prefetch_tile(const bf16* tile) {
    for (int line = 0; line < 16; ++line) __builtin_prefetch(tile + 32 * line);
}

// At most 16 rows: up to four tiles of outputs.
template <int Tiles>
void multiply_short(const bf16* x, std::int64_t stride, const bf16* weights, int num_inputs, bool streamed,
                    float* products) {
    const std::int64_t tile_size = static_cast<std::int64_t>(num_inputs) * kTile;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int input = 0; input < num_inputs; input += kInputStep) {
        const bf16* columns = weights + static_cast<std::int64_t>(input) * kTile;
        if (streamed) {
            const bf16* ahead = weights + ahead_of(input, num_inputs);
            for (int tile = 0; tile < Tiles; ++tile) prefetch_tile(ahead + tile * tile_size);
        }
        _tile_loadd(4, x + input, stride * 2);
        _tile_loadd(6, columns, 64);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (Tiles > 1) {
            _tile_loadd(7, columns + tile_size, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (Tiles > 2) {
            _tile_loadd(6, columns + 2 * tile_size, 64);
            _tile_dpbf16ps(2, 4, 6);
        }
        if constexpr (Tiles > 3) {
            _tile_loadd(7, columns + 3 * tile_size, 64);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    _tile_stored(0, products, kPanel * 4);
    if constexpr (Tiles > 1) _tile_stored(1, products + kTile, kPanel * 4);
    if constexpr (Tiles > 2) _tile_stored(2, products + 2 * kTile, kPanel * 4);
    if constexpr (Tiles > 3) _tile_stored(3, products + 3 * kTile, kPanel * 4);
}

// 17 to 32 rows: one or two tiles of outputs.
template <int Tiles>
void multiply_tall(const bf16* x, std::int64_t stride, const bf16* weights, int num_inputs, bool streamed,
                   float* products) {
    const std::int64_t tile_size = static_cast<std::int64_t>(num_inputs) * kTile;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int input = 0; input < num_inputs; input += kInputStep) {
        const bf16* columns = weights + static_cast<std::int64_t>(input) * kTile;
        const bf16* ahead = streamed ? weights + ahead_of(input, num_inputs) : columns + kInputsNear * kTile;
        for (int tile = 0; tile < Tiles; ++tile) prefetch_tile(ahead + tile * tile_size);
        _tile_loadd(6, columns, 64);
        _tile_loadd(4, x + input, stride * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, x + 16 * stride + input, stride * 2);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (Tiles > 1) {
            _tile_loadd(7, columns + tile_size, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    float* lower = products + 16 * kPanel;
    _tile_stored(0, products, kPanel * 4);
    _tile_stored(2, lower, kPanel * 4);
    if constexpr (Tiles > 1) {
        _tile_stored(1, products + kTile, kPanel * 4);
        _tile_stored(3, lower + kTile, kPanel * 4);
    }
}

void multiply_matrices(const bf16* x, std::int64_t stride, int num_rows, const bf16* weights, int num_inputs,
                       int num_tiles, bool streamed, float* products) {
    shape_tiles(num_rows);
    if (num_rows <= 16) {
        switch (num_tiles) {
            case 1:
                return multiply_short<1>(x, stride, weights, num_inputs, streamed, products);
            case 2:
                return multiply_short<2>(x, stride, weights, num_inputs, streamed, products);
            case 3:
                return multiply_short<3>(x, stride, weights, num_inputs, streamed, products);
            default:
                return multiply_short<4>(x, stride, weights, num_inputs, streamed, products);
        }
    }
    const std::int64_t tile_size = static_cast<std::int64_t>(num_inputs) * kTile;
    for (int tile = 0; tile < num_tiles; tile += 2) {
        const bf16* columns = weights + tile * tile_size;
        if (tile + 1 < num_tiles)
            multiply_tall<2>(x, stride, columns, num_inputs, streamed, products + tile * kTile);
        else
            multiply_tall<1>(x, stride, columns, num_inputs, streamed, products + tile * kTile);
    }
}

#endif

}  // namespace

const char* matmul_kind() {
#ifdef HEADRACE_AMX
    if (has_matrix_unit) return "amx";
#endif
#ifdef HEADRACE_BF16_DOT
    return "avx512_bf16";
#else
    return "portable";
#endif
}

int rows_at_once(int num_rows) {
#ifdef HEADRACE_AMX
    if (has_matrix_unit) return num_rows < 32 ? num_rows : 32;
#endif
    return num_rows < kVectorRows ? num_rows : kVectorRows;
}

void multiply(const bf16* x, std::int64_t stride, int num_rows, const bf16* weights, int num_inputs, int num_tiles,
              bool streamed, float* products) {
#ifdef HEADRACE_AMX
    if (has_matrix_unit)
        return multiply_matrices(x, stride, num_rows, weights, num_inputs, num_tiles, streamed, products);
#endif
    multiply_vectors(x, stride, num_rows, weights, num_inputs, num_tiles, streamed, products);
}

void pack(const bf16* weights, std::int64_t num_outputs, std::int64_t num_inputs, bf16* packed) {
    const auto num_tiles = (num_outputs + kTile - 1) / kTile;
    for (std::int64_t tile = 0; tile < num_tiles; ++tile) {
        for (int output = 0; output < kTile; ++output) {
            const auto row = tile * kTile + output;
            bf16* target = packed + tile * num_inputs * kTile + output * 2;
            for (std::int64_t pair = 0; pair < num_inputs / 2; ++pair, target += 2 * kTile) {
                target[0] = row < num_outputs ? weights[row * num_inputs + 2 * pair] : bf16{0};
                target[1] = row < num_outputs ? weights[row * num_inputs + 2 * pair + 1] : bf16{0};
            }
        }
    }
}

}  // namespace headrace

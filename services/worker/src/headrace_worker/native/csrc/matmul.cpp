#include "matmul.h"

namespace headrace {
namespace {

// Bytes ahead of the multiplication that weights are asked for: each one is read once and comes from memory.
constexpr int kPrefetch = 4096;

inline std::uint32_t pair_at(const bf16* x) {
    std::uint32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    return pair;
}

template <int Rows, int Tiles>
void multiply_block(const bf16* x, std::int64_t stride, const bf16* weights, int num_inputs, float* products) {
    const int num_pairs = num_inputs / 2;
#ifdef HEADRACE_BF16_DOT
    __m512 sums[Rows][Tiles];
    for (auto& row : sums)
        for (auto& value : row) value = _mm512_setzero_ps();
    for (int pair = 0; pair < num_pairs; ++pair) {
        __m512bh columns[Tiles];
        for (int tile = 0; tile < Tiles; ++tile) {
            const bf16* source = weights + (static_cast<std::int64_t>(tile) * num_pairs + pair) * 2 * kTile;
            if constexpr (Rows == 1) __builtin_prefetch(reinterpret_cast<const char*>(source) + kPrefetch);
            columns[tile] = (__m512bh)_mm512_loadu_si512(source);
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
                   float* products) {
    switch (num_tiles) {
        case 1:
            return multiply_block<Rows, 1>(x, stride, weights, num_inputs, products);
        case 2:
            return multiply_block<Rows, 2>(x, stride, weights, num_inputs, products);
        case 3:
            return multiply_block<Rows, 3>(x, stride, weights, num_inputs, products);
        default:
            return multiply_block<Rows, 4>(x, stride, weights, num_inputs, products);
    }
}

#ifdef HEADRACE_BF16_DOT
constexpr int kVectorRows = 6;  // 24 sums, 4 columns and a pair of inputs fit the 32 registers
#else
constexpr int kVectorRows = 2;
#endif

void multiply_vectors(const bf16* x, std::int64_t stride, int num_rows, const bf16* weights, int num_inputs,
                      int num_tiles, float* products) {
    switch (num_rows) {
        case 1:
            return multiply_rows<1>(x, stride, weights, num_inputs, num_tiles, products);
#ifdef HEADRACE_BF16_DOT
        case 2:
            return multiply_rows<2>(x, stride, weights, num_inputs, num_tiles, products);
        case 3:
            return multiply_rows<3>(x, stride, weights, num_inputs, num_tiles, products);
        case 4:
            return multiply_rows<4>(x, stride, weights, num_inputs, num_tiles, products);
        case 5:
            return multiply_rows<5>(x, stride, weights, num_inputs, num_tiles, products);
#endif
        default:
            return multiply_rows<kVectorRows>(x, stride, weights, num_inputs, num_tiles, products);
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
    for (int line = 0; line < 16; ++line) __builtin_prefetch(reinterpret_cast<const char*>(tile) + kPrefetch + 64 * line);
}

constexpr int kStepSize = kInputStep * kTile;  // elements of a tile for one step of inputs

void multiply_short(const bf16* x, std::int64_t stride, int num_rows, const bf16* weights, int num_inputs,
                    int num_tiles, float* products) {
    shape_tiles(num_rows);
    const std::int64_t tile_size = static_cast<std::int64_t>(num_inputs) * kTile;
    const bf16* columns[kPanelTiles];
    for (int tile = 0; tile < kPanelTiles; ++tile) columns[tile] = weights + (tile < num_tiles ? tile : 0) * tile_size;
    const auto row_bytes = stride * 2;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int step = 0; step < num_inputs / kInputStep; ++step) {
        const std::int64_t offset = static_cast<std::int64_t>(step) * kStepSize;
        _tile_loadd(4, x + step * kInputStep, row_bytes);
        prefetch_tile(columns[0] + offset);
        _tile_loadd(6, columns[0] + offset, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (num_tiles > 1) {
            prefetch_tile(columns[1] + offset);
            _tile_loadd(7, columns[1] + offset, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (num_tiles > 2) {
            prefetch_tile(columns[2] + offset);
            _tile_loadd(6, columns[2] + offset, 64);
            _tile_dpbf16ps(2, 4, 6);
        }
        if (num_tiles > 3) {
            prefetch_tile(columns[3] + offset);
            _tile_loadd(7, columns[3] + offset, 64);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    _tile_stored(0, products, kPanel * 4);
    if (num_tiles > 1) _tile_stored(1, products + kTile, kPanel * 4);
    if (num_tiles > 2) _tile_stored(2, products + 2 * kTile, kPanel * 4);
    if (num_tiles > 3) _tile_stored(3, products + 3 * kTile, kPanel * 4);
}

template <bool Two>
void multiply_tall(const bf16* x, std::int64_t stride, const bf16* weights, int num_inputs, float* products) {
    const std::int64_t tile_size = static_cast<std::int64_t>(num_inputs) * kTile;
    const auto row_bytes = stride * 2;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int step = 0; step < num_inputs / kInputStep; ++step) {
        const std::int64_t offset = static_cast<std::int64_t>(step) * kStepSize;
        _tile_loadd(6, weights + offset, 64);
        _tile_loadd(4, x + step * kInputStep, row_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, x + 16 * stride + step * kInputStep, row_bytes);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (Two) {
            _tile_loadd(7, weights + tile_size + offset, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    float* lower = products + 16 * kPanel;
    _tile_stored(0, products, kPanel * 4);
    _tile_stored(2, lower, kPanel * 4);
    if constexpr (Two) {
        _tile_stored(1, products + kTile, kPanel * 4);
        _tile_stored(3, lower + kTile, kPanel * 4);
    }
}

void multiply_matrices(const bf16* x, std::int64_t stride, int num_rows, const bf16* weights, int num_inputs,
                       int num_tiles, float* products) {
    if (num_rows <= 16) return multiply_short(x, stride, num_rows, weights, num_inputs, num_tiles, products);
    shape_tiles(num_rows);
    const std::int64_t tile_size = static_cast<std::int64_t>(num_inputs) * kTile;
    for (int tile = 0; tile < num_tiles; tile += 2) {
        const bf16* columns = weights + tile * tile_size;
        if (tile + 1 < num_tiles)
            multiply_tall<true>(x, stride, columns, num_inputs, products + tile * kTile);
        else
            multiply_tall<false>(x, stride, columns, num_inputs, products + tile * kTile);
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
              float* products) {
#ifdef HEADRACE_AMX
    if (has_matrix_unit) return multiply_matrices(x, stride, num_rows, weights, num_inputs, num_tiles, products);
#endif
    multiply_vectors(x, stride, num_rows, weights, num_inputs, num_tiles, products);
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

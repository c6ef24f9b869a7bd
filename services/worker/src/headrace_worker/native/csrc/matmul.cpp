#include "matmul.h"

#include "team.h"
#include "weight_blocks.h"

namespace headrace {
namespace {

inline std::uint32_t pair_at(const bf16* x) {
    std::uint32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    return pair;
}

template <int Rows, int Tiles, class Blocks>
void multiply_block(const bf16* x, std::int64_t stride, Blocks& blocks, int num_inputs, float* products) {
#ifdef HEADRACE_BF16_DOT
    __m512 sums[Rows][Tiles];
    for (auto& row : sums)
        for (auto& value : row) value = _mm512_setzero_ps();
#else
    Floats sums[Rows][Tiles] = {};
#endif
    for (int step = 0; step < num_inputs / kInputStep; ++step, x += kInputStep) {
        blocks.template prepare<Tiles>(step);
        const bf16* columns_of[Tiles];
        for (int tile = 0; tile < Tiles; ++tile) columns_of[tile] = blocks.block(tile, step);
        for (int pair = 0; pair < kInputStep / 2; ++pair) {
            blocks.template ask<Tiles, Rows>(pair);
#ifdef HEADRACE_BF16_DOT
            __m512bh columns[Tiles];
            for (int tile = 0; tile < Tiles; ++tile)
                columns[tile] = (__m512bh)_mm512_loadu_si512(columns_of[tile] + pair * 2 * kTile);
            for (int row = 0; row < Rows; ++row) {
                const auto inputs = (__m512bh)_mm512_set1_epi32(static_cast<int>(pair_at(x + row * stride + 2 * pair)));
                for (int tile = 0; tile < Tiles; ++tile)
                    sums[row][tile] = _mm512_dpbf16_ps(sums[row][tile], inputs, columns[tile]);
            }
#else
            for (int tile = 0; tile < Tiles; ++tile) {
                Words columns;
                std::memcpy(&columns, columns_of[tile] + pair * 2 * kTile, sizeof columns);
                const Floats first = std::bit_cast<Floats>(columns << 16);
                const Floats second = std::bit_cast<Floats>(columns & 0xffff0000u);
                for (int row = 0; row < Rows; ++row) {
                    const auto inputs = pair_at(x + row * stride + 2 * pair);
                    sums[row][tile] += first * std::bit_cast<float>(inputs << 16);
                    sums[row][tile] += second * std::bit_cast<float>(inputs & 0xffff0000u);
                }
            }
#endif
        }
    }
    for (int row = 0; row < Rows; ++row)
        for (int tile = 0; tile < Tiles; ++tile) {
            float* target = products + row * kPanel + tile * kTile;
#ifdef HEADRACE_BF16_DOT
            _mm512_storeu_ps(target, sums[row][tile]);
#else
            store(target, sums[row][tile]);
#endif
        }
}

template <int Rows, class Blocks>
void multiply_rows(const bf16* x, std::int64_t stride, Blocks& blocks, int num_inputs, int num_tiles, float* products) {
    switch (num_tiles) {
        case 1:
            return multiply_block<Rows, 1>(x, stride, blocks, num_inputs, products);
        case 2:
            return multiply_block<Rows, 2>(x, stride, blocks, num_inputs, products);
        case 3:
            return multiply_block<Rows, 3>(x, stride, blocks, num_inputs, products);
        default:
            return multiply_block<Rows, 4>(x, stride, blocks, num_inputs, products);
    }
}

#ifdef HEADRACE_BF16_DOT
constexpr int kVectorRows = 6;  // 24 sums, 4 columns and a pair of inputs fit the 32 registers
constexpr int kStreamRows = 16;
#else
constexpr int kVectorRows = 2;
constexpr int kStreamRows = 2;
#endif

// Calls body.operator()<num_rows>() for 1 <= num_rows <= Most.
template <int Most, class Body>
void with_rows(int num_rows, Body&& body) {
    if constexpr (Most > 1)
        if (num_rows < Most) return with_rows<Most - 1>(num_rows, body);
    body.template operator()<Most>();
}

// Few rows read weights once, in the order in which they lie: no other order gets as much from the memory.
template <class Blocks>
void multiply_stream(const bf16* x, std::int64_t stride, int num_rows, PackedWeights weights, int num_inputs, int num_tiles,
                     float* products) {
    for (int tile = 0; tile < num_tiles; ++tile, weights.data += weights.tile_bytes(num_inputs)) {
        Blocks blocks(weights, num_inputs, {true});
        with_rows<kStreamRows>(num_rows, [&]<int Rows> {
            multiply_block<Rows, 1>(x, stride, blocks, num_inputs, products + tile * kTile);
        });
    }
}

template <class Blocks>
void multiply_vectors(const bf16* x, std::int64_t stride, int num_rows, PackedWeights weights, int num_inputs,
                      int num_tiles, const Access& access, float* products) {
    Blocks blocks(weights, num_inputs, access);
    with_rows<kVectorRows>(
        num_rows, [&]<int Rows> { multiply_rows<Rows>(x, stride, blocks, num_inputs, num_tiles, products); });
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

template <int Tiles, class Blocks>
void prepare_and_ask(Blocks& blocks, int step) {
    blocks.template prepare<Tiles>(step);
    for (int pair = 0; pair < kInputStep / 2; ++pair) blocks.template ask<Tiles, 16>(pair);
}

// After so many steps of `num_steps` a bit is done of what is done aside.
int steps_aside(int num_steps) { return num_steps < Aside::kBits ? 1 : num_steps / Aside::kBits; }

// At most 16 rows: up to four tiles of outputs.
template <int Tiles, class Blocks>
void multiply_short(const bf16* x, std::int64_t stride, Blocks& blocks, int num_inputs, float* products,
                    const Aside& aside) {
    const int num_steps = num_inputs / kInputStep;
    const int every = steps_aside(num_steps);
    int due = every;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    prepare_and_ask<Tiles>(blocks, 0);
    for (int step = 0; step < num_steps; ++step) {
        // A step early: what has just been stored cannot be loaded into a tile at once.
        if (step + 1 < num_steps) prepare_and_ask<Tiles>(blocks, step + 1);
        _tile_loadd(4, x + step * kInputStep, stride * 2);
        _tile_loadd(6, blocks.block(0, step), 64);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (Tiles > 1) {
            _tile_loadd(7, blocks.block(1, step), 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (Tiles > 2) {
            _tile_loadd(6, blocks.block(2, step), 64);
            _tile_dpbf16ps(2, 4, 6);
        }
        if constexpr (Tiles > 3) {
            _tile_loadd(7, blocks.block(3, step), 64);
            _tile_dpbf16ps(3, 4, 7);
        }
        if (--due == 0) {
            aside();
            due = every;
        }
    }
    _tile_stored(0, products, kPanel * 4);
    if constexpr (Tiles > 1) _tile_stored(1, products + kTile, kPanel * 4);
    if constexpr (Tiles > 2) _tile_stored(2, products + 2 * kTile, kPanel * 4);
    if constexpr (Tiles > 3) _tile_stored(3, products + 3 * kTile, kPanel * 4);
}

// 17 to 32 rows: one or two tiles of outputs.
template <int Tiles, class Blocks>
void multiply_tall(const bf16* x, std::int64_t stride, Blocks& blocks, int num_inputs, float* products, int num_turns,
                   const Aside& aside) {
    const int num_steps = num_inputs / kInputStep;
    const int every = steps_aside(num_steps * num_turns);
    int due = every;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    prepare_and_ask<Tiles>(blocks, 0);
    for (int step = 0; step < num_steps; ++step) {
        if (step + 1 < num_steps) prepare_and_ask<Tiles>(blocks, step + 1);
        _tile_loadd(6, blocks.block(0, step), 64);
        _tile_loadd(4, x + step * kInputStep, stride * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, x + 16 * stride + step * kInputStep, stride * 2);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (Tiles > 1) {
            _tile_loadd(7, blocks.block(1, step), 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        if (--due == 0) {
            aside();
            due = every;
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

template <class Blocks>
void multiply_matrices(const bf16* x, std::int64_t stride, int num_rows, PackedWeights weights, int num_inputs,
                       int num_tiles, const Access& access, float* products, const Aside& aside) {
    shape_tiles(num_rows);
    if (num_rows <= 16) {
        Blocks blocks(weights, num_inputs, access);
        switch (num_tiles) {
            case 1:
                return multiply_short<1>(x, stride, blocks, num_inputs, products, aside);
            case 2:
                return multiply_short<2>(x, stride, blocks, num_inputs, products, aside);
            case 3:
                return multiply_short<3>(x, stride, blocks, num_inputs, products, aside);
            default:
                return multiply_short<4>(x, stride, blocks, num_inputs, products, aside);
        }
    }
    const int num_turns = (num_tiles + 1) / 2;
    for (int turn = 0; turn < num_turns; ++turn) {
        const int tile = 2 * turn;
        Blocks blocks({weights.data + tile * weights.tile_bytes(num_inputs), weights.format}, num_inputs,
                      access.part(turn, num_turns));
        if (tile + 1 < num_tiles)
            multiply_tall<2>(x, stride, blocks, num_inputs, products + tile * kTile, num_turns, aside);
        else
            multiply_tall<1>(x, stride, blocks, num_inputs, products + tile * kTile, num_turns, aside);
    }
}

#endif

template <class Blocks>
void multiply_with(const bf16* x, std::int64_t stride, int num_rows, PackedWeights weights, int num_inputs, int num_tiles,
                   const Access& access, float* products, [[maybe_unused]] const Aside& aside) {
#ifdef HEADRACE_AMX
    if (has_matrix_unit)
        return multiply_matrices<Blocks>(x, stride, num_rows, weights, num_inputs, num_tiles, access, products, aside);
#endif
    if (access.streamed)
        return multiply_stream<typename Blocks::Stream>(x, stride, num_rows, weights, num_inputs, num_tiles, products);
    multiply_vectors<Blocks>(x, stride, num_rows, weights, num_inputs, num_tiles, access, products);
}

template <class Block>
void decode_all(PackedWeights weights, std::int64_t num_blocks, bf16* target) {
    const auto* blocks = reinterpret_cast<const Block*>(weights.data);
    for (std::int64_t index = 0; index < num_blocks; ++index) {
        prefetch_lines(blocks + index + 8, sizeof(Block));
        decode_block(blocks[index], target + index * kBlock);
    }
}

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
    if (num_rows <= kStreamRows) return num_rows;
    const int num_turns = (num_rows + kVectorRows - 1) / kVectorRows;
    return (num_rows + num_turns - 1) / num_turns;
}

void multiply(const bf16* x, std::int64_t stride, int num_rows, PackedWeights weights, int num_inputs, int num_tiles,
              const Access& access, float* products, const Aside& aside) {
    switch (weights.format) {
        case Format::int8:
            return multiply_with<CodedBlocks<Int8Block>>(x, stride, num_rows, weights, num_inputs, num_tiles, access,
                                                         products, aside);
        case Format::int4:
            return multiply_with<CodedBlocks<Int4Block>>(x, stride, num_rows, weights, num_inputs, num_tiles, access,
                                                         products, aside);
        default:
            return multiply_with<PlainBlocks>(x, stride, num_rows, weights, num_inputs, num_tiles, access, products, aside);
    }
}

PackedWeights decoded(PackedWeights weights, int num_inputs, int num_tiles) {
    thread_local Scratch scratch;
    const auto num_blocks = static_cast<std::int64_t>(num_inputs / kInputStep) * num_tiles;
    bf16* target = scratch.get<bf16>(static_cast<std::size_t>(num_blocks) * kBlock);
    if (weights.format == Format::int8)
        decode_all<Int8Block>(weights, num_blocks, target);
    else
        decode_all<Int4Block>(weights, num_blocks, target);
    return {reinterpret_cast<const std::byte*>(target), Format::bf16};
}

void pack_tiles(const bf16* weights, std::int64_t num_outputs, std::int64_t num_inputs, std::int64_t first_tile,
                std::int64_t last_tile, bf16* packed) {
    for (auto tile = first_tile; tile < last_tile; ++tile)
        for (std::int64_t input = 0; input < num_inputs; input += kInputStep) {
            std::uint32_t block[kInputStep / 2][kTile] = {};
            for (int output = 0; output < kTile && tile * kTile + output < num_outputs; ++output) {
                const bf16* row = weights + (tile * kTile + output) * num_inputs + input;
                for (int pair = 0; pair < kInputStep / 2; ++pair) block[pair][output] = pair_at(row + 2 * pair);
            }
            std::memcpy(packed + (tile * num_inputs + input) * kTile, block, sizeof block);
        }
}

}  // namespace headrace

// Weights in 8 or 4 bits, in blocks of 32 inputs x 16 outputs that become bfloat16 blocks of a packed matrix.
//
// A block's values are scale * code (8 bits, codes from -127 to 127) or scale * code + minimum (4 bits, codes from 0 to 15),
// with one scale and minimum for each output; this is what Q8_0 and Q4_1 of GGUF say. Values are rounded to bfloat16 before
// they are multiplied, for one row as for many, so that a product does not depend on the number of rows.
#pragma once

#include <cstddef>

#include "numeric.h"

namespace headrace {

constexpr int kTile = 16;       // outputs of a tile
constexpr int kInputStep = 32;  // inputs of a block
constexpr int kBlock = kTile * kInputStep;

enum class Format : std::int32_t { bf16 = 0, int8 = 1, int4 = 2 };

// As they lie in memory. Words hold codes of one output each:
//   8 bits  word p / 2: bytes of inputs 2 p, 2 p + 1, 2 p + 2, 2 p + 3 for even p, each code + 128
//   4 bits  word p / 4: the low half has those of inputs 2 p, 2 p + 2, 2 p + 4, 2 p + 6, the high half of the odd ones
struct Int8Block {
    std::uint32_t codes[kInputStep / 4][kTile];
    std::uint16_t scales[kTile];  // IEEE half
};
struct Int4Block {
    std::uint32_t codes[kInputStep / 8][kTile];
    std::uint16_t scales[kTile];
    std::uint16_t minimums[kTile];
};

constexpr std::int64_t block_bytes(Format format) {
    switch (format) {
        case Format::int8:
            return sizeof(Int8Block);
        case Format::int4:
            return sizeof(Int4Block);
        default:
            return kBlock * sizeof(bf16);
    }
}

// target: [kInputStep / 2][kTile][2]
void decode_block(const Int8Block& block, bf16* target);
void decode_block(const Int4Block& block, bf16* target);

}  // namespace headrace

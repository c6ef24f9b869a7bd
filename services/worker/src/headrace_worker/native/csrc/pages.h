// How keys and values lie in a layer's pages: [block][keys, values][kv head][position in block][head_dim], as KVCache has
// them. Only values in bfloat16, in blocks of a multiple of 16 positions, lie in pairs of positions, [position / 2][head_dim]
// [2]: so products with them take them, and packing them for each step of a decode would take as long as the sums.
#pragma once

#include "numeric.h"

namespace headrace {

struct AttentionShape {
    int num_heads;
    int num_kv_heads;
    int head_dim;
    int block_size;
    float scale;
};

// Whether 16 neighbours, from a multiple of 16 on, lie in one block.
inline bool is_tiled(const AttentionShape& shape) { return shape.block_size % kLanes == 0; }

template <class T>
bool has_pairs(const AttentionShape& shape) {
    return sizeof(T) == sizeof(bf16) && is_tiled(shape);
}

// Puts 16 components of a token, from `component` on, to its keys (kv_head < num_kv_heads) or values (from there on). `slot`:
// the row of head_dim elements that its first key goes to.
template <class T>
void put_cached(T* pages, const AttentionShape& shape, std::int64_t slot, int kv_head, int component, Floats part) {
    const auto row = slot + static_cast<std::int64_t>(kv_head) * shape.block_size;
    if constexpr (sizeof(T) == sizeof(bf16))
        if (kv_head >= shape.num_kv_heads && has_pairs<T>(shape)) {
            const bool is_second = row % 2;
            return store_alternate(pages + (row - is_second) * shape.head_dim + 2 * component, is_second, part);
        }
    store(pages + row * shape.head_dim + component, part);
}

}  // namespace headrace

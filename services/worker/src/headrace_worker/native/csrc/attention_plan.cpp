#include <algorithm>

#include "attention.h"

namespace headrace {
namespace {

// Keys and values of a split, of all heads of an item: with the ones that are fetched meanwhile they have to stay in the
// second-level cache.
constexpr int kSplitBytes = 256 << 10;

int num_splits(int num_positions) { return (num_positions + kSplit - 1) / kSplit; }

std::int64_t cost(const AttentionItem& item) {
    return static_cast<std::int64_t>(item.last_split - item.first_split) * item.num_heads() * (item.num_queries + 4);
}

// Key-value heads of an item of so many queries. They lie beside each other in the cache.
int heads_together(const AttentionShape& shape, int num_queries) {
    const int by_rows = kTileRows / (num_queries * (shape.num_heads / shape.num_kv_heads));
    const int by_bytes = kSplitBytes / (2 * kSplit * shape.head_dim * 2);
    return std::max(1, std::min({by_rows, by_bytes, kMostHeads, shape.num_kv_heads}));
}

// Items of the same queries, one after the other: also what they read lies beside each other.
bool are_together(const AttentionItem& a, const AttentionItem& b) {
    return a.sequence == b.sequence && a.first_query == b.first_query;
}

}  // namespace

void plan_attention(const AttentionShape& shape, const Sequences& sequences, int num_threads, AttentionPlan& plan) {
    const int group = shape.num_heads / shape.num_kv_heads;
    const int tile = std::max(1, kTileRows / group);
    plan.items.clear();
    plan.groups.clear();
    plan.merges.clear();
    plan.num_partials = 0;
    plan.partial_rows = std::max(kTileRows, group);
    int num_tiles = 0;
    for (int sequence = 0; sequence < sequences.count; ++sequence)
        num_tiles += (sequences.query_starts[sequence + 1] - sequences.query_starts[sequence] + tile - 1) / tile;
    // With few tiles, splits are what the threads share; with many, partial results would be wasted work.
    const bool divided = num_threads > 1 && num_tiles * shape.num_kv_heads < 8 * num_threads;
    const bool together = !divided && num_tiles >= 8 * num_threads;
    for (int sequence = 0; sequence < sequences.count; ++sequence) {
        const int num_queries = sequences.query_starts[sequence + 1] - sequences.query_starts[sequence];
        for (int first = 0; first < num_queries; first += tile) {
            const int count = std::min(tile, num_queries - first);
            const int positions = sequences.context_lengths[sequence] - num_queries + first + count;
            const int splits = num_splits(positions);
            const int heads = together ? heads_together(shape, count) : 1;
            for (int head = 0; head < shape.num_kv_heads; head += heads) {
                AttentionItem item{sequence, head, std::min(head + heads, shape.num_kv_heads), first, count, 0, splits, -1};
                if (!divided || splits == 1) {
                    plan.items.push_back(item);
                    continue;
                }
                item.partial = static_cast<int>(plan.num_partials);
                plan.merges.push_back(item);
                for (int split = 0; split < splits; ++split) {
                    AttentionItem piece = item;
                    piece.first_split = split;
                    piece.last_split = split + 1;
                    piece.partial = item.partial + split;
                    plan.items.push_back(piece);
                }
                plan.num_partials += splits;
            }
        }
    }
    std::stable_sort(plan.items.begin(), plan.items.end(),
                     [](const AttentionItem& a, const AttentionItem& b) { return cost(a) > cost(b); });
    const int num_items = static_cast<int>(plan.items.size());
    for (int i = 0; i < num_items; ++i)
        if (i == 0 || !together || !are_together(plan.items[i - 1], plan.items[i])) plan.groups.push_back(i);
    plan.groups.push_back(num_items);
}

}  // namespace headrace

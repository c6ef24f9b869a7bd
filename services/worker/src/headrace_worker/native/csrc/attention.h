// Causal attention of a mixed batch over paged keys and values.
//
// The unit is a row: one query of one head. Positions are taken in chunks of 64 at fixed places of the sequence, chunks are
// summed up within splits of 256, and splits are merged in order. Every step of this is done row by row in the same way
// wherever the row is, so its result depends on nothing else in the batch: not on how queries are tiled, nor on whether
// splits were computed by one thread or several.
#pragma once

#include <cstdint>
#include <vector>

#include "pages.h"
#include "team.h"

namespace headrace {

constexpr int kChunk = 64;
constexpr int kSplit = 4 * kChunk;
constexpr int kTileRows = 48;  // queries of a tile times heads of a key-value head, at most (if there is more than one query)
constexpr int kMostHeads = 4;  // key-value heads of an item

struct Sequences {
    int count;
    const std::int32_t* query_starts;     // [count + 1]: rows of the flat batch
    const std::int32_t* context_lengths;  // [count]: positions up to and with the last query
    const std::int32_t* block_table;      // [count, table_stride]
    std::int64_t table_stride;
};

// One piece of work: some queries of a sequence, some key-value heads, some splits.
struct AttentionItem {
    int sequence;
    int first_head;
    int last_head;
    int first_query;
    int num_queries;
    int first_split;
    int last_split;
    int partial;  // slot of the first split's partial result; -1: the item covers all splits and writes the output itself

    int num_heads() const { return last_head - first_head; }
};

// That the item's last query sees.
inline int num_positions(const Sequences& sequences, const AttentionItem& item) {
    const int all = sequences.query_starts[item.sequence + 1] - sequences.query_starts[item.sequence];
    return sequences.context_lengths[item.sequence] - all + item.first_query + item.num_queries;
}

struct AttentionPlan {
    std::vector<AttentionItem> items;   // costly ones first
    std::vector<int> groups;            // a thread takes items [groups[i], groups[i + 1]) in a row
    std::vector<AttentionItem> merges;  // partial results to put together, one for each divided (sequence, kv head, tile)
    std::int64_t num_partials = 0;
    int partial_rows = 0;
};

void plan_attention(const AttentionShape& shape, const Sequences& sequences, int num_threads, AttentionPlan& plan);

inline std::int64_t partials_size(const AttentionShape& shape, const AttentionPlan& plan) {
    return plan.num_partials * plan.partial_rows * (shape.head_dim + 2);
}

// queries: row r of the batch at queries + r * query_stride, [num_heads, head_dim]; output: the same at
// output + r * output_stride.
// To be called by every thread of the team; `next` counts groups and merges out and starts at {0, 0}. On return every item is
// taken; the caller waits before it reads the output.
template <class T>
void attend(Team& team, const AttentionShape& shape, const Sequences& sequences, const AttentionPlan& plan,
            const T* queries, std::int64_t query_stride, const T* pages, T* output, std::int64_t output_stride, float* partials,
            std::atomic<int>* next);

}  // namespace headrace

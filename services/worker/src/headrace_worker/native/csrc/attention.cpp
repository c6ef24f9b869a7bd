#include "attention.h"

#include <algorithm>

#include "attention_chunk.h"
#include "numeric.h"

namespace headrace {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

int num_splits(int num_positions) { return (num_positions + kSplit - 1) / kSplit; }

// Running softmax of some rows: mixed values [rows][head_dim], greatest score and sum of weights [rows].
struct Sums {
    float* mixed;
    float* greatest;
    float* total;

    void clear(int num_rows, int head_dim) const {
        std::fill_n(mixed, static_cast<std::size_t>(num_rows) * head_dim, 0.0f);
        std::fill_n(greatest, num_rows, kNothing);
        std::fill_n(total, num_rows, 0.0f);
    }
};

// Adds a later split's sums of one row to those before it. Never inlined: two copies could round differently.
[[gnu::noinline]] void merge_row(const Sums& all, const Sums& split, int row, int head_dim) {
    if (split.total[row] == 0.0f) return;
    const float greatest = std::max(all.greatest[row], split.greatest[row]);
    const float old_scale = exp2(splat(all.greatest[row] - greatest))[0];
    const float new_scale = exp2(splat(split.greatest[row] - greatest))[0];
    float* mixed = all.mixed + static_cast<std::int64_t>(row) * head_dim;
    const float* added = split.mixed + static_cast<std::int64_t>(row) * head_dim;
    for (int d = 0; d < head_dim; d += kLanes) store(mixed + d, load(mixed + d) * old_scale + load(added + d) * new_scale);
    all.total[row] = all.total[row] * old_scale + split.total[row] * new_scale;
    all.greatest[row] = greatest;
}

// Hands out parts of a piece of memory.
class Arena {
  public:
    explicit Arena(std::byte* memory) : memory_(memory) {}

    template <class T>
    T* take(std::size_t count) {
        auto* taken = reinterpret_cast<T*>(memory_ + used_);
        used_ += (count * sizeof(T) + 63) / 64 * 64;
        return taken;
    }
    std::size_t used() const { return used_; }

  private:
    std::byte* memory_;
    std::size_t used_ = 0;
};

int most_rows(const AttentionShape& shape) { return std::max(kTileRows, shape.num_heads / shape.num_kv_heads); }

template <class T, class Chunk>
class Worker {
  public:
    Worker(const AttentionShape& shape, const Sequences& sequences, const T* queries, std::int64_t query_stride,
           const T* pages, T* output, float* partials, int partial_rows, std::byte* memory)
        : shape_(shape),
          sequences_(sequences),
          queries_(queries),
          query_stride_(query_stride),
          pages_(pages),
          output_(output),
          partials_(partials),
          partial_rows_(partial_rows),
          group_(shape.num_heads / shape.num_kv_heads) {
        Arena arena(memory);
        const int rows = most_rows(shape);
        const auto size = static_cast<std::size_t>(rows);
        const auto dim = static_cast<std::size_t>(shape.head_dim);
        own_queries_ = arena.take<typename Chunk::Query>(Chunk::query_size(rows, shape.head_dim));
        packed_ = arena.take<typename Chunk::Packed>(Chunk::packed_size(shape.head_dim));
        scores_ = arena.take<float>(size * kChunk);
        weights_ = arena.take<typename Chunk::Weight>(size * kChunk * Chunk::kWeightParts);
        scales_ = arena.take<float>(size);
        query_rows_ = arena.take<const T*>(size);
        for (Sums* sums : {&all_, &split_}) *sums = {arena.take<float>(size * dim), arena.take<float>(size), arena.take<float>(size)};
        used_ = arena.used();
    }

    static std::size_t scratch_size(const AttentionShape& shape) {
        return Worker(shape, {}, nullptr, 0, nullptr, nullptr, nullptr, 0, nullptr).used_;
    }

    // `after`: what this thread runs next; null: nothing.
    void run(const AttentionItem& item, const AttentionItem* after) {
        const int start = sequences_.query_starts[item.sequence];
        const int num_rows = item.num_queries * group_;
        const int end = std::min(num_positions(item), item.last_split * kSplit);
        first_position_ = num_positions(item) - item.num_queries;
        for (int row = 0; row < num_rows; ++row)
            query_rows_[row] = queries_ + (start + item.first_query + row / group_) * query_stride_ +
                               (item.kv_head * group_ + row % group_) * shape_.head_dim;
        Chunk::load_queries(query_rows_, num_rows, shape_.head_dim, own_queries_);
        if (item.partial < 0) all_.clear(num_rows, shape_.head_dim);
        ChunkRows<T> chunk = locate(item, item.first_split * kSplit);
        for (int split = item.first_split; split < item.last_split; ++split) {
            const Sums sums = item.partial < 0 ? split_ : partial(item.partial + split - item.first_split);
            sums.clear(num_rows, shape_.head_dim);
            for (int first = split * kSplit; first < std::min(end, (split + 1) * kSplit); first += kChunk) {
                ChunkRows<T> next;
                next.count = 0;
                if (first + kChunk < end)
                    next = locate(item, first + kChunk);
                else if (after)
                    next = locate(*after, after->first_split * kSplit);
                add_chunk(chunk, next, first, num_rows, sums);
                chunk = next;
            }
            if (item.partial < 0)
                for (int row = 0; row < num_rows; ++row) merge_row(all_, split_, row, shape_.head_dim);
        }
        if (item.partial < 0) write(item, num_rows);
    }

    void merge(const AttentionItem& item) {
        const int num_rows = item.num_queries * group_;
        all_.clear(num_rows, shape_.head_dim);
        for (int split = item.first_split; split < item.last_split; ++split)
            for (int row = 0; row < num_rows; ++row)
                merge_row(all_, partial(item.partial + split), row, shape_.head_dim);
        write(item, num_rows);
    }

  private:
    // That the item's last query sees.
    int num_positions(const AttentionItem& item) const {
        const int all = sequences_.query_starts[item.sequence + 1] - sequences_.query_starts[item.sequence];
        return sequences_.context_lengths[item.sequence] - all + item.first_query + item.num_queries;
    }

    Sums partial(int slot) const {
        float* base = partials_ + static_cast<std::int64_t>(slot) * partial_rows_ * (shape_.head_dim + 2);
        float* greatest = base + static_cast<std::int64_t>(partial_rows_) * shape_.head_dim;
        return {base, greatest, greatest + partial_rows_};
    }

    // Where positions [start, start + kChunk) lie, as far as the item's last query sees them.
    ChunkRows<T> locate(const AttentionItem& item, int start) const {
        const int dim = shape_.head_dim;
        ChunkRows<T> chunk;
        chunk.count = std::min(kChunk, num_positions(item) - start);
        chunk.tiled = shape_.block_size % kLanes == 0;
        const std::int32_t* block =
            sequences_.block_table + item.sequence * sequences_.table_stride + start / shape_.block_size;
        const auto part_size = static_cast<std::int64_t>(shape_.num_kv_heads) * shape_.block_size * dim;
        int offset = start % shape_.block_size;
        for (int position = 0; position < chunk.count; ++block, offset = 0) {
            const T* keys = pages_ + *block * 2 * part_size +
                            (static_cast<std::int64_t>(item.kv_head) * shape_.block_size + offset) * dim;
            const int end = std::min(chunk.count, position + shape_.block_size - offset);
            for (; position < end; ++position, keys += dim) {
                chunk.keys[position] = keys;
                chunk.values[position] = keys + part_size;
            }
        }
        return chunk;
    }

    void add_chunk(const ChunkRows<T>& chunk, const ChunkRows<T>& next, int start, int num_rows, const Sums& sums) {
        const int dim = shape_.head_dim;
        const int first_row = std::max(0, start - first_position_) * group_;  // rows before it see nothing of the chunk
        Chunk::score(own_queries_, first_row, num_rows, chunk, next, dim, packed_, scores_);
        for (int row = first_row; row < num_rows; ++row)
            weigh(row, std::min(kChunk, first_position_ + row / group_ + 1 - start), sums);
        Chunk::mix(weights_, scales_, first_row, num_rows, chunk, next, dim, packed_, sums.mixed);
    }

    // Scores of one row to weights, of which the first `visible` are not 0.
    void weigh(int row, int visible, const Sums& sums) {
        constexpr int kParts = kChunk / kLanes;
        const float* scores = scores_ + row * kChunk;
        auto* weights = weights_ + row * kChunk * Chunk::kWeightParts;
        const Ints lanes = Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        Floats greatest = splat(kNothing);
        Floats parts[kParts];
        for (int part = 0; part < kParts; ++part) {
            parts[part] = load(scores + part * kLanes) * (shape_.scale * kLog2E);
            if (visible < kChunk) parts[part] = lanes + part * kLanes < visible ? parts[part] : splat(kNothing);
            greatest = parts[part] > greatest ? parts[part] : greatest;
        }
        const float before = sums.greatest[row];
        const float now = std::max(before, maximum(greatest));
        Floats total = {};
        for (int part = 0; part < kParts; ++part) {
            Floats weight = exp2<T>(parts[part] - now);
            if (visible < kChunk) weight = lanes + part * kLanes < visible ? weight : splat(0.0f);
            total += weight;
            store(weights + part * kLanes, weight);
            if constexpr (Chunk::kWeightParts == 2)
                store(weights + kChunk + part * kLanes, weight - rounded<typename Chunk::Weight>(weight));
        }
        scales_[row] = exp2(splat(before - now))[0];
        sums.greatest[row] = now;
        sums.total[row] = sums.total[row] * scales_[row] + sum(total);
    }

    void write(const AttentionItem& item, int num_rows) const {
        const int dim = shape_.head_dim;
        const std::int64_t start = sequences_.query_starts[item.sequence] + item.first_query;
        for (int row = 0; row < num_rows; ++row) {
            const float scale = 1.0f / all_.total[row];
            T* target = output_ + ((start + row / group_) * shape_.num_heads + item.kv_head * group_ + row % group_) * dim;
            const float* mixed = all_.mixed + static_cast<std::int64_t>(row) * dim;
            for (int d = 0; d < dim; d += kLanes) store(target + d, load(mixed + d) * scale);
        }
    }

    const AttentionShape& shape_;
    const Sequences& sequences_;
    const T* queries_;
    std::int64_t query_stride_;
    const T* pages_;
    T* output_;
    float* partials_;
    int partial_rows_;
    int group_;
    int first_position_ = 0;
    typename Chunk::Query* own_queries_;
    typename Chunk::Packed* packed_;
    typename Chunk::Weight* weights_;
    float* scores_;
    float* scales_;
    const T** query_rows_;
    Sums all_{};
    Sums split_{};
    std::size_t used_;
};

std::int64_t cost(const AttentionItem& item) {
    return static_cast<std::int64_t>(item.last_split - item.first_split) * (item.num_queries + 4);
}

}  // namespace

void plan_attention(const AttentionShape& shape, const Sequences& sequences, int num_threads, AttentionPlan& plan) {
    const int group = shape.num_heads / shape.num_kv_heads;
    const int tile = std::max(1, kTileRows / group);
    plan.items.clear();
    plan.merges.clear();
    plan.num_partials = 0;
    plan.partial_rows = most_rows(shape);
    int num_tiles = 0;
    for (int sequence = 0; sequence < sequences.count; ++sequence)
        num_tiles += (sequences.query_starts[sequence + 1] - sequences.query_starts[sequence] + tile - 1) / tile;
    // With few tiles, splits are what the threads share; with many, partial results would be wasted work.
    const bool divided = num_threads > 1 && num_tiles * shape.num_kv_heads < 8 * num_threads;
    for (int sequence = 0; sequence < sequences.count; ++sequence) {
        const int num_queries = sequences.query_starts[sequence + 1] - sequences.query_starts[sequence];
        for (int first = 0; first < num_queries; first += tile) {
            const int count = std::min(tile, num_queries - first);
            const int positions = sequences.context_lengths[sequence] - num_queries + first + count;
            const int splits = num_splits(positions);
            for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
                AttentionItem item{sequence, kv_head, first, count, 0, splits, -1};
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
}

namespace {

template <class T, class Chunk>
void attend_with(Team& team, const AttentionShape& shape, const Sequences& sequences, const AttentionPlan& plan,
                 const T* queries, std::int64_t query_stride, const T* pages, T* output, float* partials,
                 std::atomic<int>* next) {
    using Worker = Worker<T, Chunk>;
    thread_local Scratch scratch;
    Worker worker(shape, sequences, queries, query_stride, pages, output, partials, plan.partial_rows,
                  scratch.get<std::byte>(Worker::scratch_size(shape)));
    MatrixUnit unit;
    const int num_items = static_cast<int>(plan.items.size());
    auto take = [&]() -> const AttentionItem* {
        const int index = next[0].fetch_add(1, std::memory_order_relaxed);
        return index < num_items ? &plan.items[static_cast<std::size_t>(index)] : nullptr;
    };
    for (const AttentionItem* item = take(); item;) {
        const AttentionItem* after = take();
        worker.run(*item, after);
        item = after;
    }
    if (plan.merges.empty()) return;
    team.wait();
    const int num_merges = static_cast<int>(plan.merges.size());
    for (int index; (index = next[1].fetch_add(1, std::memory_order_relaxed)) < num_merges;)
        worker.merge(plan.merges[index]);
}

}  // namespace

template <>
void attend<float>(Team& team, const AttentionShape& shape, const Sequences& sequences, const AttentionPlan& plan,
                   const float* queries, std::int64_t query_stride, const float* pages, float* output, float* partials,
                   std::atomic<int>* next) {
    attend_with<float, FloatChunk<float>>(team, shape, sequences, plan, queries, query_stride, pages, output, partials,
                                          next);
}

template <>
void attend<bf16>(Team& team, const AttentionShape& shape, const Sequences& sequences, const AttentionPlan& plan,
                  const bf16* queries, std::int64_t query_stride, const bf16* pages, bf16* output, float* partials,
                  std::atomic<int>* next) {
#ifdef HEADRACE_AMX
    if (has_matrix_unit)
        return attend_with<bf16, MatrixChunk>(team, shape, sequences, plan, queries, query_stride, pages, output, partials,
                                              next);
#endif
#ifdef HEADRACE_BF16_DOT
    attend_with<bf16, PairChunk>(team, shape, sequences, plan, queries, query_stride, pages, output, partials, next);
#else
    attend_with<bf16, FloatChunk<bf16>>(team, shape, sequences, plan, queries, query_stride, pages, output, partials, next);
#endif
}

}  // namespace headrace

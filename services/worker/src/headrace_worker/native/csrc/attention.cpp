#include "attention.h"

#include <algorithm>

#include "attention_chunk.h"
#include "attention_pairs.h"
#include "attention_tiles.h"
#include "numeric.h"

namespace headrace {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

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
    Sums from(int row, int head_dim) const {
        return {mixed + static_cast<std::int64_t>(row) * head_dim, greatest + row, total + row};
    }
};

void copy_row(const Sums& all, const Sums& split, int row, int head_dim) {
    std::copy_n(split.from(row, head_dim).mixed, head_dim, all.from(row, head_dim).mixed);
    all.greatest[row] = split.greatest[row];
    all.total[row] = split.total[row];
}

// Adds a later split's sums of one row to those before it. Never inlined: two copies could round differently.
[[gnu::noinline]] void merge_row(const Sums& all, const Sums& split, int row, int head_dim) {
    if (split.total[row] == 0.0f) return;
    if (all.total[row] == 0.0f) return copy_row(all, split, row, head_dim);
    const float greatest = std::max(all.greatest[row], split.greatest[row]);
    const float old_scale = exp2(splat(all.greatest[row] - greatest))[0];
    const float new_scale = exp2(splat(split.greatest[row] - greatest))[0];
    float* mixed = all.mixed + static_cast<std::int64_t>(row) * head_dim;
    const float* added = split.mixed + static_cast<std::int64_t>(row) * head_dim;
    for (int d = 0; d < head_dim; d += kLanes) store(mixed + d, load(mixed + d) * old_scale + load(added + d) * new_scale);
    all.total[row] = all.total[row] * old_scale + split.total[row] * new_scale;
    all.greatest[row] = greatest;
}

int most_rows(const AttentionShape& shape) { return std::max(kTileRows, shape.num_heads / shape.num_kv_heads); }

template <class T, class Chunk>
class Worker {
  public:
    Worker(const AttentionShape& shape, const Sequences& sequences, const T* queries, std::int64_t query_stride,
           const T* pages, T* output, std::int64_t output_stride, float* partials, int partial_rows, std::byte* memory)
        : shape_(shape),
          sequences_(sequences),
          queries_(queries),
          query_stride_(query_stride),
          pages_(pages),
          output_(output),
          output_stride_(output_stride),
          partials_(partials),
          partial_rows_(partial_rows),
          group_(shape.num_heads / shape.num_kv_heads),
          ahead_(shape, sequences, pages) {
        Arena arena(memory);
        const int rows = most_rows(shape);
        const auto size = static_cast<std::size_t>(rows);
        const auto dim = static_cast<std::size_t>(shape.head_dim);
        // At least one tile of rows for each head.
        own_queries_ = arena.take<typename Chunk::Query>(Chunk::query_size(rows + kMostHeads * kLanes, shape.head_dim));
        packed_ = arena.take<typename Chunk::Packed>(Chunk::packed_size(shape.head_dim));
        scores_ = arena.take<float>(size * kScoreStride);
        query_rows_ = arena.take<const T*>(size);
        for (Sums* sums : {&all_, &split_}) *sums = {arena.take<float>(size * dim), arena.take<float>(size), arena.take<float>(size)};
        used_ = arena.used();
    }

    static std::size_t scratch_size(const AttentionShape& shape) {
        return Worker(shape, {}, nullptr, 0, nullptr, nullptr, 0, nullptr, 0, nullptr).used_;
    }

    // `after`: what this thread runs next; null: nothing.
    void run(const AttentionItem& item, const AttentionItem* after) {
        const int start = sequences_.query_starts[item.sequence];
        const int dim = shape_.head_dim;
        const int num_rows = item.num_queries * group_;  // of each head
        const auto query_size = static_cast<std::int64_t>(Chunk::query_size(num_rows, dim));
        ahead_.begin(item, after);
        for (int head = 0; head < item.num_heads(); ++head) {
            for (int row = 0; row < num_rows; ++row)
                query_rows_[row] = queries_ + (start + item.first_query + row / group_) * query_stride_ +
                                   ((item.first_head + head) * group_ + row % group_) * dim;
            Chunk::load_queries(query_rows_, num_rows, dim, own_queries_ + head * query_size);
        }
        for (int split = item.first_split; split < item.last_split; ++split) {
            locate(item, split);
            const Rows rows{num_rows, group_, num_positions(sequences_, item) - item.num_queries - split * kSplit};
            // Of the first split every row sees something.
            const Sums first = split == 0 ? all_ : split_;
            const Sums sums = item.partial < 0 ? first : partial(item.partial + split - item.first_split);
            for (int head = 0; head < item.num_heads(); ++head) {
                float* scores = scores_ + head * num_rows * kScoreStride;
                Chunk::score(own_queries_ + head * query_size, rows, of_head(item.first_head + head), ahead_, dim, packed_,
                             scores);
                for (int row = 0; row < num_rows; ++row)
                    weigh(scores + row * kScoreStride, rows.visible(row, count_), rows.weights(row, count_),
                          head * num_rows + row, sums);
            }
            for (int head = 0; head < item.num_heads(); ++head)
                Chunk::mix(scores_ + head * num_rows * kScoreStride, rows, of_head(item.first_head + head), ahead_, dim,
                           packed_, sums.mixed + static_cast<std::int64_t>(head) * num_rows * dim);
            if (item.partial < 0 && split > 0)
                for (int row = 0; row < num_rows * item.num_heads(); ++row) merge_row(all_, split_, row, dim);
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
    Sums partial(int slot) const {
        float* base = partials_ + static_cast<std::int64_t>(slot) * partial_rows_ * (shape_.head_dim + 2);
        float* greatest = base + static_cast<std::int64_t>(partial_rows_) * shape_.head_dim;
        return {base, greatest, greatest + partial_rows_};
    }

    // Where a split's positions lie, as far as the item's last query sees them: head 0's keys.
    void locate(const AttentionItem& item, int index) {
        const int dim = shape_.head_dim;
        const int start = index * kSplit;
        count_ = std::min(kSplit, num_positions(sequences_, item) - start);
        const std::int32_t* block =
            sequences_.block_table + item.sequence * sequences_.table_stride + start / shape_.block_size;
        const auto block_size = 2 * static_cast<std::int64_t>(shape_.num_kv_heads) * shape_.block_size * dim;
        int offset = start % shape_.block_size;
        for (int position = 0; position < count_; ++block, offset = 0) {
            const T* row = pages_ + *block * block_size + offset * dim;
            const int end = std::min(count_, position + shape_.block_size - offset);
            for (; position < end; ++position, row += dim) rows_[position] = row;
        }
    }

    // One head's part of what was located.
    KeysValues<T> of_head(int head) const {
        const auto head_size = static_cast<std::int64_t>(shape_.block_size) * shape_.head_dim;
        return {rows_, head * head_size, (shape_.num_kv_heads + head) * head_size, count_,
                is_tiled(shape_), has_pairs<T>(shape_)};
    }

    // A row's scores of a split to weights, of which the first `visible` are not 0 and `wanted` are read.
    void weigh(float* scores, int visible, int wanted, int row, const Sums& sums) const {
        constexpr int kStep = 2 * kLanes;
        const float scale = shape_.scale * kLog2E;
        const int whole = visible / kStep * kStep;
        const auto masked = [&](Floats values, int first, float unseen) {
            const Ints lanes = Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
            return lanes + first < visible ? values : splat(unseen);
        };
        alignas(64) float copied[Chunk::kInPlace ? 1 : kSplit];
        const float* const source = Chunk::kInPlace ? scores : copied;
        Floats even = splat(kNothing), odd = even;
        const auto compare = [&](Floats first, Floats second, int at) {
            if constexpr (!Chunk::kInPlace) {
                store(copied + at, first);
                store(copied + at + kLanes, second);
            }
            even = first > even ? first : even;
            odd = second > odd ? second : odd;
        };
        for (int at = 0; at < whole; at += kStep) compare(load(scores + at), load(scores + at + kLanes), at);
        if (whole < visible)
            compare(masked(load(scores + whole), whole, kNothing),
                    masked(load(scores + whole + kLanes), whole + kLanes, kNothing), whole);
        const float greatest = maximum(even > odd ? even : odd) * scale;
        even = odd = splat(0.0f);
        const auto put = [&](Floats first, Floats second, int at) {
            even += Chunk::kept(first);
            odd += Chunk::kept(second);
            Chunk::put(first, second, scores, at);
        };
        const auto weight = [&](int at) { return exp2<T>(load(source + at) * scale - greatest); };
        for (int at = 0; at < whole; at += kStep) put(weight(at), weight(at + kLanes), at);
        if (whole < visible)
            put(masked(weight(whole), whole, 0.0f), masked(weight(whole + kLanes), whole + kLanes, 0.0f), whole);
        for (int at = (visible + kStep - 1) / kStep * kStep; at < wanted; at += kStep)
            Chunk::put(splat(0.0f), splat(0.0f), scores, at);
        sums.greatest[row] = greatest;
        sums.total[row] = sum(even + odd);
    }

    void write(const AttentionItem& item, int num_rows) const {
        const int dim = shape_.head_dim;
        const std::int64_t start = sequences_.query_starts[item.sequence] + item.first_query;
        for (int head = 0; head < item.num_heads(); ++head) {
            const Sums all = all_.from(head * num_rows, dim);
            const int first_head = (item.first_head + head) * group_;
            for (int row = 0; row < num_rows; ++row) {
                const float scale = 1.0f / all.total[row];
                T* target = output_ + (start + row / group_) * output_stride_ + (first_head + row % group_) * dim;
                const float* mixed = all.mixed + static_cast<std::int64_t>(row) * dim;
                for (int d = 0; d < dim; d += kLanes) store(target + d, load(mixed + d) * scale);
            }
        }
    }

    const AttentionShape& shape_;
    const Sequences& sequences_;
    const T* queries_;
    std::int64_t query_stride_;
    const T* pages_;
    T* output_;
    std::int64_t output_stride_;
    float* partials_;
    int partial_rows_;
    int group_;
    typename Chunk::Query* own_queries_;
    typename Chunk::Packed* packed_;
    float* scores_;  // [rows][kScoreStride], which become weights
    const T** query_rows_;
    Sums all_{};
    Sums split_{};
    const T* rows_[kSplit];  // see `locate`
    int count_ = 0;
    Ahead<T> ahead_;
    std::size_t used_;
};

template <class T, class Chunk>
void attend_with(Team& team, const AttentionShape& shape, const Sequences& sequences, const AttentionPlan& plan,
                 const T* queries, std::int64_t query_stride, const T* pages, T* output, std::int64_t output_stride,
                 float* partials, std::atomic<int>* next) {
    using Worker = Worker<T, Chunk>;
    thread_local Scratch scratch;
    Worker worker(shape, sequences, queries, query_stride, pages, output, output_stride, partials,
                  plan.partial_rows, scratch.get<std::byte>(Worker::scratch_size(shape)));
    MatrixUnit unit;
    int taken = 0, taken_end = 0;
    auto take = [&]() -> const AttentionItem* {
        if (taken == taken_end) {
            const auto group = static_cast<std::size_t>(next[0].fetch_add(1, std::memory_order_relaxed));
            if (group + 1 >= plan.groups.size()) return nullptr;
            taken = plan.groups[group];
            taken_end = plan.groups[group + 1];
        }
        return &plan.items[static_cast<std::size_t>(taken++)];
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
                   const float* queries, std::int64_t query_stride, const float* pages, float* output,
                   std::int64_t output_stride, float* partials, std::atomic<int>* next) {
    attend_with<float, FloatChunk<float>>(team, shape, sequences, plan, queries, query_stride, pages, output,
                                          output_stride, partials, next);
}

template <>
void attend<bf16>(Team& team, const AttentionShape& shape, const Sequences& sequences, const AttentionPlan& plan,
                  const bf16* queries, std::int64_t query_stride, const bf16* pages, bf16* output,
                  std::int64_t output_stride, float* partials, std::atomic<int>* next) {
#ifdef HEADRACE_AMX
    if (has_matrix_unit)
        return attend_with<bf16, MatrixChunk>(team, shape, sequences, plan, queries, query_stride, pages, output,
                                              output_stride, partials, next);
#endif
#ifdef HEADRACE_BF16_DOT
    attend_with<bf16, PairChunk>(team, shape, sequences, plan, queries, query_stride, pages, output, output_stride,
                                 partials, next);
#else
    attend_with<bf16, FloatChunk<bf16>>(team, shape, sequences, plan, queries, query_stride, pages, output, output_stride,
                                        partials, next);
#endif
}

}  // namespace headrace

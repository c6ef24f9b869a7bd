// A forward pass of a Llama-shaped bfloat16 model in one parallel region: nothing runs between two operations but a barrier.
//
// The residual stream stays in float32; only what goes into a product or into the cache is rounded to bfloat16.
#include <algorithm>
#include <memory>

#include "adapters.h"
#include "attention.h"
#include "greatest.h"
#include "matmul.h"
#include "parts.h"
#include "rows.h"
#include "team.h"

namespace headrace {
namespace {

constexpr int kProducts = 4;  // of each layer
constexpr int kAlone = 16;  // every thread normalizes up to this many rows for itself: that takes less time than a barrier

// A packed matrix and its bias (null: none).
struct Matrix {
    const std::byte* weights;
    const bf16* bias;
    std::int64_t num_outputs;
    std::int32_t num_inputs;
    std::int32_t step;  // so many tiles in a row stay with one thread
    Format format;

    Range tiles(const Team& team, int rank) const {
        return team.share_of(rank, (num_outputs + kTile - 1) / kTile, step);
    }
};

struct LayerWeights {
    Matrix qkv;
    Matrix output;
    Matrix gate_up;  // tiles of gate and up by turns, so that one thread has both sides of a product
    Matrix down;
    const float* attention_norm;  // weights of the norms before qkv and gate_up; null: multiplied into them
    const float* mlp_norm;
};

struct ModelShape {
    AttentionShape attention;
    int hidden_size;
    int intermediate_size;
    int num_layers;
    float epsilon;
    std::int64_t vocab_size;
};

struct Batch {
    Sequences sequences;
    std::int64_t num_tokens;
    const std::int64_t* token_ids;
    const std::int64_t* positions;
    const std::int64_t* slots;  // see `put_cached`, at multiples of slot_stride
    std::int64_t slot_stride;
    std::int64_t num_sampled;
    const std::int64_t* sampled_rows;
    const std::int32_t* slots_of_adapters;  // of each row; null: no row has one
    const Adapter* const* adapters;         // by slot
    std::int64_t num_hidden;
    const std::int64_t* hidden_rows;
    float* hidden;  // [num_hidden, hidden_size]: the rows' last hidden states, as the head gets them
    std::int64_t* tokens;  // [num_sampled]: see `Greatest::of`; null: not wanted
};

class Model {
  public:
    Model(const ModelShape& shape, const LayerWeights* layers, const bf16* embedding, Matrix head, const float* norm,
          const float* rotations)
        : shape_(shape),
          layers_(layers, layers + shape.num_layers),
          embedding_(embedding),
          head_(head),
          norm_(norm),
          rotations_(rotations),
          counters_(new std::atomic<int>[2 * static_cast<std::size_t>(shape.num_layers)]) {}

    // pages[layer]; logits [num_sampled, vocab_size], null: not wanted.
    void run(const Batch& batch, bf16* const* pages, float* logits, int num_threads) {
        const auto& attention = shape_.attention;
        share_out(workspace_.get<std::byte>(share_out(nullptr, batch.num_tokens)), batch.num_tokens);
        plan_attention(attention, batch.sequences, num_threads, plan_);
        partials_.resize(static_cast<std::size_t>(partials_size(attention, plan_)));
        adapters_.begin(batch.num_tokens, batch.slots_of_adapters, batch.adapters);
        for (int i = 0; i < 2 * shape_.num_layers; ++i) counters_[i].store(0, std::memory_order_relaxed);
        num_threads = std::max(1, num_threads);
        parts_.reset(kProducts * shape_.num_layers + 1, num_threads);
        if (batch.tokens) greatest_.reset(batch.num_sampled, num_threads);
        auto body = [&](Team& team) { work(team, batch, pages, logits); };
        run_team(num_threads, body);
        for (std::int64_t row = 0; batch.tokens && row < batch.num_sampled; ++row) batch.tokens[row] = greatest_.of(row);
    }

  private:
    // Puts the buffers of an iteration into `memory`. Returns how much they take.
    std::size_t share_out(std::byte* memory, std::int64_t num_tokens) {
        const auto tokens = static_cast<std::size_t>(num_tokens);
        const int width = shape_.attention.num_heads * shape_.attention.head_dim;
        const auto rows = [&](int size) { return tokens * static_cast<std::size_t>(row_stride(size)); };
        Arena arena(memory);
        hidden_ = arena.take<float>(tokens * shape_.hidden_size);
        normal_ = arena.take<bf16>(rows(shape_.hidden_size));
        queries_ = arena.take<bf16>(tokens * width);
        mixed_ = arena.take<bf16>(rows(width));
        gated_ = arena.take<bf16>(rows(shape_.intermediate_size));
        return arena.used();
    }

    void work(Team& team, const Batch& batch, bf16* const* pages, float* logits) {
        const auto& attention = shape_.attention;
        const int width = attention.num_heads * attention.head_dim;
        const auto own = team.share(batch.num_tokens);
        for (auto row = own.begin; row < own.end; ++row)
            for (int i = 0; i < shape_.hidden_size; i += kLanes)
                store(hidden_row(row) + i, load(embedding_ + batch.token_ids[row] * shape_.hidden_size + i));
        team.wait();
        for (int index = 0; index < shape_.num_layers; ++index) {
            const LayerWeights& layer = layers_[static_cast<std::size_t>(index)];
            const Matrix& after = index + 1 < shape_.num_layers ? layers_[static_cast<std::size_t>(index) + 1].qkv : head_;
            const int product = index * kProducts;
            project(team, product, batch, layer, pages[index]);
            team.wait();
            attend<bf16>(team, attention, batch.sequences, plan_, queries_, width, pages[index], mixed_,
                         row_stride(width), partials_.data(), &counters_[2 * index]);
            team.wait();
            add_product(team, product + 1, batch.num_tokens, mixed_, layer.output, layer.gate_up);
            team.wait();
            multiply_gate(team, product + 2, batch.num_tokens, layer);
            team.wait();
            add_product(team, product + 3, batch.num_tokens, gated_, layer.down, after);
            team.wait();
        }
        const auto wanted = team.share(batch.num_hidden);
        for (auto i = wanted.begin; i < wanted.end; ++i)
            normalize_row(hidden_row(batch.hidden_rows[i]), shape_.hidden_size, shape_.epsilon,
                          batch.hidden + i * shape_.hidden_size, norm_);
        if (batch.num_sampled == 0) return;
        const bf16* rows = normalized(team, batch.num_sampled, batch.sampled_rows, norm_);
        const int last = kProducts * shape_.num_layers;
        compute(team, last, rows, batch.num_sampled, head_, nullptr, [&](const Products& tile) {
            const auto count = shape_.vocab_size - tile.column;
            for (int i = 0; i < tile.num_rows; ++i) {
                const std::int64_t row = tile.first_row + i;
                const Floats sums = tile.at(i);
                if (batch.tokens) greatest_.see(team.rank, row, tile.column, count, sums);
                if (logits) store_part(logits + row * shape_.vocab_size + tile.column, sums, count);
            }
        });
    }

    float* hidden_row(std::int64_t row) { return hidden_ + row * shape_.hidden_size; }

    // The rows (null: the first `count` ones) of the hidden states, normalized.
    const bf16* normalized(Team& team, std::int64_t count, const std::int64_t* rows, const float* weight) {
        thread_local Scratch scratch;
        const bool alone = count <= kAlone;
        const auto stride = row_stride(shape_.hidden_size);
        bf16* target = alone ? scratch.get<bf16>(static_cast<std::size_t>(count * stride)) : normal_;
        const auto own = alone ? Range{0, count} : team.share(count);
        for (auto row = own.begin; row < own.end; ++row)
            normalize_row(hidden_row(rows ? rows[row] : row), shape_.hidden_size, shape_.epsilon,
                          target + row * stride, weight);
        if (!alone) team.wait();
        return target;
    }

    // Some rows of some tiles of a product.
    struct Products {
        int first_row;
        int num_rows;
        std::int64_t column;  // of the first tile
        const float* sums;
        Floats bias[2];

        Floats at(int row, int tile = 0) const {
            return load(sums + row * kPanel + tile * kTile) + bias[tile];
        }
    };

    // Calls finish(Products) for what this thread does of rows x outputs, with matrix.step tiles each time. x: rows
    // row_stride apart; `product`: its number in this pass. `after`: the matrix that is multiplied next; null: none.
    template <class Finish>
    void compute(Team& team, int product, const bf16* x, std::int64_t num_rows, const Matrix& matrix, const Matrix* after,
                 Finish&& finish) {
        const PackedWeights weights{matrix.weights, matrix.format};
        Access next{false};
        if (after) {
            const auto own = after->tiles(team, team.rank);
            next = first_near({after->weights, after->format}, after->num_inputs, own.begin, own.end);
        }
        const auto on_tiles = [&](int first, int count, std::int64_t tile, int num_tiles, const float* products) {
            for (int t = 0; t < num_tiles; t += matrix.step) {
                const auto column = (tile + t) * kTile;
                Products part{first, count, column, products + t * kTile, {}};
                for (int s = 0; matrix.bias && s < matrix.step; ++s)
                    part.bias[s] = load_part(matrix.bias + column + s * kTile, matrix.num_outputs - column - s * kTile);
                finish(part);
            }
        };
        parts_.work(
            team, product, near_tiles(weights, matrix.num_inputs), [&](int rank) { return matrix.tiles(team, rank); },
            [&](Range part, std::int64_t end, bool is_own) {
                Access then{false};
                if (part.end < end)
                    then = first_near(weights, matrix.num_inputs, part.end, end);
                else if (is_own)
                    then = next;
                multiply_tiles(x, row_stride(matrix.num_inputs), static_cast<int>(num_rows), weights, matrix.num_inputs, part.begin,
                               part.end, then, on_tiles);
            });
    }

    // Queries to their buffer, keys and values to the pages, rotated.
    void project(Team& team, int product, const Batch& batch, const LayerWeights& layer, bf16* pages) {
        const auto& attention = shape_.attention;
        const int dim = attention.head_dim;
        const int num_heads = attention.num_heads, num_kv_heads = attention.num_kv_heads;
        const bf16* rows = normalized(team, batch.num_tokens, nullptr, layer.attention_norm);
        adapters_.narrow(team, product, rows, row_stride(shape_.hidden_size), shape_.hidden_size);
        compute(team, product, rows, batch.num_tokens, layer.qkv, &layer.output, [&](const Products& tile) {
            const int head = static_cast<int>(tile.column) / dim, component = static_cast<int>(tile.column) % dim;
            const int part = head < num_heads ? 0 : head < num_heads + num_kv_heads ? 1 : 2;
            for (int i = 0; i < tile.num_rows; ++i) {
                const std::int64_t row = tile.first_row + i;
                Floats sums = adapters_.added(tile.at(i), product, row, tile.column / kTile, part);
                if (head < num_heads + num_kv_heads)
                    sums = rotated(sums, load(rotations_ + batch.positions[row] * dim + component));
                if (head < num_heads)
                    store(queries_ + (row * num_heads + head) * dim + component, sums);
                else
                    put_cached(pages, attention, batch.slots[row * batch.slot_stride], head - num_heads, component, sums);
            }
        });
    }

    void add_product(Team& team, int product, std::int64_t num_rows, const bf16* x, const Matrix& matrix,
                     const Matrix& after) {
        adapters_.narrow(team, product, x, row_stride(matrix.num_inputs), matrix.num_inputs);
        compute(team, product, x, num_rows, matrix, &after, [&](const Products& tile) {
            for (int i = 0; i < tile.num_rows; ++i) {
                const std::int64_t row = tile.first_row + i;
                float* target = hidden_row(row) + tile.column;
                store(target, load(target) + adapters_.added(tile.at(i), product, row, tile.column / kTile));
            }
        });
    }

    void multiply_gate(Team& team, int product, std::int64_t num_rows, const LayerWeights& layer) {
        const bf16* rows = normalized(team, num_rows, nullptr, layer.mlp_norm);
        adapters_.narrow(team, product, rows, row_stride(shape_.hidden_size), shape_.hidden_size);
        compute(team, product, rows, num_rows, layer.gate_up, &layer.down, [&](const Products& tiles) {
            const auto tile = tiles.column / kTile;
            for (int i = 0; i < tiles.num_rows; ++i) {
                const std::int64_t row = tiles.first_row + i;
                const Floats gate = adapters_.added(tiles.at(i), product, row, tile);
                const Floats up = adapters_.added(tiles.at(i, 1), product, row, tile + 1, 1);
                store(gated_ + row * row_stride(shape_.intermediate_size) + tiles.column / 2,
                      silu<bf16>(gate) * up);
            }
        });
    }

    const ModelShape shape_;
    const std::vector<LayerWeights> layers_;
    const bf16* embedding_;
    const Matrix head_;
    const float* norm_;
    const float* rotations_;
    Scratch workspace_;
    float* hidden_ = nullptr;  // [tokens, hidden_size]
    bf16* normal_ = nullptr;   // [tokens, hidden_size], rows row_stride apart, as those of mixed_ and gated_
    bf16* queries_ = nullptr;  // [tokens, heads, head_dim]
    bf16* mixed_ = nullptr;    // [tokens, heads, head_dim]
    bf16* gated_ = nullptr;    // [tokens, intermediate_size]
    std::vector<float> partials_;
    AttentionPlan plan_;
    Adapters adapters_;
    Greatest greatest_;
    std::unique_ptr<std::atomic<int>[]> counters_;
    Parts parts_;
};

}  // namespace
}  // namespace headrace

using namespace headrace;

// Keeps the pointers. `norm`: of the last norm before the head (null: multiplied into it); `rotations` is [positions,
// head_dim / 2, 2]: cosine and sine.
HEADRACE_EXPORT void* headrace_model_new(const ModelShape* shape, const LayerWeights* layers, const bf16* embedding, const Matrix* head,
                         const float* norm, const float* rotations) {
    return new Model(*shape, layers, embedding, *head, norm, rotations);
}

HEADRACE_EXPORT void headrace_model_free(void* model) { delete static_cast<Model*>(model); }

HEADRACE_EXPORT void headrace_model_run(void* model, const Batch* batch, bf16* const* pages, float* logits, int num_threads) {
    static_cast<Model*>(model)->run(*batch, pages, logits, num_threads);
}

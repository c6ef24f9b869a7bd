// LoRA adapters: y += scale (x A^T) B^T for the rows that have one, in two steps with a barrier in between.
#pragma once

#include <vector>

#include "rows.h"
#include "team.h"

namespace headrace {

// What is added to one product. Matrices that are multiplied together have a pair for each part, all of the same rank.
struct AdapterSite {
    const bf16* a;  // [parts * rank][inputs]; null: the product is not changed
    const bf16* b;  // [tiles][rank][kLanes], with the tiles of the product's own matrix
    std::int32_t parts;
};

struct Adapter {
    const AdapterSite* sites;  // by product: of each layer queries, keys and values; attention output; gate and up; down
    std::int32_t rank;
    float scale;
};

class Adapters {
  public:
    // `slots`: of each row, the place of its adapter in `adapters`, below 0 for none; null: no row has one.
    void begin(std::int64_t num_rows, const std::int32_t* slots, const Adapter* const* adapters) {
        slots_ = slots;
        adapters_ = adapters;
        rows_.clear();
        stride_ = 0;
        for (std::int64_t row = 0; slots && row < num_rows; ++row) {
            if (slots[row] < 0) continue;
            rows_.push_back(row);
            const int width = kMostParts * adapters[slots[row]]->rank;
            if (width > stride_) stride_ = width;
        }
        inner_.resize(static_cast<std::size_t>(num_rows) * static_cast<std::size_t>(stride_));
    }

    // The first step, for all rows of x [rows, size], which begin `stride` elements apart.
    void narrow(Team& team, int product, const bf16* x, std::int64_t stride, std::int64_t size) {
        if (rows_.empty()) return;
        const auto own = team.share(static_cast<std::int64_t>(rows_.size()));
        for (auto i = own.begin; i < own.end;) {
            const auto row = rows_[static_cast<std::size_t>(i)];
            const bool is_pair = i + 1 < own.end && slots_[rows_[static_cast<std::size_t>(i) + 1]] == slots_[row];
            const auto next = is_pair ? rows_[static_cast<std::size_t>(i) + 1] : row;
            i += is_pair ? 2 : 1;
            const Adapter& adapter = *adapters_[slots_[row]];
            const AdapterSite& pair = adapter.sites[product];
            if (!pair.a) continue;
            const bf16* rows[2] = {x + row * stride, x + next * stride};
            float* inner[2] = {inner_.data() + row * stride_, inner_.data() + next * stride_};
            const int width = pair.parts * adapter.rank;
            int r = 0;
            for (; r + kAtOnce <= width; r += kAtOnce)
                is_pair ? dots<2, kAtOnce>(rows, pair.a + r * size, size, adapter.scale, inner, r)
                        : dots<1, kAtOnce>(rows, pair.a + r * size, size, adapter.scale, inner, r);
            for (; r < width; ++r)
                is_pair ? dots<2, 1>(rows, pair.a + r * size, size, adapter.scale, inner, r)
                        : dots<1, 1>(rows, pair.a + r * size, size, adapter.scale, inner, r);
        }
        team.wait();
    }

    // The second step: the sums of one tile of one row with what the row's adapter adds to them.
    Floats added(Floats sums, int product, std::int64_t row, std::int64_t tile, int part = 0) const {
        if (!slots_ || slots_[row] < 0) return sums;
        const Adapter& adapter = *adapters_[slots_[row]];
        const AdapterSite& pair = adapter.sites[product];
        if (!pair.a) return sums;
        const float* inner = inner_.data() + row * stride_ + part * adapter.rank;
        const bf16* b = pair.b + tile * adapter.rank * kLanes;
        // Several chains, since each sum waits for the one before it in its chain.
        Floats change[4] = {};
        int r = 0;
        for (; r + 4 <= adapter.rank; r += 4)
            for (int k = 0; k < 4; ++k) change[k] += load(b + (r + k) * kLanes) * inner[r + k];
        for (; r < adapter.rank; ++r) change[0] += load(b + r * kLanes) * inner[r];
        return sums + ((change[0] + change[1]) + (change[2] + change[3]));
    }

  private:
    static constexpr int kMostParts = 3;

    static constexpr int kAtOnce = 8;

    // inner[row][r + k] of some rows and `Count` rows of a. Each is one chain of sums, whatever is computed beside it.
    template <int Rows, int Count>
    static void dots(const bf16* const* rows, const bf16* a, std::int64_t size, float scale, float* const* inner, int r) {
        Floats sums[Rows][Count] = {};
        for (std::int64_t i = 0; i < size; i += kLanes) {
            Floats values[Rows];
            for (int row = 0; row < Rows; ++row) values[row] = load(rows[row] + i);
            for (int k = 0; k < Count; ++k) {
                const Floats weights = load(a + k * size + i);
                for (int row = 0; row < Rows; ++row) sums[row][k] += values[row] * weights;
            }
        }
        for (int row = 0; row < Rows; ++row)
            for (int k = 0; k < Count; ++k) inner[row][r + k] = sum(sums[row][k]) * scale;
    }

    const std::int32_t* slots_ = nullptr;
    const Adapter* const* adapters_ = nullptr;
    std::vector<std::int64_t> rows_;
    std::vector<float> inner_;
    std::int64_t stride_ = 0;
};

}  // namespace headrace

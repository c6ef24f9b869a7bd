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

    // The first step, for all rows of x [rows, size].
    void narrow(Team& team, int product, const bf16* x, std::int64_t size) {
        if (rows_.empty()) return;
        const auto own = team.share(static_cast<std::int64_t>(rows_.size()));
        for (auto i = own.begin; i < own.end; ++i) {
            const auto row = rows_[static_cast<std::size_t>(i)];
            const Adapter& adapter = *adapters_[slots_[row]];
            const AdapterSite& pair = adapter.sites[product];
            if (!pair.a) continue;
            float* inner = inner_.data() + row * stride_;
            for (int r = 0; r < pair.parts * adapter.rank; ++r)
                inner[r] = dot(x + row * size, pair.a + r * size, size) * adapter.scale;
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
        Floats change = {};
        for (int r = 0; r < adapter.rank; ++r) change += load(b + r * kLanes) * inner[r];
        return sums + change;
    }

  private:
    static constexpr int kMostParts = 3;

    static float dot(const bf16* x, const bf16* y, std::int64_t size) {
        Floats sums[2] = {};
        for (std::int64_t i = 0; i < size; i += kLanes) sums[i / kLanes % 2] += load(x + i) * load(y + i);
        return sum(sums[0] + sums[1]);
    }

    const std::int32_t* slots_ = nullptr;
    const Adapter* const* adapters_ = nullptr;
    std::vector<std::int64_t> rows_;
    std::vector<float> inner_;
    std::int64_t stride_ = 0;
};

}  // namespace headrace

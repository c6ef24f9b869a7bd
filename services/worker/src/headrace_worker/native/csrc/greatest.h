// The arg-max of rows of logits that several threads compute part by part, while they are in registers.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "numeric.h"

namespace headrace {

class Greatest {
  public:
    // Before the team begins; nothing has been seen then.
    void reset(std::int64_t num_rows, int num_threads) {
        num_rows_ = num_rows;
        num_threads_ = num_threads;
        seen_.assign(static_cast<std::size_t>(num_rows * num_threads), Seen{});
    }

    // `count` logits of a row from `column` on, if there are so many; from the thread `rank`.
    void see(int rank, std::int64_t row, std::int64_t column, std::int64_t count, Floats logits) {
        Seen& seen = seen_[static_cast<std::size_t>(rank * num_rows_ + row)];
        const Ints lanes = Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const Ints columns = lanes + static_cast<std::int32_t>(column);
        logits = logits != logits ? splat(kInfinity) : logits;
        if (count < kLanes) logits = lanes < static_cast<std::int32_t>(count) ? logits : splat(-kInfinity);
        // Parts may come in any order, and of equals the first one counts.
        const Ints is_better = (logits > seen.logits) | ((logits == seen.logits) & (columns < seen.columns));
        seen.logits = is_better ? logits : seen.logits;
        seen.columns = is_better ? columns : seen.columns;
    }

    // When the team is done: the first of the greatest logits of a row; -1 if one is NaN, or none is finite.
    std::int64_t of(std::int64_t row) const {
        float greatest = -kInfinity;
        std::int32_t found = -1;
        for (int rank = 0; rank < num_threads_; ++rank) {
            const Seen& seen = seen_[static_cast<std::size_t>(rank * num_rows_ + row)];
            for (int lane = 0; lane < kLanes; ++lane) {
                const bool is_better = seen.logits[lane] > greatest ||
                                       (seen.logits[lane] == greatest && seen.columns[lane] < found);
                if (!is_better) continue;
                greatest = seen.logits[lane];
                found = seen.columns[lane];
            }
        }
        return std::isfinite(greatest) ? found : -1;
    }

  private:
    static constexpr float kInfinity = std::numeric_limits<float>::infinity();

    struct Seen {
        Floats logits = splat(-kInfinity);
        Ints columns = Ints{} + std::numeric_limits<std::int32_t>::max();
    };

    std::vector<Seen> seen_;
    std::int64_t num_rows_ = 0;
    int num_threads_ = 1;
};

}  // namespace headrace

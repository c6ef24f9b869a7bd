// Who computes which part of a matrix product. Each thread begins with its own share, part by part, and then takes parts of
// those that are not done with theirs: on a core that other processes use as well, a thread falls behind for a moment, and
// everybody would wait for it at the next barrier. What is computed does not depend on who does it.
#pragma once

#include <memory>

#include "team.h"

namespace headrace {

class Parts {
  public:
    // Before the team begins; nothing has been taken then.
    void reset(int num_products, int num_threads) {
        const auto size = static_cast<std::size_t>(num_products) * static_cast<std::size_t>(num_threads);
        if (size > size_) {
            taken_.reset(new Taken[size]);
            size_ = size;
        }
        for (std::size_t i = 0; i < size; ++i) taken_[i].count.store(0, std::memory_order_relaxed);
    }

    // Calls each(part, end of the share it belongs to, whether the share is this thread's) until nothing of the product is
    // left to take. share(rank) is a Range; parts are `most` long, the last of a share may be shorter.
    template <class Share, class Each>
    void work(const Team& team, int product, std::int64_t most, Share&& share, Each&& each) {
        for (int turn = 0; turn < team.size; ++turn) {
            const int rank = (team.rank + turn) % team.size;
            const Range whole = share(rank);
            auto& count = taken_[static_cast<std::size_t>(product) * team.size + rank].count;
            while (true) {
                // The first look costs less than the addition, which takes the line from its owner.
                if (turn > 0 && whole.begin + count.load(std::memory_order_relaxed) * most >= whole.end) break;
                const auto begin = whole.begin + count.fetch_add(1, std::memory_order_relaxed) * most;
                if (begin >= whole.end) break;
                each(Range{begin, begin + most < whole.end ? begin + most : whole.end}, whole.end, turn == 0);
            }
        }
    }

  private:
    struct alignas(64) Taken {
        std::atomic<std::int64_t> count{0};
    };

    std::unique_ptr<Taken[]> taken_;
    std::size_t size_ = 0;
};

}  // namespace headrace

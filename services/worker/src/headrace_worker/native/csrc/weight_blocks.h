// Where a kernel finds the bfloat16 blocks of a panel's tiles: in the packed matrix, or in a buffer into which they are
// decoded one step of inputs before they are multiplied.
#pragma once

#include "matmul.h"

namespace headrace {

inline void prefetch_lines(const void* from, std::int64_t bytes) {
    for (std::int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(static_cast<const std::byte*>(from) + byte);
}

// Which block of a tile's stream to ask for when block `step` is used: in the next panel when this one ends, since all
// streams of a panel start anew there, too soon for the processor to see them coming.
inline std::int64_t ahead_of(int step, int num_steps, int distance) {
    const int ahead = step + distance;
    return ahead < num_steps ? ahead : static_cast<std::int64_t>(kPanelTiles) * num_steps + ahead - num_steps;
}

// Of a single tile after the other, without the matrix unit.
class PlainStream {
  public:
    PlainStream(PackedWeights weights, int, const Access&) : blocks_(reinterpret_cast<const bf16*>(weights.data)) {}

    template <int Tiles>
    void prepare(int step) {
        now_ = blocks_ + static_cast<std::int64_t>(step) * kBlock;
    }
    // The processor sees a stream coming, unless sums take so long that it looks no further than them.
    template <int Tiles, int Rows>
    void ask(int pair) const {
        if constexpr (Rows > kFew) __builtin_prefetch(now_ + kStepsAhead * kBlock + pair * 2 * kTile, 0, 2);
    }
    const bf16* block(int, int) const { return now_; }

  private:
    static constexpr int kFew = 2;
    static constexpr int kStepsAhead = 8;

    const bf16* blocks_;
    const bf16* now_ = nullptr;
};

class PlainBlocks {
  public:
    using Stream = PlainStream;

    PlainBlocks(PackedWeights weights, int num_inputs, const Access& access)
        : blocks_(reinterpret_cast<const bf16*>(weights.data)),
          num_steps_(num_inputs / kInputStep),
          streamed_(access.streamed),
          next_(access.next),
          next_end_(access.next + access.next_bytes),
          next_step_((access.next_bytes / num_steps_ + 63) / 64 * 64) {}

    // Call once for each step, in order, before its blocks are used; and `ask` for each pair of inputs in it.
    template <int Tiles>
    void prepare(int step) {
        ahead_ = (streamed_ ? ahead_of(step, num_steps_, kStepsAhead) : step + kStepsNear) * kBlock;
        const auto* end = next_end_ - next_ < next_step_ ? next_end_ : next_ + next_step_;
        for (; next_ < end; next_ += 64) __builtin_prefetch(next_, 0, 2);
    }
    // Asks for one of the lines that will be needed: all at once would hold up the sums.
    template <int Tiles, int Rows>
    void ask(int pair) const {
        for (int tile = 0; tile < Tiles; ++tile)
            __builtin_prefetch(blocks_ + static_cast<std::int64_t>(tile) * num_steps_ * kBlock + ahead_ + pair * 2 * kTile);
    }
    const bf16* block(int tile, int step) const {
        return blocks_ + (static_cast<std::int64_t>(tile) * num_steps_ + step) * kBlock;
    }

  private:
    static constexpr int kStepsAhead = 4;
    static constexpr int kStepsNear = 2;  // the same for weights that come from the second-level cache

    const bf16* blocks_;
    int num_steps_;
    bool streamed_;
    const std::byte* next_;
    const std::byte* next_end_;
    std::int64_t next_step_;
    std::int64_t ahead_ = 0;
};

template <class Block>
class CodedBlocks {
  public:
    using Stream = CodedBlocks;

    CodedBlocks(PackedWeights weights, int num_inputs, const Access&)
        : blocks_(reinterpret_cast<const Block*>(weights.data)), num_steps_(num_inputs / kInputStep) {}

    template <int Tiles>
    void prepare(int step) {
        const auto ahead = ahead_of(step, num_steps_, kStepsAhead);
        for (int tile = 0; tile < Tiles; ++tile) {
            const Block* blocks = blocks_ + static_cast<std::int64_t>(tile) * num_steps_;
            prefetch_lines(blocks + ahead, sizeof(Block));
            decode_block(blocks[step], decoded_[step % 2][tile]);
        }
    }
    template <int Tiles, int Rows>
    void ask(int) const {}
    const bf16* block(int tile, int step) const { return decoded_[step % 2][tile]; }

  private:
    static constexpr int kStepsAhead = 6;

    const Block* blocks_;
    int num_steps_;
    alignas(64) bf16 decoded_[2][kPanelTiles][kBlock];
};

}  // namespace headrace

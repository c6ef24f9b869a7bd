// Keys and values that a thread will need, fetched into the second-level cache bit by bit while it computes: all at once
// would make the sums wait for the memory, and afterwards the memory for the sums.
//
// They are fetched in the order in which they are used, and with every step as much as the step uses, whatever comes next:
// the next head, split or item.
#pragma once

#include <algorithm>
#include <cstddef>

#include "attention.h"

namespace headrace {

template <class T>
class Ahead {
  public:
    Ahead(const AttentionShape& shape, const Sequences& sequences, const T* pages)
        : shape_(shape), sequences_(sequences), pages_(pages), row_bytes_(shape.head_dim * static_cast<int>(sizeof(T))) {}

    // `item` is what is computed now, `after` next; null: nothing.
    void begin(const AttentionItem& item, const AttentionItem* after) {
        if (fetched_ != &item) {
            enter(item);
            due_ = kDistance;
        }
        after_ = after;
    }

    // To be called when so many bytes of keys or values are used.
    void use(std::int64_t bytes) {
        due_ = std::min(due_ + bytes, kDistance);
        // Who has fallen behind makes up for it step by step.
        fetch(std::min(due_, 2 * bytes));
    }
    void use_rows(int count) { use(static_cast<std::int64_t>(count) * row_bytes_); }

  private:
    static constexpr std::int64_t kDistance = 32 << 10;  // bytes from what is used to what is fetched

    void fetch(std::int64_t bytes) {
        while (bytes > 0 && (at_ < end_ || next_run())) {
            const auto* stop = end_ - at_ < bytes ? end_ : at_ + bytes;
            bytes -= stop - at_;
            due_ -= stop - at_;
            for (; at_ < stop; at_ += 64) __builtin_prefetch(at_, 0, 2);
        }
    }

    void enter(const AttentionItem& item) {
        fetched_ = &item;
        split_ = item.first_split;
        part_ = 0;
        head_ = item.first_head;
        position_ = split_ * kSplit;
        last_position_ = std::min(item.last_split * kSplit, num_positions(sequences_, item));
        at_ = end_ = nullptr;
    }

    // A head's keys or values in one block. False: nothing is left.
    bool next_run() {
        while (position_ >= split_end())
            if (!next_part()) return false;
        const int size = shape_.block_size;
        const int offset = position_ % size, count = std::min(size - offset, split_end() - position_);
        const std::int64_t block =
            sequences_.block_table[fetched_->sequence * sequences_.table_stride + position_ / size];
        const T* start =
            pages_ + (((block * 2 + part_) * shape_.num_kv_heads + head_) * size + offset) * shape_.head_dim;
        at_ = reinterpret_cast<const std::byte*>(start);
        end_ = at_ + static_cast<std::int64_t>(count) * row_bytes_;
        position_ += count;
        return true;
    }

    int split_end() const { return std::min((split_ + 1) * kSplit, last_position_); }

    // All heads' keys of a split, then all heads' values, then the next split, then the next item.
    bool next_part() {
        if (head_ + 1 < fetched_->last_head) {
            ++head_;
        } else if (part_ == 0) {
            part_ = 1;
            head_ = fetched_->first_head;
        } else if (split_ + 1 < fetched_->last_split) {
            ++split_;
            part_ = 0;
            head_ = fetched_->first_head;
        } else {
            if (!after_) return false;
            enter(*after_);
            after_ = nullptr;
        }
        position_ = split_ * kSplit;
        return true;
    }

    const AttentionShape& shape_;
    const Sequences& sequences_;
    const T* pages_;
    int row_bytes_;
    const AttentionItem* fetched_ = nullptr;  // the item that is being fetched
    const AttentionItem* after_ = nullptr;    // and the next one; null: none, or it is not known yet
    int split_ = 0;                           // the next run's
    int part_ = 0;
    int head_ = 0;
    int position_ = 0;
    int last_position_ = 0;
    const std::byte* at_ = nullptr;  // the rest of a run
    const std::byte* end_ = nullptr;
    std::int64_t due_ = 0;  // bytes that may be fetched now
};

}  // namespace headrace

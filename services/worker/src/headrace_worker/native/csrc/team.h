// Parallel regions on the pool of threads that torch uses: two pools on the same cores would take turns spinning.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace headrace {

// The entry points of torch's OpenMP library. Every such library (GNU, LLVM, Intel) has them under these names.
struct Runtime {
    void (*parallel)(void (*body)(void*), void* argument, unsigned num_threads, unsigned flags) = nullptr;
    int (*thread_number)() = nullptr;
    int (*team_size)() = nullptr;
};
inline Runtime runtime;

// Waits spin for about 600 microseconds, then sleep: somebody else may need the core. Sleeping sooner costs more than it
// gives: on a virtual machine the way out of sleep takes longer than most waits.
class Barrier {
  public:
    void wait(int size) {
        if (size == 1) return;
        const auto current = generation_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            arrived_.store(0, std::memory_order_relaxed);
            generation_.store(current + 1, std::memory_order_release);
            generation_.notify_all();
            return;
        }
        for (int spin = 0; spin < kSpins; ++spin) {
            if (generation_.load(std::memory_order_acquire) != current) return;
            pause();
        }
        generation_.wait(current, std::memory_order_acquire);
    }

  private:
    static constexpr int kSpins = 12000;

    static void pause() {
#if defined(__x86_64__)
        _mm_pause();
#elif defined(__aarch64__)
        asm volatile("isb");
#endif
    }

    alignas(64) std::atomic<std::int32_t> arrived_{0};
    alignas(64) std::atomic<std::int32_t> generation_{0};
};

struct Range {
    std::int64_t begin;
    std::int64_t end;
};

class Team {
  public:
    Team(int rank, int size, Barrier& barrier) : rank(rank), size(size), barrier_(barrier) {}

    const int rank;
    const int size;

    void wait() { barrier_.wait(size); }

    // This thread's part of `count` items, in whole multiples of `step`.
    Range share(std::int64_t count, std::int64_t step = 1) const { return share_of(rank, count, step); }

    Range share_of(int rank, std::int64_t count, std::int64_t step = 1) const {
        const auto units = (count + step - 1) / step;
        const auto end = units * (rank + 1) / size * step;
        return {units * rank / size * step, end < count ? end : count};
    }

  private:
    Barrier& barrier_;
};

// Runs body(team) on up to `num_threads` threads, this one included.
template <class Body>
void run_team(int num_threads, Body& body) {
    struct Call {
        Body& body;
        Barrier barrier;
    } call{body, {}};
    if (num_threads <= 1 || runtime.parallel == nullptr) {
        Team team(0, 1, call.barrier);
        body(team);
        return;
    }
    runtime.parallel(
        [](void* argument) {
            auto& shared = *static_cast<Call*>(argument);
            Team team(runtime.thread_number(), runtime.team_size(), shared.barrier);
            shared.body(team);
        },
        &call, static_cast<unsigned>(num_threads), 0);
}

// Memory that is kept between calls: aligned, uninitialized, as large as the largest request so far.
class Scratch {
  public:
    template <class T>
    T* get(std::size_t count) {
        if (count * sizeof(T) > capacity_) grow(count * sizeof(T));
        return reinterpret_cast<T*>(memory_.get());
    }

  private:
    static constexpr std::size_t kHugePage = 2 << 20;

    struct Free {
        void operator()(std::byte* memory) const { std::free(memory); }
    };

    void grow(std::size_t bytes) {
        const std::size_t alignment = bytes < kHugePage ? 64 : kHugePage;
        capacity_ = (bytes + alignment - 1) / alignment * alignment;
        memory_.reset(static_cast<std::byte*>(std::aligned_alloc(alignment, capacity_)));
        if (!memory_) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
        // Many rows are read at once, each in other pages.
        if (alignment == kHugePage) madvise(memory_.get(), capacity_, MADV_HUGEPAGE);
#endif
    }

    std::unique_ptr<std::byte, Free> memory_;
    std::size_t capacity_ = 0;
};

// Hands out parts of a piece of memory; of none, it counts how much it would take.
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

}  // namespace headrace

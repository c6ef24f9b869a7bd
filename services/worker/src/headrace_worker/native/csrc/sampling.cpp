// Draws one token a row: temperature, top-k, top-p, min-p, then the race between exponential clocks. Each row is one
// thread's alone, so that what it gets depends on nothing else, and its weights stay in that thread's cache.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "rows.h"
#include "team.h"

using namespace headrace;

namespace {

// As in race.py, which draws the same: tokens of a chunk, and the first clock of a token.
constexpr std::int64_t kChunk = 128;
constexpr std::uint64_t kTokenClocks = std::uint64_t{1} << 32;
// Weights of the likeliest token's 2^-8 and 2^-16: mostly all that top-k and top-p have to look at.
constexpr float kCutoffs[] = {0x1p-8f, 0x1p-16f, 0.0f};

struct Limits {
    float temperature;
    float min_p;
    double top_p;
    std::int64_t top_k;
    std::uint64_t key;
};

// SplitMix64 (Steele et al., 2014): the number-th element of the sequence of `key`, in (0, 1).
double clock_of(std::uint64_t key, std::uint64_t number) {
    std::uint64_t mixed = key + (number + 1) * 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
    return (static_cast<double>((mixed ^ (mixed >> 31)) >> 12) + 0.5) * 0x1p-52;
}

// Which of `count` clocks, numbered from `start` on, rings first.
template <class Rate>
std::int64_t first_to_ring(const Rate* rates, std::int64_t count, std::uint64_t key, std::uint64_t start) {
    std::int64_t found = 0;
    double earliest = std::numeric_limits<double>::infinity();
    for (std::int64_t i = 0; i < count; ++i) {
        if (!(rates[i] > 0)) continue;
        const double rings = -std::log(clock_of(key, start + static_cast<std::uint64_t>(i))) / rates[i];
        if (rings < earliest) {
            earliest = rings;
            found = i;
        }
    }
    return found;
}

// One row's weights, the greatest of which is 1.
class Weights {
  public:
    void set(const float* scores, std::int64_t size, float temperature) {
        padded_ = (size + kChunk - 1) / kChunk * kChunk;
        weights_.resize(static_cast<std::size_t>(padded_));
        sums_.resize(static_cast<std::size_t>(padded_ / kChunk));
        constexpr float kInfinity = std::numeric_limits<float>::infinity();
        Floats peaks = splat(-kInfinity);
        for (std::int64_t i = 0; i < size; i += kLanes) {
            const Floats part = part_of(scores, i, size);
            peaks = part > peaks ? part : peaks;
        }
        const float peak = maximum(peaks);
        const float scale = kLog2E / temperature;
        each_chunk([&](std::int64_t i) {
            const Floats power = (part_of(scores, i, size) - peak) * scale;
            const Floats weight = power < splat(-126.0f) ? Floats{} : exp2(power);
            return power == Floats{} ? splat(1.0f) : weight;  // exp2 misses it by a rounding
        });
    }

    // Zeroes what is below the threshold.
    void keep(float threshold) {
        each_chunk([&](std::int64_t i) {
            const Floats part = load(weights_.data() + i);
            return part >= splat(threshold) ? part : Floats{};
        });
    }

    // The k-th greatest weight; 0, which keeps all, where there are fewer.
    float kth(std::int64_t k) {
        for (const float cutoff : kCutoffs) {
            gather(cutoff);
            if (static_cast<std::int64_t>(head_.size()) < k) continue;
            std::nth_element(head_.begin(), head_.begin() + (k - 1), head_.end(), std::greater<float>());
            return head_[static_cast<std::size_t>(k - 1)];
        }
        return 0.0f;
    }

    // The smallest weight of the smallest set of the greatest ones that together reach that share of all.
    float nucleus(double share) {
        double total = 0.0;
        for (const double each : sums_) total += each;
        const double target = total * share;
        for (const float cutoff : kCutoffs) {
            gather(cutoff);
            double reached = 0.0;
            for (const float weight : head_) reached += weight;
            if (reached < target && cutoff > 0.0f) continue;
            std::sort(head_.begin(), head_.end(), std::greater<float>());
            reached = 0.0;
            for (const float weight : head_) {
                reached += weight;
                if (reached >= target) return weight;
            }
        }
        return 0.0f;  // rounded, they fall short of it
    }

    // Chunks race by what they weigh together, then the tokens of the first one.
    std::int64_t draw(std::uint64_t key) const {
        const auto chunk = first_to_ring(sums_.data(), padded_ / kChunk, key, 0);
        const auto start = chunk * kChunk;
        return start + first_to_ring(weights_.data() + start, kChunk, key, kTokenClocks + static_cast<std::uint64_t>(start));
    }

  private:
    static Floats part_of(const float* scores, std::int64_t i, std::int64_t size) {
        if (i + kLanes <= size) return load(scores + i);
        float padded[kLanes];
        for (int lane = 0; lane < kLanes; ++lane)
            padded[lane] = i + lane < size ? scores[i + lane] : -std::numeric_limits<float>::infinity();
        return load(padded);
    }

    // Sets all weights to what weight_of(column) gives for a vector of them, and their sums.
    template <class WeightOf>
    void each_chunk(WeightOf&& weight_of) {
        for (std::int64_t chunk = 0; chunk < padded_ / kChunk; ++chunk) {
            Floats total = {};
            for (std::int64_t i = chunk * kChunk; i < (chunk + 1) * kChunk; i += kLanes) {
                const Floats weights = weight_of(i);
                store(weights_.data() + i, weights);
                total += weights;
            }
            sums_[static_cast<std::size_t>(chunk)] = sum(total);
        }
    }

    // Those above 0 that are not below the cutoff. A chunk that is below it as a whole has none.
    void gather(float cutoff) {
        head_.clear();
        for (std::int64_t chunk = 0; chunk < padded_ / kChunk; ++chunk) {
            if (!(sums_[static_cast<std::size_t>(chunk)] >= cutoff)) continue;
            for (std::int64_t i = chunk * kChunk; i < (chunk + 1) * kChunk; i += kLanes) {
                const Floats part = load(weights_.data() + i);
                if (!(maximum(part) >= cutoff)) continue;
                for (int lane = 0; lane < kLanes; ++lane)
                    if (part[lane] > 0.0f && part[lane] >= cutoff) head_.push_back(part[lane]);
            }
        }
    }

    std::int64_t padded_ = 0;
    std::vector<float> weights_;
    std::vector<double> sums_;
    std::vector<float> head_;
};

std::int64_t drawn(const float* scores, std::int64_t size, const Limits& limits) {
    thread_local Weights weights;
    weights.set(scores, size, limits.temperature);
    if (limits.top_k > 0 && limits.top_k < size) weights.keep(weights.kth(limits.top_k));
    if (limits.top_p < 1.0) weights.keep(weights.nucleus(limits.top_p));
    if (limits.min_p > 0.0f) weights.keep(limits.min_p);
    return weights.draw(limits.key);
}

}  // namespace

// scores [rows, size], the greatest of each finite; arrays of one element a row. top_k: 0 is no limit.
HEADRACE_EXPORT void headrace_draw(const float* scores, std::int64_t num_rows, std::int64_t size, const float* temperatures,
                                   const std::int64_t* top_k, const double* top_p, const float* min_p,
                                   const std::uint64_t* keys, std::int64_t* output, int num_threads) {
    auto body = [&](Team& team) {
        const auto own = team.share(num_rows);
        for (auto row = own.begin; row < own.end; ++row)
            output[row] = drawn(scores + row * size, size,
                                Limits{temperatures[row], min_p[row], top_p[row], top_k[row], keys[row]});
    };
    run_team(num_threads, body);
}

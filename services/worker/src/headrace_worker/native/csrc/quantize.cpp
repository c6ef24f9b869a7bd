// Matrices to blocks of fewer bits (blocks.h).
#include <algorithm>
#include <cmath>

#include "matmul.h"
#include "team.h"

using namespace headrace;

namespace {

constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits

// The 32 inputs of a block, a lane for each output.
struct Values {
    Floats of[kInputStep];
};
struct Codes {
    Words of[kInputStep];
};

Floats nearest(Floats value) { return (value + kRound) - kRound; }

Floats clamped(Floats value, float low, float high) {
    value = value < low ? splat(low) : value;
    return value > high ? splat(high) : value;
}

// IEEE half, rounded to nearest even; what is too large becomes the largest.
std::uint16_t half_of(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000);
    const auto magnitude = bits & 0x7fffffff;
    if (magnitude >= 0x477ff000) return sign | 0x7bff;
    if (magnitude < 0x38800000)
        return static_cast<std::uint16_t>(
            sign | (std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p24f + kRound) & 0x7fff));
    return static_cast<std::uint16_t>(sign | ((magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13));
}

float float_of(std::uint16_t half) {
    const float magnitude = std::bit_cast<float>((half & 0x7fffu) << 13) * 0x1p112f;
    return half & 0x8000 ? -magnitude : magnitude;
}

Floats as_halves(Floats values) {
    for (int lane = 0; lane < kLanes; ++lane) values[lane] = float_of(half_of(values[lane]));
    return values;
}

void store_halves(std::uint16_t* target, Floats values) {
    for (int lane = 0; lane < kLanes; ++lane) target[lane] = half_of(values[lane]);
}

void write_codes(const Codes& codes, Int8Block& block) {
    for (int word = 0; word < kInputStep / 4; ++word) {
        Words packed = {};
        for (int i = 0; i < 4; ++i) packed |= ((codes.of[4 * word + i] + 128) & 0xff) << (8 * i);
        std::memcpy(block.codes[word], &packed, sizeof packed);
    }
}

void write_codes(const Codes& codes, Int4Block& block) {
    for (int word = 0; word < kInputStep / 8; ++word) {
        Words packed = {};
        for (int i = 0; i < 8; ++i) packed |= (codes.of[8 * word + i] & 0xf) << (4 * (i / 2) + 16 * (i % 2));
        std::memcpy(block.codes[word], &packed, sizeof packed);
    }
}

Words integers(Floats values) { return std::bit_cast<Words>(__builtin_convertvector(values, Ints)); }

// Each returns the squares of its errors, by output.
Floats quantize(const Values& values, Int8Block& block) {
    Floats greatest = {};
    for (const Floats& value : values.of) {
        const Floats magnitude = value < 0.0f ? -value : value;
        greatest = magnitude > greatest ? magnitude : greatest;
    }
    const Floats scale = as_halves(greatest / 127.0f);
    const Floats inverse = scale > 0.0f ? 1.0f / scale : splat(0.0f);
    Codes codes;
    Floats error = {};
    for (int i = 0; i < kInputStep; ++i) {
        const Floats code = nearest(clamped(values.of[i] * inverse, -127.0f, 127.0f));
        const Floats difference = code * scale - values.of[i];
        error += difference * difference;
        codes.of[i] = integers(code);
    }
    write_codes(codes, block);
    store_halves(block.scales, scale);
    return error;
}

struct Line {
    Floats scale;
    Floats minimum;

    Floats code(Floats value) const {
        const Floats inverse = scale > 0.0f ? 1.0f / scale : splat(0.0f);
        return nearest(clamped((value - minimum) * inverse, 0.0f, 15.0f));
    }
};

// The line through (code, value) with the least squares of errors, for the codes that `guess` gives.
Line fitted(const Values& values, const Line& guess) {
    Floats codes = {}, squares = {}, sums = {}, products = {};
    for (const Floats& value : values.of) {
        const Floats code = guess.code(value);
        codes += code;
        squares += code * code;
        sums += value;
        products += code * value;
    }
    constexpr float kCount = kInputStep;
    const Floats spread = squares * kCount - codes * codes;
    const Floats scale = spread > 0.0f ? (products * kCount - codes * sums) / spread : splat(0.0f);
    return {scale, (sums - scale * codes) / kCount};
}

// The candidates are the ranges that a group's values may span. Between 16 and 9 evenly spaced codes, the lowest at the
// least value, or codes round 0 as Q4_0 of GGUF has them: so that what has no more than 4 bits already comes out as it was.
// And a range that leaves out a little at both ends, fitted: the sum of squares is less if single large values are cut off.
constexpr int kSpans = 8, kCuts = 6;

Line candidate_line(const Values& values, Floats low, Floats high, int candidate) {
    const Floats span = high - low;
    if (candidate < kSpans) return {span / static_cast<float>(15 - candidate), low};
    if (candidate == kSpans) {
        const Floats extreme = high > -low ? high : low;
        const Floats scale = extreme * -0.125f;
        return {scale < 0.0f ? -scale : scale, scale < 0.0f ? scale * 7.0f : scale * -8.0f};
    }
    const float cut = 0.025f * static_cast<float>(candidate - kSpans - 1);
    return fitted(values, {span * ((1.0f - 2.0f * cut) / 15.0f), low + span * cut});
}

Floats quantize(const Values& values, Int4Block& block) {
    Floats low = values.of[0], high = values.of[0];
    for (const Floats& value : values.of) {
        low = value < low ? value : low;
        high = value > high ? value : high;
    }
    Line best{};
    Floats least = splat(std::numeric_limits<float>::infinity());
    for (int candidate = 0; candidate < kSpans + 1 + kCuts; ++candidate) {
        Line line = candidate_line(values, low, high, candidate);
        line = {as_halves(line.scale), as_halves(line.minimum)};
        Floats error = {};
        for (const Floats& value : values.of) {
            const Floats difference = line.code(value) * line.scale + line.minimum - value;
            error += difference * difference;
        }
        const auto better = error < least;
        best.scale = better ? line.scale : best.scale;
        best.minimum = better ? line.minimum : best.minimum;
        least = better ? error : least;
    }
    Codes codes;
    for (int i = 0; i < kInputStep; ++i) codes.of[i] = integers(best.code(values.of[i]));
    write_codes(codes, block);
    store_halves(block.scales, best.scale);
    store_halves(block.minimums, best.minimum);
    return least;
}

// Calls fill(block, tile, step) for every block of the matrix.
template <class Block, class Fill>
void fill_blocks(std::int64_t num_outputs, std::int64_t num_inputs, void* packed, int num_threads, Fill&& fill) {
    const auto num_steps = num_inputs / kInputStep;
    auto body = [&](Team& team) {
        const auto tiles = team.share((num_outputs + kTile - 1) / kTile);
        for (auto tile = tiles.begin; tile < tiles.end; ++tile)
            for (std::int64_t step = 0; step < num_steps; ++step)
                fill(static_cast<Block*>(packed)[tile * num_steps + step], tile, step);
    };
    run_team(num_threads, body);
}

// Returns the root of the mean square of the errors, as a fraction of the weights' own.
template <class Block>
double quantize_matrix(const float* weights, std::int64_t num_outputs, std::int64_t num_inputs, void* packed,
                       int num_threads) {
    std::atomic<double> all_errors = 0.0, all_squares = 0.0;
    fill_blocks<Block>(num_outputs, num_inputs, packed, num_threads, [&](Block& block, std::int64_t tile, std::int64_t step) {
        Values values = {};
        for (int lane = 0; lane < kTile && tile * kTile + lane < num_outputs; ++lane) {
            const float* row = weights + (tile * kTile + lane) * num_inputs + step * kInputStep;
            for (int i = 0; i < kInputStep; ++i) values.of[i][lane] = row[i];
        }
        Floats squares = {};
        for (const Floats& value : values.of) squares += value * value;
        all_errors.fetch_add(sum(quantize(values, block)), std::memory_order_relaxed);
        all_squares.fetch_add(sum(squares), std::memory_order_relaxed);
    });
    // Compared so that what is not a number stays one.
    return all_squares == 0.0 ? 0.0 : std::sqrt(all_errors / all_squares);
}

}  // namespace

HEADRACE_EXPORT std::int64_t headrace_block_bytes(int format) { return block_bytes(static_cast<Format>(format)); }

// packed: [tiles][num_inputs / 32] blocks of the format. Returns the relative error, which is not
// finite if a weight is not.
HEADRACE_EXPORT double headrace_quantize(const float* weights, std::int64_t num_outputs, std::int64_t num_inputs, int format,
                                         void* packed, int num_threads) {
    if (static_cast<Format>(format) == Format::int8)
        return quantize_matrix<Int8Block>(weights, num_outputs, num_inputs, packed, num_threads);
    return quantize_matrix<Int4Block>(weights, num_outputs, num_inputs, packed, num_threads);
}

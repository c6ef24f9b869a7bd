// Values of GGUF's quantized blocks, as the format's description has them: float32, each rounded as gguf-py rounds it.
#include "numeric.h"
#include "team.h"

using namespace headrace;

namespace {

float half_at(const std::uint8_t* source) {
    std::uint16_t half;
    std::memcpy(&half, source, sizeof half);
    const float magnitude = std::bit_cast<float>((half & 0x7fffu) << 13) * 0x1p112f;
    return half & 0x8000 ? -magnitude : magnitude;
}

// Each has kBytes of a block, kValues in it, and read(block, values).
struct Q4_0 {
    static constexpr int kBytes = 18, kValues = 32;
    static void read(const std::uint8_t* block, float* values) {
        const float scale = half_at(block);
        for (int i = 0; i < 16; ++i) {
            values[i] = scale * static_cast<float>((block[2 + i] & 15) - 8);
            values[i + 16] = scale * static_cast<float>((block[2 + i] >> 4) - 8);
        }
    }
};

struct Q4_1 {
    static constexpr int kBytes = 20, kValues = 32;
    static void read(const std::uint8_t* block, float* values) {
        const float scale = half_at(block), minimum = half_at(block + 2);
        for (int i = 0; i < 16; ++i) {
            values[i] = scale * static_cast<float>(block[4 + i] & 15) + minimum;
            values[i + 16] = scale * static_cast<float>(block[4 + i] >> 4) + minimum;
        }
    }
};

struct Q8_0 {
    static constexpr int kBytes = 34, kValues = 32;
    static void read(const std::uint8_t* block, float* values) {
        const float scale = half_at(block);
        for (int i = 0; i < 32; ++i) values[i] = scale * static_cast<float>(static_cast<std::int8_t>(block[2 + i]));
    }
};

// Eight groups of 32, with scales and minimums of six bits.
struct Q4_K {
    static constexpr int kBytes = 144, kValues = 256;
    static void read(const std::uint8_t* block, float* values) {
        const float scale = half_at(block), minimum = half_at(block + 2);
        const std::uint8_t* packed = block + 4;
        const std::uint8_t* codes = block + 16;
        for (int group = 0; group < 8; ++group) {
            int s, m;
            if (group < 4) {
                s = packed[group] & 63;
                m = packed[group + 4] & 63;
            } else {
                s = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4;
                m = packed[group + 4] >> 4 | (packed[group] >> 6) << 4;
            }
            const float own = scale * static_cast<float>(s), low = minimum * static_cast<float>(m);
            const int shift = group % 2 * 4;
            for (int i = 0; i < 32; ++i)
                values[group * 32 + i] = own * static_cast<float>(codes[group / 2 * 32 + i] >> shift & 15) - low;
        }
    }
};

// Sixteen groups of 16, with scales of eight bits; four low bits of the codes apart from two high ones.
struct Q6_K {
    static constexpr int kBytes = 210, kValues = 256;
    static void read(const std::uint8_t* block, float* values) {
        const std::uint8_t* low = block;
        const std::uint8_t* high = block + 128;
        const auto* scales = reinterpret_cast<const std::int8_t*>(block + 192);
        const float scale = half_at(block + 208);
        for (int part = 0; part < 8; ++part) {
            const int half = part / 4, quarter = part % 4;
            for (int i = 0; i < 32; ++i) {
                const int nibble = low[half * 64 + quarter % 2 * 32 + i] >> quarter / 2 * 4 & 15;
                const int code = (nibble | (high[half * 32 + i] >> 2 * quarter & 3) << 4) - 32;
                const float own = scale * static_cast<float>(scales[part * 2 + i / 16]);
                values[part * 32 + i] = own * static_cast<float>(code);
            }
        }
    }
};

template <class Kind>
void dequantize(const std::uint8_t* blocks, std::int64_t num_blocks, float* values, int num_threads) {
    auto body = [&](Team& team) {
        const auto own = team.share(num_blocks);
        for (auto index = own.begin; index < own.end; ++index)
            Kind::read(blocks + index * Kind::kBytes, values + index * Kind::kValues);
    };
    run_team(num_threads, body);
}

}  // namespace

// `kind`: the number of the type in GGUF. False: this type is not read here.
HEADRACE_EXPORT int headrace_dequantize(const std::uint8_t* blocks, std::int64_t num_blocks, int kind, float* values,
                                        int num_threads) {
    switch (kind) {
        case 2:
            return dequantize<Q4_0>(blocks, num_blocks, values, num_threads), 1;
        case 3:
            return dequantize<Q4_1>(blocks, num_blocks, values, num_threads), 1;
        case 8:
            return dequantize<Q8_0>(blocks, num_blocks, values, num_threads), 1;
        case 12:
            return dequantize<Q4_K>(blocks, num_blocks, values, num_threads), 1;
        case 14:
            return dequantize<Q6_K>(blocks, num_blocks, values, num_threads), 1;
        default:
            return 0;
    }
}

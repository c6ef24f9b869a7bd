#include "blocks.h"

namespace headrace {
namespace {

// Sixteen IEEE halves, none of them infinite.
inline Floats load_halves(const std::uint16_t* source) {
#ifdef HEADRACE_BF16_DOT
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
#else
    Halves halves;
    std::memcpy(&halves, source, sizeof halves);
    const Words bits = __builtin_convertvector(halves, Words);
    const Floats magnitude = std::bit_cast<Floats>((bits & 0x7fff) << 13) * 0x1p112f;
    return std::bit_cast<Floats>(std::bit_cast<Words>(magnitude) | (bits & 0x8000) << 16);
#endif
}

// The `Bits` bits of each word from `Start` on, as a fraction's leading bits: 2^Bits + code.
template <int Start, int Bits>
inline Floats code_at(Words words) {
    constexpr int kShift = 23 - Bits - Start;
    constexpr std::uint32_t kMask = ((1u << Bits) - 1) << (23 - Bits);
    constexpr std::uint32_t kBase = (127u + Bits) << 23;
    Words shifted;
    if constexpr (kShift >= 0)
        shifted = words << kShift;
    else
        shifted = words >> -kShift;
#ifdef HEADRACE_BF16_DOT
    return (Floats)_mm512_ternarylogic_epi32((__m512i)shifted, _mm512_set1_epi32(static_cast<int>(kMask)),
                                             _mm512_set1_epi32(static_cast<int>(kBase)), 0xea);  // (a & b) | c
#else
    return std::bit_cast<Floats>((shifted & kMask) | kBase);
#endif
}

inline void store_pairs(bf16* target, Floats even, Floats odd) {
#ifdef HEADRACE_BF16_DOT
    const auto turns = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20,
                                        4, 19, 3, 18, 2, 17, 1, 16, 0);
    const auto halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    _mm512_storeu_si512(target, _mm512_permutexvar_epi16(turns, halves));
#else
    const auto bits_of = [](Floats value) {
        const Words bits = std::bit_cast<Words>(value);
        return bits + 0x7fff + ((bits >> 16) & 1);
    };
    const Words pairs = (bits_of(even) >> 16) | (bits_of(odd) & 0xffff0000u);
    std::memcpy(target, &pairs, sizeof pairs);
#endif
}

inline Words load_words(const std::uint32_t* source) {
    Words words;
    std::memcpy(&words, source, sizeof words);
    return words;
}

template <int First, int Second, int Bits>
inline void decode_pair(Words words, Floats scale, Floats offset, bf16* target) {
    store_pairs(target, code_at<First, Bits>(words) * scale + offset, code_at<Second, Bits>(words) * scale + offset);
}

}  // namespace

// Never inlined: two copies could round differently.
[[gnu::noinline]] void decode_block(const Int8Block& block, bf16* target) {
    const Floats scale = load_halves(block.scales);
    const Floats offset = scale * -384.0f;  // codes are stored with 128 added, and read with 256
    for (const auto& codes : block.codes) {
        const Words words = load_words(codes);
        decode_pair<0, 8, 8>(words, scale, offset, target);
        decode_pair<16, 24, 8>(words, scale, offset, target + 2 * kTile);
        target += 4 * kTile;
    }
}

[[gnu::noinline]] void decode_block(const Int4Block& block, bf16* target) {
    const Floats scale = load_halves(block.scales);
    const Floats offset = load_halves(block.minimums) - scale * 16.0f;
    for (const auto& codes : block.codes) {
        const Words words = load_words(codes);
        decode_pair<0, 16, 4>(words, scale, offset, target);
        decode_pair<4, 20, 4>(words, scale, offset, target + 2 * kTile);
        decode_pair<8, 24, 4>(words, scale, offset, target + 4 * kTile);
        decode_pair<12, 28, 4>(words, scale, offset, target + 6 * kTile);
        target += 8 * kTile;
    }
}

}  // namespace headrace

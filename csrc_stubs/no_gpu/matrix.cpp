#include "matrix.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "number.h"

namespace flash4 {
namespace {

// --- elements

// Moves exponent and mantissa into an fp32 and scales by the difference of the biases, which is right for subnormals
// too. e4m3 has no infinity; its NaN is all ones (PTX ISA, Alternate Floating-Point Data Formats).
inline float widen_e4m3(uint32_t bits) {
    const uint32_t magnitude = bits & 0x7Fu, sign = (bits & 0x80u) << 24;
    const uint32_t special = magnitude == 0x7Fu ? 0x7FC00000u : 0u;
    const float value = number::real(magnitude << 20) * 0x1p120f;
    return number::real(number::bits(value) | special | sign);
}

template <Element E>
inline float value_of(uint32_t bits) {
    if constexpr (E == Element::F16) return number::from_f16(static_cast<uint16_t>(bits));
    if constexpr (E == Element::BF16) return number::real(bits << 16);
    if constexpr (E == Element::TF32) return number::real(bits & 0xFFFFE000u);
    if constexpr (E == Element::E4M3) return widen_e4m3(bits);
    if constexpr (E == Element::E5M2) return number::from_f16(static_cast<uint16_t>(bits << 8));
    if constexpr (E == Element::S8) return static_cast<float>(static_cast<int8_t>(bits));
    if constexpr (E == Element::U8) return static_cast<float>(bits);
}

constexpr uint32_t size_of(Element element) {
    if (element == Element::TF32) return 4;
    return element == Element::F16 || element == Element::BF16 ? 2 : 1;
}

template <Element E>
constexpr uint32_t kBits = 8 * size_of(E);

template <Element E>
constexpr uint32_t kOnes = E == Element::TF32 ? ~0u : (1u << (kBits<E> % 32)) - 1;

// Calls body(std::integral_constant<Element, E>) for the element that is only known at run time.
template <class Body>
inline void with_element(Element element, Body&& body) {
    switch (element) {
        case Element::F16: return body(std::integral_constant<Element, Element::F16>{});
        case Element::BF16: return body(std::integral_constant<Element, Element::BF16>{});
        case Element::TF32: return body(std::integral_constant<Element, Element::TF32>{});
        case Element::E4M3: return body(std::integral_constant<Element, Element::E4M3>{});
        case Element::E5M2: return body(std::integral_constant<Element, Element::E5M2>{});
        case Element::S8: return body(std::integral_constant<Element, Element::S8>{});
        case Element::U8: return body(std::integral_constant<Element, Element::U8>{});
    }
}

// K runs along the words.
template <Element E>
void spread_along_k(const uint32_t* words, size_t word_step, size_t row_step, uint32_t rows, float* to) {
    for (uint32_t w = 0; w < kTileWords; ++w)
        for (uint32_t part = 0; part < 4 / size_of(E); ++part, to += kTileRows)
            for (uint32_t r = 0; r < rows; ++r)
                to[r] = value_of<E>(words[w * word_step + r * row_step] >> (kBits<E> * part % 32) & kOnes<E>);
}

// The rows run along the words: `rows` elements for each k.
template <Element E>
void spread_along_rows(const uint8_t* bytes, uint32_t rows, float* to) {
    using Bits = std::conditional_t<size_of(E) == 4, uint32_t, std::conditional_t<size_of(E) == 2, uint16_t, uint8_t>>;
    const Bits* from = reinterpret_cast<const Bits*>(bytes);
    for (uint32_t k = 0; k < kTileBytes / size_of(E); ++k, from += rows, to += kTileRows)
        for (uint32_t r = 0; r < rows; ++r) to[r] = value_of<E>(from[r]);
}

// --- where the 16-byte chunks of a tile lie

constexpr uint32_t kChunk = 16;

// Bytes of the swizzled row that repeats every 8 (or, with 32-byte atoms, 4) rows.
uint32_t row_bytes(Swizzle swizzle) {
    switch (swizzle) {
        case Swizzle::None: return kChunk;
        case Swizzle::B32: return 32;
        case Swizzle::B64: return 64;
        default: return 128;
    }
}

// Exclusive-ors address bits from 7 up into those from 4 (or 5) up. A pattern that does not begin at a multiple of its
// size says with its base offset at which row it begins.
uint32_t swizzled(uint32_t offset, const SharedMatrix& matrix) {
    const uint32_t row = (offset >> 7) - matrix.base_offset;
    switch (matrix.swizzle) {
        case Swizzle::None: return offset;
        case Swizzle::B32: return offset ^ (row & 1) << 4;
        case Swizzle::B64: return offset ^ (row & 3) << 4;
        case Swizzle::B128: return offset ^ (row & 7) << 4;
        case Swizzle::B128Atom32: return offset ^ (row & 3) << 5;
    }
    return offset;
}

// K-major: 8 rows make a group, `stride` apart; a row's two chunks are neighbours, or `leading` apart without a
// swizzle.
uint32_t along_k(const SharedMatrix& m, uint32_t row, uint32_t chunk) {
    const uint32_t step = m.swizzle == Swizzle::None ? m.leading : kChunk;
    return swizzled(m.start + row / 8 * m.stride + row % 8 * row_bytes(m.swizzle) + chunk * step, m);
}

// MN-major: a chunk holds neighbouring rows of one k. Swizzled: as many chunks as a swizzled row holds, then `leading`
// apart; groups of k are `stride` apart. Without a swizzle the two offsets change places.
uint32_t along_rows(const SharedMatrix& m, uint32_t k, uint32_t chunk) {
    if (m.swizzle == Swizzle::None) return m.start + chunk * m.stride + k % 8 * kChunk + k / 8 * m.leading;
    const uint32_t bytes = row_bytes(m.swizzle), chunks = bytes / kChunk,
                   group = m.swizzle == Swizzle::B128Atom32 ? 4 : 8;
    return swizzled(
        m.start + chunk / chunks * m.leading + chunk % chunks * kChunk + k % group * bytes + k / group * m.stride, m);
}

// Copies chunks out of shared memory and tells the race checker, neighbouring chunks together.
class Reader {
public:
    Reader(const race::Ticket& by, Cta& cta) : by_(by), cta_(cta) {}

    void copy(uint32_t offset, uint8_t* to) {
        if (offset < kSharedBase || offset + kChunk > cta_.shared.size())
            throw Fault("out-of-bounds", "a matrix descriptor reaches shared offset " + std::to_string(offset) +
                                             " of " + std::to_string(cta_.shared.size()));
        std::memcpy(to, cta_.shared.data() + offset, kChunk);
        if (offset == end_) end_ += kChunk;
        else if (offset + kChunk == begin_) begin_ = offset;
        else {
            finish();
            begin_ = offset;
            end_ = offset + kChunk;
        }
    }

    // Reports what has not been reported yet.
    void finish() {
        cta_.launch->counters.shared_read += end_ - begin_;
        if (begin_ != end_ && cta_.cluster->races) cta_.cluster->races->read(by_, cta_, begin_, end_ - begin_);
        begin_ = end_ = 0;
    }

private:
    const race::Ticket& by_;
    Cta& cta_;
    uint32_t begin_ = 0, end_ = 0;
};

// The elements of all rows for one k after those of another.
void fetch_mn_major(const race::Ticket& by, Cta& cta, const SharedMatrix& matrix, Element element, Rows rows,
                    uint8_t* to) {
    const uint32_t per_chunk = kChunk / size_of(element), first = rows.first / per_chunk;
    if (rows.count % per_chunk)
        throw Fault("unsupported", std::to_string(rows.count) + " MN-major rows of 8-bit elements; 16 share a chunk");
    Reader reader(by, cta);
    for (uint32_t k = 0; k < tile_k(element); ++k)
        for (uint32_t c = 0; c < rows.count / per_chunk; ++c, to += kChunk)
            reader.copy(along_rows(matrix, k, first + c), to);
    reader.finish();
}

Swizzle tcgen05_swizzle(uint64_t code) {
    switch (code) {
        case 0: return Swizzle::None;
        case 1: return Swizzle::B128Atom32;
        case 2: return Swizzle::B128;
        case 4: return Swizzle::B64;
        case 6: return Swizzle::B32;
    }
    throw Fault("descriptor", "matrix descriptor with swizzle mode " + std::to_string(code));
}

SharedMatrix addresses(uint64_t descriptor, Swizzle swizzle) {
    const auto field = [&](int bit) { return static_cast<uint32_t>(descriptor >> bit & 0x3FFF) << 4; };
    return {.start = field(0),
            .leading = field(16),
            .stride = field(32),
            .base_offset = static_cast<uint32_t>(descriptor >> 49 & 7),
            .swizzle = swizzle};
}

// --- the product

using Vec = float __attribute__((vector_size(64)));
using VecAt = float __attribute__((vector_size(64), aligned(4), may_alias));  // in memory
inline VecAt& vector_at(float* row, int j) { return reinterpret_cast<VecAt*>(row)[j]; }
inline const VecAt& vector_at(const float* row, int j) { return reinterpret_cast<const VecAt*>(row)[j]; }

// Four rows of d by `Vs` vectors, held in registers over k.
template <int Vs>
__attribute__((optimize("fp-contract=fast"))) void block(const float* scalars, const float* vectors, uint32_t k,
                                                         float* d) {
    Vec sum[4][Vs];
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < Vs; ++j) sum[i][j] = vector_at(d + i * kTileRows, j);
    for (; k; --k, scalars += kTileRows, vectors += kTileRows)
        for (int j = 0; j < Vs; ++j) {
            const Vec v = vector_at(vectors, j);
            for (int i = 0; i < 4; ++i) sum[i][j] += scalars[i] * v;
        }
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < Vs; ++j) vector_at(d + i * kTileRows, j) = sum[i][j];
}

}  // namespace

uint32_t bytes_of(Element element) { return size_of(element); }

SharedMatrix wgmma_matrix(uint64_t descriptor) {
    static constexpr Swizzle modes[] = {Swizzle::None, Swizzle::B128, Swizzle::B64, Swizzle::B32};
    return addresses(descriptor, modes[descriptor >> 62]);
}

SharedMatrix tcgen05_matrix(uint64_t descriptor) {
    if ((descriptor >> 46 & 7) != 1)
        throw Fault("descriptor", "bits 46 to 48 of a tcgen05 matrix descriptor must be 1");
    if (descriptor >> 52 & 1)
        throw Fault("unsupported", "matrix descriptor with an absolute leading-dimension address");
    return addresses(descriptor, tcgen05_swizzle(descriptor >> 61));
}

void gather(const race::Ticket& by, Cta& cta, const SharedMatrix& matrix, Element element, bool mn_major, Rows rows,
            Tile& tile) {
    alignas(64) uint8_t raw[kTileRows * kTileBytes];
    float* to = tile.value + rows.to;
    if (mn_major) {
        fetch_mn_major(by, cta, matrix, element, rows, raw);
        with_element(element, [&](auto e) { spread_along_rows<e()>(raw, rows.count, to); });
    } else {
        fetch(by, cta, matrix, rows, 2, raw);
        spread(element, reinterpret_cast<const uint32_t*>(raw), 1, kTileWords, rows.count, to);
    }
}

void fetch(const race::Ticket& by, Cta& cta, const SharedMatrix& matrix, Rows rows, uint32_t chunks, uint8_t* to) {
    Reader reader(by, cta);
    for (uint32_t r = 0; r < rows.count; ++r)
        for (uint32_t c = 0; c < chunks; ++c, to += kChunk) reader.copy(along_k(matrix, rows.first + r, c), to);
    reader.finish();
}

void spread(Element element, const uint32_t* words, size_t word_step, size_t row_step, uint32_t rows, float* to) {
    with_element(element, [&](auto e) {
        // Known steps let the compiler load vectors.
        if (row_step == 1) spread_along_k<e()>(words, word_step, 1, rows, to);
        else spread_along_k<e()>(words, 1, kTileWords, rows, to);
    });
}

void negate(Tile& tile, Element element) {
    for (uint32_t i = 0; i < tile_k(element) * kTileRows; ++i) tile.value[i] = -tile.value[i];
}

void multiply_add(const float* scalars, const float* vectors, uint32_t k, uint32_t count, float* d) {
    uint32_t j = 0;
    for (; j + 64 <= count; j += 64) block<4>(scalars, vectors + j, k, d + j);
    for (; j < count; j += 16) block<1>(scalars, vectors + j, k, d + j);
}

int32_t add_integer(int32_t accumulator, float product, bool saturate) {
    const int64_t sum = static_cast<int64_t>(accumulator) + static_cast<int64_t>(product);
    if (!saturate) return static_cast<int32_t>(static_cast<uint32_t>(sum));
    return static_cast<int32_t>(
        std::clamp<int64_t>(sum, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()));
}

}  // namespace flash4

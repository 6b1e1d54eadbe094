// ldmatrix, stmatrix and movmatrix: 8x8 matrices of 16-bit elements, and their transposes, across the lanes of a warp
// (PTX ISA, Warp-level matrix instructions). Lane 4r+c of a matrix fragment holds elements (r, 2c) and (r, 2c+1).
#include <cstring>

#include "banks.h"
#include "memory.h"

namespace flash4 {
namespace {

constexpr int kRows = 8, kRowBytes = 16;

using Matrix = uint16_t[kRows][kRows];

void to_fragment(const Matrix& matrix, bool transposed, uint32_t* lanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
        const int r = lane / 4, c = lane % 4 * 2;
        const uint32_t low = transposed ? matrix[c][r] : matrix[r][c],
                       high = transposed ? matrix[c + 1][r] : matrix[r][c + 1];
        lanes[lane] = low | high << 16;
    }
}

void from_fragment(const uint32_t* lanes, bool transposed, Matrix& matrix) {
    for (int lane = 0; lane < kLanes; ++lane) {
        const int r = lane / 4, c = lane % 4 * 2;
        (transposed ? matrix[c][r] : matrix[r][c]) = static_cast<uint16_t>(lanes[lane]);
        (transposed ? matrix[c + 1][r] : matrix[r][c + 1]) = static_cast<uint16_t>(lanes[lane] >> 16);
    }
}

// The row of matrix i whose address lane 8i+row holds.
SharedRef row_at(Warp& warp, const Op& op, int lane) {
    return shared_at(warp, warp.u32(op.reg[0])[lane] + static_cast<uint32_t>(op.attr[0]), kRowBytes, kRowBytes);
}

// reg: address, fragments (1, 2 or 4); attr: constant of the address, transposed.
Step load_matrices(Warp& warp, const Op& op, Mask mask) {
    need_whole_warp(mask, "ldmatrix");
    race::Checker* races = warp.cta->cluster->races.get();
    const int count = op.regs - 1;
    Matrix matrices[4];
    uint32_t rows[kLanes] = {};
    for (int lane = 0; lane < count * kRows; ++lane) {
        const SharedRef row = row_at(warp, op, lane);
        rows[lane] = row.offset;
        if (races) races->read(warp, op, race::kTogether, *row.cta, row.offset, kRowBytes);
        std::memcpy(matrices[lane / kRows][lane % kRows], row.data(), kRowBytes);
    }
    for (int i = 0; i < count; ++i) to_fragment(matrices[i], op.attr[1], warp.u32(op.reg[1 + i]));
    warp.cta->launch->counters.shared_read += static_cast<uint64_t>(count) * sizeof(Matrix);
    const Mask lanes = kAllLanes >> (kLanes - count * kRows);
    if (races) warp.cta->cluster->lanes->read_together(warp, op, *warp.cta, {rows, lanes, kRowBytes});
    count_shared(warp, op, traffic_of(rows, lanes, kRowBytes));
    return Step::Next;
}

Step store_matrices(Warp& warp, const Op& op, Mask mask) {
    need_whole_warp(mask, "stmatrix");
    race::Checker* races = warp.cta->cluster->races.get();
    const int count = op.regs - 1;
    Matrix matrices[4];
    uint32_t rows[kLanes] = {};
    for (int i = 0; i < count; ++i) from_fragment(warp.u32(op.reg[1 + i]), op.attr[1], matrices[i]);
    for (int lane = 0; lane < count * kRows; ++lane) {
        const SharedRef row = row_at(warp, op, lane);
        rows[lane] = row.offset;
        if (races) races->write(warp, op, race::kTogether, *row.cta, row.offset, kRowBytes);
        std::memcpy(row.data(), matrices[lane / kRows][lane % kRows], kRowBytes);
    }
    warp.cta->launch->counters.shared_written += static_cast<uint64_t>(count) * sizeof(Matrix);
    const Mask lanes = kAllLanes >> (kLanes - count * kRows);
    if (races) warp.cta->cluster->lanes->write_together(warp, op, *warp.cta, {rows, lanes, kRowBytes});
    count_shared(warp, op, traffic_of(rows, lanes, kRowBytes));
    return Step::Next;
}

// reg: destination, source.
Step transpose_matrix(Warp& warp, const Op& op, Mask mask) {
    need_whole_warp(mask, "movmatrix");
    Matrix matrix;
    from_fragment(warp.u32(op.reg[1]), false, matrix);
    to_fragment(matrix, true, warp.u32(op.reg[0]));
    return Step::Next;
}

FLASH4_OP("ldmatrix", Memory, load_matrices);
FLASH4_OP("stmatrix", Memory, store_matrices);
FLASH4_OP("movmatrix", Move, transpose_matrix);

}  // namespace
}  // namespace flash4

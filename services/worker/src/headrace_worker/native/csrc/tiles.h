// The matrix unit of some x86 processors (AMX): whether it may be used, and how its eight tiles are shaped.
#pragma once

#include "numeric.h"

#if !defined(HEADRACE_WITHOUT_AMX) && defined(HEADRACE_BF16_DOT) && defined(__AMX_BF16__) && defined(__linux__)
#define HEADRACE_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace headrace {

#ifdef HEADRACE_AMX

inline bool has_matrix_unit = false;

// Asks the system for the unit. Call once, before anything else.
inline void request_matrix_unit() {
    constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr int kTileData = 18;
    has_matrix_unit = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// What the tiles of a thread are shaped for: 0, or a purpose of the kernel that shaped them. Others (oneDNN) shape the same
// tiles, so it holds only within a MatrixUnit's life.
inline thread_local int tiles_shaped_for = 0;

struct alignas(64) TileShape {
    std::uint8_t palette = 1;
    std::uint8_t start_row = 0;
    std::uint8_t reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};

    void set(int tile, int num_rows, int bytes) {
        rows[tile] = static_cast<std::uint8_t>(num_rows);
        row_bytes[tile] = static_cast<std::uint16_t>(bytes);
    }
};

// Around a thread's use of the unit: its state is costly to keep across context switches.
class MatrixUnit {
  public:
    MatrixUnit() { tiles_shaped_for = 0; }
    ~MatrixUnit() {
        if (has_matrix_unit) _tile_release();
    }
    MatrixUnit(const MatrixUnit&) = delete;
    MatrixUnit& operator=(const MatrixUnit&) = delete;
};

#else

inline void request_matrix_unit() {}

class MatrixUnit {
  public:
    MatrixUnit() {}
    ~MatrixUnit() {}
};

#endif

}  // namespace headrace

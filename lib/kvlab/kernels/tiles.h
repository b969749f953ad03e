// A matrix product of bfloat16 on the processor's matrix unit (Intel AMX), for few rows of activations.
//
// A tile is 16 rows of 64 bytes. Weights are taken as they lie, 16 rows of them by 32 columns; the activations are put
// into the other operand's order once: pairs of neighbouring columns, the 16 rows of activations side by side. A
// product of 16 rows then costs hardly more than reading the weights: the 106M weights of SmolLM2's blocks take 11.0 ms
// with 1 row, 12.6 with 16 and 21.9 with 64, on two cores; torch's product takes 19 to 26, the vector units 12 to 46.
#pragma once

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstring>
#include <vector>

#if defined(__AMX_BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tiles {

constexpr int64_t SIDE = 16;         // rows of a tile
constexpr int64_t DEPTH = 32;        // bfloat16 in a row of it
constexpr int64_t PAIR = 2 * SIDE;   // rows of weights that are worked on together
constexpr int64_t AREA = SIDE * DEPTH;

#if defined(__AMX_BF16__) && defined(__linux__)

// The kernel saves 8 KiB more for each thread that uses tiles, and wants to be asked first, once for the process.
inline bool allowed() {
  constexpr int ASK = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
  return granted;
}

struct alignas(64) Shapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE};
};

// Activations in the order of the second operand: tile after tile along the columns, for each 16 rows; zeros below the
// last row.
inline std::vector<at::BFloat16> packed(const at::BFloat16* x, int64_t rows, int64_t columns) {
  const int64_t tall = (rows + SIDE - 1) / SIDE, wide = columns / DEPTH;
  std::vector<at::BFloat16> to(tall * wide * AREA, at::BFloat16(0.0f));
  for (int64_t r = 0; r < rows; r++)
    for (int64_t k = 0; k < columns; k += 2)
      std::memcpy(&to[(r / SIDE * wide + k / DEPTH) * AREA + k % DEPTH / 2 * DEPTH + r % SIDE * 2], x + r * columns + k, 4);
  return to;
}

// 32 rows of weights times M times 16 rows of activations. The processor reads ahead along each row too little.
template <int M> inline void product(const at::BFloat16* w, const at::BFloat16* x, int64_t columns, float* to) {
  constexpr int64_t AHEAD = 512;
  const int64_t line = columns * 2, wide = columns / DEPTH;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (M > 1) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < wide; k++, w += DEPTH, x += AREA) {
    _tile_loadd(4, w, line);
    _tile_loadd(5, w + SIDE * columns, line);
    for (int64_t r = 0; r < PAIR; r++) __builtin_prefetch(reinterpret_cast<const char*>(w + r * columns) + AHEAD);
    _tile_loadd(6, x, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (M > 1) {
      _tile_loadd(7, x + wide * AREA, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, to, 64);
  _tile_stored(1, to + SIDE * SIDE, 64);
  if constexpr (M > 1) {
    _tile_stored(2, to + 2 * SIDE * SIDE, 64);
    _tile_stored(3, to + 3 * SIDE * SIDE, 64);
  }
}

inline void linear(const at::BFloat16* x, const at::BFloat16* w, at::BFloat16* y, int64_t rows, int64_t columns,
                   int64_t outputs) {
  const auto input = packed(x, rows, columns);
  const int64_t tall = (rows + SIDE - 1) / SIDE, row_of_tiles = columns / DEPTH * AREA;
  at::parallel_for(0, outputs / PAIR, std::max<int64_t>(1, 1024 / columns), [&](int64_t begin, int64_t end) {
    const Shapes shapes;
    _tile_loadconfig(&shapes);
    alignas(64) float sums[2][2][SIDE][SIDE];  // of activations, of weights: tiles, then a weight's sum for each row
    for (int64_t n = begin * PAIR; n < end * PAIR; n += PAIR)
      for (int64_t m = 0; m < tall; m += 2) {
        const auto* from = input.data() + m * row_of_tiles;
        if (m + 1 < tall) product<2>(w + n * columns, from, columns, &sums[0][0][0][0]);
        else product<1>(w + n * columns, from, columns, &sums[0][0][0][0]);
        const int64_t first = m * SIDE, last = std::min(rows, first + 2 * SIDE);
        for (int64_t r = first; r < last; r++)
          for (int64_t i = 0; i < PAIR; i++) y[r * outputs + n + i] = sums[(r - first) / SIDE][i / SIDE][i % SIDE][r % SIDE];
      }
    _tile_release();
  });
}

#else

inline bool allowed() { return false; }
inline void linear(const at::BFloat16*, const at::BFloat16*, at::BFloat16*, int64_t, int64_t, int64_t) {}

#endif

// Whether this product runs on tiles.
inline bool fits(const at::Tensor& x, const at::Tensor& weight) {
  return x.scalar_type() == at::kBFloat16 && weight.scalar_type() == at::kBFloat16 && weight.size(1) % DEPTH == 0 &&
         weight.size(0) % PAIR == 0 && weight.size(0) > 0 && allowed();
}

}  // namespace tiles

// Linear layers for a few rows of activations, at the speed at which weights come out of memory.
//
// A decode step multiplies every weight with one row of activations, or with a few when requests are batched: two
// operations for a weight that takes half a byte to four bytes to read. The time is the time of reading, so codes of 8
// or 4 bits can be two or four times as fast as 16, but only if they become floats in registers, between memory and
// multiplication: written to memory as floats first, they would cost more than they save.
//
// Codes are those of kvlab.packing: value = scale * code + minimum, with a scale and a minimum for each group of a row.
// Two ideas that were tried and did not pay on the processor that the comments are from. The instruction for pairs of
// bfloat16 (vdpbf16ps) does 32 products in 0.71 ns, an FMA 16 in 0.18. Reading 4-bit codes as words of eight, so that a
// register needs one scale for each lane, saves instructions and was no faster at one row.
// Milliseconds in comments: the 106M weights of SmolLM2's blocks, one row, two cores that read 25 GB/s.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "tiles.h"
#include "vectors.h"

namespace {

using at::BFloat16, at::Half, at::Tensor;
using vectors::Ints, vectors::LANES, vectors::load, vectors::sum, vectors::Vec, vectors::widen;

// ---- Vectors of codes and of whole tensors --------------------------------------------------------------------------
constexpr int BLOCK = 32;  // weights that are decoded together; rows and groups are whole blocks
constexpr int PARTS = BLOCK / LANES;

#if defined(__AVX512F__)
inline Ints widen(const uint8_t* p) { return (Ints)_mm512_cvtepu8_epi32(load<__m128i>(p)); }
inline Vec low_nibble(Ints v) {  // looked up: the instruction reads four bits of each lane and does not need a mask
  const Vec table = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return (Vec)_mm512_permutexvar_ps((__m512i)v, (__m512)table);
}
#else
#if defined(__AVX2__) && defined(__F16C__)
inline Ints widen(const uint8_t* p) { return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
#else
inline Ints widen(const uint8_t* p) { return Ints{p[0], p[1], p[2], p[3]}; }
#endif
inline Vec low_nibble(Ints v) { return __builtin_convertvector(v & 15, Vec); }
#endif

template <class T> void widen(const T* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    const Vec v = widen(from + i);
    std::memcpy(to + i, &v, sizeof v);
  }
  for (; i < count; i++) to[i] = from[i];
}

void widen(const Tensor& t, int64_t first, int64_t count, float* to) {
  if (t.scalar_type() == at::kFloat) widen(t.const_data_ptr<float>() + first, count, to);
  else if (t.scalar_type() == at::kHalf) widen(t.const_data_ptr<Half>() + first, count, to);
  else widen(t.const_data_ptr<BFloat16>() + first, count, to);
}

// ---- Formats: how the 32 weights of a block become floats -----------------------------------------------------------
template <class T> struct Wide {
  static constexpr int BYTES = BLOCK * sizeof(T);
  static constexpr bool CODES = false, PAIRS = false, PREFETCH = true;
  static inline void decode(const uint8_t* p, Vec (&v)[PARTS]) {
    UNROLL for (int j = 0; j < PARTS; j++) v[j] = widen(reinterpret_cast<const T*>(p) + j * LANES);
  }
};

struct Decoded : Wide<float> {  // what unpack() left in the nearest cache
  static constexpr bool PREFETCH = false;
};

struct Codes8 {
  static constexpr int BYTES = BLOCK;
  static constexpr bool CODES = true, PAIRS = false, PREFETCH = true;
  static inline void decode(const uint8_t* p, Vec (&v)[PARTS]) {
    UNROLL for (int j = 0; j < PARTS; j++) v[j] = __builtin_convertvector(widen(p + j * LANES), Vec);
  }
};

// Two codes a byte: the low ones, elements 0, 2, 4, ... of the block, come out first, then the high ones, 1, 3, 5...
// Putting them in order would cost as much as multiplying; the activations are put into their order instead, once.
struct Codes4 {
  static constexpr int BYTES = BLOCK / 2;
  static constexpr bool CODES = true, PAIRS = true, PREFETCH = true;
  static inline void decode(const uint8_t* p, Vec (&v)[PARTS]) {
    UNROLL for (int j = 0; j < PARTS / 2; j++) {
      const Ints both = widen(p + j * LANES);
      v[j] = low_nibble(both);
      v[j + PARTS / 2] = low_nibble(both >> 4);
    }
  }
};

// ---- Operands -------------------------------------------------------------------------------------------------------
struct Weights {
  const uint8_t* data;
  int64_t rows, columns, row_bytes, groups = 1;
  const Tensor *scale = nullptr, *minimum = nullptr;  // of codes; symmetric ones have no minimum
  int64_t bits = 0;
};

struct Rows {  // some rows of weights, one after the other
  const uint8_t* data;
  int64_t first, bytes;         // the number of the first row, bytes of each
  const float *scale, *minimum;  // of their groups
};

// Scales and minima in float32, for 16 rows at a time. Symmetric codes get a minimum as well: minus half their range.
struct Scales {
  static constexpr int64_t ROWS = 16;
  int64_t first = 0;
  std::vector<float> scale, minimum;

  explicit Scales(const Weights& w) : scale(ROWS * w.groups), minimum(ROWS * w.groups + LANES) {}
  void read(const Weights& w, int64_t begin, int64_t end) {
    const int64_t count = (end - begin) * w.groups;
    first = begin;
    widen(*w.scale, begin * w.groups, count, scale.data());
    if (w.minimum) return widen(*w.minimum, begin * w.groups, count, minimum.data());
    for (int64_t i = 0; i < count; i++) minimum[i] = -float(1 << (w.bits - 1)) * scale[i];
  }
  Rows rows(const Weights& w, int64_t n) const {
    const int64_t at = (n - first) * w.groups;
    return {w.data + n * w.row_bytes, n, w.row_bytes, scale.data() + at, minimum.data() + at};
  }
};

// Activations in float32, in the order of the decoded weights, and their sums over each group.
struct Input {
  int64_t rows, columns, groups, stride, sum_stride;  // the strides in vectors
  std::vector<Vec> values, sums;                      // the sums of a row are filled up with zeros to whole vectors
  Ints last = {};                                     // -1 where the last vector has a sum, 0 where it has none

  Input(const Tensor& x, int64_t groups, bool pairs)
      : rows(x.size(0)), columns(x.size(1)), groups(groups), stride(columns / LANES),
        sum_stride((groups + LANES - 1) / LANES), values(rows * stride), sums(rows * sum_stride) {
    float* all = reinterpret_cast<float*>(values.data());
    widen(x, 0, rows * columns, all);
    for (int64_t g = 0; g < rows * groups; g++) {
      Vec total = {};
      for (int64_t i = g * stride / groups; i < (g + 1) * stride / groups; i++) total += values[i];
      sums[g / groups * sum_stride + g % groups / LANES][g % groups % LANES] = sum(total);
    }
    for (int i = 0; i < LANES; i++) last[i] = -((sum_stride - 1) * LANES + i < groups);
    for (int64_t k = 0; pairs && k < rows * columns; k += BLOCK) {
      float block[BLOCK];
      std::memcpy(block, all + k, sizeof block);
      for (int i = 0; i < BLOCK; i++) all[k + i % 2 * (BLOCK / 2) + i / 2] = block[i];
    }
  }
};

struct Output {
  void* data;
  at::ScalarType type;
  int64_t columns;
  void put(int64_t r, int64_t n, float value) const {
    if (type == at::kFloat) static_cast<float*>(data)[r * columns + n] = value;
    else if (type == at::kHalf) static_cast<Half*>(data)[r * columns + n] = value;
    else static_cast<BFloat16*>(data)[r * columns + n] = value;
  }
};

// ---- The kernel -----------------------------------------------------------------------------------------------------
// The processor reads ahead by itself, but too little, and never across the end of a page. So each block asks for one
// that is needed some 4 KiB later.
constexpr int64_t AHEAD = 4096;
constexpr int WIDTH = 4;    // rows of weights, and at most of activations, in a tile: 16 sums, half of the registers
constexpr int64_t FEW = 4;  // rows of activations: one tile, so weights are decoded once; above it, into a buffer

template <class F> inline void prefetch(const uint8_t* p) {
  if constexpr (F::PREFETCH)
    for (int line = 0; line < F::BYTES; line += 64) __builtin_prefetch(p + line);
}

// N rows of weights times R rows of activations: N * R dot products, a vector of partial sums for each.
//
// sum(w * x) over a group is scale * sum(code * x) + minimum * sum(x). So the scale multiplies a partial sum, once a
// group instead of once a weight, and the minimum a sum of x that all rows of weights share.
template <class F, int N, int R> inline void tile(const Rows& w, const Input& x, int64_t row, const Output& y) {
  const int64_t groups = F::CODES ? x.groups : 1, blocks = x.columns / BLOCK / groups;
  const int64_t tile_bytes = N * w.bytes, ahead = (AHEAD + tile_bytes - 1) / tile_bytes * tile_bytes;  // whole tiles
  const uint8_t* code = w.data;
  const Vec* input = &x.values[row * x.stride];
  Vec total[N][R] = {};
  for (int64_t g = 0; g < groups; g++) {
    Vec part[N][R] = {};
    for (int64_t b = 0; b < blocks; b++, code += F::BYTES, input += PARTS)
      UNROLL for (int n = 0; n < N; n++) {
        Vec v[PARTS];
        F::decode(code + n * w.bytes, v);
        prefetch<F>(code + n * w.bytes + ahead);
        UNROLL for (int r = 0; r < R; r++)
          UNROLL for (int j = 0; j < PARTS; j++) part[n][r] += v[j] * input[r * x.stride + j];
      }
    UNROLL for (int n = 0; n < N; n++)
      UNROLL for (int r = 0; r < R; r++) total[n][r] += F::CODES ? part[n][r] * w.scale[n * groups + g] : part[n][r];
  }
  for (int64_t s = 0; F::CODES && s < x.sum_stride; s++)
    UNROLL for (int n = 0; n < N; n++) {
      Vec minimum = load<Vec>(w.minimum + n * groups + s * LANES);
      if (s + 1 == x.sum_stride) minimum = (Vec)((Ints)minimum & x.last);  // the rest belongs to the next row
      UNROLL for (int r = 0; r < R; r++) total[n][r] += minimum * x.sums[(row + r) * x.sum_stride + s];
    }
  UNROLL for (int n = 0; n < N; n++)
    UNROLL for (int r = 0; r < R; r++) y.put(row + r, w.first + n, sum(total[n][r]));
}

template <class F, int N> void tiles(const Rows& w, const Input& x, const Output& y) {
  int64_t r = 0;
  for (; r + WIDTH <= x.rows; r += WIDTH) tile<F, N, WIDTH>(w, x, r, y);
  if (x.rows - r == 3) tile<F, N, 3>(w, x, r, y);
  if (x.rows - r == 2) tile<F, N, 2>(w, x, r, y);
  if (x.rows - r == 1) tile<F, N, 1>(w, x, r, y);
}

// One row as float32, in the order of the columns or, faster, as decode() returns it.
template <class F, bool ORDER> void unpack(const Rows& w, int64_t columns, int64_t groups, float* to) {
  const uint8_t* code = w.data;
  const int64_t blocks = columns / BLOCK / groups;
  for (int64_t g = 0; g < groups; g++)
    for (int64_t b = 0; b < blocks; b++, code += F::BYTES, to += BLOCK) {
      Vec v[PARTS];
      F::decode(code, v);
      prefetch<F>(code + AHEAD);
      if constexpr (F::CODES) UNROLL for (int j = 0; j < PARTS; j++) v[j] = v[j] * w.scale[g] + w.minimum[g];
      if constexpr (F::PAIRS && ORDER) {
        float block[BLOCK];
        std::memcpy(block, v, sizeof block);
        for (int i = 0; i < BLOCK; i++) to[i] = block[i % 2 * (BLOCK / 2) + i / 2];
      } else {
        std::memcpy(to, v, sizeof v);
      }
    }
}

// Calls work(first, end) for runs of rows, on all cores unless the matrix is small: 64 x 64 takes less than a start.
template <class Work> void for_rows(const Weights& w, const Work& work) {
  at::parallel_for(0, w.rows, std::max<int64_t>(1, 32768 / w.columns), work);
}

template <class F> Tensor multiply(const Tensor& x, const Weights& w) {
  const Input input(x, w.groups, F::PAIRS);
  Tensor out = at::empty({x.size(0), w.rows}, x.options());
  const Output output{out.mutable_data_ptr(), x.scalar_type(), w.rows};
  for_rows(w, [&](int64_t begin, int64_t end) {
    Scales scales(w);
    std::vector<Vec> decoded(input.rows > FEW ? WIDTH * input.stride : 0);
    float* floats = reinterpret_cast<float*>(decoded.data());
    auto run = [&]<int N>(std::integral_constant<int, N>, int64_t n) {
      if (input.rows <= FEW) return tiles<F, N>(scales.rows(w, n), input, output);
      for (int i = 0; i < N; i++) unpack<F, false>(scales.rows(w, n + i), w.columns, w.groups, floats + i * w.columns);
      const Rows rows{reinterpret_cast<const uint8_t*>(floats), n, w.columns * 4, nullptr, nullptr};
      tiles<Decoded, N>(rows, input, output);
    };
    for (int64_t n = begin; n < end;) {
      if ((n - begin) % Scales::ROWS == 0 && F::CODES) scales.read(w, n, std::min(end, n + Scales::ROWS));
      if (n + WIDTH <= end) run(std::integral_constant<int, WIDTH>(), n), n += WIDTH;
      else run(std::integral_constant<int, 1>(), n), n += 1;
    }
  });
  return out;
}

template <class F> Tensor unpack_all(const Weights& w) {
  Tensor out = at::empty({w.rows, w.columns}, at::kFloat);
  float* to = out.mutable_data_ptr<float>();
  for_rows(w, [&](int64_t begin, int64_t end) {
    Scales scales(w);
    for (int64_t n = begin; n < end; n++) {
      if ((n - begin) % Scales::ROWS == 0) scales.read(w, n, std::min(end, n + Scales::ROWS));
      unpack<F, true>(scales.rows(w, n), w.columns, w.groups, to + n * w.columns);
    }
  });
  return out;
}

// ---- Operators ------------------------------------------------------------------------------------------------------
void check(const Tensor& t, const char* name, bool codes = false) {
  const auto type = t.scalar_type();
  const bool floats = type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
  TORCH_CHECK(t.device().is_cpu(), name, " is on ", t.device(), "; this kernel takes tensors on the CPU");
  TORCH_CHECK(codes ? type == at::kByte : floats, name, " is ", type, "; it must be ",
              codes ? "uint8" : "float32, float16 or bfloat16");
  TORCH_CHECK(t.dim() == 2, name, " has ", t.dim(), " dimensions; it must have 2");
  TORCH_CHECK(t.is_contiguous(), name, " is not contiguous; call .contiguous() once, when it is made");
}

Tensor input_of(const Tensor& given, const Weights& w) {
  const Tensor x = given.contiguous();
  check(x, "x");
  TORCH_CHECK(x.size(1) == w.columns, "x has rows of ", x.size(1), ", the weights of ", w.columns, "; they must agree");
  return x;
}

void check_columns(int64_t columns, int64_t groups) {
  TORCH_CHECK(groups > 0 && columns > 0 && columns % (groups * BLOCK) == 0, "rows of ", columns, " weights in ", groups,
              " groups; a group must be a multiple of ", BLOCK, " weights");
}

Weights coded(const Tensor& codes, const Tensor& scale, const std::optional<Tensor>& minimum, int64_t bits) {
  TORCH_CHECK(bits == 8 || bits == 4, "bits is ", bits, "; it must be 8 or 4");
  check(codes, "codes", true);
  check(scale, "scale");
  if (minimum) check(*minimum, "minimum");
  const int64_t rows = codes.size(0), bytes = codes.size(1), columns = bytes * 8 / bits, groups = scale.size(1);
  check_columns(columns, groups);
  TORCH_CHECK(scale.size(0) == rows, "scale has ", scale.size(0), " rows, codes ", rows, "; they must agree");
  TORCH_CHECK(!minimum || minimum->sizes() == scale.sizes(), "minimum and scale differ in shape; they must agree");
  return {codes.const_data_ptr<uint8_t>(), rows, columns, bytes, groups, &scale, minimum ? &*minimum : nullptr, bits};
}

Tensor wide_linear(const Tensor& x, const Tensor& weight) {
  check(weight, "weight");
  check_columns(weight.size(1), 1);
  const auto* data = static_cast<const uint8_t*>(weight.const_data_ptr());
  const Weights w{data, weight.size(0), weight.size(1), weight.size(1) * weight.element_size()};
  if (weight.scalar_type() == at::kFloat) return multiply<Wide<float>>(input_of(x, w), w);
  if (weight.scalar_type() == at::kHalf) return multiply<Wide<Half>>(input_of(x, w), w);
  if (!tiles::fits(x, weight)) return multiply<Wide<BFloat16>>(input_of(x, w), w);
  const Tensor input = input_of(x, w);
  Tensor out = at::empty({input.size(0), w.rows}, input.options());
  tiles::linear(input.const_data_ptr<BFloat16>(), weight.const_data_ptr<BFloat16>(), out.mutable_data_ptr<BFloat16>(),
                input.size(0), w.columns, w.rows);
  return out;
}

Tensor code_linear(const Tensor& x, const Tensor& codes, const Tensor& scale, const std::optional<Tensor>& minimum,
                   int64_t bits) {
  const Weights w = coded(codes, scale, minimum, bits);
  return bits == 8 ? multiply<Codes8>(input_of(x, w), w) : multiply<Codes4>(input_of(x, w), w);
}

Tensor code_unpack(const Tensor& codes, const Tensor& scale, const std::optional<Tensor>& minimum, int64_t bits) {
  const Weights w = coded(codes, scale, minimum, bits);
  return bits == 8 ? unpack_all<Codes8>(w) : unpack_all<Codes4>(w);
}

}  // namespace

TORCH_LIBRARY(kvlab, m) {
  m.def("wide_linear(Tensor x, Tensor weight) -> Tensor");
  m.def("code_linear(Tensor x, Tensor codes, Tensor scale, Tensor? minimum, int bits) -> Tensor");
  m.def("code_unpack(Tensor codes, Tensor scale, Tensor? minimum, int bits) -> Tensor");
}

TORCH_LIBRARY_IMPL(kvlab, CPU, m) {
  m.impl("wide_linear", wide_linear);
  m.impl("code_linear", code_linear);
  m.impl("code_unpack", code_unpack);
}

// The same operators as plain calls, for steps that were compiled ahead: through the registry, as boxed values, each of
// the 120 products of a step would cost some microseconds more.
using torch::aot_inductor::new_tensor_handle, torch::aot_inductor::tensor_handle_to_tensor_pointer;

extern "C" {
AOTITorchError aoti_torch_cpu_wide_linear(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* out) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *out = new_tensor_handle(wide_linear(*tensor_handle_to_tensor_pointer(x), *tensor_handle_to_tensor_pointer(weight)));
  });
}

AOTITorchError aoti_torch_cpu_code_linear(AtenTensorHandle x, AtenTensorHandle codes, AtenTensorHandle scale,
                                          AtenTensorHandle* minimum, int64_t bits, AtenTensorHandle* out) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    const auto given = minimum ? std::make_optional(*tensor_handle_to_tensor_pointer(*minimum)) : std::nullopt;
    *out = new_tensor_handle(code_linear(*tensor_handle_to_tensor_pointer(x), *tensor_handle_to_tensor_pointer(codes),
                                         *tensor_handle_to_tensor_pointer(scale), given, bits));
  });
}
}  // extern "C"

// Linear layers for a few rows of activations, at the speed at which weights come out of memory.
//
// A decode step multiplies every weight with one row of activations, or with a few when requests are batched: two
// operations for a weight that takes one to four bytes to read. So the time is the time of reading, and codes of 8 or 4
// bits can be two or four times as fast as 16, if they become floats in registers, between memory and multiplication.
// Written to memory first, as floats, they would cost more than they save.
//
// Codes are those of kvlab.packing: value = scale * code + minimum, with a scale and a minimum for each group of a row.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

using at::BFloat16, at::Half, at::ScalarType, at::Tensor;

// ---- Vectors: as wide as the machine's registers, and how small numbers become floats --------------------------------
#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__) && defined(__F16C__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int BLOCK = 32;  // weights that are decoded together; rows and groups are whole blocks
constexpr int PARTS = BLOCK / LANES;

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint16_t Shorts __attribute__((vector_size(LANES * 2)));

template <class V> inline V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
inline void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }

inline Vec widen(const float* p) { return load<Vec>(p); }
inline Vec widen(const BFloat16* p) {  // the upper half of a float32
  return (Vec)(__builtin_convertvector(load<Shorts>(p), Ints) << 16);
}
#if defined(__AVX512F__)
inline Vec widen(const Half* p) { return (Vec)_mm512_cvtph_ps(load<__m256i>(p)); }
inline Ints widen(const uint8_t* p) { return (Ints)_mm512_cvtepu8_epi32(load<__m128i>(p)); }
inline float sum(Vec v) { return _mm512_reduce_add_ps((__m512)v); }
#else
#if defined(__AVX2__) && defined(__F16C__)
inline Vec widen(const Half* p) { return (Vec)_mm256_cvtph_ps(load<__m128i>(p)); }
inline Ints widen(const uint8_t* p) { return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
#else
inline Vec widen(const Half* p) { return Vec{p[0], p[1], p[2], p[3]}; }
inline Ints widen(const uint8_t* p) { return Ints{p[0], p[1], p[2], p[3]}; }
#endif
inline float sum(Vec v) {
  float total = 0;
  for (int i = 0; i < LANES; i++) total += v[i];
  return total;
}
#endif

template <class T> void widen(const void* from, int64_t count, float* to) {
  const T* p = static_cast<const T*>(from);
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(to + i, widen(p + i));
  for (; i < count; i++) to[i] = p[i];
}

void widen(const Tensor& t, int64_t first, int64_t count, float* to) {
  const void* from = static_cast<const uint8_t*>(t.const_data_ptr()) + first * t.element_size();
  if (t.scalar_type() == at::kFloat) return widen<float>(from, count, to);
  if (t.scalar_type() == at::kHalf) return widen<Half>(from, count, to);
  widen<BFloat16>(from, count, to);
}

// ---- Formats: how the 32 weights of a block become floats ------------------------------------------------------------
template <class T> struct Wide {
  static constexpr int BYTES = BLOCK * sizeof(T);
  static constexpr bool CODES = false, PAIRS = false, MEMORY = true;
  static inline void decode(const uint8_t* p, Vec (&v)[PARTS]) {
#pragma GCC unroll 8
    for (int j = 0; j < PARTS; j++) v[j] = widen(reinterpret_cast<const T*>(p) + j * LANES);
  }
};

struct Decoded : Wide<float> {  // float32 that is in the nearest cache already
  static constexpr bool MEMORY = false;
};

struct Codes8 {
  static constexpr int BYTES = BLOCK;
  static constexpr bool CODES = true, PAIRS = false, MEMORY = true;
  static inline void decode(const uint8_t* p, Vec (&v)[PARTS]) {
#pragma GCC unroll 8
    for (int j = 0; j < PARTS; j++) v[j] = __builtin_convertvector(widen(p + j * LANES), Vec);
  }
};

// Two codes a byte: the lower halves are elements 0, 2, 4, ... of the block and come first, the upper ones 1, 3, 5, ...
// Putting them in order would cost as much as multiplying; the activations are put into their order instead, once.
struct Codes4 {
  static constexpr int BYTES = BLOCK / 2;
  static constexpr bool CODES = true, PAIRS = true, MEMORY = true;
  static inline void decode(const uint8_t* p, Vec (&v)[PARTS]) {
#pragma GCC unroll 8
    for (int j = 0; j < PARTS / 2; j++) {
      Ints both = widen(p + j * LANES);
      v[j] = __builtin_convertvector(both & 15, Vec);
      v[j + PARTS / 2] = __builtin_convertvector(both >> 4, Vec);
    }
  }
};

// ---- Operands --------------------------------------------------------------------------------------------------------
struct Weights {
  const uint8_t* data;
  int64_t rows, columns, row_bytes, groups = 1;
  const Tensor* scale = nullptr;
  const Tensor* minimum = nullptr;
  int bits = 0;
};

// Scales and minima of some rows of weights, in float32. Symmetric codes have a minimum as well: minus half the range.
struct Scales {
  static constexpr int64_t ROWS = 16;
  std::vector<float> scale, minimum;

  explicit Scales(const Weights& w) : scale(ROWS * w.groups), minimum(ROWS * w.groups + LANES) {}
  void read(const Weights& w, int64_t first, int64_t rows) {
    widen(*w.scale, first * w.groups, rows * w.groups, scale.data());
    if (w.minimum) return widen(*w.minimum, first * w.groups, rows * w.groups, minimum.data());
    const float half = float(1 << (w.bits - 1));
    for (int64_t i = 0; i < rows * w.groups; i++) minimum[i] = -half * scale[i];
  }
};

// Activations in float32, in the order of the decoded weights, with their sums over each group.
struct Input {
  int64_t rows, columns, groups, sum_vectors;
  std::vector<Vec> values, sums;  // the sums of a row end in zeros, up to a whole vector
  Ints last;                      // which lanes of the last vector of sums are real

  Input(const Tensor& x, int64_t groups, bool pairs)
      : rows(x.size(0)), columns(x.size(1)), groups(groups), sum_vectors((groups + LANES - 1) / LANES),
        values(rows * columns / LANES + 1), sums(rows * sum_vectors + 1) {
    for (int i = 0; i < LANES; i++) last[i] = (sum_vectors - 1) * LANES + i < groups ? -1 : 0;
    float* out = reinterpret_cast<float*>(values.data());
    widen(x, 0, rows * columns, out);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t g = 0; g < groups; g++) {
        Vec total = {};
        for (int64_t k = 0; k < columns / groups; k += LANES) total += load<Vec>(out + r * columns + g * (columns / groups) + k);
        reinterpret_cast<float*>(sums.data())[r * sum_vectors * LANES + g] = sum(total);
      }
    for (int64_t k = 0; pairs && k < rows * columns; k += BLOCK) {
      float block[BLOCK];
      std::memcpy(block, out + k, sizeof block);
      for (int i = 0; i < BLOCK; i++) out[k + i % 2 * (BLOCK / 2) + i / 2] = block[i];
    }
  }
};

struct Output {
  void* data;
  ScalarType type;
  int64_t columns;
  void put(int64_t r, int64_t n, float value) const {
    const int64_t i = r * columns + n;
    if (type == at::kFloat) static_cast<float*>(data)[i] = value;
    else if (type == at::kHalf) static_cast<Half*>(data)[i] = value;
    else static_cast<BFloat16*>(data)[i] = value;
  }
};

// ---- The kernel: N rows of weights times R rows of activations -------------------------------------------------------
constexpr int64_t AHEAD = 4096;
constexpr int64_t MANY = 5;

template <class F, int N, int R>
inline void tile(const uint8_t* w, int64_t row_bytes, const float* scale, const float* minimum, const Input& x, int64_t r0,
                 const Output& y, int64_t n0) {
  const int64_t groups = F::CODES ? x.groups : 1, blocks = x.columns / BLOCK / groups, stride = x.columns / LANES;
  const int64_t ahead = (AHEAD + N * row_bytes - 1) / (N * row_bytes) * (N * row_bytes);
  const Vec* xp = x.values.data() + r0 * stride;
  Vec acc[N][R] = {};
  for (int64_t g = 0; g < groups; g++) {
    Vec part[N][R] = {};
    for (int64_t b = 0; b < blocks; b++, w += F::BYTES, xp += PARTS) {
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) {
        Vec v[PARTS];
        F::decode(w + n * row_bytes, v);
        if constexpr (F::MEMORY)
          for (int line = 0; line < F::BYTES; line += 64) __builtin_prefetch(w + n * row_bytes + ahead + line);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
          for (int j = 0; j < PARTS; j++) part[n][r] += v[j] * xp[r * stride + j];
        }
      }
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        if constexpr (F::CODES) acc[n][r] += part[n][r] * scale[n * groups + g];
        else acc[n][r] = part[n][r];
      }
    }
  }
  if constexpr (F::CODES)
    for (int64_t g = 0; g < x.sum_vectors; g++) {
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) {
        Vec low = load<Vec>(minimum + n * groups + g * LANES);
        if (g + 1 == x.sum_vectors) low = (Vec)((Ints)low & x.last);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[n][r] += low * x.sums[(r0 + r) * x.sum_vectors + g];
      }
    }
#pragma GCC unroll 8
  for (int n = 0; n < N; n++) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) y.put(r0 + r, n0 + n, sum(acc[n][r]));
  }
}

template <class F, int N>
inline void tiles(const uint8_t* w, int64_t row_bytes, const float* scale, const float* minimum, const Input& x,
                  const Output& y, int64_t n) {
  int64_t r = 0;
  for (; r + 4 <= x.rows; r += 4) tile<F, N, 4>(w, row_bytes, scale, minimum, x, r, y, n);
  if (x.rows - r == 3) tile<F, N, 3>(w, row_bytes, scale, minimum, x, r, y, n);
  if (x.rows - r == 2) tile<F, N, 2>(w, row_bytes, scale, minimum, x, r, y, n);
  if (x.rows - r == 1) tile<F, N, 1>(w, row_bytes, scale, minimum, x, r, y, n);
}

// One row of weights as float32, in the order of the decoded blocks or in that of the columns.
template <class F, bool ORDERED>
inline void unpack(const uint8_t* w, const float* scale, const float* minimum, int64_t groups, int64_t columns, float* to) {
  const int64_t blocks = columns / BLOCK / groups;
  for (int64_t g = 0; g < groups; g++)
    for (int64_t b = 0; b < blocks; b++, w += F::BYTES, to += BLOCK) {
      Vec v[PARTS];
      F::decode(w, v);
      for (int line = 0; line < F::BYTES; line += 64) __builtin_prefetch(w + AHEAD + line);
      if constexpr (F::CODES)
#pragma GCC unroll 8
        for (int j = 0; j < PARTS; j++) v[j] = v[j] * scale[g] + minimum[g];
      if constexpr (F::PAIRS && ORDERED) {
        float block[BLOCK];
        std::memcpy(block, v, sizeof block);
        for (int i = 0; i < BLOCK / 2; i++) to[2 * i] = block[i], to[2 * i + 1] = block[i + BLOCK / 2];
      } else {
        std::memcpy(to, v, sizeof v);
      }
    }
}

template <class F> Tensor multiply(const Tensor& x, const Weights& w) {
  const Input input(x.contiguous(), w.groups, F::PAIRS);
  Tensor out = at::empty({x.size(0), w.rows}, x.options());
  const Output output{out.mutable_data_ptr(), x.scalar_type(), w.rows};
  at::parallel_for(0, w.rows, std::max<int64_t>(1, 32768 / w.columns), [&](int64_t begin, int64_t end) {
    Scales scales(w);
    std::vector<Vec> decoded(input.rows >= MANY ? 4 * w.columns / LANES : 0);
    float* buffer = reinterpret_cast<float*>(decoded.data());
    for (int64_t c = begin; c < end; c += Scales::ROWS) {
      const int64_t stop = std::min(end, c + Scales::ROWS);
      if constexpr (F::CODES) scales.read(w, c, stop - c);
      auto run = [&]<int N>(int64_t n) {
        const float *scale = scales.scale.data() + (n - c) * w.groups, *minimum = scales.minimum.data() + (n - c) * w.groups;
        const uint8_t* p = w.data + n * w.row_bytes;
        if (input.rows < MANY || std::is_same_v<F, Wide<float>>) return tiles<F, N>(p, w.row_bytes, scale, minimum, input, output, n);
        for (int i = 0; i < N; i++)
          unpack<F, false>(p + i * w.row_bytes, scale + i * w.groups, minimum + i * w.groups, w.groups, w.columns, buffer + i * w.columns);
        tiles<Decoded, N>(reinterpret_cast<const uint8_t*>(buffer), w.columns * 4, nullptr, nullptr, input, output, n);
      };
      int64_t n = c;
      for (; n + 4 <= stop; n += 4) run.template operator()<4>(n);
      for (; n < stop; n++) run.template operator()<1>(n);
    }
  });
  return out;
}

template <class F> Tensor widen_all(const Weights& w) {
  Tensor out = at::empty({w.rows, w.columns}, at::kFloat);
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, w.rows, std::max<int64_t>(1, 32768 / w.columns), [&](int64_t begin, int64_t end) {
    Scales scales(w);
    for (int64_t n = begin; n < end; n++) {
      if ((n - begin) % Scales::ROWS == 0) scales.read(w, n, std::min(Scales::ROWS, end - n));
      const int64_t at = (n - begin) % Scales::ROWS * w.groups;
      unpack<F, true>(w.data + n * w.row_bytes, &scales.scale[at], &scales.minimum[at], w.groups, w.columns, to + n * w.columns);
    }
  });
  return out;
}

// ---- Operators -------------------------------------------------------------------------------------------------------
bool is_float(const Tensor& t) {
  return t.scalar_type() == at::kFloat || t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
}

void check(const Tensor& t, const char* name, bool type, const char* types) {
  TORCH_CHECK(t.device().is_cpu(), name, " is on ", t.device(), "; these kernels take tensors on the CPU");
  TORCH_CHECK(type, name, " is ", t.scalar_type(), "; allowed are ", types);
  TORCH_CHECK(t.dim() == 2, name, " has ", t.dim(), " dimensions; it must have 2");
}

void check_input(const Tensor& x, const Weights& w) {
  check(x, "x", is_float(x), "float32, float16 and bfloat16");
  TORCH_CHECK(x.size(1) == w.columns, "x has rows of ", x.size(1), ", the weights of ", w.columns, "; they must agree");
}

Weights weights_of(const Tensor& weight) {
  check(weight, "weight", is_float(weight), "float32, float16 and bfloat16");
  TORCH_CHECK(weight.is_contiguous(), "weight is not contiguous; call .contiguous() once, when it is loaded");
  const int64_t columns = weight.size(1);
  TORCH_CHECK(columns > 0 && columns % BLOCK == 0, "weight has rows of ", columns, "; they must be multiples of ", BLOCK);
  return {static_cast<const uint8_t*>(weight.const_data_ptr()), weight.size(0), columns, columns * weight.element_size()};
}

Weights weights_of(const Tensor& codes, const Tensor& scale, const std::optional<Tensor>& minimum, int64_t bits) {
  TORCH_CHECK(bits == 8 || bits == 4, "bits is ", bits, "; allowed are 8 and 4");
  check(codes, "codes", codes.scalar_type() == at::kByte, "uint8");
  check(scale, "scale", is_float(scale), "float32, float16 and bfloat16");
  TORCH_CHECK(codes.is_contiguous() && scale.is_contiguous(), "codes or scale is not contiguous; call .contiguous() once");
  const int64_t columns = codes.size(1) * 8 / bits, groups = scale.size(1);
  TORCH_CHECK(scale.size(0) == codes.size(0), "scale has ", scale.size(0), " rows, codes ", codes.size(0));
  TORCH_CHECK(groups > 0 && columns > 0 && columns % groups == 0 && columns / groups % BLOCK == 0, "rows of ", columns,
              " in ", groups, " groups; groups must be multiples of ", BLOCK);
  if (minimum) {
    check(*minimum, "minimum", is_float(*minimum), "float32, float16 and bfloat16");
    TORCH_CHECK(minimum->is_contiguous(), "minimum is not contiguous; call .contiguous() once");
    TORCH_CHECK(minimum->sizes() == scale.sizes(), "minimum is ", minimum->sizes(), ", scale ", scale.sizes(), "; they must agree");
  }
  return {codes.const_data_ptr<uint8_t>(), codes.size(0), columns, codes.size(1), groups, &scale, minimum ? &*minimum : nullptr, int(bits)};
}

Tensor wide_linear(const Tensor& x, const Tensor& weight) {
  const Weights w = weights_of(weight);
  check_input(x, w);
  if (weight.scalar_type() == at::kFloat) return multiply<Wide<float>>(x, w);
  if (weight.scalar_type() == at::kHalf) return multiply<Wide<Half>>(x, w);
  return multiply<Wide<BFloat16>>(x, w);
}

Tensor code_linear(const Tensor& x, const Tensor& codes, const Tensor& scale, const std::optional<Tensor>& minimum, int64_t bits) {
  const Weights w = weights_of(codes, scale, minimum, bits);
  check_input(x, w);
  return bits == 8 ? multiply<Codes8>(x, w) : multiply<Codes4>(x, w);
}

Tensor code_unpack(const Tensor& codes, const Tensor& scale, const std::optional<Tensor>& minimum, int64_t bits) {
  const Weights w = weights_of(codes, scale, minimum, bits);
  return bits == 8 ? widen_all<Codes8>(w) : widen_all<Codes4>(w);
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

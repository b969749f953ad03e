// Attention of single queries to keys and values that lie in blocks, at the speed at which they come out of memory.
//
// A decode step of many requests reads every key and every value that they hold once; with few query heads to a KV head
// there is little to compute for each. So keys are read where they lie, through the table of blocks (gathering them
// first would read and write everything once more), and all query heads of a KV head share a reading of it.
//
// The keys of a query are cut into pieces, which threads share by their number of keys: a long request is worked on by
// all of them. Where pieces begin depends on that request alone, so what it gets does not depend on the requests beside
// it nor on the number of threads. Pieces are put together as in Flash-Decoding (Dao et al., 2023).

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "vectors.h"

namespace {

using at::BFloat16, at::Half, at::Tensor;
using vectors::Ints, vectors::LANES, vectors::load, vectors::Shorts, vectors::sum, vectors::Vec, vectors::widen;

constexpr int64_t PIECE = 256;  // keys: with their values they stay in the second cache while the heads pass over them
constexpr int KEYS = 4;         // keys that are multiplied together, so that queries are loaded less often
constexpr int HEADS = 4;        // query heads at a time, and
constexpr int PARTS = 4;        // vectors of a value at a time: 16 sums, half of the registers
constexpr int HALF = 8;         // head_dim is a multiple of it: a vector of 16 may be half full at the end
constexpr int64_t SMALL = 1 << 17;  // products of keys and queries that are not worth a second thread
constexpr float INFINITE = std::numeric_limits<float>::infinity();

// ---- Vectors --------------------------------------------------------------------------------------------------------
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

// The sums of WIDTH * 2 vectors, each in the lane of its number: one addition and two moves for a halving of them all.
template <int WIDTH, int... LANE> inline Vec fold(Vec* v, std::integer_sequence<int, LANE...> lanes) {
  UNROLL for (int i = 0; i < WIDTH; i++)
    v[i] = SHUFFLE(v[i], v[i + WIDTH], (LANE & WIDTH ? LANE + LANES : LANE)...) +
           SHUFFLE(v[i], v[i + WIDTH], ((LANE & WIDTH ? LANE + LANES : LANE) ^ WIDTH)...);
  if constexpr (WIDTH > 1) return fold<WIDTH / 2>(v, lanes);
  return v[0];
}
inline Vec sums(Vec (&v)[LANES]) { return fold<LANES / 2>(v, std::make_integer_sequence<int, LANES>()); }

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }
inline float largest(Vec v) {
  float most = v[0];
  for (int i = 1; i < LANES; i++) most = std::max(most, v[i]);
  return most;
}

// 2^x for x <= 0, by the series of e^y for y between -ln(2)/2 and ln(2)/2; below 2^-126 it is 0; NaN remains NaN.
inline Vec power_of_two(Vec x) {
  constexpr float FAR = 0x1.8p23f;  // added to it, a number loses its fraction
  const Vec shifted = x + FAR, y = (x - (shifted - FAR)) * 0x1.62e43p-1f;
  Vec series = y / 5040 + 1.f / 720;
  for (float factor : {1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1.f, 1.f}) series = series * y + factor;
  const Ints scale = ((Ints)shifted + 127) << 23;
  return (Vec)((Ints)(series * (Vec)scale) & ~(x < -126));
}

template <class T> inline Vec widen_half(const T* p) {  // nothing behind it is read
  T v[std::max(LANES, HALF)] = {};
  std::memcpy(v, p, HALF * sizeof(T));
  return widen(v);
}

inline void narrow(Vec v, float* to) { std::memcpy(to, &v, sizeof v); }
inline void narrow(Vec v, BFloat16* to) {  // to the nearest, a tie to the even one; NaN must not overflow
  const Ints bits = (Ints)v, nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, nan = v != v;
  const Shorts upper = __builtin_convertvector((nearest & ~nan) | (nan & 0x7fc0), Shorts);
  std::memcpy(to, &upper, sizeof upper);
}
inline void narrow(Vec v, Half* to) {
#if defined(__AVX512F__)
  const auto narrowed = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(to, &narrowed, sizeof narrowed);
#else
  for (int i = 0; i < LANES; i++) to[i] = v[i];
#endif
}
template <class T> inline void narrow_half(Vec v, T* to) {
  T narrowed[LANES];
  narrow(v, narrowed);
  std::memcpy(to, narrowed, HALF * sizeof(T));
}

// Blocks lie anywhere, so the processor does not read ahead from one to the next: each pass asks for what the next one
// needs. Into the second cache, the first is too small for a piece: 16 requests of 1,024 tokens take a tenth less.
template <class T> inline void prefetch(const T* p, int64_t count) {
  const char *at = (const char*)p, *end = (const char*)(p + count);
  for (; at < end; at += 64) __builtin_prefetch(at, 0, 2);
}

// ---- Operands -------------------------------------------------------------------------------------------------------
template <class T> struct Row {  // rows of one head, by the number of the key in its piece
  const T* data;
  int64_t stride;
  const int64_t* slots;
  const T* operator()(int64_t i) const { return data + slots[i] * stride; }
};

template <class T> struct Held {  // keys or values
  const T* data;
  int64_t head_stride, slot_stride;
  Row<T> row(int64_t head, const int64_t* slots) const { return {data + head * head_stride, slot_stride, slots}; }
};

struct Blocks {  // of the keys that each query sees
  const int64_t *tables, *rows, *lengths;
  int64_t table_stride, size, window;

  int64_t first(int64_t query) const { return window ? std::max<int64_t>(0, lengths[query] - window) : 0; }
  const int64_t* table(int64_t query) const { return tables + rows[query] * table_stride; }
  void slots(int64_t query, int64_t first, int64_t count, int64_t* to) const {
    for (int64_t done = 0; done < count;) {
      const int64_t offset = (first + done) % size, run = std::min(size - offset, count - done);
      const int64_t slot = table(query)[(first + done) / size] * size + offset;
      for (int64_t i = 0; i < run; i++) to[done++] = slot + i;
    }
    std::fill(to + count, to + PIECE, to[count - 1]);  // the last one again rather than one too far
  }
};

struct Piece {  // some keys of one query and one KV head
  int64_t query, head, first, keys;
  int64_t before;   // keys of all pieces before it
  int64_t partial;  // where its result waits for the others, or -1: it is the only one
};

struct Join {  // pieces that make up the result of one query and one KV head
  int64_t first, count;
};

struct Partial {  // what the sums of a piece mean for one query head: they are relative to the largest score
  float largest, weight;
};

struct Scratch {  // of one thread: for each head of a group a query, a sum and a partial; scores, slots, the next slots
  std::vector<Vec> query, sum;
  std::vector<float> scores;
  std::vector<int64_t> slots, next;
  std::vector<Partial> partials;
  Scratch(int64_t group, int64_t vectors)
      : query(group * vectors), sum(group * vectors), scores(HEADS * PIECE), slots(PIECE), next(PIECE),
        partials(group) {}
};

// ---- The kernel -----------------------------------------------------------------------------------------------------
template <class T> struct Attention {
  Held<T> keys, values;
  Held<T> queries;  // a slot is a query
  T* out;
  Blocks blocks;
  int64_t n_head, group, head_dim, whole, vectors;  // whole vectors of a head, and with a half one at the end
  std::vector<Piece> pieces = {};
  std::vector<Join> joins = {};
  std::vector<Vec> waiting = {};       // sums of pieces that are not alone: group rows of vectors for each
  std::vector<Partial> partials = {};  // and group of these

  // scores[g][i] = query g * key i; what fills up the last vector becomes -infinity.
  template <int G>
  [[gnu::noinline]] void score(Row<T> key, Row<T> value, int64_t count, const Vec* query, float* scores) const {
    for (int64_t i = 0; i < count; i += LANES) {
      for (int k = 0; k < LANES; k++) prefetch(value(i + k), head_dim);
      Vec products[G][LANES];
      for (int k = 0; k < LANES; k += KEYS) {
        const T* row[KEYS];
        for (int j = 0; j < KEYS; j++) row[j] = key(i + k + j);
        Vec part[G][KEYS] = {};
        const auto multiply = [&](int64_t d, auto read) {
          UNROLL for (int j = 0; j < KEYS; j++) {
            const Vec v = read(row[j] + d * LANES);
            UNROLL for (int g = 0; g < G; g++) part[g][j] += v * query[g * vectors + d];
          }
        };
        for (int64_t d = 0; d < whole; d++) multiply(d, [](const T* p) { return widen(p); });
        if (whole < vectors) multiply(whole, [](const T* p) { return widen_half(p); });
        UNROLL for (int g = 0; g < G; g++)
          UNROLL for (int j = 0; j < KEYS; j++) products[g][k + j] = part[g][j];
      }
      UNROLL for (int g = 0; g < G; g++) {
        const Vec v = sums(products[g]);
        std::memcpy(scores + g * PIECE + i, &v, sizeof v);
      }
    }
    for (int g = 0; g < G; g++)
      for (int64_t i = count; i % LANES; i++) scores[g * PIECE + i] = -INFINITE;
  }

  // Scores become weights, relative to the largest; returns it and their sum.
  static Partial soften(float* scores, int64_t count) {
    Vec most = load<Vec>(scores), total = {};
    for (int64_t i = LANES; i < count; i += LANES) most = larger(load<Vec>(scores + i), most);
    const float top = largest(most);
    for (int64_t i = 0; i < count; i += LANES) {
      const Vec weight = power_of_two(load<Vec>(scores + i) - top);
      std::memcpy(scores + i, &weight, sizeof weight);
      total += weight;
    }
    return {top, sum(total)};
  }

  // to[g][d] = weights g * values d, for V vectors of the values. (Not inlined: among all the rest its loop, which must
  // hold 16 vectors, would lose its registers. The same holds for score.)
  template <int G, int V, class Read>
  [[gnu::noinline]] void blend(Row<T> value, Row<T> next, int64_t d, int64_t count, const float* weights, Vec* to,
                               Read read) const {
    value.data += d * LANES, next.data += d * LANES;
    Vec part[G][V] = {};
    for (int64_t i = 0; i < count; i++) {
      const T* row = value(i);
      prefetch(next(i), V * LANES);
      UNROLL for (int v = 0; v < V; v++) {
        const Vec x = read(row + v * LANES);
        UNROLL for (int g = 0; g < G; g++) part[g][v] += x * weights[g * PIECE + i];
      }
    }
    UNROLL for (int g = 0; g < G; g++)
      UNROLL for (int v = 0; v < V; v++) to[g * vectors + d + v] = part[g][v];
  }

  template <int G> void heads(const Piece& p, int64_t first, const Row<T>& next, Scratch& s) const {
    const Row<T> key = keys.row(p.head, s.slots.data()), value = values.row(p.head, s.slots.data());
    float* scores = s.scores.data();
    Vec* to = &s.sum[first * vectors];
    score<G>(key, value, p.keys, &s.query[first * vectors], scores);
    for (int g = 0; g < G; g++) s.partials[first + g] = soften(scores + g * PIECE, p.keys);
    int64_t d = 0;
    const auto read = [](const T* p) { return widen(p); };
    for (; d + PARTS <= whole; d += PARTS) blend<G, PARTS>(value, next, d, p.keys, scores, to, read);
    for (; d < whole; d++) blend<G, 1>(value, next, d, p.keys, scores, to, read);
    if (d < vectors) blend<G, 1>(value, next, d, p.keys, scores, to, [](const T* p) { return widen_half(p); });
  }

  void run(const Piece& p, const Piece& after, Scratch& s) {
    const T* query = queries.data + p.query * queries.slot_stride + p.head * group * queries.head_stride;
    const float scale = M_LOG2E / std::sqrt(double(head_dim));
    for (int64_t g = 0; g < group; g++) {
      Vec* to = &s.query[g * vectors];
      for (int64_t d = 0; d < whole; d++) to[d] = widen(query + g * queries.head_stride + d * LANES) * scale;
      if (whole < vectors) to[whole] = widen_half(query + g * queries.head_stride + whole * LANES) * scale;
    }
    s.slots.swap(s.next);
    blocks.slots(after.query, after.first, after.keys, s.next.data());
    const Row<T> next = keys.row(after.head, s.next.data());
    int64_t g = 0;
    for (; g + HEADS <= group; g += HEADS) heads<HEADS>(p, g, next, s);
    if (group - g == 3) heads<3>(p, g, next, s);
    if (group - g == 2) heads<2>(p, g, next, s);
    if (group - g == 1) heads<1>(p, g, next, s);
    if (p.partial < 0) return write(p, s.sum.data(), s.partials.data());
    std::copy_n(s.sum.data(), group * vectors, &waiting[p.partial * group * vectors]);
    std::copy_n(s.partials.data(), group, &partials[p.partial * group]);
  }

  void write(const Piece& p, const Vec* sum, const Partial* partial) const {
    T* to = out + (p.query * n_head + p.head * group) * head_dim;
    for (int64_t g = 0; g < group; g++, to += head_dim)
      for (int64_t d = 0; d < vectors; d++) {
        const Vec v = sum[g * vectors + d] / partial[g].weight;
        if (d < whole) narrow(v, to + d * LANES);
        else narrow_half(v, to + d * LANES);
      }
  }

  // Puts pieces together; their results wait one after the other.
  void run(const Join& j, Scratch& s) const {
    const Piece& p = pieces[j.first];
    const Partial* part = &partials[p.partial * group];
    const Vec* sum = &waiting[p.partial * group * vectors];
    for (int64_t g = 0; g < group; g++) {
      float top = -INFINITE;
      for (int64_t i = 0; i < j.count; i++) top = std::max(top, part[i * group + g].largest);
      Partial& total = s.partials[g] = {top, 0};
      Vec* to = &s.sum[g * vectors];
      std::fill_n(to, vectors, Vec{});
      for (int64_t i = 0; i < j.count; i++) {
        const float factor = std::exp2(part[i * group + g].largest - top);
        total.weight += part[i * group + g].weight * factor;
        for (int64_t d = 0; d < vectors; d++) to[d] += sum[(i * group + g) * vectors + d] * factor;
      }
    }
    write(p, s.sum.data(), s.partials.data());
  }

  // Lists the pieces, those of a query and a KV head one after the other; who sees nothing gets zeros.
  void cut(int64_t n) {
    int64_t before = 0, waits = 0;
    for (int64_t query = 0; query < n; query++) {
      const int64_t first = blocks.first(query), seen = blocks.lengths[query] - first;
      const int64_t parts = (seen + PIECE - 1) / PIECE;
      if (parts == 0) std::fill_n(out + query * n_head * head_dim, n_head * head_dim, T(0));
      for (int64_t head = 0; head < n_head / group; head++) {
        if (parts > 1) joins.push_back({int64_t(pieces.size()), parts});
        for (int64_t part = 0; part < parts; part++) {
          const int64_t at = part * PIECE, keys = std::min(PIECE, seen - at);
          pieces.push_back({query, head, first + at, keys, before, parts > 1 ? waits++ : -1});
          before += keys;
        }
      }
    }
    waiting.resize(waits * group * vectors);
    partials.resize(waits * group);
  }

  // Threads get equal numbers of keys; a piece belongs to the one that its first key falls to.
  void run_all() {
    if (pieces.empty()) return;
    const int64_t keys = pieces.back().before + pieces.back().keys, grain = SMALL / (group * head_dim) + 1;
    at::parallel_for(0, keys, grain, [&](int64_t begin, int64_t end) {
      Scratch scratch(group, vectors);
      const auto earlier = [](const Piece& p, int64_t key) { return p.before < key; };
      auto p = std::lower_bound(pieces.begin(), pieces.end(), begin, earlier);
      if (p == pieces.end() || p->before >= end) return;
      blocks.slots(p->query, p->first, p->keys, scratch.next.data());
      for (auto after = p; p != pieces.end() && p->before < end; p++) {
        if (++after == pieces.end()) after = p;  // nothing to ask for any more
        run(*p, *after, scratch);
      }
    });
    at::parallel_for(0, joins.size(), grain / 8 + 1, [&](int64_t begin, int64_t end) {
      Scratch scratch(group, vectors);
      for (int64_t i = begin; i < end; i++) run(joins[i], scratch);
    });
  }
};

template <class T> Held<T> held(const Tensor& t, int64_t head, int64_t slot) {
  return {t.const_data_ptr<T>(), t.stride(head), t.stride(slot)};
}

template <class T> Tensor attend(const Tensor& q, const Tensor& keys, const Tensor& values, const Blocks& blocks) {
  const int64_t n_head = q.size(1), head_dim = q.size(2);
  Tensor out = at::empty(q.sizes(), q.options());
  Attention<T> attention{
      held<T>(keys, 0, 1), held<T>(values, 0, 1), held<T>(q, 1, 0), out.mutable_data_ptr<T>(), blocks, n_head,
      n_head / keys.size(0), head_dim, head_dim / LANES, (head_dim + LANES - 1) / LANES};
  attention.cut(q.size(0));
  attention.run_all();
  return out;
}

// ---- The operator ---------------------------------------------------------------------------------------------------
void check(const Tensor& t, const char* name, at::ScalarType type, int64_t dimensions) {
  TORCH_CHECK(t.device().is_cpu(), name, " is on ", t.device(), "; this kernel takes tensors on the CPU");
  TORCH_CHECK(t.scalar_type() == type, name, " is ", t.scalar_type(), "; it must be ", type);
  TORCH_CHECK(t.dim() == dimensions, name, " has ", t.dim(), " dimensions; it must have ", dimensions);
  const int64_t last = t.size(dimensions - 1);
  TORCH_CHECK(last <= 1 || t.stride(-1) == 1, name, " has a stride of ", t.stride(-1),
              " in its last dimension; it must be 1");
}

void check_heads(const Tensor& q, const Tensor& keys, const Tensor& values) {
  const auto type = q.scalar_type();
  TORCH_CHECK(type == at::kFloat || type == at::kHalf || type == at::kBFloat16, "q is ", type,
              "; it must be float32, float16 or bfloat16");
  check(q, "q", type, 3), check(keys, "keys", type, 3), check(values, "values", type, 3);
  const int64_t n_head = q.size(1), n_kv_head = keys.size(0), head_dim = q.size(2);
  TORCH_CHECK(keys.sizes() == values.sizes(), "keys are ", keys.sizes(), ", values ", values.sizes(),
              "; they must agree");
  TORCH_CHECK(keys.size(2) == head_dim, "queries have ", head_dim, " elements, keys ", keys.size(2),
              "; they must agree");
  TORCH_CHECK(head_dim > 0 && head_dim % HALF == 0, "head_dim is ", head_dim, "; it must be a multiple of ", HALF);
  TORCH_CHECK(n_kv_head > 0 && n_head > 0 && n_head % n_kv_head == 0, n_head, " query heads do not divide among ",
              n_kv_head, " KV heads; their number must be a multiple");
}

// Looks at every entry of the tables that will be used, and at no other: memory is not read by a wrong number.
void check_blocks(const Blocks& blocks, int64_t n, const Tensor& tables, int64_t slots) {
  const int64_t room = tables.size(1) * blocks.size, held = slots / blocks.size;
  for (int64_t query = 0; query < n; query++) {
    const int64_t length = blocks.lengths[query], row = blocks.rows[query];
    if (length == 0) continue;
    TORCH_CHECK(length > 0 && length <= room, "query ", query, " has a length of ", length,
                "; the tables have room for ", room, " keys");
    TORCH_CHECK(row >= 0 && row < tables.size(0), "query ", query, " reads table ", row, "; there are ",
                tables.size(0));
    for (int64_t at = blocks.first(query) / blocks.size; at * blocks.size < length; at++) {
      const int64_t block = blocks.table(query)[at];
      TORCH_CHECK(block >= 0 && block < held, "query ", query, " reads block ", block, " (entry ", at, " of table ",
                  row, "); there are ", held, " blocks of ", blocks.size);
    }
  }
}

Tensor paged_attention(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& tables,
                       const Tensor& rows, const Tensor& lengths, int64_t block_size, int64_t window) {
  check_heads(q, keys, values);
  check(tables, "tables", at::kLong, 2), check(rows, "rows", at::kLong, 1), check(lengths, "lengths", at::kLong, 1);
  const int64_t n = q.size(0);
  TORCH_CHECK(rows.size(0) == n && lengths.size(0) == n, "there are ", n, " queries, ", rows.size(0), " rows and ",
              lengths.size(0), " lengths; they must agree");
  TORCH_CHECK(block_size > 0, "block_size is ", block_size, "; it must be positive");
  TORCH_CHECK(window >= 0, "window is ", window, "; it must be positive, or 0 for none");
  const Blocks blocks{tables.const_data_ptr<int64_t>(), rows.const_data_ptr<int64_t>(),
                      lengths.const_data_ptr<int64_t>(), tables.stride(0), block_size, window};
  check_blocks(blocks, n, tables, keys.size(1));
  if (q.scalar_type() == at::kFloat) return attend<float>(q, keys, values, blocks);
  if (q.scalar_type() == at::kHalf) return attend<Half>(q, keys, values, blocks);
  return attend<BFloat16>(q, keys, values, blocks);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(kvlab, m) {
  m.def(
      "paged_attention(Tensor q, Tensor keys, Tensor values, Tensor tables, Tensor rows, Tensor lengths, "
      "int block_size, int window) -> Tensor");
}

TORCH_LIBRARY_IMPL(kvlab, CPU, m) { m.impl("paged_attention", paged_attention); }

// As a plain call, for steps that were compiled ahead; linear.cpp says why.
using torch::aot_inductor::new_tensor_handle, torch::aot_inductor::tensor_handle_to_tensor_pointer;

extern "C" AOTITorchError aoti_torch_cpu_paged_attention(AtenTensorHandle q, AtenTensorHandle keys,
                                                         AtenTensorHandle values, AtenTensorHandle tables,
                                                         AtenTensorHandle rows, AtenTensorHandle lengths,
                                                         int64_t block_size, int64_t window, AtenTensorHandle* out) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    const auto of = tensor_handle_to_tensor_pointer;
    *out = new_tensor_handle(
        paged_attention(*of(q), *of(keys), *of(values), *of(tables), *of(rows), *of(lengths), block_size, window));
  });
}

// CPU kernels over the paged KV cache, and the small operations around them, for GCC and Clang on any CPU.
//
// Purpose: one pass over memory where torch takes ten. Each function has a torch twin (`quant`, `layout`, `attention`,
// transformers' layers) that tests hold it against. `cpu_build` compiles this file, `cpu` calls it; nothing here allocates
// what outlives a call, and nothing throws.
//
// Vectors are the compilers' own, as wide as the CPU's where that is AVX-512 and 8 lanes of 32 bits elsewhere (compilers split
// them), so head sizes, scale groups, hidden and intermediate sizes are multiples of 16: the callers check. Sums are float32.
// Never build with -ffast-math: codes must equal torch's to the bit, and NaN must stay NaN.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
typedef float f32 __attribute__((vector_size(4 * LANES)));
typedef int32_t i32 __attribute__((vector_size(4 * LANES)));
typedef uint32_t u32 __attribute__((vector_size(4 * LANES)));
typedef uint16_t u16 __attribute__((vector_size(2 * LANES)));
typedef int16_t i16 __attribute__((vector_size(2 * LANES)));
typedef uint8_t u8 __attribute__((vector_size(LANES)));
typedef int8_t i8 __attribute__((vector_size(LANES)));

enum Kind : int32_t { FP8 = 0, INT8 = 1, BF16 = 2, FP32 = 3 };  // of the cache; `cpu.KINDS` has the same numbers
enum Type : int32_t { F32 = 0, B16 = 1 };                       // of activations; `cpu.TYPES` has the same numbers

extern "C" {
// One layer of a block store; `layout.CacheLayout` is the authority on every field. Bytes, tokens, channels.
struct Cells {
  uint8_t *data;
  int64_t block_bytes, layer_offset, cell_bytes, k_codes, k_scales, v_codes, v_scales;
  int32_t kv_heads, head_size, block_tokens, group, kind;
};

// What decode reads and writes; `tables` says what the tables hold. Strides are in elements, those of a head 0 where all heads
// share; 0 for what may be missing: window, softcap, sinks, lse.
struct Reading {
  const int64_t *table;  // [count, width] blocks, or [count, kv_heads, width] bytes to cells
  int64_t table_row, table_head;
  const int64_t *rows;
  int64_t rows_row, rows_head;
  const int64_t *starts;  // with a window: positions of blocks' first rows,
  const int32_t *known;   // or of all rows of cells
  int64_t starts_row, starts_head;
  const int64_t *at, *positions;  // [count]
  const void *query;
  void *out;
  float *lse;
  const float *sinks;
  int64_t query_row, out_row, lse_row, count, heads, window;
  float scaling, softcap;
  int32_t cells, type, out_type, threads;
};

// Queries that are scored and the keys they look at, of one layer; strides in elements.
struct Scoring {
  const float *queries;  // [steps, heads, size], the last dimension contiguous
  const int32_t *asked;  // [steps] their positions
  const float *keys;     // [kv_heads, rows, size]
  const int32_t *positions;  // [kv_heads, rows]
  const uint8_t *exists;
  const float *lse;  // [steps, heads]; 0: over these keys
  float *out;        // [kv_heads, rows]
  int64_t query_row, query_head, steps, heads, kv_heads, rows, size, window;  // 0: no window
  float scaling, softcap;                                                     // 0: no softcap
  int32_t mode, threads;
};
}

namespace {

template <class V> inline V load(const void *from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
template <class V> inline void store(void *to, V value) { std::memcpy(to, &value, sizeof value); }
inline f32 all(float value) { return value - f32{}; }
inline u32 bits(f32 value) { return (u32)value; }
inline f32 number(u32 value) { return (f32)value; }
template <class V> inline V choose(i32 where, V yes, V no) { return (V)(((i32)yes & where) | ((i32)no & ~where)); }

typedef float f4 __attribute__((vector_size(16)));
inline f4 quarters(f32 v) {
  f4 total = load<f4>(&v);
  for (int i = 4; i < LANES; i += 4) total += load<f4>((const float *)&v + i);
  return total;
}
inline float sum(f32 v) {
  f4 total = quarters(v);
  return (total[0] + total[2]) + (total[1] + total[3]);
}

// The sums of four vectors, in order: halving them together takes half the operations of one after the other.
inline f4 sum_four(f32 a, f32 b, f32 c, f32 d) {
  typedef int32_t i4 __attribute__((vector_size(16)));
  f4 w = quarters(a), x = quarters(b), y = quarters(c), z = quarters(d);
#ifdef __clang__
  f4 ab = __builtin_shufflevector(w, x, 0, 4, 1, 5) + __builtin_shufflevector(w, x, 2, 6, 3, 7);
  f4 cd = __builtin_shufflevector(y, z, 0, 4, 1, 5) + __builtin_shufflevector(y, z, 2, 6, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
#else
  f4 ab = __builtin_shuffle(w, x, i4{0, 4, 1, 5}) + __builtin_shuffle(w, x, i4{2, 6, 3, 7});
  f4 cd = __builtin_shuffle(y, z, i4{0, 4, 1, 5}) + __builtin_shuffle(y, z, i4{2, 6, 3, 7});
  return __builtin_shuffle(ab, cd, i4{0, 1, 4, 5}) + __builtin_shuffle(ab, cd, i4{2, 3, 6, 7});
#endif
}

// Between 32 bits and fewer. GCC 12 takes such conversions apart lane by lane when they skip a width.
#ifdef __AVX512F__
inline u32 widen(u8 v) { return (u32)_mm512_cvtepu8_epi32((__m128i)v); }
inline i32 widen(i8 v) { return (i32)_mm512_cvtepi8_epi32((__m128i)v); }
inline u32 widen(u16 v) { return (u32)_mm512_cvtepu16_epi32((__m256i)v); }
inline u8 narrow_8(u32 v) { return (u8)_mm512_cvtepi32_epi8((__m512i)v); }
inline u16 narrow_16(u32 v) { return (u16)_mm512_cvtepi32_epi16((__m512i)v); }
#else
inline u32 widen(u16 v) { return __builtin_convertvector(v, u32); }
inline u32 widen(u8 v) { return widen(__builtin_convertvector(v, u16)); }
inline i32 widen(i8 v) { return __builtin_convertvector(__builtin_convertvector(v, i16), i32); }
inline u16 narrow_16(u32 v) { return __builtin_convertvector(v, u16); }
inline u8 narrow_8(u32 v) { return __builtin_convertvector(narrow_16(v), u8); }
#endif

// -- numbers ---------------------------------------------------------------------------------------------------------

inline f32 load_bf16(const uint16_t *from) { return number(widen(load<u16>(from)) << 16); }

// To nearest, ties to even; NaN stays NaN.
inline void store_bf16(uint16_t *to, f32 value) {
  u32 b = bits(value);
  u32 rounded = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
  store(to, narrow_16(choose(value == value, rounded, u32{} + 0x7fc0)));
}

template <Type type> struct Values;  // activations
template <> struct Values<F32> {
  typedef float element;
  static f32 get(const float *from) { return load<f32>(from); }
  static void put(float *to, f32 value) { store(to, value); }
};
template <> struct Values<B16> {
  typedef uint16_t element;
  static f32 get(const uint16_t *from) { return load_bf16(from); }
  static void put(uint16_t *to, f32 value) { store_bf16(to, value); }
};

// e4m3's bits put where float32 keeps sign, exponent and mantissa are the same number 2^120 times smaller (biases 7 and
// 127), subnormals included. NaN codes are lost, but only a NaN scale, which is kept, ever writes them.
//
// Attention multiplies by HALF = sqrt(FACTOR) twice, before and after its sums: all of it before would overflow with
// queries above 2^8 / scaling, all of it after would let small values sink into float32's subnormals.
constexpr float E4M3_FACTOR = 0x1p120f, E4M3_HALF = 0x1p60f;

// Codes to float32, short of FACTOR; and back (`limit` is already applied).
template <Kind kind> struct Codes;
template <> struct Codes<FP8> {
  typedef uint8_t element;
  static constexpr float LIMIT = 448.0f, FACTOR = E4M3_FACTOR, HALF = E4M3_HALF;
  static constexpr bool SCALED = true;
  static f32 get(const uint8_t *from) {
    u32 code = widen(load<u8>(from));
    return number(((code & 0x7f) << 20) | ((code & 0x80) << 24));
  }
  // torch's rounding: to nearest, ties to even. Below 2^-6 a large number is added whose last bit is e4m3's last.
  static void put(uint8_t *to, f32 value) {
    u32 b = bits(value), sign = b & 0x80000000u, magnitude = b ^ sign;
    u32 tiny = bits(number(magnitude) + number(u32{} + (141u << 23))) - (141u << 23);
    u32 normal = (magnitude - (120u << 23) + 0x7ffff + ((magnitude >> 20) & 1)) >> 20;
    u32 code = choose((i32)(magnitude < (121u << 23)), tiny, normal);
    code = choose((i32)(magnitude >= (1087u << 20)), u32{} + 0x7f, code);
    store(to, narrow_8(code | (sign >> 24)));
  }
};
template <> struct Codes<INT8> {
  typedef int8_t element;
  static constexpr float LIMIT = 127.0f, FACTOR = 1.0f, HALF = 1.0f;
  static constexpr bool SCALED = true;
  static f32 get(const int8_t *from) { return __builtin_convertvector(widen(load<i8>(from)), f32); }
  static void put(int8_t *to, f32 value) {
    f32 shifted = value + 12582912.0f;  // 1.5 * 2^23: the sum's last bit is one, so it is rounded to nearest, ties to even
    store(to, narrow_8(bits(shifted) - 0x4b400000u));
  }
};
template <> struct Codes<BF16> : Values<B16> {
  static constexpr float LIMIT = 0, FACTOR = 1.0f, HALF = 1.0f;
  static constexpr bool SCALED = false;
};
template <> struct Codes<FP32> : Values<F32> {
  static constexpr float LIMIT = 0, FACTOR = 1.0f, HALF = 1.0f;
  static constexpr bool SCALED = false;
};

// exp for x <= 0, after Cephes (Moshier's expf.c): 2^n * e^f with |f| <= ln 2 / 2, a polynomial of degree seven; 0 below -87.
inline f32 exponential(f32 x) {
  i32 far = x < -87.0f;
  x = choose(far, f32{}, x);
  f32 scaled = x * 1.44269504088896341f;
  f32 shifted = scaled + 12582912.0f, whole = shifted - 12582912.0f;
  f32 f = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
  f32 p = all(1.9875691500e-4f);
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + f + 1.0f;
  u32 power = (bits(shifted) - 0x4b400000u + 127u) << 23;
  return choose(far, f32{}, p * number(power));
}

inline uint8_t *cell(const Cells &c, int64_t block, int64_t head) {
  return c.data + block * c.block_bytes + c.layer_offset + head * c.cell_bytes;
}

// -- write -----------------------------------------------------------------------------------------------------------

// One row of one head: `scale = max(absmax, 1e-12) / limit` per group, codes of `value / scale`.
template <Kind kind, Type type>
inline void write_row(const Cells &c, typename Codes<kind>::element *codes, float *scales,
                      const typename Values<type>::element *from, const float *centre) {
  float row[1024];  // `cpu.MAX_HEAD_SIZE`
  for (int d = 0; d < c.head_size; d += LANES) {
    f32 value = Values<type>::get(from + d);
    if (centre) value -= load<f32>(centre + d);
    store(row + d, value);
  }
  if (!Codes<kind>::SCALED) {
    for (int d = 0; d < c.head_size; d += LANES) Codes<kind>::put(codes + d, load<f32>(row + d));
    return;
  }
  for (int at = 0, g = 0; at < c.head_size; at += c.group, g++) {
    u32 top = {};  // as integers magnitudes keep their order, and NaN is the greatest
    for (int d = at; d < at + c.group; d += LANES) {
      u32 magnitude = bits(load<f32>(row + d)) & 0x7fffffffu;
      top = choose((i32)(magnitude > top), magnitude, top);
    }
    uint32_t most = 0;
    for (int i = 0; i < LANES; i++) most = top[i] > most ? top[i] : most;
    float absmax;
    std::memcpy(&absmax, &most, 4);
    if (absmax < 1e-12f) absmax = 1e-12f;
    float scale = absmax / Codes<kind>::LIMIT;
    scales[g] = scale;
    for (int d = at; d < at + c.group; d += LANES) {
      f32 value = load<f32>(row + d) / scale;
      value = choose(value > Codes<kind>::LIMIT, all(Codes<kind>::LIMIT), value);
      value = choose(value < -Codes<kind>::LIMIT, all(-Codes<kind>::LIMIT), value);
      Codes<kind>::put(codes + d, value);
    }
  }
}

template <Kind kind, Type type>
void write(const Cells &c, const int64_t *slots, int64_t tokens, const void *keys, int64_t k_token, int64_t k_head,
           const void *values, int64_t v_token, int64_t v_head, const float *centre, int threads) {
  typedef typename Codes<kind>::element Code;
  typedef typename Values<type>::element Value;
#pragma omp parallel for num_threads(threads) if (tokens > 8)
  for (int64_t t = 0; t < tokens; t++) {
    if (slots[t] < 0) continue;  // padding of a batch
    int64_t block = slots[t] / c.block_tokens, offset = slots[t] % c.block_tokens;
    int64_t groups = c.head_size / c.group;
    for (int h = 0; h < c.kv_heads; h++) {
      uint8_t *at = cell(c, block, h);
      write_row<kind, type>(c, (Code *)(at + c.k_codes) + offset * c.head_size, (float *)(at + c.k_scales) + offset * groups,
                            (const Value *)keys + t * k_token + h * k_head, centre ? centre + h * c.head_size : nullptr);
      write_row<kind, type>(c, (Code *)(at + c.v_codes) + offset * c.head_size, (float *)(at + c.v_scales) + offset * groups,
                            (const Value *)values + t * v_token + h * v_head, nullptr);
    }
  }
}

// -- read ------------------------------------------------------------------------------------------------------------

// `table` holds blocks [count, width], or bytes to cells [count, kv_heads, width].
template <Kind kind, Type type>
void read(const Cells &c, const int64_t *table, bool cells, int64_t count, int64_t width, void *keys, void *values,
          int threads) {
  typedef typename Codes<kind>::element Code;
  typedef typename Values<type>::element Value;
  int64_t groups = c.head_size / c.group;
#pragma omp parallel for num_threads(threads) if (count * width * c.kv_heads > 8)
  for (int64_t task = 0; task < count * c.kv_heads * width; task++) {
    int64_t n = task / (c.kv_heads * width), h = task / width % c.kv_heads, b = task % width;
    const uint8_t *at = cells ? c.data + table[task] : cell(c, table[n * width + b], h);
    for (int side = 0; side < 2; side++) {
      const Code *codes = (const Code *)(at + (side ? c.v_codes : c.k_codes));
      const float *scales = (const float *)(at + (side ? c.v_scales : c.k_scales));
      Value *to = (Value *)(side ? values : keys) + task * c.block_tokens * c.head_size;
      for (int64_t r = 0; r < c.block_tokens; r++)
        for (int64_t d = 0; d < c.head_size; d += LANES) {
          f32 value = Codes<kind>::get(codes + r * c.head_size + d);
          if (Codes<kind>::SCALED) value = value * Codes<kind>::FACTOR * scales[r * groups + d / c.group];
          Values<type>::put(to + r * c.head_size + d, value);
        }
    }
  }
}

// -- decode attention ------------------------------------------------------------------------------------------------

constexpr int HEADS = 4;  // query heads that share one pass over their KV head's rows

// Logits of up to HEADS query heads against one cell's keys; K scales multiply logits.
template <Kind kind, int D, int G>
inline void cell_logits(const Cells &c, const uint8_t *at, const float *query, int64_t rows, float *logits, int64_t stride) {
  typedef typename Codes<kind>::element Code;
  const int size = D ? D : c.head_size, group = D || !Codes<kind>::SCALED ? size : c.group, groups = size / group;
  const Code *codes = (const Code *)(at + c.k_codes);
  const float *scales = (const float *)(at + c.k_scales);
  int64_t r = 0;
  if constexpr (D > 0) {  // one scale a row: four rows at once, queries in registers
    f32 q[G][D / LANES];
    for (int g = 0; g < G; g++)
      for (int i = 0; i < D / LANES; i++) q[g][i] = load<f32>(query + g * D + i * LANES);
    for (; r + 4 <= rows; r += 4) {
      f32 dot[4][G] = {};
      for (int i = 0; i < D / LANES; i++)
        for (int k = 0; k < 4; k++) {
          f32 key = Codes<kind>::get(codes + (r + k) * D + i * LANES);
          for (int g = 0; g < G; g++) dot[k][g] += key * q[g][i];
        }
      f4 scale = Codes<kind>::SCALED ? load<f4>(scales + r) * Codes<kind>::HALF : f4{1.0f, 1.0f, 1.0f, 1.0f};
      for (int g = 0; g < G; g++)
        store(logits + g * stride + r, sum_four(dot[0][g], dot[1][g], dot[2][g], dot[3][g]) * scale);
    }
  }
  for (; r < rows; r++) {
    float total[G] = {};
    for (int part = 0; part < groups; part++) {
      f32 dot[G] = {};
      for (int d = part * group; d < (part + 1) * group; d += LANES) {
        f32 key = Codes<kind>::get(codes + r * size + d);
        for (int g = 0; g < G; g++) dot[g] += key * load<f32>(query + g * size + d);
      }
      float scale = Codes<kind>::SCALED ? scales[r * groups + part] * Codes<kind>::HALF : 1.0f;
      for (int g = 0; g < G; g++) total[g] += sum(dot[g]) * scale;
    }
    for (int g = 0; g < G; g++) logits[g * stride + r] = total[g];
  }
}

// Adds one cell's values, weighted; V scales multiply probabilities.
template <Kind kind, int D, int G>
inline void cell_values(const Cells &c, const uint8_t *at, const float *weights, int64_t stride, int64_t rows, float *out) {
  typedef typename Codes<kind>::element Code;
  const int size = D ? D : c.head_size, group = D || !Codes<kind>::SCALED ? size : c.group, groups = size / group;
  const Code *codes = (const Code *)(at + c.v_codes);
  const float *scales = (const float *)(at + c.v_scales);
  constexpr int WIDE = 4 * LANES;
  for (int from = 0; from < size; from += WIDE) {
    const int n = size - from < WIDE ? (size - from) / LANES : 4;
    f32 sums[G][4];
    for (int g = 0; g < G; g++)
      for (int i = 0; i < 4; i++) sums[g][i] = i < n ? load<f32>(out + g * size + from + i * LANES) : f32{};
    for (int64_t r = 0; r < rows; r++)
      for (int i = 0; i < 4; i++) {
        if (i >= n) break;
        int d = from + i * LANES;
        f32 value = Codes<kind>::get(codes + r * size + d);
        float scale = Codes<kind>::SCALED ? scales[groups == 1 ? r : r * groups + d / group] * Codes<kind>::HALF : 1.0f;
        for (int g = 0; g < G; g++) sums[g][i] += value * (weights[g * stride + r] * scale);
      }
    for (int g = 0; g < G; g++)
      for (int i = 0; i < n; i++) store(out + g * size + from + i * LANES, sums[g][i]);
  }
}

inline f32 get(const void *from, int64_t at, int32_t type) {
  return type == B16 ? load_bf16((const uint16_t *)from + at) : load<f32>((const float *)from + at);
}
inline void put(void *to, int64_t at, f32 value, int32_t type) {
  if (type == B16) store_bf16((uint16_t *)to + at, value);
  else store((float *)to + at, value);
}

// Softmax of one head's logits in place, without its division: returns the sum's inverse, and its logarithm in `lse`. A sink
// is one more logit; without rows and sink the sum is 0, and so is what it divides.
inline float probabilities(float *logits, int64_t rows, int64_t padded, const float *sink, float &lse) {
  for (int64_t r = rows; r < padded; r++) logits[r] = -INFINITY;
  f32 top = all(-INFINITY);
  for (int64_t r = 0; r < padded; r += LANES) {
    f32 value = load<f32>(logits + r);
    top = choose(value > top, value, top);
  }
  float most = sink ? *sink : -INFINITY;
  for (int i = 0; i < LANES; i++) most = top[i] > most ? top[i] : most;
  if (most == -INFINITY) most = 0.0f;
  f32 parts = {};
  for (int64_t r = 0; r < padded; r += LANES) {
    f32 p = exponential(load<f32>(logits + r) - most);
    store(logits + r, p);
    parts += p;
  }
  float total = sum(parts);
  if (sink) total += std::exp(*sink - most);
  lse = most + std::log(total);
  return total == 0.0f ? 0.0f : 1.0f / total;
}

// Logits of what is out of the window become -infinity.
inline void out_of_window(const Cells &c, const Reading &in, int64_t n, int64_t h, int64_t b, int64_t here, float *logits,
                          int64_t stride, int heads) {
  const int64_t at = n * in.starts_row + h * in.starts_head;
  for (int64_t r = 0; r < here; r++) {
    int64_t position = in.cells ? in.known[at + b * c.block_tokens + r] : in.starts[at + b] + r;
    if (in.positions[n] - position >= in.window)
      for (int g = 0; g < heads; g++) logits[g * stride + r] = -INFINITY;
  }
}

// G query heads from `head` on, of KV head h of sequence n.
template <Kind kind, int D, int G>
void decode_heads(const Cells &c, const Reading &in, int64_t n, int64_t h, int64_t head, std::vector<float> &space) {
  const int size = D ? D : c.head_size;
  const int64_t from = in.at[n] * in.query_row + head * size, to = in.at[n] * in.out_row + head * size;
  const int64_t rows = in.rows[n * in.rows_row + h * in.rows_head], blocks = (rows + c.block_tokens - 1) / c.block_tokens;
  const int64_t stride = (blocks * c.block_tokens + LANES - 1) / LANES * LANES;
  space.resize(G * (stride + 2 * size));
  float *logits = space.data(), *q = logits + G * stride, *sums = q + G * size;
  for (int i = 0; i < G * size; i += LANES) {
    store(q + i, get(in.query, from + i, in.type) * (in.scaling * Codes<kind>::HALF));
    store(sums + i, f32{});
  }
  const int64_t *table = in.table + n * in.table_row + h * in.table_head;
  for (int64_t b = 0; b < blocks; b++) {
    int64_t here = rows - b * c.block_tokens < c.block_tokens ? rows - b * c.block_tokens : c.block_tokens;
    float *some = logits + b * c.block_tokens;
    cell_logits<kind, D, G>(c, in.cells ? c.data + table[b] : cell(c, table[b], h), q, here, some, stride);
    if (in.softcap > 0)
      for (int g = 0; g < G; g++)
        for (int64_t r = 0; r < here; r++)
          some[g * stride + r] = in.softcap * std::tanh(some[g * stride + r] / in.softcap);
    if (in.window) out_of_window(c, in, n, h, b, here, some, stride, G);
  }
  float share[G];
  for (int g = 0; g < G; g++) {
    float lse;
    const float *sink = in.sinks ? in.sinks + head + g : nullptr;
    share[g] = probabilities(logits + g * stride, rows, stride, sink, lse) * Codes<kind>::HALF;
    if (in.lse) in.lse[in.at[n] * in.lse_row + head + g] = lse;
  }
  for (int64_t b = 0; b < blocks; b++) {
    int64_t here = rows - b * c.block_tokens < c.block_tokens ? rows - b * c.block_tokens : c.block_tokens;
    const uint8_t *at = in.cells ? c.data + table[b] : cell(c, table[b], h);
    cell_values<kind, D, G>(c, at, logits + b * c.block_tokens, stride, here, sums);
  }
  for (int g = 0; g < G; g++)
    for (int d = 0; d < size; d += LANES)
      put(in.out, to + g * size + d, load<f32>(sums + g * size + d) * share[g], in.out_type);
}

template <Kind kind, int D> void decode(const Cells &c, const Reading &in) {
  const int64_t repeat = in.heads / c.kv_heads;
#pragma omp parallel num_threads(in.threads) if (in.count * c.kv_heads > 1)
  {
    std::vector<float> space;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < in.count * c.kv_heads; task++) {
      int64_t n = task / c.kv_heads, h = task % c.kv_heads;
      for (int64_t g = 0; g < repeat; g += HEADS) {
        int64_t head = h * repeat + g;
        switch (repeat - g) {
          case 1: decode_heads<kind, D, 1>(c, in, n, h, head, space); break;
          case 2: decode_heads<kind, D, 2>(c, in, n, h, head, space); break;
          case 3: decode_heads<kind, D, 3>(c, in, n, h, head, space); break;
          default: decode_heads<kind, D, HEADS>(c, in, n, h, head, space);
        }
      }
    }
  }
}

// -- attention of many queries to keys -------------------------------------------------------------------------------

#include "cpu_scores.h"

// -- small operations of a layer -------------------------------------------------------------------------------------

// y = x / rms(x) * weight; with `residual`: residual += x first, and its new value is what is normalised.
template <Type type>
void rms_norm(const void *x, int64_t x_row, void *residual, const void *weight, float eps, void *y, int64_t rows, int64_t size,
              int threads) {
  typedef typename Values<type>::element Value;
#pragma omp parallel for num_threads(threads) if (rows > 8)
  for (int64_t r = 0; r < rows; r++) {
    const Value *from = (const Value *)x + r * x_row;
    Value *kept = residual ? (Value *)residual + r * size : nullptr, *to = (Value *)y + r * size;
    f32 squares = {};
    for (int64_t d = 0; d < size; d += LANES) {
      f32 value = Values<type>::get(from + d);
      if (kept) {
        value += Values<type>::get(kept + d);
        Values<type>::put(kept + d, value);
        value = Values<type>::get(kept + d);
      }
      squares += value * value;
    }
    float scale = 1.0f / std::sqrt(sum(squares) / (float)size + eps);
    if (kept) from = kept;
    for (int64_t d = 0; d < size; d += LANES)
      Values<type>::put(to + d, Values<type>::get(from + d) * scale * Values<type>::get((const Value *)weight + d));
  }
}

// y = silu(gate) * up, where each row of x is [gate, up].
template <Type type> void silu_mul(const void *x, void *y, int64_t rows, int64_t size, int threads) {
  typedef typename Values<type>::element Value;
#pragma omp parallel for num_threads(threads) if (rows > 4)
  for (int64_t r = 0; r < rows; r++) {
    const Value *gate = (const Value *)x + 2 * r * size, *up = gate + size;
    for (int64_t d = 0; d < size; d += LANES) {
      f32 g = Values<type>::get(gate + d);
      // exp of a number that is not positive, and the sigmoid by the side that g lies on
      i32 positive = g > 0.0f;
      f32 e = exponential(choose(positive, -g, g));
      f32 sigmoid = choose(positive, all(1.0f), e) / (e + 1.0f);
      Values<type>::put((Value *)y + r * size + d, g * sigmoid * Values<type>::get(up + d));
    }
  }
}

// Rotary embedding in place on `heads` heads of each row: x * cos + rotate_half(x) * sin.
template <Type type>
void rotate(void *x, int64_t x_row, const void *cosine, const void *sine, int64_t rows, int64_t heads, int64_t size,
            int threads) {
  typedef typename Values<type>::element Value;
  const int64_t half = size / 2;
#pragma omp parallel for num_threads(threads) if (rows > 8)
  for (int64_t r = 0; r < rows; r++) {
    const Value *cos = (const Value *)cosine + r * size, *sin = (const Value *)sine + r * size;
    for (int64_t h = 0; h < heads; h++) {
      Value *low = (Value *)x + r * x_row + h * size, *high = low + half;
      for (int64_t d = 0; d < half; d += LANES) {
        f32 a = Values<type>::get(low + d), b = Values<type>::get(high + d);
        Values<type>::put(low + d, a * Values<type>::get(cos + d) - b * Values<type>::get(sin + d));
        Values<type>::put(high + d, b * Values<type>::get(cos + half + d) + a * Values<type>::get(sin + half + d));
      }
    }
  }
}

}  // namespace

// -- entry points: choose the instance -------------------------------------------------------------------------------

#define WITH_TYPE(type, call)      \
  if ((type) == B16) {             \
    constexpr Type T = B16;        \
    call;                          \
  } else {                         \
    constexpr Type T = F32;        \
    call;                          \
  }
#define WITH_KIND(kind, call)                              \
  switch (kind) {                                          \
    case FP8: { constexpr Kind K = FP8; call; } break;     \
    case INT8: { constexpr Kind K = INT8; call; } break;   \
    case BF16: { constexpr Kind K = BF16; call; } break;   \
    default: { constexpr Kind K = FP32; call; }            \
  }

extern "C" {

// What this library was made from, and the instructions it was compiled for as /proc/cpuinfo names them: `cpu` asks both
// before it calls anything else, as a library that was made beforehand may be of another version or for another CPU.
const char *ullage_source() { return ULLAGE_SOURCE; }
const char *ullage_needs() {
  return ""
#ifdef __AVX__
         " avx"
#endif
#ifdef __AVX2__
         " avx2"
#endif
#ifdef __FMA__
         " fma"
#endif
#ifdef __F16C__
         " f16c"
#endif
#ifdef __MOVBE__
         " movbe"
#endif
#ifdef __LZCNT__
         " abm"
#endif
#ifdef __BMI__
         " bmi1"
#endif
#ifdef __BMI2__
         " bmi2"
#endif
#ifdef __AVX512F__
         " avx512f"
#endif
#ifdef __AVX512BW__
         " avx512bw"
#endif
#ifdef __AVX512CD__
         " avx512cd"
#endif
#ifdef __AVX512DQ__
         " avx512dq"
#endif
#ifdef __AVX512VL__
         " avx512vl"
#endif
#ifdef __AVX512VBMI__
         " avx512vbmi"
#endif
#ifdef __AVX512VBMI2__
         " avx512_vbmi2"
#endif
#ifdef __ARM_FEATURE_SVE
         " sve"
#endif
      ;
}

void ullage_write(const Cells *c, const int64_t *slots, int64_t tokens, const void *keys, int64_t k_token, int64_t k_head,
                  const void *values, int64_t v_token, int64_t v_head, const float *centre, int32_t type, int32_t threads) {
  WITH_TYPE(type, WITH_KIND(c->kind, (write<K, T>(*c, slots, tokens, keys, k_token, k_head, values, v_token, v_head, centre,
                                                  threads))))
}

void ullage_read(const Cells *c, const int64_t *table, int32_t cells, int64_t count, int64_t width, void *keys, void *values,
                 int32_t type, int32_t threads) {
  WITH_TYPE(type, WITH_KIND(c->kind, (read<K, T>(*c, table, cells, count, width, keys, values, threads))))
}

void ullage_decode(const Cells *c, const Reading *in) {
#define DECODE(D) WITH_KIND(c->kind, (decode<K, D>(*c, *in)))
  // the common head sizes with one scale per row are worth instances of their own
  if (c->head_size == 64 && c->group == 64) DECODE(64)
  else if (c->head_size == 128 && c->group == 128) DECODE(128)
  else DECODE(0)
#undef DECODE
}

void ullage_scores(const Scoring *in) {
  // as in decode
  if (in->size == 64) scores<64>(*in);
  else if (in->size == 128) scores<128>(*in);
  else scores<0>(*in);
}

void ullage_rms_norm(const void *x, int64_t x_row, void *residual, const void *weight, float eps, void *y, int64_t rows,
                     int64_t size, int32_t type, int32_t threads) {
  WITH_TYPE(type, (rms_norm<T>(x, x_row, residual, weight, eps, y, rows, size, threads)))
}

void ullage_silu_mul(const void *x, void *y, int64_t rows, int64_t size, int32_t type, int32_t threads) {
  WITH_TYPE(type, (silu_mul<T>(x, y, rows, size, threads)))
}

void ullage_rotate(void *x, int64_t x_row, const void *cosine, const void *sine, int64_t rows, int64_t heads, int64_t size,
                   int32_t type, int32_t threads) {
  WITH_TYPE(type, (rotate<T>(x, x_row, cosine, sine, rows, heads, size, threads)))
}
}

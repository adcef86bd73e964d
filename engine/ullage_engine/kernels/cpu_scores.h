// How much attention many queries pay to keys (`policies.mass.attention`); a part of cpu.cpp, which includes it.
//
// Queries lie side by side in the lanes of vectors, so that keys are read as they are, one number for all lanes, and no sum
// runs across lanes but the last. A tile is WIDE queries of one KV head against all rows: its logits (128 bytes a row with
// AVX-512) stay in the L2 cache between product, softmax and sums. Tiles go in parts, whose number does not depend on
// threads: neither do results, to the bit.

constexpr int WIDE = 2 * LANES;  // queries of a tile
// Bytes of the CPU's own vectors, and rows of a block: its sums, a key and a tile's queries must fit into registers.
#if defined(__AVX512F__)
constexpr int OWN = 64, HIGH = 12;
#elif defined(__AVX__)
constexpr int OWN = 32, HIGH = 6;
#elif defined(__ARM_NEON)
constexpr int OWN = 16, HIGH = 6;
#else
constexpr int OWN = 16, HIGH = 3;
#endif
constexpr int64_t PART = 8, PARTS = 16;  // a part has PART tiles, or more where a head would have more than PARTS parts
enum Mode : int32_t { SQUARE = 0, SUM = 1, ENTROPY = 2 };  // `cpu.MODES` has the same numbers

// Rows of one KV head that are computed together.
struct Span {
  int32_t first, last;  // positions of rows that exist; first > last where none does
  bool whole;           // all rows exist
};

// Space of a thread.
struct Scratch {
  std::vector<float> logits, found, queries, tail;
  std::vector<int64_t> seen;
};

// A tile's queries: what each sees, as positions [from, to], and the same over all of them.
struct Sight {
  i32 from[2], to[2];
  int32_t some_from, some_to;  // seen by at least one
  int32_t all_from, all_to;    // seen by every lane
};

// tanh after Cephes (Moshier's tanhf.c): a polynomial near 0, 1 - 2 / (e^2x + 1) elsewhere.
inline f32 hyperbolic_tangent(f32 x) {
  f32 size = number(bits(x) & 0x7fffffffu), z = x * x;
  f32 p = all(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  f32 e = exponential(size * -2.0f);
  f32 far = 1.0f - 2.0f * e / (e + 1.0f);
  far = number(bits(far) | (bits(x) & 0x80000000u));
  return choose(size < 0.625f, p * z * x + x, far);
}

inline std::vector<Span> spans_of(const Scoring &in) {
  const int64_t blocks = (in.rows + HIGH - 1) / HIGH;
  std::vector<Span> spans(in.kv_heads * blocks);
  for (int64_t i = 0; i < in.kv_heads * blocks; i++) {
    Span span = {INT32_MAX, INT32_MIN, true};
    for (int64_t r = i % blocks * HIGH; r < (i % blocks + 1) * HIGH; r++) {
      int64_t at = i / blocks * in.rows + r;
      if (r >= in.rows || !in.exists[at]) {
        span.whole = false;
        continue;
      }
      span.first = in.positions[at] < span.first ? in.positions[at] : span.first;
      span.last = in.positions[at] > span.last ? in.positions[at] : span.last;
    }
    spans[i] = span;
  }
  return spans;
}

// Queries `first` to `first + WIDE` of head h, by (step, query head), scaled, as [size][WIDE]; lanes without one see nothing.
inline Sight take_queries(const Scoring &in, int64_t h, int64_t first, float *to) {
  const int64_t group = in.heads / in.kv_heads, count = in.steps * group;
  Sight sight = {{}, {}, INT32_MAX, INT32_MIN, INT32_MIN, INT32_MAX};
  for (int lane = 0; lane < WIDE; lane++) {
    int32_t low = INT32_MAX, high = INT32_MIN;
    if (first + lane < count) {
      int64_t step = (first + lane) / group, head = h * group + (first + lane) % group;
      const float *from = in.queries + step * in.query_row + head * in.query_head;
      for (int64_t d = 0; d < in.size; d++) to[d * WIDE + lane] = from[d] * in.scaling;
      high = in.asked[step];
      int64_t nearest = in.window ? (int64_t)high - in.window + 1 : INT32_MIN;
      low = nearest < INT32_MIN ? INT32_MIN : (int32_t)nearest;
      sight.some_from = low < sight.some_from ? low : sight.some_from;
      sight.some_to = high > sight.some_to ? high : sight.some_to;
    } else {
      for (int64_t d = 0; d < in.size; d++) to[d * WIDE + lane] = 0.0f;
    }
    sight.all_from = low > sight.all_from ? low : sight.all_from;
    sight.all_to = high < sight.all_to ? high : sight.all_to;
    sight.from[lane / LANES][lane % LANES] = low;
    sight.to[lane / LANES][lane % LANES] = high;
  }
  return sight;
}

// Logits [HIGH][WIDE] of HIGH rows that lie side by side, in vectors as wide as the CPU's.
template <int D> inline void block_logits(const float *keys, const float *queries, int64_t size, float *logits) {
  typedef float own __attribute__((vector_size(OWN)));
  constexpr int EACH = OWN / 4, COUNT = WIDE / EACH;
  const int64_t n = D ? D : size;
  own dot[HIGH][COUNT] = {};
  for (int64_t d = 0; d < n; d++) {
    own query[COUNT];
    for (int i = 0; i < COUNT; i++) query[i] = load<own>(queries + d * WIDE + i * EACH);
#pragma GCC unroll 12
    for (int r = 0; r < HIGH; r++) {
      own key = keys[r * n + d] - own{};
      for (int i = 0; i < COUNT; i++) dot[r][i] += key * query[i];
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < HIGH; r++)
    for (int i = 0; i < COUNT; i++) store(logits + r * WIDE + i * EACH, dot[r][i]);
}

// Softmax in lanes: logits of `count` rows become probabilities without their division, whose inverse sum is `share`, or stay
// as they are (`keep`); `lse` is the logarithm of the sum, 0 in lanes that see nothing.
inline void softmax(float *logits, int64_t count, bool keep, f32 *share, f32 *lse) {
  for (int half = 0; half < 2; half++) {
    f32 top = all(-INFINITY), total = {};
    for (int64_t r = 0; r < count; r++) {
      f32 value = load<f32>(logits + r * WIDE + half * LANES);
      top = choose(value > top, value, top);
    }
    top = choose(top == -INFINITY, f32{}, top);
    for (int64_t r = 0; r < count; r++) {
      float *at = logits + r * WIDE + half * LANES;
      f32 p = exponential(load<f32>(at) - top);
      total += p;
      if (!keep) store(at, p);
    }
    i32 none = total == 0.0f;
    total = choose(none, all(1.0f), total);
    share[half] = choose(none, f32{}, 1.0f / total);
    for (int lane = 0; lane < LANES; lane++) lse[half][lane] = top[lane] + std::log(total[lane]);
  }
}

// Adds a tile to `found` [rows][LANES]; of `ready` logits probabilities lack only `share`.
template <Mode mode, bool ready>
inline void add_tile(const float *logits, const std::vector<int64_t> &seen, const f32 *share, const f32 *lse, float *found) {
  const float *from = logits;
  for (int64_t b : seen)
    for (int64_t r = b * HIGH; r < (b + 1) * HIGH; r++, from += WIDE) {
      f32 total = load<f32>(found + r * LANES);
      for (int half = 0; half < 2; half++) {
        f32 value = load<f32>(from + half * LANES), log = value - lse[half];
        f32 p = ready ? value * share[half] : exponential(log);
        if (mode == SQUARE) total += p * p;
        else if (mode == SUM) total += p;
        else total -= choose(p > 0.0f, p * log, f32{});
      }
      store(found + r * LANES, total);
    }
}

inline void mask_block(const Scoring &in, const Sight &sight, int64_t h, int64_t b, float *logits) {
  for (int r = 0; r < HIGH; r++) {
    int64_t row = b * HIGH + r, at = h * in.rows + row;
    bool there = row < in.rows && in.exists[at];
    for (int half = 0; half < 2; half++) {
      float *where = logits + r * WIDE + half * LANES;
      i32 visible = {};
      if (there) visible = (i32)(in.positions[at] >= sight.from[half]) & (i32)(in.positions[at] <= sight.to[half]);
      store(where, choose(visible, load<f32>(where), all(-INFINITY)));
    }
  }
}

// The tile's logits of rows that some of its queries see, block after block as in `space.seen`.
template <int D> void tile_logits(const Scoring &in, const Span *spans, int64_t h, const Sight &sight, Scratch &space) {
  const int64_t blocks = (in.rows + HIGH - 1) / HIGH;
  space.seen.clear();
  float *logits = space.logits.data();
  for (int64_t b = 0; b < blocks; b++) {
    const Span &span = spans[b];
    if (span.first > span.last || span.first > sight.some_to || span.last < sight.some_from) continue;
    const float *keys = in.keys + (h * in.rows + b * HIGH) * in.size;
    if ((b + 1) * HIGH > in.rows) {  // the last, short block: nothing is read past its end
      std::memcpy(space.tail.data(), keys, (in.rows - b * HIGH) * in.size * 4);
      keys = space.tail.data();
    }
    block_logits<D>(keys, space.queries.data(), in.size, logits);
    if (in.softcap > 0)
      for (int i = 0; i < HIGH * WIDE; i += LANES)
        store(logits + i, hyperbolic_tangent(load<f32>(logits + i) / in.softcap) * in.softcap);
    if (!span.whole || span.first < sight.all_from || span.last > sight.all_to) mask_block(in, sight, h, b, logits);
    space.seen.push_back(b);
    logits += HIGH * WIDE;
  }
}

template <Mode mode> void score_tile(const Scoring &in, int64_t h, int64_t first, Scratch &space) {
  const int64_t group = in.heads / in.kv_heads, count = in.steps * group;
  f32 share[2] = {}, lse[2] = {};
  float *logits = space.logits.data(), *found = space.found.data();
  if (!in.lse) {
    softmax(logits, (int64_t)space.seen.size() * HIGH, mode == ENTROPY, share, lse);
    add_tile<mode, mode != ENTROPY>(logits, space.seen, share, lse, found);
    return;
  }
  for (int lane = 0; lane < WIDE && first + lane < count; lane++) {
    float given = in.lse[(first + lane) / group * in.heads + h * group + (first + lane) % group];
    lse[lane / LANES][lane % LANES] = given == -INFINITY ? 0.0f : given;
  }
  add_tile<mode, false>(logits, space.seen, share, lse, found);
}

// Tiles [begin, end) of head h into `to` [rows].
template <int D>
void score_part(const Scoring &in, const Span *spans, int64_t h, int64_t begin, int64_t end, Scratch &space, float *to) {
  const int64_t blocks = (in.rows + HIGH - 1) / HIGH;
  space.logits.resize(blocks * HIGH * WIDE);
  space.found.assign(blocks * HIGH * LANES, 0.0f);
  space.queries.resize(in.size * WIDE);
  space.tail.resize(in.size * HIGH);
  for (int64_t tile = begin; tile < end; tile++) {
    Sight sight = take_queries(in, h, tile * WIDE, space.queries.data());
    tile_logits<D>(in, spans, h, sight, space);
    if (in.mode == SQUARE) score_tile<SQUARE>(in, h, tile * WIDE, space);
    else if (in.mode == SUM) score_tile<SUM>(in, h, tile * WIDE, space);
    else score_tile<ENTROPY>(in, h, tile * WIDE, space);
  }
  for (int64_t r = 0; r < in.rows; r++) to[r] = sum(load<f32>(&space.found[r * LANES]));
}

template <int D> void scores(const Scoring &in) {
  const int64_t group = in.heads / in.kv_heads, tiles = (in.steps * group + WIDE - 1) / WIDE;
  const int64_t each = tiles > PART * PARTS ? (tiles + PARTS - 1) / PARTS : PART, parts = (tiles + each - 1) / each;
  const int64_t blocks = (in.rows + HIGH - 1) / HIGH;
  const std::vector<Span> spans = spans_of(in);
  std::vector<float> found(in.kv_heads * parts * in.rows);
#pragma omp parallel num_threads(in.threads) if (in.kv_heads * parts > 1)
  {
    Scratch space;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < in.kv_heads * parts; task++) {
      int64_t h = task / parts, begin = task % parts * each, end = begin + each < tiles ? begin + each : tiles;
      score_part<D>(in, spans.data() + h * blocks, h, begin, end, space, found.data() + task * in.rows);
    }
  }
  for (int64_t i = 0; i < in.kv_heads * in.rows; i++) {
    float total = 0.0f;
    for (int64_t part = 0; part < parts; part++) total += found[(i / in.rows * parts + part) * in.rows + i % in.rows];
    in.out[i] = total / (float)group;
  }
}

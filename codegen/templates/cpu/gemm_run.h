// gemm_run.h: what all formats share: splitting the work over threads, cutting tokens into tiles, epilogues.
//
// Work is split by units, a unit being two 16-row blocks (a gate and an up block for kGated). A thread walks its
// units once per token block; a token block is cut into tiles; a format's kernel computes a unit for a tile into a
// small float buffer [block of the unit][kPanelTile tokens][16], and the epilogue takes it from there.
// A format F gives:
//   X, Tile                                  its activations, and its activations of one tile as its kernels read them
//   kTile                                    tokens of a panel tile, kSmallTile..kPanelTile
//   kPanelFrom                               from this many tokens on a unit is unpacked once for all tiles
//   prepare<panel>(g, x, first, count, mem)  the Tile of tokens first.., built in mem; moves mem past what it used
//   tile_bytes(kp, count)                    the most bytes prepare uses
//   unpack(g, block, blocks, panel)          a unit's weights into the panel
//   unit<M>(g, block, blocks, tile, out)     kernel of M tokens; the results of block b at out + b * kPanelTile * 16
//   panel_unit(g, block, blocks, panel, tile, i, out)   the same for kTile tokens (tile i) from the unpacked unit
#pragma once

constexpr int kTokenBlock = 256;                       // most tokens in a token block
constexpr size_t kTokenBlockBytes = (size_t)512 << 10;  // activations of a token block stay in L2

struct Shape {
  int kp, chunks, blocks;  // padded inputs, 32-input chunks, 16-row blocks
  explicit Shape(const Gemm& g) : kp(gemm_kp(g.k)), chunks(kp / 32), blocks(g.blocks) {
    if (!blocks) blocks = g.epilogue == kGated ? 2 * ((g.n / 2 + 15) / 16) : (g.n + 15) / 16;
  }
};

QC_INLINE f32x16 gated(const Gemm& g, f32x16 gate, f32x16 up) {
  if (g.limit < __builtin_inff()) {  // what is not a number stays so
    gate = select(gate > g.limit, splat(g.limit), gate);
    up = select(up > g.limit, splat(g.limit), select(up < -g.limit, splat(-g.limit), up));
  }
  return unary(g.act, gate) * (up + g.offset);
}

// Where a unit's results go: columns column.. of the output, `width` of them within the matrix.
struct Columns {
  int column, width;
  Columns(const Gemm& g, int block, int blocks) {
    const bool pair = g.epilogue == kGated;
    column = (pair ? block / 2 : block) * 16;
    const int end = column + (pair ? 1 : blocks) * 16, n = pair ? g.n / 2 : g.n;
    width = (end < n ? end : n) - column;
  }
};

// The output lines of a tile, asked for before the tile is computed: they lie a row apart, in as many pages, and where
// another core has read them since, to own them again takes the time of some hundred instructions a line.
static void prefetch_out(const Gemm& g, const Columns& c, int first, int tokens) {
  if (!g.out) return;
  for (int t = first; t < first + tokens; ++t) {
    const char* out = (const char*)(g.out + t * g.out_stride + c.column);
    for (int i = 0; i < c.width * 4; i += 64) __builtin_prefetch(out + i, 1);
    __builtin_prefetch(out + c.width * 4 - 1, 1);
  }
}

constexpr i32x16 kLanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Logits of row t, of which the first `count` lanes are.
QC_INLINE void note_best(const Gemm& g, int t, f32x16 y, i32x16 columns, int count) {
  if (!g.best) return;
  if (count < 16) y = select(kLanes < count, y, splat(-__builtin_inff()));
  g.best[t].note(y, columns);
}

template <EpilogueKind E>
static void finish_rows(const Gemm& g, const Columns& c, int first, int tokens, const float* bias, const float* buffer) {
  for (int t = 0; t < tokens; ++t) {
    for (int i = 0; i < c.width; i += 16) {
      const float* row = buffer + (i / 16 * kPanelTile + t) * 16;
      f32x16 y = load<f32x16>(row);
      if (bias) y += load<f32x16>(bias + i);
      if constexpr (E == kGated) {
        f32x16 up = load<f32x16>(row + kPanelTile * 16);
        y = gated(g, y, bias ? up + load<f32x16>(bias + 16) : up);
      }
      if constexpr (E == kLogits) {
        note_best(g, first + t, y, c.column + i + kLanes, c.width - i);
        if (!g.out) continue;
      }
      float* out = g.out + (first + t) * g.out_stride + c.column + i;
      const float* residual = E == kAdd ? g.residual + (first + t) * g.residual_stride + c.column + i : nullptr;
      if (c.width - i >= 16) {
        store(out, E == kAdd ? load<f32x16>(residual) + y : y);
        continue;
      }
      for (int j = 0; j < c.width - i; ++j) out[j] = E == kAdd ? residual[j] + y[j] : y[j];
    }
  }
}

// p[index[i]], and p[index[i]] = v[i], for the first `count` of 16 lanes.
QC_INLINE f32x16 gather(const float* p, const int32_t* index, int count) {
  f32x16 v{};
  for (int i = 0; i < count; ++i) v[i] = p[index[i]];
  return v;
}
QC_INLINE void scatter(float* p, const int32_t* index, int count, f32x16 v) {
#if defined(QC_ISA_AVX512)
  _mm512_mask_i32scatter_ps(p, (__mmask16)((1 << count) - 1), _mm512_loadu_si512(index), v, 4);
#else
  for (int i = 0; i < count; ++i) p[index[i]] = v[i];
#endif
}

// The same for rows that go to columns of their own; for kGated the unit's two blocks are of the same columns.
template <EpilogueKind E>
static void scatter_rows(const Gemm& g, int block, int blocks, int first, int tokens, const float* buffer) {
  for (int b = 0; b < (E == kGated ? 1 : blocks); ++b) {
    const int32_t* columns = g.columns + (int64_t)(block + b) * 16;
    int count = 16;
    while (columns[count - 1] < 0) --count;
    f32x16 bias{}, up_bias{};
    for (int i = 0; g.bias && i < count; ++i) {
      const int row = E == kGated ? columns[i] / 16 * 32 + columns[i] % 16 : columns[i];
      bias[i] = g.bias[row];
      if (E == kGated) up_bias[i] = g.bias[row + 16];
    }
    for (int t = 0; t < tokens; ++t) {
      const float* row = buffer + (b * kPanelTile + t) * 16;
      f32x16 y = load<f32x16>(row);
      if (g.bias) y += bias;
      if constexpr (E == kGated) {
        f32x16 up = load<f32x16>(row + kPanelTile * 16);
        y = gated(g, y, g.bias ? up + up_bias : up);
      }
      if constexpr (E == kLogits) {
        note_best(g, first + t, y, load<i32x16>(columns), count);
        if (!g.out) continue;
      }
      if (E == kAdd) y = gather(g.residual + (first + t) * g.residual_stride, columns, count) + y;
      scatter(g.out + (first + t) * g.out_stride, columns, count, y);
    }
  }
}

template <EpilogueKind E>
static void finish(const Gemm& g, int block, int blocks, const Columns& c, int first, int tokens,
                   const float* buffer) {
  if (g.columns) scatter_rows<E>(g, block, blocks, first, tokens, buffer);
  else finish_rows<E>(g, c, first, tokens, g.bias ? g.bias + block * 16 : nullptr, buffer);
}

// From the buffer to the output.
static void finish_tile(const Gemm& g, int block, int blocks, const Columns& c, int first, int tokens,
                        const float* buffer) {
  switch (g.epilogue) {
    case kStore: return finish<kStore>(g, block, blocks, c, first, tokens, buffer);
    case kAdd: return finish<kAdd>(g, block, blocks, c, first, tokens, buffer);
    case kGated: return finish<kGated>(g, block, blocks, c, first, tokens, buffer);
    case kLogits: return finish<kLogits>(g, block, blocks, c, first, tokens, buffer);
  }
}

template <class F>
struct TokenTile {
  int first, count;  // tokens, counted from the start of the token block
  bool panel;
  typename F::Tile x;
};

// Cuts `tokens` into tiles: full panel tiles first where panels pay, then equal tiles of at most kSmallTile.
template <class F>
static int cut_tiles(const Gemm& g, const typename F::X& x, int start, int tokens, TokenTile<F>* tiles, char* mem) {
  int n = 0, done = 0;
  if (tokens >= F::kPanelFrom)
    for (; tokens - done >= F::kTile; done += F::kTile, ++n)
      tiles[n] = {done, F::kTile, true, F::template prepare<true>(g, x, start + done, F::kTile, mem)};
  for (int left = (tokens - done + kSmallTile - 1) / kSmallTile; left; --left, ++n) {
    int count = (tokens - done + left - 1) / left;
    tiles[n] = {done, count, false, F::template prepare<false>(g, x, start + done, count, mem)};
    done += count;
  }
  return n;
}

template <class F, int M = kSmallTile>
QC_INLINE void small_unit(const Gemm& g, int block, int blocks, int count, const typename F::Tile& x, float* out) {
  if (count == M) return F::template unit<M>(g, block, blocks, x, out);
  if constexpr (M > 1) small_unit<F, M - 1>(g, block, blocks, count, x, out);
}

// This thread's units of a part of `units` units.
QC_INLINE void own_units(int units, const Worker& w, int* begin, int* end) {
  *begin = (int)((int64_t)units * w.tid / w.threads);
  *end = (int)((int64_t)units * (w.tid + 1) / w.threads);
}

// Units first + begin .. first + end - 1 for the tokens of all tiles.
template <class F>
static void run_units(const Gemm& g, int begin, int end, int start, const TokenTile<F>* tiles, int n, char* panel,
                      float* buffer) {
  constexpr int kAhead = 3;  // units: to own a line takes longer than one of few tokens
  const int all = Shape(g).blocks, tokens = tiles[n - 1].first + tiles[n - 1].count;
  const bool early = !tiles[0].panel && !g.columns;
  const auto blocks_of = [&](int u) { return all - 2 * u < 2 ? 1 : 2; };
  const auto ask = [&](int u) {
    if (u < end) prefetch_out(g, Columns(g, 2 * u, blocks_of(u)), start, tokens);
  };
  for (int u = begin; early && u < begin + kAhead; ++u) ask(u);
  for (int u = begin; u < end; ++u) {
    const int block = 2 * u, blocks = blocks_of(u);
    const Columns columns(g, block, blocks);
    if (early) ask(u + kAhead);
    if (tiles[0].panel) F::unpack(g, block, blocks, panel);
    for (int i = 0; i < n; ++i) {
      const int first = start + tiles[i].first;
      if (tiles[i].panel) {
        if (!g.columns) prefetch_out(g, columns, first, tiles[i].count);
        F::panel_unit(g, block, blocks, panel, tiles[i].x, i, buffer);
      } else {
        small_unit<F>(g, block, blocks, tiles[i].count, tiles[i].x, buffer);
      }
      finish_tile(g, block, blocks, columns, first, tiles[i].count, buffer);
    }
  }
}

template <class F>
static void run_gemm(const Gemm& g, const typename F::X& x, const Worker& worker) {
  const Shape shape(g);
  float* buffer = (float*)worker.scratch;
  char* panel = (char*)(buffer + 2 * kPanelTile * 16);
  char* mem = panel + F::panel_bytes(shape.kp);
  int tile_tokens = (int)(kTokenBlockBytes / F::tile_bytes(shape.kp, F::kTile)) * F::kTile;
  tile_tokens = tile_tokens < F::kTile ? F::kTile : tile_tokens;
  const int step = tile_tokens < kTokenBlock / F::kTile * F::kTile ? tile_tokens : kTokenBlock / F::kTile * F::kTile;
  TokenTile<F> tiles[kTokenBlock / F::kTile + 2];
  for (int start = 0; start < g.m; start += step) {
    const int tokens = g.m - start < step ? g.m - start : step;
    const int n = cut_tiles<F>(g, x, start, tokens, tiles, mem);
    int first = 0, begin, end;
    for (int units : g.parts) {
      own_units(units, worker, &begin, &end);
      run_units<F>(g, first + begin, first + end, start, tiles, n, panel, buffer);
      first += units;
    }
    own_units((shape.blocks + 1) / 2 - first, worker, &begin, &end);
    run_units<F>(g, first + begin, first + end, start, tiles, n, panel, buffer);
  }
}

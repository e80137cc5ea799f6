// gemm_run.h: shared by all formats: work split over threads, token tiling, epilogues.
//
// Work is split by units of two 16-row blocks (a gate and an up block for kGated). A thread processes all its units for
// one token block before the next. A token block is cut into tiles. A format's kernel computes one unit for one tile
// into a small float buffer [block of the unit][kBufferRows tokens][16], which the epilogue then writes out.
// A format F provides:
//   X, Tile                                  its activations, and one tile of them in its kernels' layout
//   kTile                                    most tokens of a panel tile or streamed tile, at most kBufferRows
//   kStreamFrom                              from this many tokens on, a single tile is streamed, if kTile holds all
//   kPanelFrom, kPanelLeast                  from kPanelFrom tokens on, a unit is unpacked once for all tiles; at least
//                                            kPanelLeast tokens left over by full tiles form another panel tile
//   prepare<kind>(g, x, first, count, mem)   builds the Tile of tokens first.. in mem and advances mem
//   tile_bytes(kp, count)                    upper bound of the bytes prepare uses
//   unpack(g, block, blocks, panel)          unpacks a unit's weights into the panel
//   unit<M>(g, block, blocks, tile, out)     kernel for M tokens; block b's results go to out + b * kBufferRows * 16
//   streamed(g, block, blocks, tile, count, out)        the same for up to kTile tokens, unless kStreamFrom is kNever
//   panel_unit(g, block, blocks, panel, tile, pass, out)       the same from the unpacked unit
#pragma once

// How a tile's kernel reads the weights. kDirectTile: packed, straight from memory, for a compiled-in number of tokens.
// kStreamedTile: unpacked on the fly, for any number. kUnpackedTile: from a panel that is unpacked once for all tiles.
enum TileKind { kDirectTile, kStreamedTile, kUnpackedTile };
constexpr int kNever = 1 << 30;  // token threshold that is never reached
// The tile for which a unit is about to be computed: its index, the number of tiles, and the tile's tokens.
struct TilePass {
  int index, tiles, count;
};

constexpr int kTokenBlock = 256;                       // most tokens in a token block
#if defined(QC_AMX)
constexpr size_t kTokenBlockBytes = (size_t)1 << 20;  // activations of a token block stay in L2
#else
constexpr size_t kTokenBlockBytes = (size_t)512 << 10;
#endif

struct Shape {
  int kp, chunks, blocks;  // padded inputs, 32-input chunks, 16-row blocks
  explicit Shape(const Gemm& g) : kp(gemm_kp(g.k)), chunks(kp / 32), blocks(g.blocks) {
    if (!blocks) blocks = g.epilogue == kGated ? 2 * ((g.n / 2 + 15) / 16) : (g.n + 15) / 16;
  }
};

QC_INLINE f32x16 gated(const Gemm& g, f32x16 gate, f32x16 up) {
  if (g.limit < __builtin_inff()) {  // NaN passes through
    gate = select(gate > g.limit, splat(g.limit), gate);
    up = select(up > g.limit, splat(g.limit), select(up < -g.limit, splat(-g.limit), up));
  }
  return unary_of<QC_GATES>(g.act, gate) * (up + g.offset);
}

// Output columns of a unit: from `column` on, `width` of them inside the matrix.
struct Columns {
  int column, width;
  Columns(const Gemm& g, int block, int blocks) {
    const bool pair = g.epilogue == kGated;
    column = (pair ? block / 2 : block) * 16;
    const int end = column + (pair ? 1 : blocks) * 16, n = pair ? g.n / 2 : g.n;
    width = (end < n ? end : n) - column;
  }
};

// Prefetches a tile's output lines for writing before the tile is computed. The lines are one row stride apart, each in
// its own page. Where another core has read a line since, its read-for-ownership takes as long as some hundred
// instructions.
static void prefetch_out(const Gemm& g, const Columns& c, int first, int tokens) {
  if (!g.out) return;
  for (int t = first; t < first + tokens; ++t) {
    const char* out = (const char*)(g.out + t * g.out_stride + c.column);
    for (int i = 0; i < c.width * 4; i += 64) __builtin_prefetch(out + i, 1);
    __builtin_prefetch(out + c.width * 4 - 1, 1);
  }
}

constexpr i32x16 kLanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Updates the running maximum of row t; the first `count` lanes of y are logits.
QC_INLINE void update_best(const Gemm& g, int t, f32x16 y, i32x16 columns, int count) {
  if (!g.best) return;
  if (count < 16) y = select(kLanes < count, y, splat(-__builtin_inff()));
  g.best[t].update(y, columns);
}

template <EpilogueKind E>
static void finish_rows(const Gemm& g, const Columns& c, int first, int tokens, const float* bias, const float* buffer) {
  for (int t = 0; t < tokens; ++t) {
    for (int i = 0; i < c.width; i += 16) {
      const float* row = buffer + (i / 16 * kBufferRows + t) * 16;
      f32x16 y = load<f32x16>(row);
      if (bias) y += load<f32x16>(bias + i);
      if constexpr (E == kGated) {
        f32x16 up = load<f32x16>(row + kBufferRows * 16);
        y = gated(g, y, bias ? up + load<f32x16>(bias + 16) : up);
      }
      if constexpr (E == kLogits) {
        update_best(g, first + t, y, c.column + i + kLanes, c.width - i);
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

// Fewest tokens for which analysing a block's columns pays off; fewer are stored element by element. Masked stores of
// AVX-512 cost a single token 3 % of its total time (measured on Zen 4).
constexpr int kMaskedFrom = 3;

// Scatters a block's rows to their output columns. Trailing rows of the 16 may have none (-1).
struct ColumnScatter {
  const int32_t* columns;
  int count;
#if defined(QC_ISA_AVX512)
  bool masked;
  // Whether columns ascend within 32 of the first, as those of narrow rows do. If so, low and high mask the columns
  // present among the first and the second 16.
  bool compact = false;
  __mmask16 valid = 0, low = 0, high = 0;
  __m512i high_rows;  // lane i holds row i + popcount(low): the rows of the second 16 columns
#endif
  ColumnScatter(const int32_t* columns, int tokens) : columns(columns) {
    for (count = 16; columns[count - 1] < 0;) --count;
#if defined(QC_ISA_AVX512)
    masked = tokens >= kMaskedFrom;
    if (!masked) return;
    const __m512i all = _mm512_loadu_si512(columns), lanes = (__m512i)kLanes;
    const __m512i before = _mm512_permutexvar_epi32(_mm512_sub_epi32(lanes, _mm512_set1_epi32(1)), all);
    const __m512i delta = _mm512_sub_epi32(all, _mm512_set1_epi32(columns[0]));
    const __mmask16 in_window = _mm512_cmplt_epu32_mask(delta, _mm512_set1_epi32(32));
    const __mmask16 ascending = _mm512_cmpgt_epi32_mask(all, before) | 1;
    valid = (__mmask16)((1 << count) - 1);
    compact = !(valid & ~(in_window & ascending));
    if (!compact) return;
    const uint32_t mask = (uint32_t)_mm512_reduce_or_epi32(_mm512_maskz_sllv_epi32(valid, _mm512_set1_epi32(1), delta));
    low = (__mmask16)mask, high = (__mmask16)(mask >> 16);
    high_rows = _mm512_add_epi32(_mm512_set1_epi32(__builtin_popcount(low)), lanes);
#else
    (void)tokens;
#endif
  }
  // out[columns[i]] = v[i], plus residual[columns[i]] if residual is given.
  __attribute__((always_inline)) void put(float* out, const float* residual, f32x16 v) const {
#if defined(QC_ISA_AVX512)
    if (compact) {
      expand_store(out + columns[0], residual ? residual + columns[0] : nullptr, low, v);
      const f32x16 rest = (f32x16)_mm512_permutexvar_ps(high_rows, v);
      if (high) expand_store(out + columns[0] + 16, residual ? residual + columns[0] + 16 : nullptr, high, rest);
      return;
    }
    if (masked && !residual) return _mm512_mask_i32scatter_ps(out, valid, _mm512_loadu_si512(columns), v, 4);
#endif
    alignas(64) float y[16];
    store(y, v);
    for (int i = 0; i < count; ++i) out[columns[i]] = residual ? residual[columns[i]] + y[i] : y[i];
  }
#if defined(QC_ISA_AVX512)
  QC_INLINE void expand_store(float* out, const float* residual, __mmask16 mask, f32x16 v) {
    __m512 y = _mm512_maskz_expand_ps(mask, v);
    if (residual) y = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, residual), y);
    _mm512_mask_storeu_ps(out, mask, y);
  }
#endif
};

// The same for rows with explicit output columns. For kGated both blocks of the unit have the same columns.
template <EpilogueKind E>
static void scatter_rows(const Gemm& g, int block, int blocks, int first, int tokens, const float* buffer) {
  for (int b = 0; b < (E == kGated ? 1 : blocks); ++b) {
    const int32_t* columns = g.columns + (int64_t)(block + b) * 16;
    const ColumnScatter scatter(columns, tokens);
    const int count = scatter.count;
    f32x16 bias{}, up_bias{};
    for (int i = 0; g.bias && i < count; ++i) {
      const int row = E == kGated ? columns[i] / 16 * 32 + columns[i] % 16 : columns[i];
      bias[i] = g.bias[row];
      if (E == kGated) up_bias[i] = g.bias[row + 16];
    }
    for (int t = 0; t < tokens; ++t) {
      const float* row = buffer + (b * kBufferRows + t) * 16;
      f32x16 y = load<f32x16>(row);
      if (g.bias) y += bias;
      if constexpr (E == kGated) {
        f32x16 up = load<f32x16>(row + kBufferRows * 16);
        y = gated(g, y, g.bias ? up + up_bias : up);
      }
      if constexpr (E == kLogits) {
        update_best(g, first + t, y, load<i32x16>(columns), count);
        if (!g.out) continue;
      }
      scatter.put(g.out + (first + t) * g.out_stride,
                 E == kAdd ? g.residual + (first + t) * g.residual_stride : nullptr, y);
    }
  }
}

template <EpilogueKind E>
static void finish(const Gemm& g, int block, int blocks, const Columns& c, int first, int tokens,
                   const float* buffer) {
  if (g.columns) scatter_rows<E>(g, block, blocks, first, tokens, buffer);
  else finish_rows<E>(g, c, first, tokens, g.bias ? g.bias + block * 16 : nullptr, buffer);
}

// Writes a tile's buffer to the output.
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
  TileKind kind;
  typename F::Tile x;
};

// Cuts `tokens` into tiles: one streamed tile; or panel tiles where they pay off, then equal tiles of at most
// kSmallTile.
template <class F>
static int cut_tiles(const Gemm& g, const typename F::X& x, int start, int tokens, TokenTile<F>* tiles, char* mem) {
  int n = 0, done = 0;
  if (tokens >= F::kStreamFrom && tokens <= F::kTile) {
    tiles[0] = {0, tokens, kStreamedTile, F::template prepare<kStreamedTile>(g, x, start, tokens, mem)};
    return 1;
  }
  while (tokens >= F::kPanelFrom && tokens - done >= F::kPanelLeast) {
    const int count = tokens - done < F::kTile ? tokens - done : F::kTile;
    tiles[n++] = {done, count, kUnpackedTile, F::template prepare<kUnpackedTile>(g, x, start + done, count, mem)};
    done += count;
  }
  for (int left = (tokens - done + kSmallTile - 1) / kSmallTile; left; --left, ++n) {
    int count = (tokens - done + left - 1) / left;
    tiles[n] = {done, count, kDirectTile, F::template prepare<kDirectTile>(g, x, start + done, count, mem)};
    done += count;
  }
  return n;
}

// Only tiles with fewer than kStreamFrom tokens arrive here.
template <class F, int M = (F::kStreamFrom <= kSmallTile ? F::kStreamFrom - 1 : kSmallTile)>
QC_INLINE void small_unit(const Gemm& g, int block, int blocks, int count, const typename F::Tile& x, float* out) {
  if (count == M) return F::template unit<M>(g, block, blocks, x, out);
  if constexpr (M > 1) small_unit<F, M - 1>(g, block, blocks, count, x, out);
}
template <class F>
QC_INLINE void other_unit(const Gemm& g, int block, int blocks, const TokenTile<F>& tile, float* out) {
  if constexpr (F::kStreamFrom != kNever)
    if (tile.kind == kStreamedTile) return F::streamed(g, block, blocks, tile.x, tile.count, out);
  if constexpr (F::kStreamFrom > 1) small_unit<F>(g, block, blocks, tile.count, tile.x, out);
}

// This thread's share of `units` units.
QC_INLINE void thread_units(int units, const Worker& w, int* begin, int* end) {
  *begin = (int)((int64_t)units * w.tid / w.threads);
  *end = (int)((int64_t)units * (w.tid + 1) / w.threads);
}

// Computes units begin .. end - 1 for the tokens of all tiles.
template <class F>
static void run_units(const Gemm& g, int begin, int end, int start, const TokenTile<F>* tiles, int n, char* panel,
                      float* buffer) {
  constexpr int kAhead = 3;  // units; a read-for-ownership takes longer than a unit of few tokens
  const int all = Shape(g).blocks, tokens = tiles[n - 1].first + tiles[n - 1].count;
  const bool prefetch_ahead = tiles[0].kind != kUnpackedTile && !g.columns;
  const auto blocks_of = [&](int u) { return all - 2 * u < 2 ? 1 : 2; };
  const auto prefetch_unit = [&](int u) {
    if (u < end) prefetch_out(g, Columns(g, 2 * u, blocks_of(u)), start, tokens);
  };
  for (int u = begin; prefetch_ahead && u < begin + kAhead; ++u) prefetch_unit(u);
  for (int u = begin; u < end; ++u) {
    const int block = 2 * u, blocks = blocks_of(u);
    const Columns columns(g, block, blocks);
    if (prefetch_ahead) prefetch_unit(u + kAhead);
    if (tiles[0].kind == kUnpackedTile) F::unpack(g, block, blocks, panel);
    for (int i = 0; i < n; ++i) {
      const int first = start + tiles[i].first;
      if (tiles[i].kind == kUnpackedTile) {
        if (!g.columns) prefetch_out(g, columns, first, tiles[i].count);
        F::panel_unit(g, block, blocks, panel, tiles[i].x, {i, n, tiles[i].count}, buffer);
      } else {
        other_unit<F>(g, block, blocks, tiles[i], buffer);
      }
      finish_tile(g, block, blocks, columns, first, tiles[i].count, buffer);
    }
  }
}

// AMX formats define kTileBytes, the bytes of inputs per tile step.
template <class F, class = void>
constexpr bool uses_tiles = false;
template <class F>
constexpr bool uses_tiles<F, std::void_t<decltype(F::kTileBytes)>> = true;

template <class F>
static void run_gemm(const Gemm& g, const typename F::X& x, const Worker& worker) {
  const Shape shape(g);
  float* buffer = (float*)worker.scratch;
  char* panel = (char*)(buffer + 2 * kBufferRows * 16);
  char* mem = panel + F::panel_bytes(shape.kp);
  int tile_tokens = (int)(kTokenBlockBytes / F::tile_bytes(shape.kp, F::kTile)) * F::kTile;
  tile_tokens = tile_tokens < F::kTile ? F::kTile : tile_tokens;
  const int step = tile_tokens < kTokenBlock / F::kTile * F::kTile ? tile_tokens : kTokenBlock / F::kTile * F::kTile;
  TokenTile<F> tiles[kTokenBlock / F::kTile + 2];
#if defined(QC_AMX)
  if constexpr (uses_tiles<F>) shape_tiles(F::kTileBytes);
#endif
  for (int start = 0; start < g.m; start += step) {
    const int tokens = g.m - start < step ? g.m - start : step;
    const int n = cut_tiles<F>(g, x, start, tokens, tiles, mem);
    int first = 0, begin, end;
    for (int units : g.parts) {
      thread_units(units, worker, &begin, &end);
      run_units<F>(g, first + begin, first + end, start, tiles, n, panel, buffer);
      first += units;
    }
    thread_units((shape.blocks + 1) / 2 - first, worker, &begin, &end);
    run_units<F>(g, first + begin, first + end, start, tiles, n, panel, buffer);
  }
#if defined(QC_AMX)
  if constexpr (uses_tiles<F>) release_tiles();
#endif
}

// ---- the model -----------------------------------------------------------------------------------

constexpr int kVocab = 203, kTokenIds = 203, kMaxPosition = 512;
constexpr int kCalls = 14;
constexpr KvFormat kKv = kKv8;
constexpr int kHeadDim = 32;
constexpr KvPlace kLayers[] = {{2, 32, 0}};
constexpr int64_t kTokenBytes = 3200, kOutputBytes = 512;
constexpr int64_t kRopeFloats = 32;
constexpr int kHidden = 96;  // of the final hidden states, 0 if they cannot be given
constexpr int kFeatures = 0;  // width of those that steps return, 0 if they return none
constexpr bool kReadsFeatures = false;
constexpr int kFewRows = 48, kOwnRows = 64;
constexpr size_t kOwnBytes = (size_t)(kTokenBytes + kOutputBytes) * kOwnRows;
constexpr int kWidest = 256;  // elements of the longest row
constexpr size_t kOwnScratchBytes = gemm_scratch_bytes(kWidest) + attention_scratch_bytes(kv_padded(kKv, kHeadDim));
constexpr size_t kScratchBytes = kOwnScratchBytes + expert_scratch_bytes(0, 0);
constexpr int64_t kSlotNumbers = 0;  // of a sequence's states
constexpr int kLoggedRows = 32;                       // rows of a step that may be taken back
static_assert(kv_page_bytes(kKv, kLayers) == 10240, "the runtime sizes pages by this");
static const char kDescription[] = "{\"abi\": 12, \"calls\": [\"embed\", \"0.norm1\", \"0.qkv\", \"0.rope\", \"0.attention\", \"0.o.quantize\", \"0.o\", \"0.norm2\", \"0.gate_up\", \"0.down.quantize\", \"0.down\", \"take\", \"norm\", \"head\"], \"embed_width\": 0, \"hidden_width\": 96, \"isa\": \"avx2\", \"kv\": {\"format\": \"kv8\", \"layers\": 1, \"page_bytes\": 10240, \"page_tokens\": 64}, \"max_position\": 512, \"vocab_size\": 203, \"weights\": 21}";
// ---- the program ---------------------------------------------------------------------------------
// h: f32 [tokens, 96]
// 0.qkv: f32 [tokens, 256]
// 0.x: q8 [tokens, 96] sums of 128
// 0.attended: f32 [tokens, 128]
// 0.o.in: q8 [tokens, 128] sums of 128
// 0.y: q8 [tokens, 96] sums of 128
// 0.inner: f32 [tokens, 160]
// 0.down.in: q8 [tokens, 160] sums of 128
// last: f32 [outputs, 96]
// final: q8 [outputs, 96] sums of 128

static void step(Model& m, int tid) {
  Step s(m, tid);
  const qc_batch& b = s.b;
  const auto v_h = s.rows<float>(kTokens, 0, false);
  const auto v_0_qkv = s.rows<float>(kTokens, 2176, false);
  const auto v_0_x = s.q8(kTokens, 384, true, 96, {128, 96, 127.0f, 127.0f});
  const auto v_0_attended = s.rows<float>(kTokens, 512, false);
  const auto v_0_o_in = s.q8(kTokens, 1024, true, 128, {128, 128, 127.0f, 127.0f});
  const auto v_0_y = s.q8(kTokens, 1216, true, 96, {128, 96, 127.0f, 127.0f});
  const auto v_0_inner = s.rows<float>(kTokens, 1344, false);
  const auto v_0_down_in = s.q8(kTokens, 1984, true, 160, {128, 160, 127.0f, 127.0f});
  const auto v_last = s.rows<float>(kOutputs, 0, true);
  const auto v_final = s.q8(kOutputs, 384, true, 96, {128, 96, 127.0f, 127.0f});
  float* const rope0 = m.rope + (int64_t)0 * s.stride[kTokens];
  rope_table(s.mine(kTokens, false), b.positions, s.weight<float>(1), 32, 1.0f, rope0);

  // embed
  embed(s.mine(kTokens, false), b.token_ids, s.weight<float>(0), 96, 1.0f, v_h);
  s.done(0, true);

  // 0.norm1
  norm<kRms>(s.mine(kTokens, true), v_h + 0, 96, false, 96, s.weight<float>(2), nullptr, 9.99999997e-07f, s.w, v_0_x);
  s.done(1, !s.few[kTokens]);

  // 0.qkv
  Gemm g2{b.tokens, 256, 96, s.weight<void>(4)};
  g2.scale = s.weight<float>(5);
  g2.zero = s.weight<uint8_t>(6);
  g2.bias = s.weight<float>(3);
  g2.epilogue = kStore;
  g2.out = v_0_qkv, g2.out_stride = 256;
  if (s.by_head(2)) g2.parts[0] = 4, g2.parts[1] = 2;
  gemm_w4_asym_g128(g2, v_0_x, s.w);
  s.done(2, !s.by_head(2));

  // 0.rope
  s.append({v_0_qkv, 256, 0, 128, 192, 4, {rope0, 32, false}, b.positions, b.query_start}, 0);
  s.done(3, !s.by_head(2));

  // 0.attention
  s.attend({v_0_qkv, 256, 0, v_0_attended, 4, 0.176776692f, 0, 0, 0.0f, nullptr, nullptr, kMaxPosition, nullptr, b.sequences, b.positions, b.query_start}, 0, 4);
  s.done(4, true);

  // 0.o.quantize
  quantize(s.mine(kTokens, true), v_0_attended, 128, v_0_o_in);
  s.done(5, !s.few[kTokens]);

  // 0.o
  Gemm g6{b.tokens, 96, 128, s.weight<void>(7)};
  g6.scale = s.weight<float>(8);
  g6.zero = s.weight<uint8_t>(9);
  g6.epilogue = kAdd;
  g6.residual = v_h, g6.residual_stride = 96;
  g6.out = v_h, g6.out_stride = 96;
  gemm_w4_asym_g128(g6, v_0_o_in, s.w);
  s.done(6, true);

  // 0.norm2
  norm<kRms>(s.mine(kTokens, true), v_h + 0, 96, false, 96, s.weight<float>(10), nullptr, 9.99999997e-07f, s.w, v_0_y);
  s.done(7, !s.few[kTokens]);

  // 0.gate_up
  Gemm g8{b.tokens, 320, 96, s.weight<void>(11)};
  g8.scale = s.weight<float>(12);
  g8.zero = s.weight<uint8_t>(13);
  g8.epilogue = kGated;
  g8.act = kSilu;
  g8.out = v_0_inner, g8.out_stride = 160;
  gemm_w4_asym_g128(g8, v_0_y, s.w);
  s.done(8, true);

  // 0.down.quantize
  quantize(s.mine(kTokens, true), v_0_inner, 160, v_0_down_in);
  s.done(9, !s.few[kTokens]);

  // 0.down
  Gemm g10{b.tokens, 96, 160, s.weight<void>(14)};
  g10.scale = s.weight<float>(15);
  g10.zero = s.weight<uint8_t>(16);
  g10.epilogue = kAdd;
  g10.residual = v_h, g10.residual_stride = 96;
  g10.out = v_h, g10.out_stride = 96;
  gemm_w4_asym_g128(g10, v_0_down_in, s.w);
  s.done(10, true);

  // take
  if (b.outputs == 0) return;
  take_rows(s.mine(kOutputs, true), b.output_rows, v_h, 96, v_last);
  s.done(11, !s.few[kOutputs]);

  // norm
  norm<kRms>(s.mine(kOutputs, true), v_last + 0, 96, false, 96, s.weight<float>(17), nullptr, 9.99999997e-07f, s.w, v_final);
  s.done(12, !s.few[kOutputs]);

  // head
  if (m.hidden) return get_rows(s.mine(kOutputs, false), v_final, 96, m.hidden);
  Gemm g13{b.outputs, 203, 96, s.weight<void>(18)};
  g13.scale = s.weight<float>(19);
  g13.zero = s.weight<uint8_t>(20);
  g13.epilogue = kLogits;
  g13.out = b.logits, g13.out_stride = kVocab;
  g13.best = s.best();
  gemm_w4_asym_g128(g13, v_final, s.w);
  s.done(13, false);
}
// ---- penalties.h --------------------------------------------------------------------------------
// penalties.h: biases, and penalties on the tokens of a text so far, as runtime/sampling/penalties.py defines them; and
// masks of the tokens that a grammar allows.

// Keeps the tokens of a step's rows that follow those listed, for this and later steps of the same call.
static inline void keep_recent(const qc_batch& b) {
  for (int s = 0; s < b.sequences; ++s) {
    const qc_sampling& d = b.sampling[s];
    for (int t = b.query_start[s]; d.room > 0 && t < b.query_start[s + 1]; ++t) {
      const int at = b.positions[t] - d.first - 1;
      if (at >= 0 && at < d.room) d.recent[at] = b.token_ids[t];
    }
  }
}

// Applies the biases and penalties of a row at `position` to its logits x [n]. times [n] must be zeros, and is left so.
static inline void penalize(float* x, int n, const qc_sampling& d, int position, int32_t* times) {
  const int after = position - d.first, recent = after < 0 ? 0 : after < d.room ? after : d.room;
  const float factor = (float)d.repetition;
  const auto inside = [&](int32_t token) { return token >= 0 && token < n; };
  const auto apply = [&](int32_t token, int32_t count) {
    const float y = x[token] > 0.0f ? x[token] / factor : x[token] * factor;
    x[token] = count > 0 ? y - (float)(d.frequency * (double)count + d.presence) : y;
  };
  for (int i = 0; i < d.biased; ++i)
    if (inside(d.bias_tokens[i])) x[d.bias_tokens[i]] += d.bias_values[i];
  if (d.repetition == 0) return;
  for (int i = 0; i < recent; ++i)
    if (inside(d.recent[i])) ++times[d.recent[i]];
  for (int i = 0; i < d.listed; ++i) {
    const int32_t token = d.seen[i];
    if (!inside(token)) continue;
    apply(token, d.counts[i] + times[token]);
    times[token] = 0;
  }
  for (int i = 0; i < recent; ++i) {  // those left are not listed
    const int32_t token = d.recent[i];
    if (!inside(token) || times[token] == 0) continue;
    apply(token, times[token]);
    times[token] = 0;
  }
}

constexpr int mask_words(int n) { return (n + 31) / 32; }

// Writes the mask of a row at `position`, if it has one.
static inline void fill_mask(const qc_sampling& d, int position, uint32_t* mask, int words) {
  const int after = position - d.first;
  if (!d.fill_mask || after < 0) return;
  memset(mask, 0, (size_t)words * sizeof(uint32_t));
  d.fill_mask(d.grammar, d.recent, after < d.room ? after : d.room, mask, words);
}

// Whether the mask of a row at `position` is asked for only if it leaves out the argmax: where nothing else changes the
// argmax, one token is checked far faster than a mask is computed. `chosen` is whether the caller reads no logits.
static inline bool mask_later(const qc_sampling& d, int position, bool chosen) {
  const bool changed = d.temperature > 0 || d.repetition != 0 || d.biased > 0 || d.reported > 0 || d.known > 0;
  return d.fill_mask && position >= d.first && chosen && !changed;
}

// Whether a token may be chosen at `position`, as far as that is known without the mask.
static inline bool allowed(const qc_sampling& d, int position, int32_t token) {
  const int after = position - d.first;
  return d.fill_mask(d.grammar, d.recent, after < d.room ? after : d.room, nullptr, token) == 1;
}

// Makes the logits x [n] of the tokens that a mask leaves out minus infinity.
static inline void apply_mask(float* x, int n, const uint32_t* mask) {
  for (int first = 0; first < n; first += 32) {
    const uint32_t word = mask[first / 32];
    const int count = n - first < 32 ? n - first : 32;
    if (word == 0xffffffffu) continue;
    for (int i = 0; i < count; ++i) x[first + i] = word >> i & 1 ? x[first + i] : -__builtin_inff();
  }
}

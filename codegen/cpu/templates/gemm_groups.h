// gemm_groups.h: weights in small groups of inputs, y = xs sum_g s (sum(q x) - z sum(x)): w4_asym_g32, w4_asym_g64, and
// w8_sym_g32, w8_sym_g64, w8_sym_g128 with z = 0. Scales (role scale) and zero points are [nb][groups][16].
// Every chunk of 32 inputs has a sum of its own, also where several chunks share a scale. Included only by models that
// have such weights.
#pragma once

// Nibbles; the rule subtracts the zero point of their group.
struct GroupNibbles : NibbleCodes {};

// A group has `Chunks` chunks of 32 inputs.
template <int Chunks>
struct NibbleGroupRule : GroupRule {
  static constexpr int kChunks = 1;
  QC_INLINE I16 begin(const IntBlock& w, int g, int32_t start) {
    return i_mul16(i_load_u8(w.zero + g / Chunks * 16), start);
  }
  template <int M>
  QC_INLINE void finish(F16* acc, const I16* part, const IntBlock& w, int g, const float*) {
    const F16 s = f_load(w.scale + g / Chunks * 16);
    QC_UNROLL for (int m = 0; m < M; ++m) acc[m] = f_fma(f_from_i(part[m]), s, acc[m]);
  }
};
template <int Chunks>
struct ByteGroupRule : NibbleGroupRule<Chunks> {
  static int32_t start(const int32_t* sums, int, int g) { return -kFullOffset * sums[g]; }
  QC_INLINE I16 begin(const IntBlock&, int, int32_t start) { return i_set(start); }
};
template <bool X128, class Rule>
using OfGroups = std::conditional_t<X128, JoinedRule<Rule>, Rule>;

#if defined(QC_AMX)
template <class Rule>
struct TileTraits<GroupNibbles, Rule> : TileTraitsBase<UnpackedBytes<GroupNibbles>, Rule, 8> {};
#endif

template <bool X128, int Chunks>
struct NibbleGroups : QC_INT_KERNELS<NibbleGroups<X128, Chunks>, GroupNibbles, OfGroups<X128, NibbleGroupRule<Chunks>>,
                                     SmallByteCodes, OfGroups<X128, NibbleGroupRule<Chunks>>, 48> {
  static IntBlock block(const Gemm& g, int chunks, int b) {
    const int64_t at = (int64_t)b * ((chunks + Chunks - 1) / Chunks) * 16;
    return {(const uint8_t*)g.codes + (int64_t)b * chunks * 256, g.scale + at, g.zero + at, nullptr};
  }
};
template <bool X128, int Chunks>
struct ByteGroups : QC_INT_KERNELS<ByteGroups<X128, Chunks>, ByteCodes, OfGroups<X128, ByteGroupRule<Chunks>>,
                                   ByteCodes, OfGroups<X128, ByteGroupRule<Chunks>>, 9> {
  static IntBlock block(const Gemm& g, int chunks, int b) {
    const int64_t at = (int64_t)b * ((chunks + Chunks - 1) / Chunks) * 16;
    return {(const uint8_t*)g.codes + (int64_t)b * chunks * 512, g.scale + at, nullptr, nullptr};
  }
};

#define QC_GROUP_FORMAT(name, Format, Chunks)                           \
  inline void gemm_##name(const Gemm& g, const Q8Act& q, const Worker& w) { \
    run_gemm<Format<false, Chunks>>(g, q, w);                           \
  }                                                                     \
  inline void gemm_##name##_x128(const Gemm& g, const Q8Act& q, const Worker& w) { \
    run_gemm<Format<true, Chunks>>(g, q, w);                            \
  }
QC_GROUP_FORMAT(w4_asym_g32, NibbleGroups, 1)
QC_GROUP_FORMAT(w4_asym_g64, NibbleGroups, 2)
QC_GROUP_FORMAT(w8_sym_g32, ByteGroups, 1)
QC_GROUP_FORMAT(w8_sym_g64, ByteGroups, 2)
QC_GROUP_FORMAT(w8_sym_g128, ByteGroups, 4)
#undef QC_GROUP_FORMAT
// bfloat16 activations: vector instructions for every number of tokens, also where there are AMX tiles.
inline void gemm_w4_asym_g32_bf16(const Gemm& g, const uint16_t* x, const Worker& w) { run_gemm<W4AsymBf16<1>>(g, x, w); }
inline void gemm_w4_asym_g64_bf16(const Gemm& g, const uint16_t* x, const Worker& w) { run_gemm<W4AsymBf16<2>>(g, x, w); }

// gemm_w3.h: w3_asym_g128 weights with bfloat16 activations: 3-bit codes are opened to lines of nibbles (ThreeBitLayout of
// qcompile/formats/blocks.py), and multiplied as those of w4_asym_g128. Included only by models that have such weights.
#pragma once

struct ThreeBitLines {
  struct Opened {
    B64 lines[4];
  };
  static constexpr int kBytes = 192;
  QC_INLINE Opened open(const uint8_t* chunk) {
    const B64 first = b_load(chunk), second = b_load(chunk + 64), lowest = b_load(chunk + 128);
    return {{b_add(b_bits<1>(first, 0x66), b_bits<0>(lowest, 0x11)),
             b_add(b_bits<0>(b_add(first, first), 0x66), b_bits<1>(lowest, 0x11)),
             b_add(b_bits<1>(second, 0x66), b_bits<2>(lowest, 0x11)),
             b_add(b_bits<0>(b_add(second, second), 0x66), b_bits<3>(lowest, 0x11))}};
  }
  QC_INLINE B64 line(const Opened& chunk, int l) { return chunk.lines[l]; }
};

// Vector instructions for every number of tokens, also where there are AMX tiles.
inline void gemm_w3_asym_g128_bf16(const Gemm& g, const uint16_t* x, const Worker& w) {
  run_gemm<W4AsymBf16<4, ThreeBitLines>>(g, x, w);
}

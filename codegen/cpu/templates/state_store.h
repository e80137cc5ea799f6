// state_store.h: matrix states in the slots in fewer bits than float32 (STATE_FORMATS of qcompile/formats/states.py).
// They are computed in float32, in a copy, and rounded after every kStateBlock-th position of the text.
#pragma once
#include "vec.h"

constexpr int kStateBlock = 8;  // BLOCK_TOKENS

enum StateFormat { kStateF32 = 4, kStateBf16 = 2, kStateInt8 = 1 };  // bytes of a number

// The columns of a head's matrix [key_dim][...] in a slot that a copy holds as floats [key_dim][copy_stride], the columns
// in vectors of 16. The numbers of the columns after the last one are 0 in the copy.
struct StoredTile {
  StateFormat form;
  uint8_t* p;     // of the first column, rows `stride` numbers apart
  float* scales;  // of the columns of int8
  int64_t stride;
  int key_dim, columns;

  void clear() const {
    for (int i = 0; i < key_dim; ++i) memset(row(i), 0, (size_t)columns * form);
    if (form == kStateInt8) memset(scales, 0, (size_t)columns * sizeof(float));
  }

  void widen(float* copy, int copy_stride) const {
    for (int c = 0; c < columns; c += 16) {
      const int n = columns - c < 16 ? columns - c : 16;
      f32x16 scale{};
      if (form == kStateInt8) memcpy(&scale, scales + c, (size_t)n * sizeof(float));
      for (int i = 0; i < key_dim; ++i) {
        const uint8_t* from = row(i) + (int64_t)c * form;
        float* to = copy + (int64_t)i * copy_stride + c;
        if (form == kStateBf16) store(to, bf16_to_f32(part<u16x16>(from, n)));
        else store(to, to_f32(as_i32(part<i8x16>(from, n))) * scale);
      }
    }
  }

  // Rounds the copy, and puts the rounded state into the slot if that is `kept`.
  void round(float* copy, int copy_stride, bool kept) const {
    for (int c = 0; c < columns; c += 16) {
      const int n = columns - c < 16 ? columns - c : 16;
      if (form == kStateBf16) round_bf16(copy + c, copy_stride, c, n, kept);
      else round_int8(copy + c, copy_stride, c, n, kept);
    }
  }

 private:
  uint8_t* row(int i) const { return p + (int64_t)i * stride * form; }

  // By way of i16: GCC 12 converts 16 numbers of 8 bits to 32 one by one, and back.
  static i32x16 as_i32(i8x16 v) { return __builtin_convertvector(__builtin_convertvector(v, i16x16), i32x16); }

  template <class V>
  static V part(const uint8_t* from, int n) {
    if (n == 16) return load<V>(from);
    V v{};
    memcpy(&v, from, (size_t)n * sizeof(v[0]));
    return v;
  }

  void round_bf16(float* copy, int copy_stride, int c, int n, bool kept) const {
    for (int i = 0; i < key_dim; ++i, copy += copy_stride) {
      const u16x16 code = f32_to_bf16(load<f32x16>(copy));
      store(copy, bf16_to_f32(code));
      if (kept) memcpy(row(i) + 2 * c, &code, (size_t)n * 2);
    }
  }

  // The code of a column's largest number is 127 or -127.
  void round_int8(float* copy, int copy_stride, int c, int n, bool kept) const {
    f32x16 largest{};
    for (int i = 0; i < key_dim; ++i) largest = vmax(largest, vabs(load<f32x16>(copy + (int64_t)i * copy_stride)));
    const f32x16 inverse = select(largest > 0.0f, 127.0f / largest, splat(0.0f)), scale = largest * (1.0f / 127.0f);
    if (kept) memcpy(scales + c, &scale, (size_t)n * sizeof(float));
    for (int i = 0; i < key_dim; ++i, copy += copy_stride) {
      const i32x16 rounded = round_to_i32(load<f32x16>(copy) * inverse);
      store(copy, to_f32(rounded) * scale);
      const i8x16 code = __builtin_convertvector(__builtin_convertvector(rounded, i16x16), i8x16);
      if (kept) memcpy(row(i) + c, &code, (size_t)n);
    }
  }
};

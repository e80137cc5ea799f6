// state_harness.cpp: kernels of recurrent states behind C functions, for tests (ctypes).
#include "state.h"

extern "C" {

struct Batch {
  int sequences;
  const int32_t *positions, *query_start, *slots, *certain;
  float* states;
  int64_t slot_numbers;
};

static StateBatch batch_of(const Batch& b) {
  return {b.sequences, b.positions, b.query_start, b.slots, b.certain, b.states, b.slot_numbers};
}

// Runs the shares meant for `threads` threads one after the other.
void harness_conv(const Batch* b, const float* x, int x_stride, float* out, int features, int width,
                  const float* weight, const float* bias, int64_t state, int threads) {
  for (int tid = 0; tid < threads; ++tid)
    conv_step({x, x_stride, out, features, width, weight, bias, state}, batch_of(*b),
              share((features + 15) / 16, {tid, threads, nullptr}));
}

// inputs: q, k, v, decay and gain (or null), rows `strides` floats apart.
void harness_recurrence(const Batch* b, const float* const* inputs, const int* strides, float* out, int heads,
                        int key_heads, int key_dim, int value_dim, int by_key, int delta, const float* rates,
                        int rates_by_key, int64_t state, int form, int threads) {
  StateInput in[5];
  for (int i = 0; i < 5; ++i) in[i] = {inputs[i], strides[i]};
  const RecurrenceArgs a{in[0], in[1], in[2], in[3], in[4], out, heads, key_heads, key_dim, value_dim,
                         by_key != 0, delta != 0, rates, rates_by_key != 0, state, (StateFormat)form};
  void* scratch = nullptr;
  if (posix_memalign(&scratch, 64, recurrence_scratch_bytes(key_dim))) return;
  for (int tid = 0; tid < threads; ++tid) recurrence_step(a, batch_of(*b), {tid, threads, scratch});
  for (int tid = 0; tid < threads; ++tid) recurrence_log(a, batch_of(*b), {tid, threads, scratch});
  free(scratch);
}
}

// abi.h: the C interface of a generated library (version 2). Integers are int32 unless said otherwise.
#pragma once
#include <stdint.h>

#define QC_API extern "C" __attribute__((visibility("default")))

typedef struct {               // the rows of one step
  int32_t tokens;              // M, 1 .. max_tokens
  int32_t sequences;           // S
  int32_t outputs;             // R rows whose logits are wanted; may be 0
  int32_t block_stride;        // entries in a row of block_table
  const int32_t* token_ids;    // [M]
  const int32_t* positions;    // [M]
  const int32_t* query_start;  // [S + 1] rows of sequence s: query_start[s] .. query_start[s + 1] - 1, positions consecutive
  const int32_t* block_table;  // [S][block_stride] position p is in page block_table[s][p / 64], slot p % 64
  const int32_t* output_rows;  // [R]
  float* logits;               // [R][vocab] or null
  int32_t* argmax;             // [R] or null; the lowest index wins ties, -1 where the largest logit is not finite
} qc_batch;

// The token that a step reads behind logits that are not finite: the caller learns of them, and drops what follows.
static inline int32_t token_after(int32_t argmax) { return argmax < 0 ? 0 : argmax; }

typedef struct {
  const void* const* weights;  // one pointer for each packed tensor, 64-byte aligned
  void* kv;                    // [layer][page][kv head] blocks, 64-byte aligned
  int64_t kv_pages;
  int32_t threads;             // >= 1, the calling thread included
  int32_t max_tokens;
  int32_t max_outputs;
  void* team;                  // threads of another opened model (qc_team) to work with, or null: its own
} qc_config;

typedef struct {               // one level of speculation: a path of the artifact, or lookup in the text so far
  int (*step)(void*, const qc_batch*);  // qc_step of the path's library; null: lookup
  void* model;
  int32_t vocab;
  int32_t cache;               // levels of one number share a cache
  int32_t gamma;               // most tokens it proposes at once to the level above it
  int32_t match;               // lookup: the longest end of the text that is looked for
  float threshold;             // it stops proposing after a token less probable than this; 0 never stops
} qc_level;

enum { qc_most_drafts = 16 };

typedef struct {               // rounds of drafting and verifying, greedy, for S sequences
  int32_t levels;              // level 0 is the target; each level drafts for the one before it
  int32_t sequences;
  int32_t rounds;              // most rounds of level 0; 0: only draft, as level 1 proposes
  int32_t max_rows;            // most rows of a step of any level
  int32_t stride;              // entries in a row of tokens
  int32_t block_stride;
  const qc_level* level;
  int32_t* tokens;             // [S][stride] the text from position first[s] on
  const int32_t* first;        // [S]
  int32_t* length;             // [S] in, out: tokens in the row
  const int32_t* limit;        // [S] length that is enough
  const int32_t* gamma;        // [S] most drafts a round
  int32_t* computed;           // [levels][S] in, out: positions in the level's cache
  const int32_t* block_table;  // [S][block_stride]; pages have room up to position limit - 2
  int32_t* rounds_done;        // [S] += rounds
  int32_t* drafted;            // [S][qc_most_drafts] += drafts by their place in the round
  int32_t* accepted;           // [S][qc_most_drafts] += those accepted
  double* seconds;             // [levels] += time in the level's steps
} qc_speculation;

QC_API const char* qc_describe(void);             // JSON: abi, isa, dimensions, call names in order
QC_API void* qc_open(const qc_config* config);    // null if memory or threads cannot be had
QC_API void* qc_team(void* model);
QC_API int qc_step(void* model, const qc_batch* batch);  // 0 done, 1 bad argument
// Greedy decoding of `steps` tokens a sequence (tokens == sequences == outputs), each fed back; step i of
// sequence s is out[i * S + s]. The block tables must already have room. 0 done, 1 bad argument.
QC_API int qc_decode(void* model, const qc_batch* batch, int32_t steps, int32_t* out);
QC_API int qc_speculate(const qc_speculation*);  // 0 done, 1 bad argument
QC_API int qc_profile(void* model, int32_t on);   // time each call, or stop; either way counters restart
QC_API int qc_profile_read(void* model, double* seconds, int64_t* counts, int32_t n);
QC_API double qc_probe(void* model, int32_t what);  // 0 read GB/s, 1 int8 GOPS, 2 f32 GFLOPS, 3 bf16 GFLOPS
QC_API void qc_close(void* model);

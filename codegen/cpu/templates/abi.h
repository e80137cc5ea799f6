// abi.h: the C interface of a generated library (version 11). Integers are int32 unless stated otherwise.
#pragma once
#include <stdint.h>

#define QC_API extern "C" __attribute__((visibility("default")))

// Writes which tokens may follow a text and `count` more tokens: token t may if bit t % 32 of mask[t / 32] is 1. The
// words are zeros before. If mask is null, it writes nothing, and `words` is a token instead: it returns 1 only if that
// token may follow, and 0 if only the mask can tell. It is called while the library runs no other thread.
typedef int32_t (*qc_fill_mask)(void* grammar, const int32_t* tokens, int32_t count, uint32_t* mask, int32_t words);

typedef struct {               // sampling inputs: how the tokens of a sequence are chosen
  double temperature;          // 0: the argmax
  double top_p;                // 1: no limit
  double min_logit;            // min-p: added to the largest logit it gives the limit; minus infinity: no limit
  const double* uniforms;      // [count] random numbers; position p draws by uniforms[p - first], the last from there on
  int32_t top_k;               // 0: no limit
  int32_t first;
  int32_t count;               // at least 1 unless the temperature is 0
  int32_t listed;
  int32_t room;                // of `recent`; 0: neither penalties nor masks
  int32_t reported;            // positions from `first` on for which log probabilities are reported; may be 0
  int32_t alternatives;        // 0 .. vocabulary
  int32_t known;               // positions before `first` for which those of the next tokens are reported; may be 0
  int32_t biased;              // 0: no biases
  double repetition;           // divides positive logits of the tokens so far, and multiplies the others; 0: no penalties
  double frequency;            // subtracted for each time that a token was generated
  double presence;             // subtracted if it was generated
  const int32_t* seen;         // [listed] the distinct tokens that penalties are for, those up to position `first`
  const int32_t* counts;       // [listed] how often each was generated
  int32_t* recent;             // [room] generated tokens from position first + 1 on; steps write those of their rows
  double* reports;             // [known + reported][4 + 2 * alternatives] see report.h
  const int32_t* known_next;   // [known] these next tokens; rows of these positions choose nothing
  const int32_t* bias_tokens;  // [biased] distinct
  const float* bias_values;    // [biased] added to these tokens' logits, before penalties
  qc_fill_mask fill_mask;      // null: all tokens may be drawn; else of those from position `first` on, which it says
  void* grammar;               // for fill_mask
} qc_sampling;

typedef struct {               // one batch of rows for a step
  int32_t tokens;              // M, 1 .. max_tokens
  int32_t sequences;           // S
  int32_t outputs;             // R rows with requested logits; may be 0
  int32_t block_stride;        // entries in a row of block_table
  const int32_t* token_ids;    // [M]
  const int32_t* positions;    // [M]
  const int32_t* query_start;  // [S + 1] first row of each sequence, then M; a sequence's positions are consecutive
  const int32_t* block_table;  // [S][block_stride] position p is in page block_table[s][p / 64], slot p % 64
  const int32_t* output_rows;  // [R]
  float* logits;               // [R][vocab] or null; those of rows with penalties have them applied
  int32_t* argmax;             // [R] or null; the lowest index wins ties, -1 where the largest logit is not finite
  const qc_sampling* sampling; // [S] or null; argmax of rows is the token that they choose
  const int32_t* state_slots;  // [S] distinct slots of states, or null if the model has none
  const int32_t* certain;      // [S] leading positions that are never taken back, or null likewise; see state.h
  const float* const* embeds;  // [M] or null; an embedding [width] in place of that of the row's token, or null
} qc_batch;

// The token id that the step after a row with non-finite logits reads. The caller sees argmax == -1 and discards the
// rest.
static inline int32_t token_after(int32_t argmax) { return argmax < 0 ? 0 : argmax; }

typedef struct {
  const void* const* weights;  // one pointer per packed tensor, 64-byte aligned
  void* kv;                    // [page][layer][kv head] blocks, 64-byte aligned
  int64_t kv_pages;
  int32_t threads;             // >= 1, including the calling thread
  int32_t max_tokens;
  int32_t max_outputs;
  void* thread_pool;           // qc_thread_pool of another open model, to share its threads; null: start own threads
  void* states;                // [slot][numbers of a slot] f32, 64-byte aligned; null if the model has none
  int64_t state_slots;
} qc_config;

typedef struct {               // one draft stage: a path of the artifact, or prompt lookup in the text so far
  int (*step)(void*, const qc_batch*);  // qc_step of the path's library; null: prompt lookup
  void* model;
  int32_t vocab;
  int32_t cache;               // stages with the same number share a KV cache
  int32_t gamma;               // maximum tokens proposed at once to the stage above
  int32_t match;               // lookup: the longest suffix of the text to match
  float threshold;             // drafting stops after a token with a lower probability than this; 0: never
} qc_stage;

enum { qc_most_drafts = 16 };

typedef struct {               // what a draft head, stage 1, gets from the target in rounds; both are connected (qc_connect)
  const int32_t* tokens;       // [vocab of the stage] the tokens that the head proposes; null: their own numbers
  const float* target;         // features that the target's last step has returned
  const float* own;            // those that the head's last step has returned
  float* given;                // those that the head's steps read
  float* known;                // [S][room][width] in/out: the target's of positions computed[1][s] to computed[0][s] - 1
  int32_t room;                // at least 2 * qc_most_drafts
  int32_t width;
} qc_head;

typedef struct {               // rounds of drafting and verifying for S sequences
  int32_t stages;              // stage 0 is the target; stage i + 1 drafts for stage i
  int32_t sequences;
  int32_t rounds;              // maximum rounds of stage 0; 0: only draft what stage 1 would propose
  int32_t max_rows;            // maximum rows in one step of any stage
  int32_t stride;              // entries in a row of tokens
  int32_t block_stride;
  const qc_stage* stage;
  int32_t* tokens;             // [S][stride] the text, from position first[s] on
  const int32_t* first;        // [S]
  int32_t* length;             // [S] in/out: tokens in the row
  const int32_t* limit;        // [S] stop once the text has this length
  const int32_t* gamma;        // [S] maximum drafts per round
  const qc_sampling* sampling; // [S] or null; stages draw by the same random numbers
  int32_t* computed;           // [stages][S] in/out: positions present in the stage's cache
  const int32_t* block_table;  // [S][block_stride]; pages must have room up to position limit - 2
  int32_t* rounds_done;        // [S] += rounds
  int32_t* drafted;            // [S][qc_most_drafts] += drafts by index within the round
  int32_t* accepted;           // [S][qc_most_drafts] += accepted drafts, by the same index
  double* seconds;             // [stages] += time spent in the stage's steps
  const int32_t* state_slots;  // [S] as in qc_batch, the same in all stages
  const qc_head* head;         // null: stage 1 is no draft head. Libraries built before it was added ignore it
} qc_speculation;

QC_API const char* qc_describe(void);             // JSON: abi, isa, dimensions, call names in order
QC_API void* qc_open(const qc_config* config);    // null if memory or threads are unavailable
QC_API void* qc_thread_pool(void* model);
QC_API int qc_step(void* model, const qc_batch* batch);  // 0 done, 1 invalid argument, 2 a rank has failed
// Decodes `steps` tokens per sequence (tokens == sequences == outputs), each fed back as the next input.
// Token i of sequence s goes to out[i * S + s]. The block tables must already have room. 0 done, 1 invalid argument.
QC_API int qc_decode(void* model, const qc_batch* batch, int32_t steps, int32_t* out);
// A step that writes the final hidden states of the output rows, [R][kHidden], instead of logits and argmax. Artifacts
// built before it was added do not have it. 0 done, 1 invalid argument or no hidden states.
QC_API int qc_hidden(void* model, const qc_batch* batch, float* out);
// Where a draft head's steps read features of their rows, [tokens][kFeatures], and where steps write those that they
// return, [tokens][kFeatures], in qc_decode one step after the other; null: nowhere. It holds until it is called again.
// Artifacts built before it was added do not have it. 0 done, 1 no features.
QC_API int qc_connect(void* model, const float* given, float* features);
QC_API int qc_speculate(const qc_speculation*);  // 0 done, 1 invalid argument
// Only in a library of a divided model: join the processes that run it together. To be called once, before any step.
typedef struct {
  void* memory;                // shared by all, zeros at first: see ranks.h
  int64_t bytes;
  int32_t ranks;
  int32_t rank;                // 0: this process schedules; others call qc_follow
  void* const* other_paths;    // such memory of the other paths, which run on the same threads
  int32_t other_count;
} qc_ranks;
QC_API int64_t qc_rank_bytes(void* model);               // of the memory that they share
QC_API int qc_join(void* model, const qc_ranks* ranks);  // 0 done, 1 invalid argument
// Runs the steps of this path that rank 0 runs, until it ends. Each path has a thread of its own that calls this; rank 0
// plans a step once no step of another path runs anywhere. 0 ended, 2 a rank has failed.
QC_API int qc_follow(void* model);
QC_API int qc_profile(void* model, int32_t on);   // start or stop timing calls; both reset the counters
QC_API int qc_profile_read(void* model, double* seconds, int64_t* counts, int32_t n);
QC_API double qc_probe(void* model, int32_t what);  // 0 read GB/s, 1 int8 GOPS, 2 f32 GFLOPS, 3 bf16 GFLOPS
QC_API void qc_close(void* model);

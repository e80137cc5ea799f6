"""Faults of mutations.py in kernels for GPUs and what launches them, and the tests that ought to notice each."""

from __future__ import annotations

from benchmarks.mutation_list import Mutation

GPU_PENALTIES, GPU_REPORTS = "tests/codegen/gpu/test_penalties.py", "tests/codegen/gpu/test_report.py"
GLUON = "tests/codegen/gpu/test_gluon.py"
OVERLAPPED = "codegen/gpu/templates/gemm_overlapped.py.jinja"
GPU_PROMPTS = "tests/codegen/gpu/test_prompts.py"
WARP_GROUPS = "codegen/gpu/templates/attention_warp_specialized.py.jinja"
CUDA, ENGINE = "tests/runtime/cuda/test_cuda.py", "tests/runtime/engine/test_engine.py"
GPU_FUSE = "tests/codegen/gpu/test_fuse.py"
GPU_ROUNDED = "tests/codegen/gpu/test_rounded.py"
GPU_STATES, GPU_STATE_ROUNDS = "tests/codegen/gpu/test_states.py", "tests/codegen/gpu/test_state_rounds.py"

GPU_MUTATIONS = (
    Mutation(
        "experts' slots behind the first part of a large step go to the place of that part's",
        "codegen/gpu/templates/expert_blocks.py.jinja",
        "placed += tl.sum(mine.to(tl.int32), 0)",
        "placed += 0",
        "tests/codegen/gpu/test_experts.py -k slots_in_order",
    ),
    Mutation(
        "all parts of the epilogue of a tile of many tokens store to the first part's tokens",
        "codegen/gpu/templates/gemm_warp_specialized.py.jinja",
        '{{ " + %d * SLICE" % h if h }}',
        "",
        f"{GLUON} -k many_tokens",
    ),
    Mutation(
        "a GPU reports logits with their biases",
        "codegen/gpu/templates/report.py.jinja",
        '(tl.load({{ option("room") }}) > 0) | (tl.load({{ option("biases") }}) > 0)',
        'tl.load({{ option("room") }}) > 0',
        "tests/codegen/gpu/test_report.py -k rows",
    ),
    Mutation(
        "a GPU's biases and penalties change rows whose next token is known",
        "codegen/gpu/templates/penalties.py.jinja",
        "after + known >= 0",
        "known < 0",
        f"{GPU_PENALTIES} -k rows",
    ),
    Mutation(
        "a GPU's penalties are for each occurrence of a recent token",
        "codegen/gpu/templates/penalties.py.jinja",
        "(at < after) & (before == 0)",
        "at < after",
        f"{GPU_PENALTIES} -k rows",
    ),
    Mutation(
        "a GPU keeps the tokens of a step one place too far on",
        "codegen/gpu/templates/penalties.py.jinja",
        "seen + start + after - 1",
        "seen + start + after",
        f"{GPU_PENALTIES} -k rows",
    ),
    Mutation(
        "a GPU's drafts keep recent tokens of their own",
        "runtime/cuda/speculate.py",
        "drafting, seen)",
        "drafting)",
        f"{GPU_PENALTIES} -k shared",
    ),
    Mutation(
        "a GPU's rank counts equal logits",
        "codegen/gpu/templates/report.py.jinja",
        "(x > own)",
        "(x >= own)",
        f"{GPU_REPORTS} -k rows",
    ),
    Mutation(
        "programs without queries store rows of other sequences",
        WARP_GROUPS,
        "live = (first >= 0) & (query < count)",
        "live = (query < count)",
        f"{GLUON} -k attention_of",
    ),
    Mutation(
        "a consumer without queries releases other leaves than the program has",
        WARP_GROUPS,
        "ended = tl.where(latest < 0, program_begun, (latest + LEAF) // LEAF)",
        "ended = (latest + LEAF) // LEAF",
        f"{GLUON} -k attention_of",
    ),
    Mutation(
        "values of tokens that are not written are copied",
        WARP_GROUPS,
        "(t <= latest - at)[:, None], item)",
        "(t <= latest + LEAF - at)[:, None], item)",
        f"{GLUON} -k not_written",
    ),
    Mutation(
        "the zero points of a leaf's values are not in the unit of the sums",
        WARP_GROUPS,
        "p = exp2(score - m[:, None]) * grow[:, None]",
        "p = exp2(score - m[:, None])",
        f"{GLUON} -k attention_of",
    ),
    Mutation(
        "a warp group's stages begin with the wrong phase after the last",
        "codegen/gpu/templates/gemm_warp_specialized.py.jinja",
        "tl.where(last, 0, stage + 1), phase ^ last.to(tl.int32)",
        "tl.where(last, 0, stage + 1), phase",
        f"{GLUON} -k of_warp_groups",
    ),
    Mutation(
        "an unpacking MMA's weights are those of the plane before",
        "codegen/gpu/templates/ws_mainloops.jinja",
        "acc = warpgroup_mma(q{{ plane }}, x_t",
        "acc = warpgroup_mma(q{{ [plane - 1, 0] | max }}, x_t",
        f"{GLUON} -k of_warp_groups",
    ),
    Mutation(
        "a chunk's copies go to the buffer that the tensor cores read",
        OVERLAPPED,
        "done = tl.where(slot == 0, {{ slots - 1 }}, slot - 1)",
        "done = slot",
        f"{GLUON} -k overlap_copies",
    ),
    Mutation(
        "the last part of K is left out of the sum",
        OVERLAPPED,
        "total = tl.where(serial_part == 0, acc, total + acc)",
        "total = tl.where(serial_part < {{ tile.serial_k - 1 }}, acc, total)",
        f"{GLUON} -k overlap",
    ),
    Mutation(
        "half of a last tile is that of the one before",
        OVERLAPPED,
        "later % 2 * (TOKENS // 2)",
        "0",
        f"{GLUON} -k halved",
    ),
    Mutation(
        "prompts are given the pages of the sequences that decode in front of them",
        "codegen/gpu/attention_launches.py",
        'InputRef("block_table", ("decoding", "table_stride"))',
        'InputRef("block_table")',
        f"{GPU_PROMPTS} -k decoding_beside",
    ),
    Mutation(
        "a launch that is kept does not learn where the prompts' pages begin now",
        "runtime/cuda/launching.py",
        'return operand["kind"] == "count" or "past" in operand',
        'return operand["kind"] == "count"',
        f"{GPU_PROMPTS} -k decoding_beside",
    ),
    Mutation(
        "rows of a prompt are copied to the ring from the step's first row on",
        "codegen/gpu/templates/staged_kv.py.jinja",
        "row = first_row + tl.program_id(0) * TOKENS",
        "row = tl.program_id(0) * TOKENS",
        f"{GPU_PROMPTS} -k decoding_beside",
    ),
    Mutation(
        "the inputs of a step overwrite those of the one before, which may not be read yet",
        "runtime/cuda/executor.py",
        "self._turn = 1 - self._turn",
        "self._turn = 1",
        f"{CUDA} -k in_turn",
    ),
    Mutation(
        "no prompt is computed ahead where drafts follow",
        "runtime/engine/runner.py",
        "if speculates and any(request.sequence.decodes for request in running):",
        "if speculates:",
        f"{ENGINE} -k follow_each_other",
    ),
    Mutation(
        "what is read as float32, too, is written in bf16 alone",
        "codegen/gpu/reads.py",
        "return self.last(name) == self._program.calls.index(call)",
        "return True",
        f"{GPU_ROUNDED} -k apart",
    ),
    Mutation(
        "a GEMM's bf16 result may lie over what it reads",
        "passes/plan_memory.py",
        "lives = place[computed], _last_use(node, place)",
        "lives = place[node], _last_use(node, place)",
        f"{GPU_ROUNDED} -k only_rounds",
    ),
    Mutation(
        "a token that is none, as its logits are not finite, is looked up by the step queued behind",
        "codegen/gpu/templates/follow.py.jinja",
        "tl.maximum(found, 0)",
        "found",
        "tests/codegen/gpu/test_follow.py -k step_before",
    ),
    Mutation(
        "memory for tokens is used again before they are read",
        "runtime/cuda/executor.py",
        "for turn in (self._turn,) if behind else",
        "for turn in () if behind else",
        f"{CUDA} -k in_turn",
    ),
    Mutation(
        "reports of one step are those of the step queued behind it",
        "runtime/cuda/executor.py",
        "behind = not (reports or (self._sampling and self._sampling.reporting))",
        "behind = not (reports and (self._sampling and self._sampling.reporting))",
        f"{CUDA} -k step_before",
    ),
    Mutation(
        "a sum over slots that another call reads too is not stored",
        "codegen/gpu/fuse.py",
        "return other if reads.alone(after, combine.out) and reads.disjoint([after.out], combine.reads) else None",
        "return other if reads.disjoint([after.out], combine.reads) else None",
        f"{GPU_FUSE} -k not_added",
    ),
    Mutation(
        "a norm of heads that the append does comes after a norm that was behind it",
        "codegen/gpu/fuse.py",
        " and not any(_overlaps(norm, later) for later in separate)",
        "",
        f"{GPU_FUSE} -k order_of_norms",
    ),
    Mutation(
        "slots stay sorted by an index that was written again",
        "codegen/gpu/fuse_experts.py",
        "order = None if order and order.index in call.writes else order",
        "order = order if order else None",
        f"{GPU_FUSE} -k prepare_anew",
    ),
    Mutation(
        "a GPU's recurrence begins with what its slot holds",
        "codegen/gpu/templates/recurrence_step.py.jinja",
        "s = tl.where(begun, s, 0.0)",
        "",
        f"{GPU_STATES} -k recurrences_interpreted",
    ),
    Mutation(
        "a GPU's recurrence keeps a state before drafts are accepted",
        "codegen/gpu/templates/recurrence_step.py.jinja",
        "kept = tl.maximum(done, tl.minimum(tl.load(certain + sequence), end))",
        "kept = tl.maximum(done, end)",
        f"{GPU_STATES} -k bits_do_not",
    ),
    Mutation(
        "a GPU's convolution reads before the text",
        "codegen/gpu/templates/conv_step.py.jinja",
        "mask=inside & (p{{ tap }} >= 0) & (p{{ tap }} < start)",
        "mask=inside & (p{{ tap }} < start)",
        f"{GPU_STATES} -k convolutions_interpreted",
    ),
    Mutation(
        "a GPU's convolution is activated where others have yet to read",
        "codegen/gpu/fuse.py",
        " and reads.disjoint([after.out], conv.reads)",
        "",
        f"{GPU_STATES} -k does_not_apply",
    ),
    Mutation(
        "states of a sequence that has ended move on",
        "codegen/gpu/templates/speculation_round.py.jinja",
        "tl.where(goes_on, known, 0)",
        "known",
        f"{GPU_STATE_ROUNDS} -k certain",
    ),
    Mutation(
        "a GPU's draft keeps the position that the next round computes again",
        "runtime/cuda/executor.py",
        "repeated=int(own_cache)",
        "repeated=0",
        f"{GPU_STATE_ROUNDS} -k certain_inputs",
    ),
)

"""The faults of mutations.py outside of GPUs' kernels, and the tests that ought to notice each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """In `file`, `old` (which occurs once) becomes `new`; `tests` are pytest's arguments."""

    fault: str
    file: str
    old: str
    new: str
    tests: str


NORMS, ROTATE = "tests/passes/test_fold_norms.py", "tests/passes/test_rotate.py"
SMOOTH, REORDER = "tests/passes/test_smooth.py", "tests/passes/test_reorder.py"
STEP, OPS, NUMERICS = "tests/passes/test_step_passes.py", "tests/ops/test_ops.py", "tests/formats/test_formats.py"
RAISE, FAMILIES = "tests/passes/raising/test_raise.py", "tests/passes/raising/test_families.py"
KERNELS, ROWS = "tests/codegen/cpu/test_step.py", "tests/codegen/cpu/test_rowops.py"
PENALTIES, REPORTS = "tests/codegen/cpu/test_penalties.py", "tests/codegen/cpu/test_report.py"
TORCH = f"{KERNELS} -k equals_torch"
WEIGHTS, MODEL = "qcompile/ops/weights.py", "qcompile/ops/model.py"
ATTENTION, KV, ROPE = (f"codegen/cpu/templates/{name}.h" for name in ("attention", "kv", "rope"))

MUTATIONS = (
    Mutation(
        "a norm's bias is dropped when it is folded",
        "passes/fold_norms.py",
        "        if shift is not None:\n            moved",
        "        if False:\n            moved",
        NORMS,
    ),
    Mutation(
        "biases that write a centered stream are not centered",
        "passes/fold_norms.py",
        'for name in ("weight", "bias"):\n            dataflow.rewrite_weight(graph, writer',
        'for name in ("weight",):\n            dataflow.rewrite_weight(graph, writer',
        NORMS,
    ),
    Mutation(
        "one writer of the residual stream is not rotated",
        "passes/rotate.py",
        "for writer in sources:\n            fired",
        "for writer in sources[1:]:\n            fired",
        ROTATE,
    ),
    Mutation(
        "biases that write a rotated stream are not rotated",
        "passes/rotate.py",
        '    dataflow.rewrite_weight(graph, node, "bias", "rotate", signs=signs, axis=axis)\n',
        "",
        ROTATE,
    ),
    Mutation(
        "the output projection does not follow its rotated values",
        "passes/rotate.py",
        "        for reader in readers:\n            _rotate_inputs(graph, reader, signs)\n        return 1",
        "        return 1",
        ROTATE,
    ),
    Mutation(
        "weights behind an online rotation are not rotated",
        "passes/rotate.py",
        "            _rotate_inputs(graph, reader, ones)\n",
        "",
        ROTATE,
    ),
    Mutation(
        "norms with weights let a rotation pass",
        "passes/dataflow.py",
        'ops.name_of(user.target) == "rms_norm" and ops.operand(user, "weight") is None',
        'ops.name_of(user.target) == "rms_norm"',
        ROTATE,
    ),
    Mutation(
        "what reads a residual stream and writes it is no reader",
        "passes/dataflow.py",
        "for user in node.users if user not in tied]",
        "for user in node.users if user not in values]",
        ROTATE,
    ),
    Mutation(
        "wrong rotary pairing of key scales",
        WEIGHTS,
        "(-1, 2) if interleaved else (2, -1))",
        "(2, -1) if interleaved else (-1, 2))",
        SMOOTH,
    ),
    Mutation(
        "smoothing divides where it should multiply",
        "passes/smooth.py",
        "axis=axis, inverse=False)",
        "axis=axis, inverse=True)",
        SMOOTH,
    ),
    Mutation(
        "keys that others read are scaled too",
        "passes/channels.py",
        "if set(node.users) != {user} or not dataflow.read_once(node):",
        "if not node.users:",
        SMOOTH,
    ),
    Mutation(
        "norm weights do not follow reordered channels",
        "passes/reorder.py",
        "for node, name in space.vectors:",
        "for node, name in space.vectors[1:]:",
        REORDER,
    ),
    Mutation(
        "all query heads take the order of the first KV head",
        WEIGHTS,
        "(order + torch.arange(len(order))[:, None] * head_dim)",
        "(order[:1] + torch.arange(len(order))[:, None] * head_dim)",
        REORDER,
    ),
    Mutation(
        "gate and up swapped",
        "passes/merge.py",
        '"interleave_rows", _weight(gate), _weight(up)',
        '"interleave_rows", _weight(up), _weight(gate)',
        STEP,
    ),
    Mutation(
        "the gate's bias is dropped",
        "passes/merge.py",
        "if _bias(n) is None else _bias(n) for n in linears]",
        "if _bias(n) is None or n is linears[0] else _bias(n) for n in linears]",
        STEP,
    ),
    Mutation(
        "a bias is dropped when its linear is quantized",
        "passes/quantize.py",
        "bias=bias,\n                residual=None",
        "bias=None,\n                residual=None",
        STEP,
    ),
    Mutation(
        "the cached attention ignores windows",
        "passes/cache.py",
        "given = ops.named(node)\n        k, v",
        'given = ops.named(node) | {"window": 0}\n        k, v',
        STEP,
    ),
    Mutation(
        "a norm that others read is fused all the same",
        "passes/fuse.py",
        'if kind is None or len(norm.users) > 1 or dtype == "f32":',
        'if kind is None or dtype == "f32":',
        STEP,
    ),
    Mutation(
        "values that meet in one call share memory",
        "passes/plan_memory.py",
        "if b.first <= value.last and value.first <= b.last",
        "if b.first < value.last and value.first < b.last",
        STEP,
    ),
    Mutation(
        "weights are rounded down",
        "qcompile/formats/rounding.py",
        "codes = (torch.round(w / scale) + zero)",
        "codes = (torch.floor(w / scale) + zero)",
        NUMERICS,
    ),
    Mutation(
        "zero points are rounded down",
        "qcompile/formats/rounding.py",
        "zero = torch.round(-low / scale)",
        "zero = torch.floor(-low / scale)",
        NUMERICS,
    ),
    Mutation(
        "ties of E2M1 go down",
        "qcompile/formats/elements.py",
        "(size >= edge) if index % 2",
        "(size > edge) if index % 2",
        NUMERICS,
    ),
    Mutation(
        "the reference's window is one token too wide",
        MODEL,
        "seen & (distance < window) if window",
        "seen & (distance <= window) if window",
        f"{FAMILIES} -k gemma2",
    ),
    Mutation(
        "the reference ignores soft caps", MODEL, "    if softcap:\n", "    if softcap < 0:\n", f"{FAMILIES} -k gemma2"
    ),
    Mutation(
        "the reference pairs rotary features the other way",
        MODEL,
        "if interleaved else head.chunk(2, -1)",
        "if not interleaved else head.chunk(2, -1)",
        OPS,
    ),
    Mutation(
        "the reference's RMS norm has no eps",
        MODEL,
        "x.pow(2).mean(-1, keepdim=True) + eps)",
        "x.pow(2).mean(-1, keepdim=True))",
        f"{RAISE} {FAMILIES}",
    ),
    Mutation(
        "a proven window is one token too wide",
        "passes/raising/masks.py",
        "for window, chunk in ((width % length, 0)",
        "for window, chunk in (((width + 1) % length, 0)",
        RAISE,
    ),
    Mutation(
        "an unbiased variance counts as a layer norm's",
        "passes/raising/norms.py",
        'get("correction", 1) not in (0, 0.0)',
        'get("correction", 1) not in (0, 0.0, 1)',
        "tests/passes/raising/test_norms.py",
    ),
    Mutation(
        "the kernel's window is one token too wide", ATTENTION, "position - a.window + 1", "position - a.window", TORCH
    ),
    Mutation(
        "the kernel's chunks begin one token too late",
        ATTENTION,
        "? position - position % a.chunk",
        "? position - position % a.chunk + 1",
        "tests/codegen/cpu/test_attention.py",
    ),
    Mutation("the kernel ignores soft caps", ATTENTION, "if (a.softcap > 0)", "if (a.softcap < 0)", TORCH),
    Mutation(
        "the kernel turns interleaved pairs the other way",
        ROPE,
        "x[2 * i + 1] = b * c[i] + a * s[i];",
        "x[2 * i + 1] = b * c[i] - a * s[i];",
        TORCH,
    ),
    Mutation(
        "keys go to the next page slot", KV, "(float*)block.k + slot;", "(float*)block.k + (slot + 1) % kPage;", TORCH
    ),
    Mutation(
        "quantized keys have a zero point one too high",
        KV,
        "const float z = __builtin_rintf(-lo / step);",
        "const float z = __builtin_rintf(-lo / step) + 1.0f;",
        TORCH,
    ),
    Mutation(
        "the kernel's norm has no eps",
        "codegen/cpu/templates/rowops.h",
        "(float)width + eps);\n    int i = 0;",
        "(float)width);\n    int i = 0;",
        ROWS,
    ),
    Mutation(
        "the kernel's layer norm keeps the mean",
        "codegen/cpu/templates/rowops.h",
        "load<f32x16>(from + i) - mean);",
        "load<f32x16>(from + i));",
        ROWS,
    ),
    Mutation(
        "the online rotation leaves out a doubling",
        "codegen/cpu/templates/hadamard.h",
        "stride = kCore == 1 ? 16 : kCore;",
        "stride = kCore == 1 ? 16 : 2 * kCore;",
        "tests/codegen/cpu/test_hadamard.py -k kernel",
    ),
    Mutation(
        "top-p drops the token that crosses it",
        "runtime/sampling/sampling.py",
        "count = np.count_nonzero(np.cumsum(falling) - falling < params.top_p)",
        "count = max(1, np.count_nonzero(np.cumsum(falling) <= params.top_p))",
        "tests/runtime/sampling/test_sampling.py",
    ),
    Mutation(
        "negative logits of seen tokens are divided too",
        "runtime/sampling/penalties.py",
        "found * factor)",
        "found / factor)",
        "tests/runtime/sampling/test_sampling.py",
    ),
    Mutation(
        "penalties do not note what an executor chose",
        "runtime/sampling/sampling.py",
        "for token in tokens if self._noted else ():",
        "for token in ():",
        "tests/runtime/sampling/test_penalties.py",
    ),
    Mutation(
        "drafts' penalties do not know the drafts before them",
        "runtime/speculation/stages.py",
        "len(drafts[i]) + 1, drafts[i])",
        "len(drafts[i]) + 1)",
        "tests/runtime/sampling/test_penalties.py",
    ),
    Mutation(
        "the library's penalties do not count the tokens of a multi-step decode again",
        "codegen/cpu/templates/penalties.h",
        "d.counts[i] + times[token]",
        "d.counts[i]",
        f"{PENALTIES} -k are_pythons",
    ),
    Mutation(
        "the library keeps the tokens of a step one place too far on",
        "codegen/cpu/templates/penalties.h",
        "b.positions[t] - d.first - 1",
        "b.positions[t] - d.first",
        f"{PENALTIES} -k gives_pythons",
    ),
    Mutation(
        "the library does not look for the largest logit after penalties",
        "codegen/cpu/templates/driver.h",
        "      b.argmax[r] = sampler.best(x);\n",
        "",
        f"{PENALTIES} -k gives_pythons",
    ),
    Mutation(
        "the library leaves one bias out",
        "codegen/cpu/templates/penalties.h",
        "i < d.biased",
        "i + 1 < d.biased",
        f"{PENALTIES} -k are_pythons",
    ),
    Mutation(
        "the library reports a prompt's likeliest token instead of its own",
        "codegen/cpu/templates/driver.h",
        "d.known_next[at], d, at",
        "b.argmax[r], d, at",
        "tests/runtime/sampling/test_prompt_logprobs_kernels.py -k transformers",
    ),
    Mutation(
        "a prompt's log probabilities are not computed where its pages are known",
        "runtime/request.py",
        "return len(self.sequence.tokens) if self.prompt_report.complete else self.prompt_report.scored",
        "return len(self.sequence.tokens)",
        "tests/runtime/sampling/test_prompt_logprobs.py -k cached",
    ),
    Mutation(
        "the library reports logits with penalties",
        "codegen/cpu/templates/driver.h",
        "if (reported) plain = (float*)memcpy(",
        "if (reported) (void)memcpy(",
        f"{REPORTS} -k python_finds",
    ),
    Mutation(
        "the library reports the last of equal logits",
        "codegen/cpu/templates/report.h",
        "logits[at - 1] < x[i]",
        "logits[at - 1] <= x[i]",
        f"{REPORTS} -k are_pythons",
    ),
    Mutation(
        "perplexity is of the token itself, not the next",
        "runtime/evaluate.py",
        "tokens[start + 1 : start + 1 + len(logits)]",
        "tokens[start : start + len(logits)]",
        "tests/runtime/test_evaluate.py",
    ),
    Mutation(
        "a preempted request keeps its place",
        "runtime/engine/scheduler.py",
        "= pages, computed, list(drafted)",
        "= pages, max(computed, sequence.computed), list(drafted)",
        "tests/runtime/engine/test_engine.py",
    ),
    Mutation(
        "all of a prompt may be cached, so that no token is left to give logits",
        "runtime/engine/prefixes.py",
        "range(0, len(tokens) - self._page_tokens, self._page_tokens)",
        "range(0, len(tokens) - self._page_tokens + 1, self._page_tokens)",
        "tests/runtime/engine/test_prefixes.py",
    ),
    Mutation(
        "a page that is not full yet is shared",
        "runtime/engine/scheduler.py",
        "full = min(sequence.computed, len(sequence.tokens)) // self.pool.page_tokens",
        "full = -(-min(sequence.computed, len(sequence.tokens)) // self.pool.page_tokens)",
        "tests/runtime/engine/test_prefixes.py",
    ),
    Mutation(
        "a forgotten page is still found through the page before it",
        "runtime/engine/prefixes.py",
        "del first.parent.children[first.key]",
        "first.key",
        "tests/runtime/engine/test_prefixes.py",
    ),
    Mutation(
        "a shared page is given away when the first of its requests ends",
        "runtime/engine/blocks.py",
        "self._idle.pop(page, None)\n            self._holders[page] += 1",
        "self._idle.pop(page, None)\n            self._holders[page] = 1",
        "tests/runtime/engine/test_prefixes.py",
    ),
    Mutation(
        "a draft goes on from pages that its own cache lacks",
        "runtime/engine/prefixes.py",
        "held = [count >= depth * self._page_tokens for count in positions]",
        "held = [True for _ in positions]",
        "tests/runtime/engine/test_prefixes.py",
    ),
    Mutation(
        "tokens of a request that a stop text ended while the next step ran are kept",
        "runtime/engine/postprocess.py",
        "if request.output.finish_reason is not None:  # cancelled, or ended by a stop text, while the step ran",
        "if request.output.finish_reason == 'abort':",
        "tests/runtime/test_text.py tests/runtime/engine/test_engine.py",
    ),
    Mutation(
        "a step's tokens are attributed without those of requests cancelled while it ran",
        "runtime/engine/postprocess.py",
        "at + row.outputs\n            new",
        "at + row.outputs * (request.output.finish_reason is None)\n            new",
        "tests/runtime/engine/test_engine.py tests/runtime/engine/test_prefixes.py",
    ),
    Mutation(
        "a step queued behind another draws with the random numbers of that one",
        "runtime/sampling/sampling.py",
        "islice(self._ahead, skipped, skipped + count)",
        "islice(self._ahead, count)",
        "tests/runtime/engine/test_engine.py",
    ),
    Mutation(
        "a request that reaches its limit in the step that runs is in the next one",
        "runtime/engine/scheduler.py",
        "if not _ends_in_pending_step(request)",
        "if request",
        "tests/runtime/engine/test_engine.py",
    ),
    Mutation(
        "a request is preempted while its step runs",
        "runtime/engine/scheduler.py",
        "if any(running.sequence.pending_rows for running in self.running):",
        "if not self.running:",
        "tests/runtime/engine/test_engine.py",
    ),
    Mutation(
        "a step with penalties is queued before the tokens are known that they are for",
        "runtime/sampling/sampling.py",
        "return self._noted is None and self.params.logprobs is None",
        "return self.params.logprobs is None",
        "tests/runtime/engine/test_engine.py",
    ),
    Mutation(
        "positions computed in vain are not counted where a text over a hierarchical cache is kept",
        "runtime/request.py",
        "= self.scheduled, 0, 0",
        "= self.computed, 0, 0",
        "tests/runtime/engine/test_engine.py -k in_vain",
    ),
    Mutation(
        "a stream that holds tokens back does not publish them later",
        "runtime/server/service.py",
        "job.partial and samples.published <= latest",
        "job.partial and not samples.published",
        "tests/runtime/server/test_service.py",
    ),
    Mutation(
        "a sample that overflows waits for the other samples of its prompt",
        "runtime/server/service.py",
        "if samples.finished or samples.overflowed or (",
        "if samples.finished or (",
        "tests/runtime/server/test_service.py -k overflow",
    ),
    Mutation(
        "weights that a draft shares are chosen again for it",
        "passes/calibration/calibrate.py",
        ' and ops.operand(weight, "codes") is None:',
        ":",
        "tests/passes/test_speculate.py -k not_chosen_again",
    ),
    Mutation(
        "other models that draft are not calibrated",
        "qcompile/drafts.py",
        "self.calibration(options.calib, target.calibration), options.kept)",
        "None, options.kept)",
        "tests/runtime/speculation/test_speculation.py -k calibrated",
    ),
    Mutation(
        "a file's hash is not looked at",
        "qcompile/artifact/hashes.py",
        'return None if digest == expected["sha256"] else',
        "return None if digest else",
        "tests/artifact/test_artifact.py",
    ),
    Mutation(
        "the context is taken to end one position early",
        "qcompile/checkpoints/branches.py",
        "for place in (0, context - 1))",
        "for place in (0, context - 2))",
        "tests/checkpoints/test_branches.py",
    ),
    Mutation(
        "a branch on the length is traced one way only",
        "qcompile/checkpoints/branches.py",
        "waiting.append(forced | {condition: True})",
        "waiting.append(forced | {condition: False})",
        "tests/checkpoints/test_branches.py",
    ),
    Mutation(
        "weights of a loop over experts are multiplied the wrong way round",
        "qcompile/checkpoints/expert_loops.py",
        'known.transposed != (name == "linear")',
        'known.transposed == (name == "linear")',
        "tests/checkpoints/test_expert_loops.py",
    ),
    Mutation(
        "a mask that multiplies scores may hide what no other hides",
        "passes/raising/masks.py",
        "if (seen & (PositionEvaluator(facts, length).value(mask.node) != 1)).any():",
        "if False:",
        "tests/passes/raising/test_kept_masks.py",
    ),
    Mutation(
        "a weight by head is laid out as one by feature",
        "passes/raising/builder.py",
        "w.flatten().float().repeat_interleave(size)",
        "w.flatten().float().repeat(size)",
        "tests/passes/raising/test_by_head.py",
    ),
    Mutation(
        "a negative epsilon passes",
        "qcompile/checkpoints/sizes.py",
        "if (EPSILON.fullmatch(name) or counts) and value < 0:",
        "if counts and value < 0:",
        "tests/checkpoints/test_sizes.py",
    ),
)

"""GPU kernel that merges the partial results of attention, in order of position (attention.py states the order)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from qcompile.codegen.gpu.attention_splits import GROUP_SPLITS
from qcompile.codegen.gpu.kernel import Argument, Kernel, render_template, result_argument
from qcompile.codegen.gpu.kv_pages import GpuKV
from qcompile.codegen.gpu.visible_keys import VisibleKeys
from qcompile.codegen.sizes import power_of_two
from qcompile.targets import has_pdl

PART_FEATURES = 128
"""Features of a program that merges many splits: a warp loads them at once."""
IN_TURN = 256
"""Most features that eight warps merge at once, of the leaves of all splits of a group."""
MANY = 32
"""Splits that such a program loads at a time."""


@dataclass(frozen=True)
class MergeSpec(VisibleKeys):
    """Log-sum-exp merge of AttentionSpec's partial results: of the splits of a group (level 1) or of groups (level 2).

    Each split has `leaves` partial results, or one. The `final` level writes [tokens, heads * dim] as `out`, and with
    `amax` also the largest magnitude of each half of a head's features, or of the whole head in both entries,
    [tokens, heads, 2] f32, for quantization. A level that is not final overwrites the first partial result of each
    group. With `sinks` an attention sink f32 [heads] is added to the final sum of softmax weights.
    """

    kv: GpuKV
    heads: int
    level: int = 1
    final: bool = True
    split: int = 512
    leaves: int = 1
    amax: bool = False
    sinks: bool = False
    out: Literal["f32", "bf16"] = "f32"
    most_splits: int = GROUP_SPLITS
    """Most splits of a group."""

    @property
    def batched(self) -> bool:
        """Whether it merges a few whole splits, as in large batches: enough work for programs of several heads."""
        return (self.level, self.final, self.leaves) == (1, True, 1)

    @property
    def heads_per_program(self) -> int:
        """Heads per program."""
        return math.gcd(self.heads, 4) if self.batched and not self.many else 1

    @property
    def many(self) -> bool:
        """Whether it merges more splits than a group has, one after the other: programs have few features."""
        return self.most_splits > GROUP_SPLITS

    @property
    def merges_leaves(self) -> bool:
        """Whether the leaves of each split are merged first, for all splits in parallel."""
        return self.level == 1 and self.leaves > 1

    @property
    def dim_parts(self) -> int:
        """Programs that divide a head's features: several only if none overwrites what another reads."""
        if self.many and self.final and not self.amax:
            return max(1, power_of_two(self.kv.value_dim) // PART_FEATURES)
        return 2 if self.merges_leaves and self.final else 1

    @property
    def programs(self) -> int:
        """Programs per token and group of splits."""
        return self.heads // self.heads_per_program * self.dim_parts

    @property
    def warps(self) -> int:
        """Warps of a program. With leaves a warp has registers for 32 features, of as many splits as a group has."""
        if self.batched:
            return self.heads_per_program
        if not self.merges_leaves:
            return 4
        return max(4 if self.final else 8, self.features // 32)

    @property
    def turns(self) -> int:
        """Parts of a head's features that a program merges one after the other, where programs cannot divide them."""
        return max(1, power_of_two(self.kv.value_dim) // IN_TURN) if self.merges_leaves and not self.final else 1

    @property
    def features(self) -> int:
        """Features that a program has at once, padded to a power of two."""
        return power_of_two(self.kv.value_dim) // (self.dim_parts * self.turns)

    @property
    def kind(self) -> str:
        """What it merges, for the title of the generated source."""
        return f"{f'splits of {self.split} positions' if self.level == 1 else 'groups of splits'} in order of position"

    def kernel(self, capability: int) -> Kernel:
        """The kernel for a compute capability."""
        arguments = [Argument("parts", "*fp32"), Argument("stats", "*fp32")] + [result_argument(self.out)] * self.final
        arguments += [Argument("amax", "*fp32")] * (self.amax and self.final)
        arguments += [Argument("sinks", "*fp32")] * (self.sinks and self.final)
        arguments += [Argument("positions", "*i32"), Argument("splits", "i32")]
        pdl = has_pdl(capability)
        name = f"merge_{self.split}_{self.leaves}_{self.level}{'' if self.final else '_part'}"
        source = render_template(
            "merge.py.jinja",
            spec=self,
            name=name,
            arguments=arguments,
            pdl=pdl,
            splits_a_group=self.most_splits,
            dim_block=power_of_two(self.kv.value_dim),
            sinks=self.sinks and self.final,
            log2_e=math.log2(math.e),
            batch=MANY if self.many else 8 if self.batched else GROUP_SPLITS,
        )
        return Kernel(name, source, tuple(arguments), self.warps, 1, pdl, fusion=False)

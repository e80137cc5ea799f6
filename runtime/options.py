"""The options of loading an artifact, and the checks of their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from qcompile.artifact.rebuilt import RebuiltKernels
from qcompile.artifact.signature import trusted_keys
from qcompile.errors import UsageError
from qcompile.runtime.lora.table import check_names
from qcompile.runtime.outputs import AUTO, MOST_DRAFTS
from qcompile.runtime.ranks.launcher import launched
from qcompile.runtime.sampling.params import plain_number

MAX_BATCH = 16
"""The default of `LoadOptions.max_batch`."""

STEP_TOKENS = {"cpu": 512, "cuda": 2048}
"""Most tokens of a step by default, by the kind of device; loading takes fewer where a GPU's memory is short. In larger
steps prompts are hardly faster, and sequences that decode wait longer for them."""


@dataclass(frozen=True)
class LoadOptions:
    """The options of `qcompile.load`, which describes them. gamma: AUTO stands for "auto"."""

    threads: int | None = None
    max_batch: int = MAX_BATCH
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    kv_cache_bytes: int | None = None
    gamma: int = AUTO
    acceptance: str = "drawn"
    gpu_memory_utilization: float = 0.9
    prefix_caching: bool = True
    generation_config: str = "auto"
    lora: Mapping[str, str | Path] | None = None
    tensor_parallel_size: int | None = None
    require_signature: str | Path | None = None
    kernels: RebuiltKernels | None = None

    @staticmethod
    def of(given: dict[str, Any]) -> LoadOptions:
        """The options by name; numbers of any type become Python's, and gamma "auto" becomes AUTO."""
        options = {field.name: plain_number(given[field.name]) for field in fields(LoadOptions)}
        return LoadOptions(**options | {"gamma": AUTO if options["gamma"] == "auto" else options["gamma"]})

    def trusted(self) -> tuple[str, ...] | None:
        """The keys one of which must have signed the artifact; None if it need not be signed. Raises UsageError."""
        key = self.require_signature
        if not isinstance(key, str | Path | None):
            raise UsageError(f"require_signature must be a public key or the path of one, not {key!r}")
        return None if key is None else trusted_keys(key)

    def check(self, path: str | Path, runtime: dict[str, Any]) -> None:
        """Raise UsageError for an invalid value, or one that the artifact at `path` does not support.

        `runtime` is the section of that name in the artifact's manifest.
        """
        self._check_batch(runtime.get("max_outputs") or runtime["max_tokens"], runtime["max_tokens"])
        # The manifest calls draft stages "levels": the format of artifacts is stable.
        self._check_drafts(path, bool(runtime.get("levels")))
        self._check_machine()
        self._check_ranks(path, len(runtime.get("ranks") or [0]))
        check_names(self.lora or {})

    def _check_batch(self, most: int, most_rows: int) -> None:
        for name, value, more in (("gamma", self.gamma, ' or "auto"'), ("max_batch", self.max_batch, "")):
            if not isinstance(value, int):
                raise UsageError(f"{name} must be a whole number{more}, not {value!r}")
        if not 1 <= self.max_batch <= most:
            raise UsageError(f"max_batch must be between 1 and {most}, not {self.max_batch}")
        rows = self.max_num_batched_tokens
        if not isinstance(rows, int | None):
            raise UsageError(f"max_num_batched_tokens must be a whole number, not {rows!r}")
        if rows is not None and not self.max_batch <= rows <= most_rows:
            raise UsageError(
                f"max_num_batched_tokens must be between max_batch ({self.max_batch}) and {most_rows}, not {rows}"
            )

    def _check_drafts(self, path: str | Path, has_drafts: bool) -> None:
        if self.gamma != AUTO and not 0 <= self.gamma < MOST_DRAFTS:
            raise UsageError(f'gamma must be between 0 and {MOST_DRAFTS - 1}, or "auto", not {self.gamma}')
        if self.acceptance not in ("drawn", "rejection"):
            raise UsageError(f"acceptance must be drawn or rejection, not {self.acceptance!r}")
        if self.gamma not in (0, AUTO) and not has_drafts:
            raise UsageError(
                f"gamma {self.gamma}: {path} has no drafts; build it with a recipe that drafts, or with --draft"
            )

    def _check_ranks(self, path: str | Path, built: int) -> None:
        wanted = self.tensor_parallel_size
        if not isinstance(wanted, int | None) or (wanted is not None and wanted < 1):
            raise UsageError(f"tensor_parallel_size must be a whole number of at least 1, not {wanted!r}")
        if wanted not in (None, built):
            if (own := launched()) is not None and own.size == wanted:
                raise UsageError(own.other_size(path, built))
            processes = f"{built} processes" if built > 1 else "one process"
            raise UsageError(
                f"tensor_parallel_size {wanted}: {path} was built for {processes}; build it with "
                f"--tensor-parallel-size {wanted}"
            )

    def _check_machine(self) -> None:
        if not (self.threads is None or (isinstance(self.threads, int) and 1 <= self.threads <= 1024)):
            raise UsageError(f"threads must be a whole number between 1 and 1024, not {self.threads!r}")
        if not isinstance(self.kv_cache_bytes, int | None):
            raise UsageError(f"kv_cache_bytes must be a whole number, not {self.kv_cache_bytes!r}")
        share = self.gpu_memory_utilization
        if not (isinstance(share, int | float) and 0 < share <= 1):
            raise UsageError(f"gpu_memory_utilization must be above 0 and at most 1, not {share!r}")
        if not isinstance(self.prefix_caching, bool):
            raise UsageError(f"prefix_caching must be True or False, not {self.prefix_caching!r}")
        if self.generation_config not in ("auto", "none"):
            raise UsageError(f"generation_config must be auto or none, not {self.generation_config!r}")

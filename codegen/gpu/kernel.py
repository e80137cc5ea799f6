"""A GPU kernel: Triton source, rendered from a template, with its arguments and launch parameters."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

_TEMPLATES = Path(__file__).parent / "templates"
ANY_CAPABILITY = "tl.constexpr(0)  # the compute capability, where known"
"""A placeholder in sources that depend on the compute capability; Triton only knows that of a GPU it can see."""


class Argument(NamedTuple):
    """A kernel argument: its name, and its type in Triton's notation."""

    name: str
    type: str


def result_argument(dtype: str) -> Argument:
    """The argument `out` of a kernel with results in `dtype`, f32 or bf16."""
    return Argument("out", "*bf16" if dtype == "bf16" else "*fp32")


@dataclass(frozen=True)
class Kernel:
    """A kernel as Triton source: the function `name` in `source`, launched with `arguments`.

    With `pdl` (from sm_90 on) it is launched by programmatic dependent launch: it may start before the preceding kernel
    has ended, and waits for that itself. Without `fusion` the compiler fuses only multiply-adds written as fma.
    A thread has at most `most_registers` registers, if not 0.
    """

    name: str
    source: str
    arguments: tuple[Argument, ...]
    warps: int = 4
    stages: int = 3
    pdl: bool = False
    fusion: bool = True
    most_registers: int = 0

    @property
    def label(self) -> str:
        """A unique file name for what is compiled from it."""
        return _label(self)


@cache
def _label(kernel: Kernel) -> str:
    how = f"{kernel.warps} {kernel.stages} {kernel.pdl} {kernel.fusion} {kernel.most_registers}"
    text = "\0".join((kernel.source, str(kernel.arguments), how))
    return f"{kernel.name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


@cache
def templates() -> Environment:
    """The templates in templates/, each parsed when first asked for."""
    return Environment(
        loader=FileSystemLoader(_TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render_template(template: str, /, **values: Any) -> str:
    """Triton source from a template in templates/; undefined names are errors."""
    return templates().get_template(template).render(**values)

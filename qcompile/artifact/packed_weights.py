"""The weights of an artifact, read back: the tensors that its packed weights stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from qcompile import ops
from qcompile.artifact.plain_files import read_plain
from qcompile.artifact.reader import read_checked_manifest, verify
from qcompile.errors import ArtifactError, UnsupportedError
from qcompile.formats import mixed_layout
from qcompile.formats.floats import TABLE_TYPES
from qcompile.formats.registry import STORED_FORMATS
from qcompile.formats.rounding import Parts
from qcompile.graph import Graph, WeightStore

STEP = "graphs/step.json"


class PackedWeights:
    """The packed weights of an artifact for a CPU, unpacked for the nodes of its step graph.

    Raises UsageError or ArtifactError if there is no intact artifact at `root`, UnsupportedError if it is for a GPU.
    """

    def __init__(self, root: Path) -> None:
        manifest = read_checked_manifest(root)
        problems = [] if STEP in manifest["files"] else [f"{STEP} is missing"]
        if problems := problems or verify(root):
            raise ArtifactError(f"{root} is damaged: {problems[0]}; build it again")
        if manifest["target"].get("kind", "cpu") != "cpu":
            raise UnsupportedError(f"export: {root} is packed for {manifest['target']['name']}; build it for a CPU")
        if ranks := manifest["runtime"].get("ranks"):
            raise UnsupportedError(f"export: {root} is divided over {len(ranks)} processes; build it for one")
        self.root = root
        self.entries = {entry["name"]: entry for entry in manifest["runtime"]["weights"]}
        text = read_plain(root / STEP).decode()
        self.graph = Graph.from_json(text, WeightStore())
        self.shapes = {node["name"]: node["shapes"] for node in json.loads(text)["nodes"]}

    @property
    def row_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each weight node by its name: [N, K] of a weight in parts."""
        return {node.name: self._shape(node) for node in self.graph.nodes if self.shapes.get(node.name)}

    def _shape(self, node: fx.Node) -> tuple[int, ...]:
        shapes = [tuple(shape) for shape, _ in self.shapes[node.name]]
        format = STORED_FORMATS.get(node.meta.get("packed", {}).get("kind", ""))
        return shapes[0] if format is None else format.shape([torch.empty(shape, device="meta") for shape in shapes])

    def value(self, node: fx.Node) -> Any:
        """The value of a weight expression: unpacked if the artifact holds it, else computed from its operands."""
        if "packed" in node.meta:
            packed = node.meta["packed"]
            return self._unpacked(node, packed["kind"], packed["names"], packed.get("dtype", "f32"))
        if ops.name_of(node.target) == "quantize_mixed":
            return self._mixed(node)
        if node.op == "get_attr" or not callable(node.target):
            raise UnsupportedError(f"export: node {node.name}: {node.op} cannot be read back out of an artifact")
        return node.target(*fx.node.map_arg(node.args, self.value))

    def _mixed(self, node: fx.Node) -> Parts:
        """The parts of a weight with rows of two widths. How it is packed is noted at the weight that is rounded."""
        given: fx.Node = ops.operand(node, "w")
        blobs = dict(zip(mixed_layout.ROLES, map(self._blob, given.meta["packed"]["names"]), strict=True))
        pairs = any(ops.operand(user, "epilogue") in ops.GATED for user in node.users)
        n, k = self.row_shapes[node.name]
        return mixed_layout.unpack(blobs, n, k, pairs)

    def _unpacked(self, node: fx.Node, kind: str, names: list[str], dtype: str) -> Any:
        blobs = [self._blob(name) for name in names]
        (shape, _), *_ = self.shapes[node.name]
        format = STORED_FORMATS.get(kind)
        if format and not format.marks_rows:
            n, k = self._shape(node)
            return format.unpack(dict(zip(format.roles, blobs, strict=True)), n, k)
        if kind == "transposed":
            n, k = shape
            return blobs[0].view(torch.float32).view(k, -1)[:, :n].t()
        if kind == "indices":
            return blobs[0].view(torch.int32)[: int(np.prod(shape))].long()
        if kind not in ("vector", "flat", "table"):
            raise UnsupportedError(f"export: node {node.name}: {kind} weights cannot be exported; take another recipe")
        return blobs[0].view(TABLE_TYPES[dtype])[: int(np.prod(shape))].reshape(shape).float()

    def _blob(self, name: str) -> Tensor:
        entry = self.entries[name]
        path = self.root / entry["file"]
        data = np.fromfile(path, dtype=np.uint8, count=entry["bytes"], offset=entry["offset"])
        return torch.from_numpy(data)

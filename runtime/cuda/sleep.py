"""Gives the memory of a GPU model's weights and caches back, and brings the weights back to the same addresses.

CUDA graphs, prepared launches and the table of adapters hold these addresses, and stay as they are.
"""

from __future__ import annotations

from pathlib import Path

from qcompile.artifact.layout import ADAPTER_TABLE, Manifest
from qcompile.errors import ResourceError
from qcompile.runtime.cuda.driver import Driver
from qcompile.runtime.cuda.weights import DeviceWeights, upload_again
from qcompile.runtime.loader import Arena
from qcompile.system.free_memory import available_memory


class CudaMemory:
    """The weights of the artifact at `root`, or a rank's part of them, and `caches`, as ReleasableMemory of the engine.

    caches: addresses on the GPU. Level 1 keeps the weights in the host's memory, level 2 reads the artifact again.
    """

    def __init__(self, gpu: Driver, root: Path, manifest: Manifest, weights: DeviceWeights, caches: list[int]) -> None:
        self._gpu, self._root = gpu, root.absolute()  # the working directory may change
        self._files, self._weights, self._caches = manifest["files"], weights, caches
        self._places, self._released = weights.files, False
        # What loading has written over the weights that were read: the table of adapters.
        self._written = [
            (weights.by_name[entry["name"]], entry["bytes"])
            for entry in manifest["runtime"]["weights"]
            if entry["name"] == ADAPTER_TABLE and ADAPTER_TABLE in weights.by_name
        ]
        self._contents: list[Arena] = []
        self._copies: dict[str, Arena] = {}

    def release(self, level: int) -> None:
        """Give the memory back. Raises ResourceError if level 1 finds none for its copy; then nothing is given back.

        Does nothing if it is given back already, as that of a rank that could not take it again.
        """
        if self._released:
            return
        self._gpu.use()
        self._gpu.synchronize()
        if level == 1:
            self._copies = self._copied()
        self._contents = [self._download(address, size) for address, size in self._written]
        self._gpu.synchronize()
        self._give_back()
        self._released = True

    def restore(self) -> None:
        """Take the memory again, then copy the weights from the host's memory, or read and verify them."""
        if not self._released:
            return
        self._gpu.use()
        self._check_room()
        try:
            for address in (*self._places.values(), *self._caches):
                self._gpu.take_again(address, "a model that wakes")
            for name, copy in self._copies.items():
                self._upload(self._places[name], copy)
            read = [name for name in self._places if name not in self._copies]
            upload_again(self._gpu, self._root, self._files, self._weights, read)
            for (address, _), content in zip(self._written, self._contents, strict=True):
                self._upload(address, content)
        except BaseException:
            self._gpu.synchronize()
            self._give_back()
            raise
        self._copies, self._released = {}, False

    def _check_room(self) -> None:
        """Raise ResourceError if the GPU has too little memory left."""
        free, _ = self._gpu.memory()
        if (size := self._gpu.lacking([*self._places.values(), *self._caches])) > free:
            raise ResourceError(
                f"waking takes {size:,} bytes of GPU memory, which has {free:,} left: end what has taken it meanwhile"
            )

    def _copied(self) -> dict[str, Arena]:
        """The content of all files of weights in the host's memory."""
        size, available = sum(map(self._weights.size, self._places)), available_memory()
        if size > available:
            raise ResourceError(
                f"a copy of the weights takes {size:,} bytes of the host's memory, which has {available:,} available: "
                f"level 2 keeps no copy"
            )
        return {name: self._download(at, self._weights.size(name)) for name, at in self._places.items()}

    def _download(self, address: int, size: int) -> Arena:
        copy = Arena(size)
        self._gpu.download(copy.address, address, size, pinned=False)
        self._gpu.synchronize()
        return copy

    def _upload(self, address: int, content: Arena) -> None:
        self._gpu.upload(address, content.address, content.size, pinned=False)
        self._gpu.synchronize()

    def _give_back(self) -> None:
        for address in (*self._places.values(), *self._caches):
            self._gpu.release(address)

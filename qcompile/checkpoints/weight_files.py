"""The weight files of a folder that are not read: errors name them. Imported before torch."""

from __future__ import annotations

from pathlib import Path

from qcompile.errors import UnsupportedError

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
OTHERS = {
    "*.onnx": "an ONNX model",
    "*.h5": "weights of TensorFlow",
    "*.msgpack": "weights of Flax",
    "*.mlmodel": "a Core ML model",
    "*.tflite": "a TensorFlow Lite model",
}
"""Files of other programs, by pattern."""


def check_weights(directory: Path) -> None:
    """Raise UnsupportedError if the checkpoint `directory` has weights, but none that are read."""
    if any(directory.glob("*.safetensors")):
        return
    pickles = sorted(name for pattern in PICKLES for name in matching(directory, pattern))
    if pickles:
        raise UnsupportedError(
            f"{directory} has only pickled weights ({pickles[0]}), which are never loaded; save it as safetensors"
        )
    if files := matching(directory, "*.gguf"):
        raise UnsupportedError(
            f"{directory} has its weights only as GGUF ({files[0]}): give that file, {directory / files[0]}"
        )
    for pattern, what in OTHERS.items():
        if files := matching(directory, pattern):
            raise UnsupportedError(f"{directory} has only {files[0]}, {what}; save it as safetensors")


def matching(directory: Path, pattern: str) -> list[str]:
    """The names of the files in `directory` that match `pattern`, in order."""
    return sorted(path.name for path in directory.glob(pattern) if path.is_file())

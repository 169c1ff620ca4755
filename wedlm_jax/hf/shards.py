"""Safetensors on disk: one file or shards with an index, read and written tensor by tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from wedlm_jax.errors import UserError
from wedlm_jax.hf.config import read_json, write_hf_json
from wedlm_jax.hf.turning import contiguous

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LFS_POINTER = b"version https://git-lfs"  # how each begins
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

Shapes = Mapping[str, tuple[int, ...]]


def require_contents(directory: Path) -> None:
    """Raises a `UserError` where a file of a model or an adapter only stands for its contents: a link to nowhere, as of a hub's
    cache that was copied without its blobs, or a pointer of Git LFS."""
    for file in sorted(directory.glob("*")):
        if file.suffix not in (".safetensors", ".json", ".jinja", ".txt"):
            continue
        if file.is_symlink() and not file.exists():
            raise UserError(f"{file}: leads to {file.readlink()}, which is not there; copy what it leads to")
        if _begins_with(file, LFS_POINTER):
            raise UserError(f"{file}: a pointer of Git LFS in the place of the file; git lfs pull fetches it")


def _begins_with(file: Path, beginning: bytes) -> bool:
    try:
        with file.open("rb") as opened:
            return opened.read(len(beginning)) == beginning
    except OSError:  # whoever reads it says why
        return False


class StoredTensors:
    """The tensors of an HF directory. Headers are read at once, data when asked for.

    Raises:
      UserError: no weights, an unreadable or truncated file, a missing shard, an index that disagrees with its shards.
    """

    def __init__(self, directory: Path, single_file: str = SINGLE_FILE):
        self.directory = directory
        if (directory / single_file).is_file():
            shard = _open(directory / single_file)
            self._shards = dict.fromkeys(shard.keys(), shard)
        elif (directory / INDEX_FILE).is_file():
            self._shards = _open_indexed(directory / INDEX_FILE)
        elif shards := sorted(directory.glob("*.safetensors")):
            raise UserError(f"{directory}: {shards[0].name} is here but {INDEX_FILE} is not; copy the index too")
        elif (directory / "pytorch_model.bin").is_file() or (directory / "pytorch_model.bin.index.json").is_file():
            raise UserError(
                f"{directory}: only pickled weights (pytorch_model.bin), never read here; save as safetensors"
            )
        else:
            raise UserError(
                f"{directory}: no {SINGLE_FILE} and no {INDEX_FILE}; copy or download them, or convert again"
            )
        self.shapes = {name: tuple(s.get_slice(name).get_shape()) for name, s in self._shards.items()}
        self.dtypes = {name: s.get_slice(name).get_dtype() for name, s in self._shards.items()}

    def read(self, name: str) -> np.ndarray:
        return self.read_part(name, ())

    def read_part(self, name: str, part: tuple[slice, ...]) -> np.ndarray:
        """The part of a tensor that `part` cuts out, a slice for each of its first axes; no more of the file is read.

        Raises:
          UserError: it is stored in another format than those of `DTYPES`.
        """
        if self.dtypes[name] not in DTYPES:
            raise UserError(
                f"{self.directory}: tensor {name} is stored as {self.dtypes[name]}; "
                f"readable are {', '.join(DTYPES)} (quantised checkpoints are not implemented)"
            )
        return self._shards[name].get_slice(name)[part] if part else self._shards[name].get_tensor(name)


def mismatches(held: Shapes, needed: Shapes, allowed: Shapes | None = None, most: int = 20) -> str:
    """What is missing, extra or misshapen among the tensors that are held, on one line; nothing where they fit.

    Args:
      allowed: `needed` and what may be there beside it.
      most: names of each kind.
    """
    allowed = needed if allowed is None else allowed
    misshapen: dict[str, list[str]] = {}
    for name in held.keys() & allowed.keys():
        if held[name] != allowed[name]:
            misshapen.setdefault(f"is {list(held[name])}, needs {list(allowed[name])}", []).append(name)
    problems = []
    if missing := needed.keys() - held.keys():
        problems.append(f"missing {names_on_one_line(missing, most)}")
    if extra := held.keys() - allowed.keys():
        problems.append(f"extra {names_on_one_line(extra, most)}")
    problems += [
        f"misshapen {names_on_one_line(names, most)} ({shapes})" for shapes, names in sorted(misshapen.items())
    ]
    return "; ".join(problems)


def names_on_one_line(names: Iterable[str], most: int = 20) -> str:
    """Tensor names on one line, the layers of one pattern together: `model.layers.{0,1}.mlp.up_proj.weight`."""
    layers: dict[str, list[int]] = {}
    for name in names:
        pattern, layer = re.sub(r"(?<=\.layers\.)\d+", "{}", name), re.search(r"(?<=\.layers\.)\d+", name)
        layers.setdefault(pattern, []).extend([int(layer[0])] if layer else [])
    shown = [
        pattern.replace("{}", str(numbers[0]) if len(numbers) == 1 else "{" + ",".join(map(str, sorted(numbers))) + "}")
        for pattern, numbers in sorted(layers.items())
    ]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")


class TensorToWrite(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    load: Callable[[], np.ndarray]  # called once, when its turn comes

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def write_tensors(directory: Path, tensors: Sequence[TensorToWrite], max_shard_size: int) -> None:
    """Writes `model.safetensors`, or shards of at most `max_shard_size` bytes and an index, one tensor at a time."""
    shards: list[list[TensorToWrite]] = [[]]
    room = max_shard_size
    for tensor in tensors:
        if shards[-1] and tensor.nbytes > room:
            shards.append([])
            room = max_shard_size
        shards[-1].append(tensor)
        room -= tensor.nbytes
    if len(shards) == 1:
        write_file(directory / SINGLE_FILE, shards[0])
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(directory / name, shard)
        weight_map |= {tensor.name: name for tensor in shard}
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors)}, "weight_map": dict(sorted(weight_map.items()))}
    write_hf_json(directory / INDEX_FILE, index)


def write_file(file: Path, tensors: Sequence[TensorToWrite]) -> None:
    """The format: 8 bytes of header length, a JSON header padded to 8 bytes, the raw little-endian data."""
    stored = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": stored[tensor.dtype], "shape": tensor.shape, "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little"))
        out.write(encoded)
        for tensor in tensors:
            data = contiguous(np.asarray(tensor.load(), dtype=tensor.dtype))
            assert data.shape == tensor.shape, (tensor.name, data.shape, tensor.shape)
            out.write(data.view(np.uint8).data)


def _open(file: Path) -> Any:
    try:
        file.open("rb").close()  # safetensors calls a file that may not be read one that is not there
        return safe_open(file, framework="np")
    except PermissionError:
        raise UserError(f"{file}: permission denied; make it readable") from None
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; the checkpoint is missing a shard, copy or download it") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: truncated or not safetensors ({error}); copy or download it again") from None


def _open_indexed(index: Path) -> dict[str, Any]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UserError(f"{index}: no weight_map from tensor names to files; copy or download it again")
    files = sorted(set(weight_map.values()))
    absent = [name for name in files if not (index.parent / name).is_file()]
    if absent:
        raise UserError(
            f"{index.parent}: missing shard {', '.join(absent)}, which {index.name} names; copy or download it"
        )
    opened = {name: _open(index.parent / name) for name in files}
    for file, shard in opened.items():
        listed, held = {name for name, at in weight_map.items() if at == file}, set(shard.keys())
        if lost := sorted(listed - held):
            raise UserError(f"{index}: places {', '.join(lost)} in {file}, which does not hold it; copy both again")
        if unlisted := sorted(held - listed):
            raise UserError(f"{index}: has no entry for {', '.join(unlisted)} of {file}; copy both again")
    return {name: opened[file] for name, file in weight_map.items()}

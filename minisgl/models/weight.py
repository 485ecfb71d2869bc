"""Reads a checkpoint tensor by tensor into a model, and refuses one that does not fit it exactly.

Never holds the checkpoint in memory: files are mapped, and each tensor goes straight to its place on the device. Where
the model is one rank's, that is the rank's shard of the tensor, and the rest is not read.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from minisgl.layers.linear import MergedLinear
from minisgl.layers.shard import Shard
from minisgl.models import BadCheckpoint
from minisgl.models.config import read_json
from minisgl.models.llama import LlamaForCausalLM

Weights = Iterable[tuple[str, torch.Tensor]]  # Hugging Face's names


class Place(NamedTuple):
    """Where a tensor of the checkpoint belongs, and what of it."""

    data: torch.Tensor
    shard: Shard

    @property
    def shape(self) -> torch.Size:
        """Of the tensor in the checkpoint."""
        shape = list(self.data.shape)
        shape[self.shard.dim] = self.shard.whole
        return torch.Size(shape)

    def fill(self, full: torch.Tensor) -> None:
        self.shard.fill(self.data, full)


def iter_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, tensor) of a folder of safetensors, one at a time, on the CPU."""
    for shard in _shards(folder):
        try:
            yield from load_file(shard).items()  # mapped, too: a tensor's bytes are read when it is copied
        except SafetensorError as error:
            raise BadCheckpoint(f"{shard} is damaged ({error}): fetch the model again") from None


def _shards(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise BadCheckpoint(f"{folder} holds neither {single.name} nor {index.name}: fetch it in safetensors form")
    names = sorted(set(read_json(index)["weight_map"].values()))
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise BadCheckpoint(f"{folder} lacks {_some(missing)} named by {index.name}: fetch the model again")
    return [folder / name for name in names]


def load_weights(model: LlamaForCausalLM, weights: Weights, device: torch.device, dtype: torch.dtype) -> None:
    """Give the model, which is on the meta device, memory of this device and dtype, and fill it.

    Raises:
        BadCheckpoint: tensors are missing, left over, given twice, or of another shape or kind.
    """
    places = {name: place for parameter in _allocate(model, device, dtype) for name, place in parameter.items()}
    missing = dict(places)
    problems: defaultdict[str, list[str]] = defaultdict(list)
    head = None
    for name, tensor in weights:
        if name.endswith("rotary_emb.inv_freq"):  # written by old versions of transformers; ours are computed
            continue
        if name == "lm_head.weight" and model.lm_head is None:
            head = tensor
        elif name not in missing:
            problems["given twice" if name in places else "left over"].append(name)
        elif tensor.shape != places[name].shape:
            problems["of the wrong shape"].append(f"{name} {list(tensor.shape)} for {list(places[name].shape)}")
        elif tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            problems["of a kind that needs dequantisation"].append(f"{name} {tensor.dtype}")
        else:
            places[name].fill(tensor)
        missing.pop(name, None)
    if missing:
        problems["missing"] = list(missing)
    if problems:
        found = "; ".join(f"{len(names)} {problem}: {_some(names)}" for problem, names in problems.items())
        raise BadCheckpoint(f"the checkpoint does not fit {model.config.architecture}: {found}")
    if head is not None and not _holds(places["model.embed_tokens.weight"], head):
        raise BadCheckpoint("lm_head.weight differs from model.embed_tokens.weight, but tie_word_embeddings is true")


def _holds(place: Place, tensor: torch.Tensor) -> bool:
    if tensor.shape != place.shape:
        return False
    other = place._replace(data=torch.empty_like(place.data))
    other.fill(tensor)
    return torch.equal(other.data, place.data)


def random_weights(
    model: LlamaForCausalLM, seed: int, device: torch.device, dtype: torch.dtype, std: float = 0.02
) -> None:
    """Fill the model, which is on the meta device, with noise: the same for the same seed, on one kind of device.

    Norms become 1; all else is normal with deviation std. Speed needs no checkpoint. Each rank draws the whole model's
    noise and keeps its shards, so the model is the same for any number of ranks.
    """
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in _allocate(model, device, dtype):
        rows = [place.shape[0] for place in parameter.values()]
        [name, place], *_ = parameter.items()
        if name.endswith("norm.weight"):
            place.data.fill_(1)
            continue
        # Drawn in fp32, so that a model in 16 bits is the rounding of the one in 32.
        noise = torch.randn(sum(rows), *place.shape[1:], generator=generator, device=device).mul_(std)
        for place, part in zip(parameter.values(), torch.split(noise, rows), strict=True):
            place.fill(part)


def _allocate(model: nn.Module, device: torch.device, dtype: torch.dtype) -> list[dict[str, Place]]:
    """Replace the meta parameters by uninitialised ones. Returns, for each, what tensors of the checkpoint fill it."""
    parameters: list[dict[str, Place]] = []
    for path, module in model.named_modules():
        for kind, meta in list(module.named_parameters(recurse=False)):
            data = torch.empty(meta.shape, device=device, dtype=dtype)
            setattr(module, kind, nn.Parameter(data, requires_grad=False))
            if isinstance(module, MergedLinear):
                parent, parts = path.rpartition(".")[0], module.parts
                rows = torch.split(data, [shard.size for shard in parts.values()])
                places = zip(parts, map(Place, rows, parts.values()), strict=True)
                parameters.append({f"{parent}.{part}.{kind}": place for part, place in places})
            else:
                shards = getattr(module, "shards", {})  # of a module that each rank holds a part of
                shard = shards.get(kind) or Shard(len(data), ((0, len(data)),))
                parameters.append({f"{path}.{kind}": Place(data, shard)})
    return parameters


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")

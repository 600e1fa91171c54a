"""Turn a Llama-family model's stream to its principal axes: the same function, other coordinates.

Usage: python recipes/rotate_stream.py MODEL TEXT FOLDER [WINDOWS]

Skipping small input channels costs least where few channels hold most of an input. RMSNorm does not
see a rotation once its weight is part of the next matrices (SliceGPT, arXiv 2401.15024), so one
rotation of the stream costs nothing at run time; nor does one of each value head, which passes from
v to o (QuaRot, arXiv 2404.00456). Here both go to the axes of the inputs' second moments, in order
to make inputs sparse (LaRoSA, arXiv 2507.01299, has a rotation a layer and turns inputs while it
runs). FOLDER then is a checkpoint like any other (bf16, head and embedding apart), to `prepare`.
With axes from 6100 tokens it was no gain on other books (`docs/log.md`, "Other coordinates").
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dejavu.kernels.channels import WHOLE
from dejavu.kernels.ops import Ops
from dejavu.kernels.reference import TorchOps
from dejavu.kernels.selection import Selection
from dejavu.load import LoadedModel, load_model
from dejavu.models.base import DecoderLM
from dejavu.models.llama import CHECKPOINT_NAMES
from dejavu.predictor.calibration import make_windows
from dejavu.predictor.wide import widened
from dejavu.sparsity.policy import Points, Selector, Site, Stage
from dejavu.weights.tokenizer import load_tokenizer

WINDOW, WINDOWS = 512, 24


class Moments(Selector):
    """Second moments of what norms give, their weights aside, and of each group's head outputs.

    stream: fp32 `[D, D]`, every place weighing the same; heads: fp32 `[K, d, d]` by layer.
    """

    capturable = False

    def __init__(self, model: DecoderLM) -> None:
        self.model = model
        c = model.config
        self.places = torch.zeros(2 * c.num_hidden_layers, c.hidden_size, c.hidden_size)
        self.heads = torch.zeros(c.num_hidden_layers, c.num_key_value_heads, c.head_dim, c.head_dim)

    @property
    def stream(self) -> Tensor:
        traces = self.places.diagonal(dim1=1, dim2=2).sum(dim=1)
        return (self.places / traces[:, None, None]).sum(dim=0)

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        block = self.model.weights.blocks[layer]
        norm = block.mlp_norm if site == Site.NEURONS else block.attention_norm
        assert norm.weight is not None
        x = points.source(site, layer)[WHOLE:] / norm.weight
        self.places[2 * layer + (site == Site.NEURONS)] += x.t() @ x
        return None

    def observe(self, stage: Stage, layer: int, value: Tensor) -> None:
        if stage == Stage.HEAD_OUTPUTS:
            groups, _, width = self.heads[layer].shape
            x = value[WHOLE:].reshape(len(value) - WHOLE, groups, -1, width)
            x = x.transpose(0, 1).flatten(1, 2)
            self.heads[layer] += x.transpose(1, 2) @ x


def axes(moments: Tensor) -> Tensor:
    """Principal axes as rows, `[..., n, n]`."""
    rows: Tensor = torch.linalg.eigh(moments.double()).eigenvectors.transpose(-1, -2)
    return rows.float()


def rotated(model: DecoderLM, stream: Tensor, heads: Tensor) -> dict[str, Tensor]:
    """Tensors by slot. stream: `[D, D]`, heads: `[layers, K, d, d]`, new axes as rows."""
    found = {}
    for n, block in enumerate(model.weights.blocks):
        a, mlp = block.attention, block.mlp
        assert mlp.gate is not None
        if any(part.bias is not None for part in (a.q, a.k, a.v, mlp.gate, mlp.up)):
            raise SystemExit("projections with a bias are not known here")
        for parts, norm in (
            ((a.q, a.k, a.v), block.attention_norm),
            ((mlp.gate, mlp.up), block.mlp_norm),
        ):
            names = (
                ("attention.q", "attention.k", "attention.v")
                if len(parts) == 3
                else ("mlp.gate", "mlp.up")
            )
            for name, part in zip(names, parts, strict=True):
                found[f"layers.{n}.{name}"] = (part.weight.float() * norm.weight) @ stream.t()
        groups, width, _ = heads[n].shape
        v = found[f"layers.{n}.attention.v"]
        found[f"layers.{n}.attention.v"] = (heads[n] @ v.view(groups, width, -1)).flatten(0, 1)
        o = a.o.weight.float().view(groups, -1, width, stream.shape[0])  # by input
        o = heads[n][:, None] @ o
        found[f"layers.{n}.attention.o"] = stream @ o.flatten(0, 2).t()
        found[f"layers.{n}.mlp.down"] = stream @ mlp.down.weight.float().t()
        for name in ("attention_norm", "mlp_norm"):
            found[f"layers.{n}.{name}"] = torch.ones(stream.shape[0])
    w = model.weights
    assert w.final_norm is not None
    found["embed_tokens"] = w.embed_tokens.float() @ stream.t()
    found["lm_head"] = (w.lm_head.float() * w.final_norm.weight) @ stream.t()
    found["final_norm"] = torch.ones(stream.shape[0])
    return found


def checkpoint_name(slot: str) -> str:
    """As transformers calls it."""
    if not slot.startswith("layers."):
        name = CHECKPOINT_NAMES[slot]
        return name if name.endswith(".weight") else f"{name}.weight"
    _, layer, part = slot.split(".", 2)
    return f"{CHECKPOINT_NAMES['layers']}.{layer}.{CHECKPOINT_NAMES[part]}.weight"


def moments_of(loaded: LoadedModel, text: Path, windows: int) -> Moments:
    """Read text densely."""
    model = widened(loaded.model)
    ids = make_windows([text], load_tokenizer(loaded.checkpoint), length=WINDOW, train=windows,
                       held_out=2, separator=model.config.eos_token_ids[0]).train  # fmt: skip
    found = Moments(model)
    for window in ids:
        model.logits(window[:-1], model.new_cache(WINDOW), found, TorchOps(), last_only=True)
    return found


def main() -> None:
    """Read, rotate, write."""
    source, text, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    loaded = load_model(source, dtype="bf16")
    moments = moments_of(loaded, text, int(sys.argv[4]) if sys.argv[4:] else WINDOWS)
    tensors = rotated(moments.model, axes(moments.stream), axes(moments.heads))
    folder.mkdir(parents=True)
    named = {checkpoint_name(slot): t.bfloat16().contiguous() for slot, t in tensors.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    config = loaded.checkpoint.config | {"tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    load_tokenizer(loaded.checkpoint).save_pretrained(folder)


if __name__ == "__main__":
    with torch.inference_mode():
        main()

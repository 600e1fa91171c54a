"""A sparse model beside the dense one on the same text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dejavu.eval.counting import Reads, counter_of
from dejavu.eval.forced import Reader
from dejavu.eval.perplexity import Perplexity, Progress, Sums, result
from dejavu.eval.text import EvalText
from dejavu.kernels.native import MAX_ROWS
from dejavu.kernels.ops import Ops
from dejavu.models.base import DecoderLM
from dejavu.sparsity.losses import token_losses
from dejavu.sparsity.policy import Dense, Selector

_ROWS = 256  # rows of logits whose distributions exist at a time


@dataclass(frozen=True)
class Comparison:
    """ratio: sparse over dense perplexity; its error is that of the paired difference of losses, so
    it may be far smaller than the errors of the two perplexities. kl: mean of KL(dense || sparse)
    in nats. agreement: share of tokens at which both have the same likeliest next token. Errors are
    standard errors over blocks of text (`perplexity.blocks`).

    reads: what the selector read; None on the decode path for a selector that does not count.
    """

    dense: Perplexity
    sparse: Perplexity
    ratio: float
    ratio_error: float | None
    kl: float
    kl_error: float | None
    agreement: float
    agreement_error: float | None
    reads: Reads | None

    def to_json(self) -> dict[str, Any]:
        """Plain values; mean densities beside those of each layer."""
        found = asdict(self)
        if self.reads is not None:
            found["reads"]["neuron_density"] = self.reads.neuron_density
            found["reads"]["head_density"] = self.reads.head_density
        return found


@torch.inference_mode()
def compare(
    model: DecoderLM,
    text: EvalText,
    selector: Selector,
    *,
    through: str = "prefill",
    ops: Ops | None = None,
    rows: int = MAX_ROWS,
    progress: Progress | None = None,
) -> Comparison:
    """Run dense and sparse side by side over a text, on one path (see `evaluate`).

    On the prefill path densities and bytes are counted token by token; on the decode path by the
    selector itself, over the steps of up to `rows` windows.
    """
    reader = Reader(model, through, ops, rows)
    windows = text.windows
    dense_loss, sparse_loss, difference, kl, agreement = (Sums(windows) for _ in range(5))
    counter = counter_of(selector, model, through)
    for stretch in reader.stretches(windows):
        part = windows[stretch.begin : stretch.end]
        counter.start()
        for dense, sparse in zip(
            reader.read(part, Dense()), reader.read(part, counter.selector), strict=True
        ):
            owners = dense.owners + stretch.begin
            full = token_losses(dense.logits, dense.targets)
            own = token_losses(sparse.logits, dense.targets)
            same = dense.logits.argmax(dim=1) == sparse.logits.argmax(dim=1)
            dense_loss.add(owners, full)
            sparse_loss.add(owners, own)
            difference.add(owners, own - full)
            kl.add(owners, divergence(dense.logits, sparse.logits))
            agreement.add(owners, same)
            if progress is not None:
                progress(kl.done, kl.total)
        counter.stop(stretch)
    ratio = difference.mean().exp()
    return Comparison(
        dense=result(text, reader, dense_loss.mean()),
        sparse=result(text, reader, sparse_loss.mean()),
        ratio=ratio.value,
        ratio_error=ratio.error,
        kl=kl.mean().value,
        kl_error=kl.mean().error,
        agreement=agreement.mean().value,
        agreement_error=agreement.mean().error,
        reads=counter.reads(model, selector),
    )


def divergence(first: Tensor, second: Tensor) -> Tensor:
    """KL(first || second) of the distributions of two logits `[n, V]`, nats, fp32 `[n]`."""
    parts = []
    for p, q in zip(torch.split(first, _ROWS), torch.split(second, _ROWS), strict=True):
        log_p, log_q = p.log_softmax(dim=1), q.log_softmax(dim=1)
        parts.append((log_p.exp() * (log_p - log_q)).sum(dim=1))
    return torch.cat(parts)

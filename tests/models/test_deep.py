"""Sixty layers with outlier channels: nothing may be summed below fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dejavu.kernels.reference import TorchOps
from dejavu.load import load_model
from dejavu.sparsity.policy import Selector, Stage

from .decoding import Decoding, Stepper
from .tiny import Case, Tiny, build, prompt, reference_logits

LAYERS = 60
IDS = prompt(9)


class Inputs(Selector):
    """Notes the residual stream entering every block."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def observe(self, stage: Stage, layer: int, value: Tensor) -> None:
        if stage == Stage.BLOCK_INPUT:
            self.seen.append(value.clone())


@pytest.fixture(scope="module", params=["llama", "opt"])
def deep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Channels 3 and 17 a thousand times the others, weights rounded to bf16 on both sides."""
    case = Case("deep", request.param, {"num_hidden_layers": LAYERS})
    tiny = build(case, tmp_path_factory.mktemp(request.param))
    with torch.no_grad():
        tiny.reference.get_input_embeddings().weight[:, [3, 17]] *= 1e3
        tiny.reference.to(torch.bfloat16).float()
    tiny.reference.save_pretrained(tiny.path)
    return tiny


def test_every_layer_keeps_its_direction(deep: Tiny) -> None:
    model = load_model(Path(deep.path), dtype="bf16").model
    inputs = Inputs()
    with torch.inference_mode():
        logits = model.logits(torch.tensor(IDS), model.new_cache(32), inputs, TorchOps())
        outputs = deep.reference(torch.tensor([IDS]), output_hidden_states=True)
    assert len(inputs.seen) == LAYERS + 1
    # the reference's last entry is behind the final norm, ours before it
    for ours, theirs in zip(inputs.seen[:-1], outputs.hidden_states[:-1], strict=True):
        assert ours.isfinite().all()
        assert float(F.cosine_similarity(ours, theirs[0]).min()) > 0.999
    assert float(F.cosine_similarity(logits, outputs.logits[0]).min()) > 0.999


def test_decode_keeps_the_direction(deep: Tiny, stepper: Callable[[], Stepper]) -> None:
    run = Decoding(load_model(deep.path, dtype="bf16").model, stepper())
    with torch.inference_mode():
        run.start(0, IDS[:-1])
        logits = run.step({0: IDS[-1]})[0]
    expected = reference_logits(deep.reference, IDS)[-1]
    assert float(F.cosine_similarity(logits, expected, dim=0)) > 0.999

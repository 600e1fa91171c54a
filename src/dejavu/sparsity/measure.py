"""Deja Vu's two-pass experiment (section 3 of the paper) on any model and text.

First pass: run the model in full and note what mattered to each token. Second pass: run it again
with only that, and see what the loss of the rest costs. Static pruning, the same parts for every
token, is tested beside it at equal density: the difference is what context is worth.

The masks of the second pass come from the dense run and carry some of what it knew: with heads left
out, dropping the neurons that were idle in the dense run as well even lowers the loss. So a true
arm is a bound; a selector that must choose on its own sparse trajectory is judged by `dejavu.eval`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dejavu.errors import InputError
from dejavu.kernels.reference import TorchOps
from dejavu.sparsity.arms import Choices, Tally, arms
from dejavu.sparsity.first_pass import FirstPass
from dejavu.sparsity.losses import block_mean, mean_rise, token_losses
from dejavu.sparsity.measurement import Contextuality, Measurement, MeasureOptions
from dejavu.sparsity.model_view import Cache, ModelView
from dejavu.sparsity.policy import Selector
from dejavu.sparsity.record import Recorder
from dejavu.sparsity.replay import Replay

Progress = Callable[[int, int], None]  # forwards done, forwards in all


def measure(
    model: ModelView[Cache],
    windows: Sequence[Tensor],
    other_windows: Sequence[Tensor] = (),
    options: MeasureOptions | None = None,
    progress: Progress | None = None,
) -> Measurement:
    """Run the experiment; the same input gives the same figures.

    windows, other_windows: int64 `[n + 1]` each, n tokens read and the n after the first
    predicted; the others are of another text, on which static pruning makes its choice.
    Every token has its own selection throughout. Memory beside the model: the activations of one
    window, 8 bytes a token, layer and neuron, and its logits.

    Raises InputError for windows that cannot be used, or if static pruning has no other text.
    """
    options = options or MeasureOptions()
    limit = model.config.context_length
    for window in (*windows, *other_windows):
        if not 2 <= len(window) <= limit + 1:
            raise InputError(f"a window has {len(window)} tokens; it takes 2 to {limit + 1}")
    if not windows:
        raise InputError("windows: there is no text to measure on")
    if "other" in options.static and options.densities and not other_windows:
        raise InputError("static: `other` chooses on other_windows, and there are none; give some")
    with torch.inference_mode():
        return _Experiment(model, options, progress).run(windows, other_windows)


class _Experiment:
    def __init__(
        self, model: ModelView[Cache], options: MeasureOptions, progress: Progress | None
    ) -> None:
        self._model = model
        self._options = options
        self._progress = progress
        self._ops = TorchOps()
        self._recorder = Recorder(model)
        self._tallies = [Tally(arm, model.config.num_hidden_layers) for arm in arms(options)]
        self._done = self._total = 0

    def run(self, windows: Sequence[Tensor], other_windows: Sequence[Tensor]) -> Measurement:
        self._total = len(other_windows) + len(windows) * (2 + len(self._tallies))
        tested, other = FirstPass(self._model, self._options), FirstPass(self._model, self._options)
        dense, counts = self._first_pass(windows, other_windows, tested, other)
        self._second_pass(windows, tested, other, dense)
        results = tuple(tally.result(dense, counts) for tally in self._tallies)
        loss = block_mean(dense, counts)
        return Measurement(
            options=self._options,
            model_type=self._model.config.model_type,
            windows=len(windows),
            other_windows=len(other_windows),
            tokens=sum(counts),
            active_set=tested.active_set,
            loss=loss.value,
            loss_error=loss.error,
            perplexity=loss.exp().value,
            layers=tested.layers(),
            arms=results,
            contextuality=tuple(self._contextuality(counts)),
        )

    def _first_pass(
        self,
        windows: Sequence[Tensor],
        other_windows: Sequence[Tensor],
        tested: FirstPass,
        other: FirstPass,
    ) -> tuple[list[float], list[int]]:
        """Sums of the dense losses and numbers of tokens, window by window."""
        dense, counts = [], []
        for i in range(max(len(windows), len(other_windows))):
            sets = None
            if i < len(other_windows):
                self._record(other_windows[i])
                sets = other.add(self._recorder)
            if i < len(windows):
                dense.append(self._record(windows[i]))
                counts.append(len(windows[i]) - 1)
                tested.add(self._recorder, sets)
        return dense, counts

    def _second_pass(
        self, windows: Sequence[Tensor], tested: FirstPass, other: FirstPass, dense: list[float]
    ) -> None:
        importance = {"static": other.importance, "static-same": tested.importance}
        for window, loss in zip(windows, dense, strict=True):
            self._record(window)
            choices = Choices(self._recorder, tested.histograms, importance)
            lossy: list[Tally] = []
            replays = self._replays(choices, loss, lossy)
            for number, value in enumerate(self._losses(window, replays)):
                lossy[number].losses.append(value)

    def _replays(self, choices: Choices, loss: float, lossy: list[Tally]) -> Iterator[Selector]:
        """What plays each arm back, one made as it is asked for; the arms that it is of go to
        `lossy`. loss: of the dense run."""
        for tally in self._tallies:
            masks = choices.masks(tally.arm)
            if tally.add_masks(masks, self._recorder):
                lossy.append(tally)
                yield Replay(masks)
            else:
                # What is exactly zero adds exactly zero: such an arm is the dense run, bit for bit.
                tally.losses.append(loss)
                self._step(1)

    def _record(self, window: Tensor) -> float:
        self._recorder.clear()
        (loss,) = self._losses(window, [self._recorder])
        return loss

    def _losses(self, window: Tensor, selectors: Iterable[Selector]) -> Iterator[float]:
        """Sum of the losses of a window's tokens in nats, with each selector."""
        rows = len(window) - 1
        cache = self._model.new_cache(rows)
        readings = (self._model.reading(window[:-1], cache, s, self._ops) for s in selectors)
        for logits in self._model.together(readings, rows):
            self._step(1)
            yield float(token_losses(logits, window[1:]).sum())

    def _step(self, forwards: int) -> None:
        self._done += forwards
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _contextuality(self, counts: list[int]) -> list[Contextuality]:
        by_arm = {tally.arm: tally for tally in self._tallies}
        found = []
        for arm, tally in by_arm.items():
            if arm.rule != "static":
                continue
            true = by_arm[replace(arm, rule="true")]
            nats = mean_rise(tally.losses, true.losses, counts)
            assert arm.budget is not None
            assert arm.target is not None
            found.append(Contextuality(arm.parts, arm.budget, arm.target, nats.value, nats.error))
        return found

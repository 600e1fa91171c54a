"""From a model and a text to a plan: the front of the pipeline, with its checks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dejavu.errors import InputError
from dejavu.load import LoadedModel
from dejavu.predictor.calibration import Tokenizer, Windows, make_windows
from dejavu.predictor.input_prepare import prepare_inputs, wants_inputs
from dejavu.predictor.levels import Progress
from dejavu.predictor.options import PrepareOptions
from dejavu.predictor.pipeline import FP16_BYTES, Pipeline
from dejavu.predictor.plan import PLAN_FILE, Plan
from dejavu.predictor.recording import room

__all__ = ["PrepareOptions", "prepare"]


def prepare(
    loaded: LoadedModel,
    texts: Iterable[str | Path],
    out: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer,
    options: PrepareOptions | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Make a plan for a model and save it to the folder `out`.

    texts: documents (`str`) or text files (`Path`), see `calibration.documents`. name: of the
    model, for messages; default, the checkpoint's path. progress: called with a stage, steps done
    and steps in all. An interrupted run leaves `<out>.partial`, from which the same call continues;
    a plan that stands at `out` is replaced when the new one is complete. A gated model whose
    activation has no zeros gets thresholds of input sparsity in place of predictors.

    Raises InputError for text too short or an `out` that is something else, PlanError naming a
    layer that cannot be learned.
    """
    options = options or PrepareOptions()
    target = _destination(out)
    name = name or str(loaded.checkpoint.path)
    progress = progress or (lambda stage, done, total: None)
    with _threads(options.threads), torch.inference_mode():
        windows = _windows(loaded, texts, tokenizer, options)
        if wants_inputs(loaded.model, options):
            if loaded.model.streamed:
                raise InputError(
                    f"{loaded.checkpoint.path} does not fit into the memory of "
                    f"{loaded.model.device}, and thresholds of a gated model are found on one that "
                    "does; use --device cpu or a larger GPU"
                )
            return prepare_inputs(loaded, windows, target, options, name, progress)
        return Pipeline(loaded, windows, target, options, name, progress).run()


def _windows(
    loaded: LoadedModel,
    texts: Iterable[str | Path],
    tokenizer: Tokenizer,
    options: PrepareOptions,
) -> Windows:
    c = loaded.model.config
    length = min(options.window, c.context_length)
    # Held-out inputs of both sites of all layers stay in memory for the whole run.
    a_token = 2 * c.num_hidden_layers * c.hidden_size * FP16_BYTES
    rows = int(room(loaded.model.device, options.memory_gib) / 2 / a_token)
    return make_windows(
        texts,
        tokenizer,
        length=length,
        train=max(2, options.tokens // length),
        held_out=max(2, min(options.held_out, rows) // length),
        separator=c.eos_token_ids[0] if c.eos_token_ids else None,
    )


def _destination(out: str | os.PathLike[str]) -> Path:
    path = Path(out).expanduser()
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file; a plan is a folder")
    if path.is_dir() and any(path.iterdir()) and not (path / PLAN_FILE).is_file():
        raise InputError(f"{path} is a folder of something else; choose another destination")
    return path


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """torch's threads, put back afterwards."""
    before = torch.get_num_threads()
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)

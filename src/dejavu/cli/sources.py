"""From what a user typed to loaded things: a model with a progress bar, a selector, texts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dejavu.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from dejavu.config import ModelConfig
    from dejavu.load import LoadedModel
    from dejavu.predictor.plan import Plan
    from dejavu.sparsity.policy import Selector


def load(
    model: str, dtype: str, threads: int | None, device: str = "cpu", *, to_read: bool = False
) -> LoadedModel:
    """Load a model onto a device, with a progress bar; torch gets as many threads as ours.

    to_read: for forwards over whole texts alone, so that one larger than a GPU may be streamed.
    """
    import torch

    from dejavu.cli.output import progress
    from dejavu.load import load_model
    from dejavu.load_blocks import load_to_read

    if threads is not None:
        torch.set_num_threads(threads)
    with progress("loading") as update:
        read = load_to_read if to_read else load_model
        return read(model, dtype=dtype, device=device, progress=update)


def model_shape(model: str | None, shape: str | None) -> ModelConfig:
    """The config of a checkpoint (no weights are read) or of a named shape. Raises InputError for
    both or neither."""
    if (model is None) == (shape is None):
        raise InputError("give MODEL or --shape NAME, one of them")
    if shape is not None:
        from dejavu.bench.shapes import model_config

        return model_config(shape)
    from dejavu.registry import architecture
    from dejavu.weights.checkpoint import open_checkpoint

    assert model is not None
    hf = open_checkpoint(model).config
    config: ModelConfig = architecture(hf.get("model_type")).config_from_hf(hf)
    return config


class Chosen(NamedTuple):
    """A selector, None where all is computed; of a plan's, the level that runs and the plan."""

    selector: Selector | None = None
    level: str | None = None
    plan: Plan | None = None


def selector(
    loaded: LoadedModel, plan: str | None, level: str | None, policy: str | None
) -> Chosen:
    """The selector of a plan or of a named policy. Raises InputError for both."""
    if plan is not None and policy is not None:
        raise InputError("give --plan or --policy, not both")
    if plan is not None:
        from dejavu.predictor.plan import load_plan

        found = load_plan(plan)
        return Chosen(found.selector(loaded, level), level or found.default_level, found)
    if level is not None:
        raise InputError(f"--level {level} is one of a plan's, and no --plan is given")
    if policy is not None:
        from dejavu.embedded import CALIBRATION_TEXT
        from dejavu.sparsity.policies import parse_policy

        found_policy = parse_policy(
            policy,
            loaded.model,
            lambda: [w[:-1] for w in text_windows(loaded, [CALIBRATION_TEXT], None, 16)],
        )
        return Chosen(found_policy)
    return Chosen()


def level_name(plan: str | None, level: str | None) -> str | None:
    """What `--level` stands for: itself, else the plan's default; None without a plan."""
    if plan is None or level is not None:
        return level
    from dejavu.predictor.plan import default_level

    return default_level(plan)


def texts(paths: list[Path] | None, default: Path) -> list[Path]:
    """The text files given, else the embedded one."""
    return list(paths) if paths else [default]


def numbers(option: str, value: str) -> tuple[float, ...]:
    """`0.5,0.2` as numbers, one at least. Raises InputError naming the option."""
    parts = names(option, value)
    try:
        return tuple(map(float, parts))
    except ValueError as error:
        raise InputError(f"{option}: {value!r} is not a list of numbers like 0.5,0.2") from error


def whole_numbers(option: str, value: str) -> tuple[int, ...]:
    """`8,16` as numbers from 1 on. Raises InputError naming the option."""
    parts = names(option, value)
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"{option}: {value!r} is not a list of whole numbers like 8,16")
    return tuple(map(int, parts))


def share(option: str, value: str) -> float:
    """`1%` or `0.01` as 0.01, always above 0. Raises InputError naming the option."""
    text = value.strip()
    in_hundred = text.endswith("%")
    try:
        found = float(text.removesuffix("%")) / (100 if in_hundred else 1)
    except ValueError as error:
        raise InputError(f"{option}: {value!r} is not a share like 1% or 0.01") from error
    if not 0 < found < math.inf:
        raise InputError(f"{option}: {value!r} is not above 0; give a share like 1% or 0.01")
    if found > 1 and not in_hundred:  # 200 for 2 %, as likely as for 20000 %
        raise InputError(f"{option}: {value!r} is {found:.0%}; give a share like 1% or 0.01")
    return found


def text_windows(
    loaded: LoadedModel, paths: list[Path], window: int | None, count: int
) -> list[Tensor]:
    """The first `count` whole windows of text files, int64 `[window + 1]` each.

    window: default, the model's context, at most 512. Raises InputError for texts too short.
    """
    from dejavu.eval.text import read_text
    from dejavu.weights.tokenizer import load_tokenizer

    context = loaded.model.config.context_length
    width = min(context, 512) if window is None else window
    tokenizer = load_tokenizer(loaded.checkpoint)
    found: list[Tensor] = []
    for path in paths:
        text = read_text(path, tokenizer, context, window=width)
        found += [w.ids for w in text.windows if len(w.ids) == width + 1]
        if len(found) >= count:
            return found[:count]
    if not found:
        names = ", ".join(str(path) for path in paths)
        raise InputError(f"{names}: not one whole window of {width} tokens; give more text")
    return found


def names(option: str, value: str) -> list[str]:
    """`a,b` as its parts, one at least. Raises InputError naming the option."""
    found = [part.strip() for part in value.split(",") if part.strip()]
    if not found:
        raise InputError(f"{option}: {value!r} names nothing; leave the option out")
    return found

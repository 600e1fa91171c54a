"""What sparsity in the embedded ReLU model is: measured, drawn, and printed as tables.

Usage: python recipes/findings.py CORPUS_FOLDER EVALUATION_FOLDER RESULT.json PLOTS_FOLDER [SECONDS]

Asks whether what a token needs depends on its context, how slowly inputs change along the layers,
what predicting ahead costs, how much text predictors need, and what other kinds of text do to a
plan. Every finished piece waits in RESULT.work.json; after SECONDS (default: never) no other one is
begun, and the same command goes on.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from findings_plots import draw
from torch import Tensor

from dejavu.bench.machine import origin, this_machine
from dejavu.embedded import CALIBRATION_TEXT, HELDOUT_TEXT
from dejavu.eval.compare import compare
from dejavu.eval.text import read_text
from dejavu.kernels.reference import TorchOps
from dejavu.load import load_model
from dejavu.predictor.calibration import Windows, make_windows
from dejavu.predictor.curve import HIGH, LOW, STEP
from dejavu.predictor.layer import Task, learn
from dejavu.predictor.plan import load_plan
from dejavu.predictor.recording import Recorded, record, window_losses
from dejavu.predictor.search import Candidate
from dejavu.predictor.selector import Choice, PlanSelector
from dejavu.predictor.survey import Survey, make_survey
from dejavu.predictor.training import TrainOptions
from dejavu.predictor.wide import widened
from dejavu.predictor.worth import Neurons
from dejavu.sparsity.losses import mean_rise
from dejavu.sparsity.measure import measure
from dejavu.sparsity.measurement import MeasureOptions
from dejavu.sparsity.policy import Dense, Key, Site
from dejavu.weights.files import atomic_write
from dejavu.weights.tokenizer import load_tokenizer

MODEL, WINDOW, RANK = "relu-30m", 512, 128
MEASURED = 2  # windows that the two-pass experiment reads
DENSITIES = (0.5, 0.2, 0.1)
TRAINED, HELD, JUDGED = 16_384, 2_048, 8_192  # tokens
AMOUNTS = (1_024, 4_096, 16_384)
DISTANCES = (0.0, 0.5, 1.0)
DENSITY = 0.14  # of the neurons, at which predictors are compared: about that of `balanced`
DRIFT_TOKENS = 4_096
LEVEL = "balanced"  # of the embedded plan: `prepare` reports what it was calibrated to, by layer
_SPOKEN = re.compile(r"^[A-Z][A-Za-z]{0,10}: ")


class Stopped(Exception):  # noqa: N818 - no error
    """The time is up; what is finished is kept."""


class Pieces:
    """Finished pieces of work by name, in a file."""

    def __init__(self, path: Path, seconds: float = math.inf) -> None:
        self._path, self._end = path, time.monotonic() + seconds
        self._found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """A piece (plain values) that is there, or made and kept. Raises Stopped."""
        if name not in self._found:
            if time.monotonic() > self._end:
                raise Stopped(name)
            started = time.monotonic()
            self._found[name] = make()
            with atomic_write(self._path) as aside:
                aside.write_text(json.dumps(self._found, indent=1), encoding="utf-8")
            print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
        return self._found[name]


class Study:
    """The embedded model, and texts."""

    def __init__(self, corpus: Path, evaluation: Path, scratch: Path) -> None:
        self._corpus, self._evaluation, self._scratch = corpus, evaluation, scratch
        self.loaded = load_model(MODEL)
        self.wide = widened(self.loaded.model)
        self.config = self.wide.config
        self.tokenizer = load_tokenizer(self.loaded.checkpoint)
        self.ops = TorchOps()

    def windows(self, path: Path, count: int) -> list[Tensor]:
        """The first windows of a text, int64 `[WINDOW + 1]` each."""
        text = read_text(path, self.tokenizer, WINDOW, max_tokens=count * WINDOW)
        return [window.ids for window in text.windows]

    def contexts(self) -> dict[str, Any]:
        """The paper's two passes: by token against the same parts for every token."""
        options = MeasureOptions(
            densities=DENSITIES,
            thresholds=(0.05,),
            parts=("neurons", "heads"),
            budgets=("uniform",),
            static=("other",),
        )
        tested, other = (self.windows(p, MEASURED) for p in (HELDOUT_TEXT, CALIBRATION_TEXT))
        return measure(self.wide, tested, other, options).to_json()

    @cached_property
    def _texts(self) -> Windows:
        return make_windows(
            [self._corpus / "train-0.txt.xz"],
            self.tokenizer,
            length=WINDOW,
            train=TRAINED // WINDOW,
            held_out=HELD // WINDOW,
            separator=self.config.eos_token_ids[0],
        )

    @cached_property
    def _recorded(self) -> tuple[Recorded, Recorded, Survey]:
        """Inputs of all MLPs and attentions, of text to train on and of other text."""
        layers = range(self.config.num_hidden_layers)
        keys = [(site, layer) for layer in layers for site in Site]
        train, held = (
            record(self.wide, windows, keys, set(), self.ops, _quiet)
            for windows in (self._texts.train, self._texts.held_out)
        )
        survey = make_survey(
            self.wide,
            self.loaded.model,
            held,
            self._texts.held_out,
            max_loss=0.01,
            heads=False,
            ops=self.ops,
            tick=_quiet,
        )
        return train, held, survey

    def predicted(self, tokens: int, distance: float) -> dict[str, Any]:
        """Predictors of every layer from so many tokens and from so early an input: perplexity
        over dense with all of them at one threshold. Layers without so early an input take the
        earliest they have."""
        train, held, survey = self._recorded
        train = train.first(tokens)
        chosen: dict[Key, Candidate] = {}
        for layer in range(self.config.num_hidden_layers):
            key = (Site.NEURONS, layer)
            far = min(distance, layer + 0.5)
            mlp = self.wide.weights.blocks[layer].mlp
            task = Task(key, survey.sites[key], survey.price, Neurons.of(mlp, self.wide.activation))
            (chosen[key],) = learn(task, train, held, [RANK], far, TrainOptions(), self.ops)
        threshold = self._threshold(chosen, survey)
        selector = PlanSelector(
            self.config.num_hidden_layers,
            self.config.intermediate_size,
            {k: Choice(c.predictor, c.distance, threshold) for k, c in chosen.items()},
        )
        windows = torch.stack(self.windows(HELDOUT_TEXT, JUDGED // WINDOW))
        losses = window_losses(self.wide, windows, selector, self.ops)
        dense = window_losses(self.wide, windows, Dense(), self.ops)
        ratio = mean_rise(losses, dense, [WINDOW] * len(losses)).exp()
        used = selector.meter.used(Site.NEURONS)
        missed = [
            c.curve.at(threshold, survey.sites[key].sensitivity).missed_mass
            for key, c in chosen.items()
        ]
        return {
            "tokens": tokens,
            "distance": distance,
            "threshold": threshold,
            "perplexity_ratio": ratio.value,
            "perplexity_ratio_error": ratio.error,
            "density": sum(used) / len(used) / self.config.intermediate_size,
            "missed_mass": missed,
        }

    def _threshold(self, chosen: dict[Key, Candidate], survey: Survey) -> float:
        """At which the layers together list `DENSITY` of their neurons."""
        wanted = DENSITY * self.config.intermediate_size * len(chosen)

        def listed(threshold: float) -> float:
            return sum(
                c.curve.at(threshold, survey.sites[key].sensitivity).selected
                for key, c in chosen.items()
            )

        low, high = LOW, HIGH
        while high - low > STEP:
            middle = (low + high) / 2
            low, high = (middle, high) if listed(middle) > wanted else (low, middle)
        return high

    def drift(self, kind: str) -> dict[str, Any]:
        """The embedded plan on a kind of text, as a server would see it."""
        path, preset = self._kinds()[kind]
        text = read_text(
            path, self.tokenizer, WINDOW, preset, window=WINDOW, max_tokens=DRIFT_TOKENS
        )
        plan = load_plan(MODEL)
        found = compare(self.loaded.model, text, plan.selector(self.loaded, LEVEL))
        assert found.reads is not None
        return {
            "kind": kind,
            "tokens": found.dense.tokens,
            "dense_perplexity": found.dense.perplexity,
            "perplexity_ratio": found.ratio,
            "perplexity_ratio_error": found.ratio_error,
            "kl": found.kl,
            "agreement": found.agreement,
            "density": found.reads.neuron_density,
            "densities": found.reads.neurons,
            "planned_density": plan.level(LEVEL).report["neuron_density"],
            "planned_densities": [
                plan.level(LEVEL).report["layers"][f"neurons.{n}"]["density"]
                for n in range(self.config.num_hidden_layers)
            ],
        }

    def _kinds(self) -> dict[str, tuple[Path, str]]:
        """File and preset of every kind of text."""
        spoken = self._scratch / "dialogue.txt"
        documents = (self._corpus / "validation.txt").read_text(encoding="utf-8")
        found = [d.strip() for d in documents.split("<|endoftext|>") if _is_spoken(d.strip())]
        with atomic_write(spoken) as aside:
            aside.write_text("\n<|endoftext|>\n".join(found), encoding="utf-8")
        return {
            "books": (HELDOUT_TEXT, "documents"),
            "dialogue": (spoken, "documents"),
            "encyclopaedia": (self._evaluation / "wikitext2.test.raw.txt", "wikitext2"),
            "web": (self._evaluation / "c4.sample1480.jsonl", "documents"),
        }


KINDS = ("books", "dialogue", "encyclopaedia", "web")


def _is_spoken(document: str) -> bool:
    lines = document.split("\n")
    return len(lines) > 2 and sum(bool(_SPOKEN.match(line)) for line in lines) >= len(lines) / 2


def _quiet(done: int, total: int) -> None:
    """Progress that nobody watches."""


def results(study: Study, pieces: Pieces) -> dict[str, Any]:
    """All pieces; what is missing for want of time is named."""
    trained = [(tokens, 0.0) for tokens in AMOUNTS]
    trained += [(TRAINED, distance) for distance in DISTANCES if distance]
    content: dict[str, Any] = {"model": MODEL, "predicted": [], "drift": [], "missing": []}
    todo: list[tuple[str, str, Callable[[], Any]]] = [("contexts", "contexts", study.contexts)]
    todo += [(f"drift {kind}", "drift", partial(study.drift, kind)) for kind in KINDS]
    todo += [
        (f"predicted {tokens} {far:g}", "predicted", partial(study.predicted, tokens, far))
        for tokens, far in trained
    ]
    for name, part, make in todo:
        try:
            found = pieces.kept(name, make)
        except Stopped:
            content["missing"].append(name)
            continue
        if isinstance(content.get(part), list):
            content[part].append(found)
        else:
            content[part] = found
    return content


def main(arguments: Sequence[str]) -> None:
    """Do what is left as far as the time goes, write what is there, and draw it."""
    corpus, evaluation, result, plots = (Path(a) for a in arguments[:4])
    seconds = float(arguments[4]) if arguments[4:] else math.inf
    pieces = Pieces(result.with_suffix(".work.json"), seconds)
    with torch.inference_mode(), tempfile.TemporaryDirectory() as scratch:
        content = results(Study(corpus, evaluation, Path(scratch)), pieces)
    content |= {"origin": vars(origin()), "machine": this_machine().to_json()}
    with atomic_write(result) as aside:
        aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if content["missing"]:
        print(f"missing: {', '.join(content['missing'])}; run the same command again")
    for path in draw(content, plots):
        print(f"wrote {path}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""The two-pass experiment against plain loops and transformers with hooks."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from dejavu.config import ModelConfig
from dejavu.errors import InputError
from dejavu.kernels.reference import TorchOps
from dejavu.load import load_model, random_model
from dejavu.models.base import DecoderLM
from dejavu.sparsity.budgets import Histogram, kept, mass_count, ranks
from dejavu.sparsity.losses import block_mean, token_losses
from dejavu.sparsity.measure import measure
from dejavu.sparsity.measure_plots import save_plots
from dejavu.sparsity.measure_tables import tables
from dejavu.sparsity.measurement import Measurement, MeasureOptions
from dejavu.sparsity.policy import Dense, Site
from dejavu.sparsity.record import Recorder
from dejavu.sparsity.replay import Replay
from dejavu.sparsity.similarity import Overlap, ResidualFlow

NEURONS, HEADS, LAYERS, VOCAB = 50, 4, 2, 67
Reference = transformers.PreTrainedModel
Pair = tuple[DecoderLM, Reference]


def _pair(folder: Path, config: transformers.PretrainedConfig) -> Pair:
    """A random model with real biases and spread, ours and the reference's."""
    torch.manual_seed(7)
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            spread = 0.1 if "norm" in name else 0.3
            parameter.add_(torch.randn_like(parameter) * spread)
    reference.save_pretrained(folder)
    return load_model(folder, dtype="fp32").model, reference


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    config = transformers.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        word_embed_proj_dim=24,
        ffn_dim=NEURONS,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=40,
        dropout=0.0,
    )
    return _pair(tmp_path_factory.mktemp("opt"), config)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=NEURONS,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=40,
    )
    return _pair(tmp_path_factory.mktemp("llama"), config)


def windows(lengths: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths]


def parts(reference: Reference) -> Iterator[tuple[torch.nn.Linear, torch.nn.Linear]]:
    """(output projection, down projection) of each layer."""
    if reference.config.model_type == "opt":
        for layer in reference.model.decoder.layers:
            yield layer.self_attn.out_proj, layer.fc2
    else:
        for layer in reference.model.layers:
            yield layer.self_attn.o_proj, layer.mlp.down_proj


Edit = Callable[[int, int, Tensor], Tensor]  # layer, 0 for heads or 1 for neurons, input -> input


@torch.inference_mode()
def run_reference(reference: Reference, ids: Tensor, edit: Edit) -> float:
    """Sum of losses with the inputs of output and down projections edited."""
    handles = []
    for layer, pair in enumerate(parts(reference)):
        for kind, module in enumerate(pair):

            def hook(
                _: object, inputs: tuple[Tensor], layer: int = layer, kind: int = kind
            ) -> tuple:
                return (edit(layer, kind, inputs[0]),)

            handles.append(module.register_forward_pre_hook(hook))
    logits = reference(ids[None, :-1]).logits[0]
    for handle in handles:
        handle.remove()
    return float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))


def observe_reference(reference: Reference, ids: Tensor) -> tuple[float, dict, dict]:
    """Loss, contributions `[N, F]` and group norms `[N, K]` by layer, from plain loops."""
    projections = list(parts(reference))
    groups = getattr(reference.config, "num_key_value_heads", HEADS)
    neurons, heads = {}, {}

    def look(layer: int, kind: int, x: Tensor) -> Tensor:
        weight = projections[layer][kind].weight  # [D, in]
        rows = x.reshape(-1, x.shape[-1])
        if kind == 1:
            neurons[layer] = rows.abs() * weight.norm(dim=0)
        else:
            size = weight.shape[1] // groups
            slices = [slice(g * size, (g + 1) * size) for g in range(groups)]
            heads[layer] = torch.stack(
                [torch.stack([(weight[:, s] @ row[s]).norm() for s in slices]) for row in rows]
            )
        return x

    return run_reference(reference, ids, look), neurons, heads


@torch.inference_mode()
def reference_stream(reference: Reference, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The residual stream `[N, D]` after attention and after the MLP of each layer."""
    middle: list[Tensor] = []
    after: list[Tensor] = []
    is_opt = reference.config.model_type == "opt"
    layers = reference.model.decoder.layers if is_opt else reference.model.layers
    handles = []
    for layer in layers:
        norm = layer.final_layer_norm if is_opt else layer.post_attention_layernorm
        handles.append(norm.register_forward_pre_hook(lambda _, x: middle.append(x[0])))
        handles.append(
            layer.register_forward_hook(
                lambda *at: after.append(at[2][0] if isinstance(at[2], tuple) else at[2])
            )
        )
    reference(ids[None, :-1])
    for handle in handles:
        handle.remove()
    width = reference.config.hidden_size
    pairs = zip(middle, after, strict=True)
    return [(m.reshape(-1, width), a.reshape(-1, width)) for m, a in pairs]


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_recorder_sees_what_transformers_compute(name: str, request: pytest.FixtureRequest) -> None:
    model, reference = request.getfixturevalue(name)
    (ids,) = windows([21])
    _, neurons, heads = observe_reference(reference, ids)
    recorder = Recorder(model)
    with torch.inference_mode():
        model.logits(ids[:-1], model.new_cache(20), recorder, TorchOps())
    assert len(recorder.residuals) == 2 * LAYERS + 1
    for layer, (middle, after) in enumerate(reference_stream(reference, ids)):
        for site, scores, stream in (
            (Site.HEADS, heads[layer], middle),
            (Site.NEURONS, neurons[layer], after),
        ):
            torch.testing.assert_close(recorder.scores(site, layer), scores, rtol=1e-4, atol=1e-5)
            relative = scores / stream.norm(dim=1, keepdim=True)
            torch.testing.assert_close(
                recorder.relative_scores(site, layer), relative, rtol=1e-4, atol=1e-5
            )


@torch.inference_mode()
def test_replay_of_everything_is_the_dense_run(opt: Pair) -> None:
    model, _ = opt
    (ids,) = windows([17])
    masks = {(Site.NEURONS, i): torch.ones(17, NEURONS, dtype=torch.bool) for i in range(LAYERS)}
    masks |= {(Site.HEADS, i): torch.ones(17, HEADS, dtype=torch.bool) for i in range(LAYERS)}
    dense = model.logits(ids, model.new_cache(17), Dense(), TorchOps())
    replayed = model.logits(ids, model.new_cache(17), Replay(masks), TorchOps())
    assert torch.equal(dense, replayed)


@pytest.mark.parametrize("name", ["opt", "llama"])
@pytest.mark.parametrize("kind", ["neurons", "heads", "both"])
def test_true_share_equals_masking_in_transformers(
    name: str, kind: str, request: pytest.FixtureRequest
) -> None:
    """Uniform budget: every token keeps its own top 30 % (neurons) and top half (heads)."""
    model, reference = request.getfixturevalue(name)
    texts = windows([30, 12, 2])
    options = MeasureOptions(densities=(0.5,), parts=(kind,), budgets=("uniform",), static=())
    (result,) = measure(model, texts, options=options).find("true", kind, "uniform")

    dense = sparse = 0.0
    for ids in texts:
        loss, neurons, heads = observe_reference(reference, ids)
        dense += loss

        def drop(layer: int, part: int, x: Tensor, heads=heads, neurons=neurons) -> Tensor:
            if kind != "both" and part != ("heads", "neurons").index(kind):
                return x
            scores = (heads, neurons)[part][layer]
            k = scores.shape[1] // 2
            order = scores.argsort(dim=1, descending=True, stable=True)  # zeros tie
            mask = torch.zeros_like(scores).scatter(1, order[:, :k], 1.0)
            return x * mask.repeat_interleave(x.shape[-1] // scores.shape[1], dim=1).view_as(x)

        sparse += run_reference(reference, ids, drop)
    tokens = sum(len(ids) - 1 for ids in texts)
    assert result.loss == pytest.approx(sparse / tokens, rel=1e-5)
    assert result.ratio == pytest.approx(
        float(torch.tensor((sparse - dense) / tokens).exp()), rel=1e-4
    )
    for layers in result.density.values():
        assert layers == [0.5] * LAYERS


def test_natural_arms_and_extremes(opt: Pair) -> None:
    model, reference = opt
    texts = windows([25, 25])
    options = MeasureOptions(
        densities=(1.0, 0.6), thresholds=(1e-30, 0.5, 1e9), static=("same",), budgets=("uniform",)
    )
    m = measure(model, texts, options=options)
    (exact,) = m.find("exact")
    active = [layer.active for layer in m.layers]
    assert exact.density[Site.NEURONS] == pytest.approx(active)
    assert all(0.2 < share < 0.8 for share in active)
    assert exact.ratio == 1.0
    assert exact.ratio_error == 0.0
    everything, some, nothing = m.find("threshold")
    assert everything.ratio == 1.0
    assert everything.density == exact.density
    assert some.ratio != 1.0
    scores = [observe_reference(reference, ids)[1] for ids in texts]
    for layer, share in enumerate(some.density[Site.NEURONS]):
        above = torch.cat([s[layer] >= 0.5 for s in scores]).double().mean()
        assert 0.1 < share < active[layer]
        assert share == pytest.approx(float(above), abs=1e-3)
    assert nothing.density[Site.NEURONS] == [0.0] * LAYERS
    assert nothing.missed_mass[Site.NEURONS] == pytest.approx([1.0] * LAYERS)
    silent = sum(
        run_reference(reference, ids, lambda _, part, x: x * 0 if part else x) for ids in texts
    )
    assert nothing.loss == pytest.approx(silent / 48, rel=1e-5)
    for family in ("true", "static-same"):
        for kind in ("neurons", "heads", "both"):
            full, part = m.find(family, kind, "uniform")
            assert full.ratio == 1.0, (family, kind)
            assert all(x == 0 for layer in full.missed_mass.values() for x in layer)
            assert part.loss != m.loss or kind == "neurons"  # 60 % may hold all active neurons


@pytest.mark.parametrize("budget", ["global", "relative"])
def test_missed_mass_and_one_threshold_for_all_layers(opt: Pair, budget: str) -> None:
    model, reference = opt
    texts = windows([31, 31], seed=5)
    seen = [observe_reference(reference, ids)[1] for ids in texts]
    scores = torch.stack([torch.cat([s[i] for s in seen]) for i in range(LAYERS)])
    options = MeasureOptions(densities=(0.2,), parts=("neurons",), static=())
    m = measure(model, texts, options=options)
    (uniform,) = m.find("true", budget="uniform")
    top = scores.topk(kept(0.2, NEURONS), dim=2).values.sum(dim=(1, 2))
    missed = 1 - top / scores.sum(dim=(1, 2))
    assert uniform.missed_mass[Site.NEURONS] == pytest.approx(missed.tolist(), abs=1e-5)

    (shared,) = m.find("true", budget=budget)
    if budget == "relative":
        streams = [reference_stream(reference, ids) for ids in texts]
        norms = [torch.cat([s[i][1].norm(dim=1) for s in streams]) for i in range(LAYERS)]
        scores = scores / torch.stack(norms)[..., None]
    threshold = scores.flatten().topk(int(0.2 * scores.numel())).values[-1]
    wanted = (scores >= threshold).float().mean(dim=(1, 2))
    # The threshold may be one bin, 1/128 of its value, above the exact one.
    low = (scores >= threshold * (1 + 1 / 64)).float().mean(dim=(1, 2))
    for got, upper, lower in zip(shared.density[Site.NEURONS], wanted, low, strict=True):
        assert lower - 1e-6 <= got <= upper + 1e-6
    assert shared.density[Site.NEURONS] != pytest.approx([0.2] * LAYERS, abs=1e-3)


@pytest.mark.parametrize("budget", ["uniform", "global", "relative"])
@pytest.mark.parametrize("text", ["other", "same"])
def test_static_choice(opt: Pair, budget: str, text: str) -> None:
    """The parts with the largest mean, on the text that the rule names."""
    model, reference = opt
    texts, others = windows([20, 9], seed=1), windows([22], seed=2)
    options = MeasureOptions(
        densities=(0.3,), parts=("neurons",), budgets=(budget,), static=(text,), thresholds=()
    )
    m = measure(model, texts, others, options)
    rule = {"other": "static", "same": "static-same"}[text]
    (result,) = m.find(rule, budget=budget)

    chosen_on = others if text == "other" else texts
    seen = [observe_reference(reference, ids)[1] for ids in chosen_on]
    if budget == "relative":
        for scores, ids in zip(seen, chosen_on, strict=True):
            for i, (_, after) in enumerate(reference_stream(reference, ids)):
                scores[i] = scores[i] / after.norm(dim=1, keepdim=True)
    mean = torch.stack([torch.cat([s[i] for s in seen]).mean(dim=0) for i in range(LAYERS)])
    mask = torch.zeros_like(mean)
    if budget == "uniform":
        mask.scatter_(1, mean.topk(15, dim=1).indices, 1.0)
    else:
        mask.view(-1)[mean.flatten().topk(30).indices] = 1.0
    losses = [
        run_reference(reference, ids, lambda i, part, x: x * mask[i] if part else x)
        for ids in texts
    ]
    assert result.loss == pytest.approx(sum(losses) / 27, rel=1e-5)
    assert result.density[Site.NEURONS] == pytest.approx((mask.sum(dim=1) / NEURONS).tolist())
    if text == "other":
        (true,) = m.find("true", budget=budget)
        (worth,) = m.contextuality
        assert worth.nats == pytest.approx(result.loss - true.loss, rel=1e-6)
        assert (worth.parts, worth.budget, worth.density) == ("neurons", budget, 0.3)


def test_overlaps_and_residuals(opt: Pair) -> None:
    model, reference = opt
    texts, others = windows([18, 11], seed=3), windows([14], seed=4)
    m = measure(model, texts, others, MeasureOptions(densities=(), distances=(1, 3, 30), mass=0.8))
    assert m.active_set == "nonzero"

    def sets(ids: Tensor, layer: int) -> list[set[int]]:
        scores = observe_reference(reference, ids)[1][layer]
        return [set(row.nonzero().flatten().tolist()) for row in scores]

    for layer, figures in enumerate(m.layers):
        for distance in (1, 3):
            found = []
            for ids in texts:
                active = sets(ids, layer)
                found += [
                    len(a & b) / len(a | b)
                    for a, b in zip(active, active[distance:], strict=False)
                    if a | b
                ]
            assert figures.neuron_overlap[str(distance)] == pytest.approx(sum(found) / len(found))
        assert figures.neuron_overlap["30"] is None
        pairs = list(zip(sets(texts[0], layer), sets(others[0], layer), strict=False))
        assert len(pairs) == 13
        mean = sum(len(a & b) / len(a | b) for a, b in pairs) / len(pairs)
        assert figures.neuron_overlap["other"] == pytest.approx(mean)
    with torch.inference_mode():
        hidden = [
            reference(ids[None, :-1], output_hidden_states=True).hidden_states for ids in texts
        ]
    before = torch.cat([h[0][0] for h in hidden])
    after = torch.cat([h[1][0] for h in hidden])
    change = m.layers[0].change
    assert change.cosine == pytest.approx(
        float(torch.cosine_similarity(before, after).mean()), rel=1e-4
    )
    assert change.block == pytest.approx(
        float(((after - before).norm(dim=1) / before.norm(dim=1)).mean()), rel=1e-4
    )


def test_models_without_exact_zeros_are_judged_by_mass(llama: Pair) -> None:
    model, reference = llama
    texts = windows([20])
    m = measure(model, texts, options=MeasureOptions(densities=(), mass=0.9))
    assert m.active_set == "mass"
    _, neurons, heads = observe_reference(reference, texts[0])
    for layer, figures in enumerate(m.layers):
        assert figures.active == 1.0
        for scores, got in (
            (neurons[layer], figures.neurons_for_mass),
            (heads[layer], figures.heads_for_mass),
        ):
            counts = []
            for row in scores.tolist():
                total, taken = 0.0, 0
                for value in sorted(row, reverse=True):
                    if total < 0.9 * sum(row):
                        total, taken = total + value, taken + 1
                counts.append(taken / len(row))
            assert got == pytest.approx(sum(counts) / len(counts), abs=2e-3)


def test_thresholded_relu_counts_what_it_zeroes_as_inactive() -> None:
    def config(activation: str, threshold: float = 0.0) -> ModelConfig:
        return ModelConfig(
            model_type="llama",
            vocab_size=VOCAB,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=NEURONS,
            max_position_embeddings=32,
            activation=activation,
            activation_threshold=threshold,
            norm="rms_norm",
        )

    def active(activation: str, threshold: float = 0.0) -> float:
        model = random_model(config(activation, threshold), dtype="fp32", seed=1)
        return measure(model, texts, options=options).layers[0].active

    texts, options = windows([30]), MeasureOptions(densities=(), thresholds=())
    relu = active("relu")
    assert active("fatrelu", 0.0) == relu
    assert 0 < active("fatrelu", 0.05) < relu - 0.05
    assert active("fatrelu", 1e9) == 0.0


def test_same_input_same_json(opt: Pair) -> None:
    model, _ = opt
    texts, others = windows([20, 30]), windows([20, 9, 9], seed=9)
    options = MeasureOptions(densities=(1.0, 0.3))
    steps: list[tuple[int, int]] = []
    first = measure(model, texts, others, options, lambda done, total: steps.append((done, total)))
    second = measure(model, texts, others, options)
    text = json.dumps(first.to_json(), allow_nan=False)
    assert text == json.dumps(second.to_json(), allow_nan=False)
    assert [done for done, _ in steps][-1] == steps[-1][1]
    assert steps == sorted(steps)
    document = json.loads(text)
    assert document["options"]["densities"] == [1.0, 0.3]
    assert document["tokens"] == 48
    assert len(document["arms"]) == 1 + 3 + 3 * 3 * 3 * 2


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"densities": (0.0,)}, "densities"),
        ({"densities": (float("nan"),)}, "densities"),
        ({"thresholds": (-1.0,)}, "thresholds"),
        ({"distances": (0,)}, "distances"),
        ({"mass": 0.0}, "mass"),
        ({"parts": ("neuron",)}, "parts"),
        ({"budgets": ("none",)}, "budgets"),
        ({"static": ("others",)}, "static"),
    ],
)
def test_bad_options_name_the_field(change: dict[str, object], field: str) -> None:
    with pytest.raises(InputError, match=field):
        replace(MeasureOptions(), **change)


@pytest.mark.parametrize(
    ("texts", "others", "message"),
    [
        ([], [10], "no text"),
        ([1], [10], "has 1 tokens"),
        ([42], [10], "has 42 tokens"),
        ([10], [0], "has 0 tokens"),
        ([10], [], "other_windows"),
    ],
)
def test_bad_windows(opt: Pair, texts: list[int], others: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        measure(opt[0], windows(texts), windows(others))


@pytest.fixture(scope="module")
def small(opt: Pair) -> Measurement:
    options = MeasureOptions(densities=(0.5, 0.2))
    return measure(opt[0], windows([20, 20]), windows([20], seed=1), options)


def test_tables_show_every_layer_and_arm(small: Measurement) -> None:
    from rich.console import Console

    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    for table in tables(small):
        console.print(table)
    text = console.export_text()
    assert f"{small.layers[1].active:.1%}" in text
    for result in small.arms:
        assert f"{result.ratio:.3f}" in text or f"{result.ratio:.0f}" in text


@pytest.mark.filterwarnings("error")
def test_little_asked_little_shown(opt: Pair, tmp_path: Path) -> None:
    options = MeasureOptions(densities=(), thresholds=(), distances=())
    m = measure(opt[0], windows([5]), options=options)
    assert len(m.arms) == 1
    assert [table.row_count for table in tables(m)] == [LAYERS, 1, 0]
    pytest.importorskip("matplotlib")
    assert len(save_plots(m, tmp_path)) == 4


def test_plots_leave_matplotlib_alone(small: Measurement, tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    before, pyplot = dict(matplotlib.rcParams), "matplotlib.pyplot" in sys.modules
    paths = save_plots(small, tmp_path / "plots")
    assert sorted(path.name for path in paths) == sorted(
        entry.name for entry in (tmp_path / "plots").iterdir()
    )
    assert all(path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for path in paths)
    assert ("matplotlib.pyplot" in sys.modules) == pyplot
    assert dict(matplotlib.rcParams) == before


def test_ranks_break_ties_by_number() -> None:
    scores = torch.tensor([[0.0, 2.0, 0.0, 2.0, 1.0]])
    assert ranks(scores).tolist() == [[3, 0, 4, 1, 2]]
    assert ranks(torch.zeros(0, 3)).shape == (0, 3)


@pytest.mark.parametrize(
    ("density", "count"), [(1.0, 16), (0.05, 1), (0.5, 8), (0.03, 1), (0.8, 13)]
)
def test_kept(density: float, count: int) -> None:
    assert kept(density, 16) == count


def test_mass_count() -> None:
    scores = torch.tensor([[4.0, 3.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 5.0, 0.0]])
    assert mass_count(scores, 0.7).tolist() == [2, 0, 1]
    assert mass_count(scores, 0.71).tolist() == [3, 0, 1]
    assert mass_count(scores, 1.0).tolist() == [4, 0, 1]


@pytest.mark.parametrize("density", [1.0, 0.5, 0.37, 0.01, 1e-9])
def test_histogram_threshold(density: float) -> None:
    generator = torch.Generator().manual_seed(0)
    layers = [torch.randn(301, 7, generator=generator).relu() * scale for scale in (1.0, 0.01)]
    histogram = Histogram(2)
    for layer, scores in enumerate(layers):
        for part in scores.t().split(3):  # not contiguous
            histogram.add(layer, part)
    scores = torch.cat([x.flatten() for x in layers])
    threshold = histogram.threshold(density)
    share = float((scores >= threshold).float().mean())
    assert threshold > 0
    assert share <= density
    positive = float((scores > 0).float().mean())
    below = float((scores >= threshold * (1 - 1 / 64)).float().mean())
    assert share == pytest.approx(positive) or below > density


def test_losses_and_their_error() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(600, 11, generator=generator) * 5
    targets = torch.randint(0, 11, (600,), generator=generator)
    losses = token_losses(logits, targets)
    wanted = torch.nn.functional.cross_entropy(logits.double(), targets, reduction="none")
    torch.testing.assert_close(losses, wanted, rtol=0, atol=2e-6)
    assert token_losses(logits[:0], targets[:0]).shape == (0,)
    blocks = losses.view(6, 100).sum(dim=1).tolist()
    mean = block_mean(blocks, [100] * 6)
    means = torch.tensor(blocks) / 100
    assert mean.value == pytest.approx(float(losses.mean()))
    assert mean.error == pytest.approx(float(means.std() / 6**0.5), rel=1e-5)
    assert block_mean([3.0], [2]) == (1.5, None)
    assert mean.exp().error == pytest.approx(mean.exp().value * mean.error)


def test_overlap_and_flow_of_hostile_inputs() -> None:
    overlap = Overlap(1)
    overlap.add(0, torch.zeros(3, 4, dtype=torch.bool), torch.zeros(5, 4, dtype=torch.bool))
    overlap.add(0, torch.ones(0, 4, dtype=torch.bool), torch.ones(2, 4, dtype=torch.bool))
    assert overlap.means() == [None]
    overlap.add(0, torch.tensor([[True, True, False]]), torch.tensor([[False, True, True]]))
    assert overlap.means() == [pytest.approx(1 / 3)]
    flow = ResidualFlow(1)
    flow.add([torch.tensor([x]) for x in ([2.0, 0.0], [2.0, 4.0], [-1.0, 0.0])])
    (change,) = flow.means()
    assert change == pytest.approx((-1.0, 1.5, 2.0, 5 / 20**0.5))
    flow = ResidualFlow(1)
    flow.add([torch.zeros(2, 3)] * 3)
    (change,) = flow.means()
    assert (change.block, change.attention, change.mlp) == (0.0, 0.0, 0.0)


def test_a_real_model_is_as_sparse_as_known(shared: Path) -> None:
    """Shares known from 16 windows; one window of a text differs by some tenths of a point."""
    model = load_model(shared / "models" / "relu-30m", dtype="fp32").model
    tokenizer = transformers.AutoTokenizer.from_pretrained(shared / "models" / "relu-30m")
    text = (shared / "corpus" / "validation.txt").read_text(encoding="utf-8")[:12000]
    ids = torch.tensor(tokenizer(text, verbose=False).input_ids)
    options = MeasureOptions(densities=(), thresholds=(0.1,))
    m = measure(model, [ids[:513]], options=options)
    known = [0.218, 0.022, 0.035, 0.039, 0.049, 0.072, 0.100, 0.148]
    for layer, share in zip(m.layers, known, strict=True):
        assert layer.active == pytest.approx(share, rel=0.2)
    (threshold,) = m.find("threshold")
    assert threshold.mean_density(Site.NEURONS) == pytest.approx(0.074, rel=0.15)
    assert 0.99 < threshold.ratio < 1.01

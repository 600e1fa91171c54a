"""What a benchmark reports; never how fast anything was."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from statistics import median

import pytest

from dejavu.bench import decode, summary
from dejavu.bench.arms import ArmInfo
from dejavu.bench.decode import bench, bench_subject
from dejavu.bench.options import BenchOptions
from dejavu.bench.subject import RANDOM_NOTICE, open_subject
from dejavu.errors import InputError
from dejavu.sparsity.policies import parse_policy
from dejavu.sparsity.policy import Selector

QUICK = BenchOptions(
    densities=(), peers=(), threads=1, prompt_tokens=6, new_tokens=3, skipped=0, repeats=1
)


def test_json_holds_every_condition(result):
    told = json.loads(json.dumps(result.to_json()))
    assert told.keys() == {
        "name",
        "random_weights",
        "dense_bytes",
        "cache_resident",
        "read_bandwidth",
        "roofline_ms",
        "arms",
        "missing",
        "warnings",
        "conditions",
        "machine",
        "origin",
    }
    assert told["conditions"].keys() == {
        "shape",
        "weights",
        "dtype",
        "device",
        "threads",
        "isa",
        "batch",
        "prompt_tokens",
        "new_tokens",
        "skipped",
        "repeats",
        "sampling",
        "rank",
        "head_rank",
        "look_ahead",
        "cuts",
        "seed",
    }
    assert told["machine"].keys() >= {"cpu", "cores", "caches", "last_level_cache", "isas"}
    assert told["origin"].keys() == {
        "date",
        "revision",
        "versions",
        "environment",
        "load_average",
    }
    assert told["origin"]["versions"].keys() >= {"python", "torch", "transformers", "dejavu-llm"}
    assert told["conditions"]["shape"]["hidden_size"] == 32
    assert told["read_bandwidth"] > 0
    for arm in told["arms"]:
        assert arm["ms_per_token"].keys() == {"median", "p10", "p90", "least"}
        assert len(arm["repeat_medians"]) == 2
        assert arm["threads"] == 1
        assert arm["gb_per_second"] > 0
        assert arm["faster_than"].keys() == {a["name"] for a in told["arms"]} - {arm["name"]}


def test_arms_and_their_programs(result):
    assert [(arm.name, arm.dtype) for arm in result.arms] == [
        ("dense", "fp32"),
        ("exact", "fp32"),
        ("forced 0.1", "fp32"),
        ("forced 0.4", "fp32"),
        ("transformers fp32", "fp32"),
        ("CTranslate2 int8", "int8"),
    ]
    assert [arm.recorded for arm in result.arms[:4]] == [True, True, True, False]
    assert RANDOM_NOTICE in result.warnings


def test_forced_densities_come_out_within_a_point(result):
    for asked in (0.1, 0.4):
        density = result.arm(f"forced {asked}").density
        assert density.asked == asked
        assert density.neurons == pytest.approx(asked, abs=0.01)
        assert density.neurons - 0.02 < density.active <= density.neurons
        assert len(density.neurons_by_layer) == 3


def test_bytes_by_hand(result):
    hidden, neurons, layers, vocab = 32, 200, 3, 104
    block = 4 * (hidden * hidden + hidden) + 2 * neurons * hidden + neurons + hidden + 4 * hidden
    dense = 4 * (layers * block + 2 * hidden + vocab * hidden)
    assert result.dense_bytes == dense
    for name in ("dense", "transformers fp32"):
        assert result.arm(name).bytes_per_token == dense
    int8 = layers * (4 * hidden * (hidden + 4) + 2 * neurons * (hidden + 4)) + vocab * (hidden + 4)
    vectors = 4 * (layers * (9 * hidden + neurons) + 2 * hidden)
    assert result.arm("CTranslate2 int8").bytes_per_token == int8 + vectors
    rank = 9  # in 4 bits a sixth of the bytes of the first matrix in int8
    first, second = rank * (hidden // 2 + 4), neurons * (rank + 1) // 2
    predictors = layers * (first + second + 4 * neurons)
    arm = result.arm("forced 0.1")
    listed, active = arm.density.neurons, arm.density.active
    skipped = layers * neurons * 4 * ((1 - listed) * (hidden + 1) + (1 - active) * hidden)
    assert arm.bytes_per_token == pytest.approx(dense - skipped + predictors)
    assert arm.density.bytes == pytest.approx(arm.bytes_per_token / dense)
    exact = result.arm("exact")
    assert exact.density.neurons == 1.0
    assert exact.bytes_per_token == pytest.approx(
        dense - layers * neurons * 4 * hidden * (1 - exact.density.active)
    )
    assert result.arm("dense").density.bytes == 1.0


def test_ratios_agree_with_times(result):
    dense, forced = result.arm("dense"), result.arm("forced 0.1")
    ratio = dense.ms_per_token.median / forced.ms_per_token.median
    assert forced.faster_than["dense"] == pytest.approx(ratio)
    assert dense.faster_than["forced 0.1"] == pytest.approx(1 / ratio)
    assert dense.tokens_per_second == pytest.approx(1e3 / dense.ms_per_token.median)
    rate = dense.bytes_per_token / dense.ms_per_token.median / 1e6
    assert dense.gb_per_second == pytest.approx(rate)


def test_lopsided_comparisons_are_flagged(result):
    lopsided = {arm.name: arm.lopsided for arm in result.arms if arm.lopsided}
    assert lopsided == {
        "forced 0.4": ["steps not recorded, dense arm's recorded"],
        "CTranslate2 int8": ["weights in int8, dense arm in fp32"],
    }
    dense = ArmInfo("dense", "dejavu", "bf16", 2, recorded=True)
    assert summary.lopsided(dense, dense) == []
    assert summary.lopsided(replace(dense, threads=4), dense) == ["4 threads, dense arm 2"]


def test_small_models_get_no_roofline_and_large_ones_do(result, tiny, monkeypatch):
    assert result.cache_resident
    assert result.roofline_ms is None
    assert all(arm.of_roofline is None and arm.of_bandwidth is None for arm in result.arms)
    assert all(arm.of_bandwidth_then is None for arm in result.arms)
    assert any("cache-resident" in line for line in result.warnings)
    small = replace(result.machine, caches={"L2": result.dense_bytes // 4})
    monkeypatch.setattr(decode, "this_machine", lambda *_: small)
    large = bench_subject(tiny, {}, QUICK)
    assert not large.cache_resident
    assert large.roofline_ms == pytest.approx(large.dense_bytes / large.read_bandwidth / 1e6)
    (dense,) = large.arms
    assert dense.of_roofline == pytest.approx(large.roofline_ms / dense.ms_per_token.median)
    assert dense.of_bandwidth == pytest.approx(dense.of_roofline)


def test_turns_are_held_against_the_bandwidth_around_them(tiny, monkeypatch):
    rates = [8.0, 4.0, 2.0, 6.0]
    told = iter(rates)
    real = decode.open_backend

    def open_backend(*args, **options):
        return replace(real(*args, **options), read_bandwidth=lambda: next(told))

    monkeypatch.setattr(decode, "open_backend", open_backend)
    small = replace(decode.this_machine(tiny.loaded.model.device), caches={"L2": 1})
    monkeypatch.setattr(decode, "this_machine", lambda *_: small)
    done = bench_subject(tiny, {}, replace(QUICK, repeats=3))
    (dense,) = done.arms
    assert done.read_bandwidth == max(rates)
    around = [6.0, 3.0, 4.0]
    shares = [
        dense.bytes_per_token / ms / 1e6 / rate
        for ms, rate in zip(dense.repeat_medians, around, strict=True)
    ]
    assert dense.of_bandwidth_then == pytest.approx(median(shares))


def test_trained_models_read_their_own_tokens(tiny):
    options = replace(QUICK, new_tokens=8, repeats=2, exact=None)
    done = bench_subject(replace(tiny, random=False), {}, options)
    assert [arm.name for arm in done.arms] == ["dense", "exact"]
    assert [arm.agreeing for arm in done.arms] == [9, 9]
    assert done.conditions.sampling == "greedy"
    assert RANDOM_NOTICE not in done.warnings


def test_a_batch_counts_its_union_over_its_rows(gated):
    options = replace(QUICK, batch=3, densities=(0.25,), prompt_tokens=10, new_tokens=20)
    done = bench_subject(gated, {}, options)
    dense, forced = done.arms
    assert dense.bytes_per_token == pytest.approx(done.dense_bytes / 3)
    assert forced.density.neurons > 0.3  # read for any of three rows
    assert forced.density.active < forced.density.neurons
    assert done.conditions.batch == 3


class Silent(Selector):
    """Selects everything and counts nothing."""


def test_selectors_of_the_caller(tiny):
    threshold = parse_policy("threshold:value=0.1", tiny.loaded.model, lambda: [])
    done = bench_subject(tiny, {"silent": Silent(), "threshold": threshold}, QUICK)
    assert [arm.name for arm in done.arms] == ["dense", "silent", "threshold"]
    assert done.arm("silent").density is None
    assert any("does not count" in note for note in done.arm("silent").notes)


def test_peers_that_are_not_installed_are_reported(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    done = bench_subject(tiny, {}, replace(QUICK, peers=("ctranslate2",)))
    assert [arm.name for arm in done.arms] == ["dense"]
    (missing,) = done.missing
    assert missing.name == "ctranslate2"
    assert "dejavu-llm[peers]" in missing.reason


def test_progress_counts_the_turns(tiny):
    seen = []
    options = replace(QUICK, repeats=2, exact=True)
    bench_subject(tiny, {}, options, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_prompts_give_way_to_a_short_context(tiny):
    done = bench_subject(tiny, {}, replace(QUICK, prompt_tokens=None, new_tokens=50))
    assert done.conditions.prompt_tokens == 64 - 50 - 3
    with pytest.raises(InputError, match=r"prompt_tokens 12 and .* context of 64 .* at most .* 11"):
        bench_subject(tiny, {}, replace(QUICK, prompt_tokens=12, new_tokens=50))
    with pytest.raises(InputError, match="context of 64"):
        bench_subject(tiny, {}, replace(QUICK, new_tokens=61))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"repeats": 0}, "repeats"),
        ({"batch": 0}, "batch"),
        ({"skipped": -1}, "skipped"),
        ({"peers": ("vlm",)}, "unknown peer 'vlm'"),
        ({"peers": ("transformers:int8",)}, "dtype of transformers"),
    ],
)
def test_bad_options_are_refused_at_once(wrong, said):
    with pytest.raises(InputError, match=said):
        BenchOptions(**wrong)


def test_bad_names_and_densities(tiny):
    with pytest.raises(InputError, match="no arm named nobody"):
        bench_subject(tiny, {}, replace(QUICK, at_once=("nobody",)))
    with pytest.raises(InputError, match=r"\(0, 1\]"):
        bench_subject(tiny, {}, replace(QUICK, densities=(1.5,)))
    with pytest.raises(InputError, match="loaded already"):
        open_subject(tiny.loaded, dtype="bf16")
    with pytest.raises(InputError):
        bench("no-such-model-anywhere/", options=QUICK)

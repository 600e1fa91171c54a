"""Text in, text out: the real model, tiny ones, policies and plans."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from dejavu import (
    LLM,
    BackendError,
    DejavuError,
    InputError,
    PlanError,
    SamplingParams,
)
from dejavu.kernels.ops import Ops
from dejavu.kernels.selection import Selection
from dejavu.load import load_model
from dejavu.models.base import DecoderLM
from dejavu.predictor.plan import BaseModel, LayerPolicy, Level, Plan
from dejavu.sparsity.meter import MeteredSelector
from dejavu.sparsity.policy import Points, Site
from models.tiny import Case, build

from .stub import word_tokenizer


def model_folder(folder: Path, tokens: int) -> Path:
    """A tiny Llama of 128 outputs, the largest of which is 120, with a tokenizer of `tokens`."""
    case = build(Case("llama", "llama", {"vocab_size": 128}), folder)
    with torch.no_grad():
        # Id 120 wins wherever it may: its logit is the sum of all others' squares.
        case.reference.lm_head.weight[120] = 0
        head = torch.nn.functional.normalize(case.reference.lm_head.weight, dim=1)
        case.reference.lm_head.weight.copy_(head * 1e-3)
        case.reference.model.norm.weight.fill_(1.0)
        case.reference.lm_head.weight[120] = 1.0
    case.reference.save_pretrained(folder)
    word_tokenizer(tokens, bos_token="t001").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_more_outputs_than_tokens(tmp_path: Path, temperature: float) -> None:
    llm = LLM(model_folder(tmp_path, 100), threads=1)
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=3)
    answer = llm.generate("t005 t006", params)
    assert max(answer.token_ids) < 100
    assert answer.text == "".join(f" t{i:03}" for i in answer.token_ids)
    assert "".join(chunk.text for chunk in llm.stream("t005 t006", params)) == answer.text


def test_more_tokens_than_embeddings(tmp_path: Path) -> None:
    llm = LLM(model_folder(tmp_path, 200), threads=1)
    assert llm.generate("t005 t006", SamplingParams(max_tokens=3)).completion_tokens == 3
    with pytest.raises(InputError, match="token id 150"):
        llm.generate("t005 t150")


def test_constructor_refuses_what_would_have_no_effect(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"--device cuda .* use --device cpu"):
        LLM(tmp_path, device="cuda")
    with pytest.raises(InputError, match=r"'fast'.*no plan"):
        LLM(tmp_path, level="fast")
    with pytest.raises(InputError, match="not both"):
        LLM(tmp_path, plan=tmp_path, policy=object())  # type: ignore[arg-type]


def test_real_model_equals_transformers(relu_path: Path) -> None:
    llm = LLM(load_model(relu_path, dtype="fp32"), threads=1)
    prompts = ["Once upon a time", "The", "", "She opened the door and"]
    reference = transformers.AutoModelForCausalLM.from_pretrained(relu_path, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(relu_path)
    answers = llm.generate(prompts, SamplingParams(max_tokens=20))
    for text, answer in zip(prompts, answers, strict=True):
        ids = tokenizer(text, return_tensors="pt")
        assert answer.prompt_token_ids == tuple(ids.input_ids[0].tolist())
        out = reference.generate(**ids, do_sample=False, max_new_tokens=20)[0]
        assert answer.token_ids == tuple(out[ids.input_ids.shape[1] :].tolist())
        whole = tokenizer.decode(out, skip_special_tokens=True)
        assert text + answer.text == whole
        assert (
            "".join(c.text for c in llm.stream(text, SamplingParams(max_tokens=20))) == answer.text
        )


class Share(MeteredSelector):
    """The first `count` neurons of every layer but the last, for everyone."""

    def __init__(self, model: DecoderLM, count: int) -> None:
        super().__init__(model.config.num_hidden_layers)
        mask = torch.arange(model.config.intermediate_size) < count
        self._chosen = Selection.from_mask(mask[None])
        self._last = model.config.num_hidden_layers - 1

    def select(self, site: Site, layer: int, points: Points, ops: Ops) -> Selection | None:
        if site is not Site.NEURONS or layer == self._last:
            return None
        self.meter.tally(site, layer, self._chosen, len(points.source(site, layer)), ops)
        return self._chosen


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_policy_reaches_the_model_and_is_reported(relu_path: Path, share: float) -> None:
    """All kept: nothing changes; fewer: another text. The density says so."""
    model = load_model(relu_path)
    policy = Share(model.model, int(share * model.model.config.intermediate_size))
    llm = LLM(model, policy=policy, threads=1)
    params = SamplingParams(max_tokens=12)
    answer = llm.generate("Once upon a time", params)
    density = (7 * share + 1) / 8
    assert answer.density == pytest.approx(density)
    # Counted anew, also where rows come and go.
    for counter in policy.meter._counters.values():
        counter.fill_(1000)
    pair = llm.generate(["The", "A"], [params, SamplingParams(max_tokens=5)])
    assert [a.density for a in pair] == pytest.approx([density] * 2)
    assert llm.generate("The", SamplingParams(max_tokens=1)).density is None
    dense = LLM(model, threads=1).generate("Once upon a time", params)
    assert dense.density is None
    assert (answer.token_ids == dense.token_ids) == (share == 1.0)


def test_a_plan_is_loaded_by_level(relu_path: Path, tmp_path: Path) -> None:
    model = load_model(relu_path)
    layers = model.model.config.num_hidden_layers
    dense, full = (LayerPolicy("dense"),) * layers, (LayerPolicy("full"),) * layers
    levels = {"exact": Level(0.0, full, dense), "balanced": Level(0.01, dense, dense)}
    Plan(BaseModel.of(model, "relu-30m"), levels, {}).save(tmp_path / "plan")
    prompts = ["Once upon a time", "The"]
    params = SamplingParams(max_tokens=12)
    plain = LLM(model, threads=1).generate(prompts, params)
    llm = LLM(relu_path, tmp_path / "plan", level="exact", threads=1)
    answers = llm.generate(prompts, params)
    assert [a.token_ids for a in answers] == [a.token_ids for a in plain]
    assert answers[0].density == 1.0, "all neurons are scored, whatever the activation zeroes"
    with pytest.raises(PlanError, match="'fast'"):
        LLM(model, tmp_path / "plan", level="fast")
    llama = build(Case("llama", "llama"), tmp_path / "llama").path
    word_tokenizer(10).save_pretrained(llama)
    with pytest.raises(PlanError, match="made for relu-30m"):
        LLM(llama, tmp_path / "plan")


def test_end_tokens_come_from_every_place_that_names_them(tmp_path: Path, relu_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in relu_path.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 15]}')
    llm = LLM(folder, threads=1)
    params = SamplingParams(max_tokens=30, logit_bias={15: 100})
    assert llm.generate("x", params).token_ids == (15,)
    assert llm.generate("x", params).finish_reason == "stop"
    (folder / "generation_config.json").write_text('{"eos_token_id": "2"}')
    with pytest.raises(DejavuError, match=r"generation_config\.json: eos_token_id"):
        LLM(folder, threads=1)

"""Text in, text out: the public face, with a scripted model, the real one, and odd tokenizers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors

from dejavu import (
    LLM,
    BackendError,
    Completion,
    DejavuError,
    InputError,
    PlanError,
    SamplingParams,
)
from dejavu.engine.codec import Codec
from dejavu.kernels.ops import Ops
from dejavu.kernels.selection import Selection
from dejavu.load import load_model
from dejavu.models.base import DecoderLM
from dejavu.predictor.plan import BaseModel, LayerPolicy, Level, Plan
from dejavu.sparsity.meter import MeteredSelector
from dejavu.sparsity.policy import Points, Site
from models.tiny import Case, build

from .stub import ScriptedLM, scripted

MESSAGES = [{"role": "user", "content": "Hello"}]


def writer(codec: Codec, text: str, **options: object) -> tuple[LLM, ScriptedLM]:
    """An LLM that answers every prompt with the same text and then its end token."""
    ids = [*codec._encode(text, special=False), codec.eos_token_id]
    engine, model = scripted(
        lambda prompt: ids,
        vocab_size=codec.vocab_size,
        context=256,
        eos_token_ids=[codec.eos_token_id],
        **options,
    )
    return LLM.around(engine, codec), model


@pytest.fixture
def greek(codec: Codec) -> LLM:
    return writer(codec, "alpha beta gamma delta")[0]


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        ("beta gamma", "alpha ", "stop"),
        ("gam", "alpha beta ", "stop"),
        ("delta!", "alpha beta gamma delta", "stop"),
        ("a", "", "stop"),
        (["beta gamma", "beta"], "alpha ", "stop"),
        (["gamma", "beta gamma"], "alpha ", "stop"),
        (["delta", "gamma", "eta g"], "alpha b", "stop"),
        ([], "alpha beta gamma delta", "stop"),
        ("", "alpha beta gamma delta", "stop"),
        (None, "alpha beta gamma delta", "stop"),
    ],
)
def test_stop_strings(greek: LLM, stop: object, text: str, reason: str) -> None:
    params = SamplingParams(stop=stop)  # type: ignore[arg-type]
    whole = greek.generate("x", params)
    assert (whole.text, whole.finish_reason) == (text, reason)
    chunks = list(greek.stream("x", params))
    assert "".join(chunk.text for chunk in chunks) == text
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    last = chunks[-1]
    assert last.finish_reason == reason
    assert last.completion is not None
    assert last.completion.text == text
    assert last.completion.token_ids == whole.token_ids
    assert tuple(i for chunk in chunks for i in chunk.token_ids) == whole.token_ids
    assert (greek.engine.running, greek.engine.waiting) == (0, 0)


def test_the_end_token_has_no_text(greek: LLM) -> None:
    full = greek.generate("x")
    params = SamplingParams(stop_token_ids=[full.token_ids[3]])
    answer = greek.generate("x", params)
    assert answer.token_ids == full.token_ids[:4]
    assert answer.text == greek.codec.decode(list(full.token_ids[:3]))
    assert answer.finish_reason == "stop"
    assert "".join(chunk.text for chunk in greek.stream("x", params)) == answer.text


def test_held_text_comes_at_the_limit(greek: LLM) -> None:
    full = greek.generate("x")
    for tokens in range(1, len(full.token_ids)):
        params = SamplingParams(max_tokens=tokens, stop=["delta!", "alpha beta gamma delta?"])
        answer = greek.generate("x", params)
        assert answer.finish_reason == "length"
        assert answer.text == greek.codec.decode(list(answer.token_ids))
        assert "".join(chunk.text for chunk in greek.stream("x", params)) == answer.text


def test_no_more_is_held_than_may_become_a_stop_string(greek: LLM) -> None:
    told = ""
    for chunk in greek.stream("x", SamplingParams(stop="delta!")):
        told += chunk.text
        if told.endswith("gamma "):
            return
    pytest.fail("'gamma ' should have been sent before 'delta' was over")


def test_characters_of_several_tokens(codec: Codec) -> None:
    text = "naïve 汉字 😀 end"
    llm, _ = writer(codec, text)
    chunks = list(llm.stream("x"))
    assert len(chunks) > len(text.split()) + 3
    assert "".join(chunk.text for chunk in chunks) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in chunk.text for chunk in chunks)
    assert llm.generate("x", SamplingParams(stop="字")).text == "naïve 汉"


def test_answers_have_the_shape_of_the_question(greek: LLM) -> None:
    ids = greek.codec.encode("x")
    one = greek.generate("x")
    assert isinstance(one, Completion)
    assert [a.text for a in greek.generate(["x", "y"])] == [one.text] * 2
    assert [a.prompt_token_ids for a in greek.generate([ids, [2]])] == [tuple(ids), (2,)]
    assert greek.generate([]) == []
    each = greek.generate(["x", "y"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)])
    assert [a.completion_tokens for a in each] == [1, 2]
    (from_tensor,) = greek.generate([torch.tensor(ids)])  # type: ignore[list-item]
    assert from_tensor.prompt_token_ids == tuple(ids)


def test_completion_counts(greek: LLM) -> None:
    answer = greek.generate("x", SamplingParams(max_tokens=3))
    assert answer.prompt_tokens == len(greek.codec.encode("x"))
    assert answer.completion_tokens == len(answer.token_ids) == 3
    assert answer.tokens_per_second is not None
    assert answer.tokens_per_second == pytest.approx(2 / answer.decode_seconds)
    assert greek.generate("x", SamplingParams(max_tokens=1)).tokens_per_second is None
    json = answer.to_json()
    assert json["completion_tokens"] == 3
    assert json["text"] == answer.text


def test_many_more_prompts_than_rows(codec: Codec) -> None:
    llm, model = writer(codec, "alpha beta gamma delta", max_batch=2)
    answers = llm.generate(["x"] * 7, SamplingParams(stop="beta"))
    assert [a.text for a in answers] == ["alpha "] * 7
    assert len(model.prefills) == 7
    assert max(model.rows) == 2
    stopped = len(answers[0].token_ids)
    # A stop string frees its row at once: nobody's answer runs on to its end behind the scenes.
    assert sum(model.rows) == 7 * (stopped - 1)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["x", "y"], [SamplingParams()], "2 prompts and 1 params"),
        (["x"], [{"max_tokens": 3}], "params must be SamplingParams"),
        ([5], None, "a prompt is a text or a list of token ids"),
        ([[1.5]], None, "a prompt is a text or a list of token ids"),
        (["x", "word " * 300], None, "the context is 256"),
        (["x", [10**6]], None, "token id 1000000"),
        (["\ud800"], None, "not valid Unicode"),
    ],
)
def test_bad_input_is_refused_before_any_work(
    codec: Codec, prompts: object, params: object, message: str
) -> None:
    llm, model = writer(codec, "alpha")
    with pytest.raises(InputError, match=message):
        llm.generate(prompts, params)  # type: ignore[call-overload]
    assert model.prefills == []
    assert llm.engine.waiting == 0
    assert llm.generate("x").text == "alpha"


def test_stream_refuses_bad_input_at_once(greek: LLM) -> None:
    with pytest.raises(InputError, match="the context is 256"):
        greek.stream("word " * 300)


def test_broken_logits_are_an_error_that_names_the_prompt(codec: Codec) -> None:
    fine = [*codec._encode("fine", special=False), codec.eos_token_id]
    engine, _ = scripted(
        lambda ids: [None] if ids[-1] == 7 else fine,
        vocab_size=codec.vocab_size,
        eos_token_ids=[codec.eos_token_id],
    )
    llm = LLM.around(engine, codec)
    bystander = llm.stream([5])
    next(bystander)
    with pytest.raises(DejavuError, match=r"prompts\[1\].*not finite"):
        llm.generate([[6], [7]])
    with pytest.raises(DejavuError, match=r"^the logits"):
        list(llm.stream([7]))
    assert next(bystander).finish_reason or list(bystander)[-1].finish_reason == "stop"
    assert llm.generate([[6]])[0].text == "fine"
    assert (llm.engine.running, llm.engine.waiting) == (0, 0)


def test_interrupt_inside_a_stream_leaves_the_engine_usable(codec: Codec) -> None:
    llm, model = writer(codec, "alpha beta gamma delta")
    free = llm.engine._cache.free_blocks
    other = llm.stream("y")
    told = next(other).text

    def interrupt() -> None:
        model.before = lambda: None
        raise KeyboardInterrupt

    stream = llm.stream("x")
    next(stream)
    model.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert (llm.engine.running, llm.engine.waiting) == (1, 0)
    assert told + "".join(chunk.text for chunk in other) == "alpha beta gamma delta"
    model.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["x", "y"])
    assert llm.generate("x").text == "alpha beta gamma delta"
    assert (llm.engine.running, llm.engine._cache.free_blocks) == (0, free)


def test_dropped_and_interleaved_streams(greek: LLM) -> None:
    for chunk in greek.stream("x"):
        assert chunk.token_ids
        break
    assert greek.engine.running == 0
    greek.stream("never started")
    assert greek.engine.waiting == 0
    text = greek.generate("x").text
    first, second = greek.stream("x"), greek.stream("y")
    pairs = list(zip(first, second, strict=True))
    assert "".join(a.text for a, _ in pairs) == "".join(b.text for _, b in pairs) == text


def test_empty_prompt_is_the_bos(codec: Codec, greek: LLM) -> None:
    for prompt in ("", []):
        (chunk,) = greek.stream(prompt, SamplingParams(max_tokens=1))
        assert chunk.completion is not None
        assert chunk.completion.prompt_token_ids == (codec.bos_token_id,)


def word_tokenizer(size: int, **special: str) -> transformers.PreTrainedTokenizerFast:
    """Words t000, t001, ...; a `bos_token` goes first by the post-processor."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({f"t{i:03}": i for i in range(size)}, "t000"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if "bos_token" in special:
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, int(bos[1:]))]
        )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def test_no_bos_no_empty_prompt() -> None:
    codec = Codec(word_tokenizer(10))
    with pytest.raises(InputError, match="no BOS"):
        codec.encode("")
    assert codec.encode("t003 t004") == [3, 4]


def test_tokenizer_is_left_alone_and_never_truncates() -> None:
    tokenizer = word_tokenizer(10, bos_token="t001")
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=20)
    codec = Codec(tokenizer)
    state = tokenizer.backend_tokenizer.to_str()
    assert codec.encode("t002 t003 t004") == [1, 2, 3, 4]
    codec.encode_chat(MESSAGES, "{{ messages[0].content }}")
    codec.decode([1, 2])
    assert tokenizer.backend_tokenizer.to_str() == state


def test_template_writes_the_only_bos() -> None:
    codec = Codec(word_tokenizer(10, bos_token="t001", eos_token="t002"))
    template = (
        "{{ bos_token }}{% for m in messages %} t005 {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %} t006{% endif %}"
    )
    parts = [{"type": "text", "text": "t003"}, {"type": "text", "text": "t004"}]
    said = [{"role": "user", "content": parts}]
    assert codec.encode_chat(said, template) == [1, 5, 3, 4, 6]
    assert codec.encode_chat([{"role": "user", "content": "t003\nt004"}], template) == [
        1,
        5,
        3,
        4,
        6,
    ]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one"),
        ("Hello", "at least one"),
        ([{"content": "x"}], r"messages\[0\].*'role'"),
        ([*MESSAGES, {"role": "user"}], r"messages\[1\]\.content"),
        ([{"role": "user", "content": None}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\].*'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text"),
        ([{"role": "system", "content": "x"}], "no system role here"),
        ([{"role": "tool", "content": "x"}], "chat template"),
    ],
)
def test_bad_messages_are_refused(messages: object, message: str) -> None:
    codec = Codec(word_tokenizer(10))
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}"
        "{% elif messages[0].role == 'tool' %}{{ messages[0].content + 1 }}{% endif %}t003"
    )
    with pytest.raises(InputError, match=message):
        codec.encode_chat(messages, template)  # type: ignore[arg-type]


def test_chat(greek: LLM) -> None:
    with pytest.raises(InputError, match="chat_template="):
        greek.chat(MESSAGES)
    template = "{{ messages[0].content }}"
    answer = greek.chat(MESSAGES, chat_template=template)
    assert answer.text == "alpha beta gamma delta"
    assert answer.prompt_token_ids == tuple(greek.codec._encode("Hello", special=False))
    chunks = list(greek.chat(MESSAGES, stream=True, chat_template=template))
    assert "".join(chunk.text for chunk in chunks) == answer.text


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


def test_threads_share_an_llm(codec: Codec) -> None:
    llm, _ = writer(codec, "alpha beta gamma delta")

    def run(number: int) -> str:
        if number % 3:
            return "".join(chunk.text for chunk in llm.stream("x"))
        return llm.generate("x").text

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(run, range(30))) == {"alpha beta gamma delta"}
    assert (llm.engine.running, llm.engine.waiting) == (0, 0)


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

"""GGUF files written here from tiny models of transformers must read back as those models."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dejavu.errors import CheckpointError, ConfigError, InputError
from dejavu.weights.checkpoint import open_checkpoint
from dejavu.weights.quantize import dequantize, quantize_checkpoint
from dejavu.weights.tokenizer import load_tokenizer

from .folders import byte_level_tokenizer, contents, names
from .gguf_files import HEADS, HIDDEN, gguf_name, tiny_model, write_gguf

gguf = pytest.importorskip("gguf")
Type = gguf.GGMLQuantizationType

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama, tied, with biases": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        {},
    ),
    "llama, wide heads": ("llama", {"head_dim": 24}, {"attention.key_length": 24}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "mistral": ("mistral", {"sliding_window": 7}, {"attention.sliding_window": 7}),
    "linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "yarn": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 5000.0,
                "original_max_position_embeddings": 64,
            }
        },
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_and_config_give_the_same_model(tmp_path: Path, case: str) -> None:
    import transformers

    arch, options, metadata = CASES[case]
    model = tiny_model(arch, **options)
    state = dict(model.state_dict())
    if options.get("tie_word_embeddings"):
        del state["lm_head.weight"]
    stored_arch = "llama" if arch == "mistral" else arch
    write_gguf(tmp_path / "m.gguf", stored_arch, state, metadata=metadata)

    checkpoint = open_checkpoint(tmp_path)
    got = dict(checkpoint.stream())
    assert got.keys() == state.keys()
    assert all(torch.equal(got[name], state[name]) for name in state)
    assert checkpoint.shapes() == {name: tuple(t.shape) for name, t in got.items()}

    assert checkpoint.config["model_type"] == arch
    fields = {k: v for k, v in checkpoint.config.items() if k not in ("architectures",)}
    again = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**fields), dtype=torch.float32
    ).eval()
    again.load_state_dict(got, strict=not options.get("tie_word_embeddings"))
    again.tie_weights()
    ids = torch.arange(90).remainder(37)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1", "Q5_0"])
def test_stored_types(tmp_path: Path, kind: str) -> None:
    state = tiny_model("llama").state_dict()
    types = {"ffn": Type[kind], "attn_q.": Type[kind], "token_embd": Type[kind]}
    types = {"norm": Type.F32} | types
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", state, types))
    natively = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    bits = {"F16": 10, "BF16": 7, "Q8_0": 7, "Q4_1": 3, "Q5_0": 4}[kind]
    for name, tensor in checkpoint.stream():
        typed = any(part in gguf_name(name) for part in types if part != "norm")
        typed &= "norm" not in name
        assert (
            tensor.dtype
            == (natively if typed else torch.float32)
            == (checkpoint.tensor_infos()[name].dtype)
        )
        if not typed:
            assert torch.equal(tensor, state[name])
            continue
        # Half a step of `bits` bits over a range that the largest value of the tensor bounds.
        step = 2 * state[name].abs().max() / 2**bits
        assert (tensor.float() - state[name]).abs().max() <= step
        if natively is not torch.float32:
            assert torch.equal(tensor, state[name].to(natively))


def test_identity_is_of_what_is_stored(tmp_path: Path) -> None:
    state = dict(tiny_model("llama").state_dict())
    path = write_gguf(tmp_path / "a.gguf", "llama", state, {"ffn": Type.Q8_0})
    first = open_checkpoint(path).identity()
    assert first == open_checkpoint(path).identity()
    name = "model.layers.1.mlp.up_proj.weight"
    state[name] = state[name].clone()
    state[name][5, 5] += 1.0
    assert (
        first
        != open_checkpoint(
            write_gguf(tmp_path / "b.gguf", "llama", state, {"ffn": Type.Q8_0})
        ).identity()
    )


def test_unknown_tensor_keeps_its_name(tmp_path: Path) -> None:
    state = dict(tiny_model("llama").state_dict()) | {"extra_thing": torch.ones(4)}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", state))
    assert "extra_thing" in checkpoint.tensor_names()


def test_long_arrays_are_walked_over(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.tokens": ["é" * (i % 5) for i in range(2000)],
        "tokenizer.ggml.token_type": list(range(1500)),
        "tokenizer.ggml.eos_token_id": 7,
    }
    state = tiny_model("llama").state_dict()
    path = write_gguf(tmp_path / "m.gguf", "llama", state, metadata=metadata, vocabulary=None)
    checkpoint = open_checkpoint(path)
    assert checkpoint.config["eos_token_id"] == 7
    assert all(torch.equal(tensor, state[name]) for name, tensor in checkpoint.stream())


def llama3_factors(factor: float) -> torch.Tensor:
    """Frequency divisors that transformers applies, taken from its own rotary embedding."""
    import transformers

    def frequencies(**rope: Any) -> torch.Tensor:
        config = transformers.LlamaConfig(
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            max_position_embeddings=32768,
            rope_parameters={"rope_theta": 500000.0, **rope},
        )
        embedding = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        return embedding.inv_freq

    scaled = frequencies(
        rope_type="llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    return frequencies(rope_type="default") / scaled


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope(tmp_path: Path, factor: float) -> None:
    divisors = llama3_factors(factor)
    assert len(divisors.unique()) > 2  # some in between, or the rule would not be tested
    state = dict(tiny_model("llama").state_dict()) | {"rope_freqs.weight": divisors}
    metadata = {"rope.freq_base": 500000.0}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", state, metadata=metadata))
    assert "rope_freqs.weight" not in checkpoint.tensor_names()
    scaling = checkpoint.config["rope_scaling"]
    assert scaling.pop("factor") == pytest.approx(factor, rel=1e-6)
    assert scaling == {
        "rope_type": "llama3",
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    divisors[3] *= 1.5
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
        open_checkpoint(write_gguf(tmp_path / "n.gguf", "llama", state, metadata=metadata))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"block_count": None}, r"lack llama\.block_count"),
        ({"attention.layer_norm_rms_epsilon": None}, r"lack llama\.attention\.layer_norm_rms"),
        ({"attention.head_count": [4, 4]}, r"llama\.attention\.head_count must be one integer"),
        ({"expert_count": 8}, r"llama\.expert_count"),
        ({"rope.dimension_count": 8}, r"llama\.rope\.dimension_count"),
        ({"rope.scaling.type": "longrope"}, r"llama\.rope\.scaling\.type 'longrope'"),
        ({"split.count": 3}, "one of 3 parts"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama").state_dict(), {}, metadata)
    with pytest.raises((ConfigError, CheckpointError), match=message) as error:
        open_checkpoint(path)
    assert str(path) in str(error.value)


def test_other_architecture(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "mamba", {})
    with pytest.raises(ConfigError, match="'mamba'; supported are llama, qwen2, qwen3"):
        open_checkpoint(path)


def test_damaged_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_model("llama").state_dict())
    whole = path.read_bytes()
    for size in (0, 3, 20, 100, 3000, len(whole) // 2, len(whole) - 1000):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"m\.gguf"):
            open_checkpoint(path)
    path.write_bytes(b"no" + whole[2:])
    with pytest.raises(CheckpointError, match="not a GGUF"):
        open_checkpoint(path)
    path.write_bytes(whole)
    os.link(path, tmp_path / "other.gguf")
    with pytest.raises(InputError, match=r"several models \(m\.gguf, other\.gguf\)"):
        open_checkpoint(tmp_path)


TEXTS = [
    "the cat sat on the mat",
    "  two  spaces\n\n and\ttabs \n7 12345",
    "<s>the hat</s> é日本🙂",
    "",
]


def test_tokenizer(tmp_path: Path) -> None:
    state = tiny_model("llama").state_dict()
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", state))
    before = contents(tmp_path)
    expected, got = byte_level_tokenizer(), load_tokenizer(checkpoint)
    assert contents(tmp_path) == before
    for text in TEXTS:
        assert got(text).input_ids == expected(text).input_ids
        assert got.decode(got(text).input_ids) == text
    assert (got.bos_token_id, got.eos_token_id) == (1, 2)
    chat = [{"role": "user", "content": "the cat"}]
    assert got.apply_chat_template(chat, tokenize=False) == "<s>the cat</s>"


def test_vocabulary_with_single_digits(tmp_path: Path) -> None:
    state = tiny_model("llama").state_dict()
    pieces = {}
    for kind in ("default", "smollm"):
        path = write_gguf(tmp_path / f"{kind}.gguf", "llama", state, vocabulary=kind)
        backend = load_tokenizer(open_checkpoint(path)).backend_tokenizer
        split = backend.pre_tokenizer.pre_tokenize_str("  \n12 ab")
        pieces[kind] = [piece for piece, _ in split]
    assert pieces["default"] == ["ĠĠ", "Ċ", "12", "Ġab"]
    assert pieces["smollm"] == ["ĠĠĊ", "1", "2", "Ġab"]


def test_tokenizer_beside_the_file_wins(tmp_path: Path) -> None:
    state = tiny_model("llama").state_dict()
    write_gguf(tmp_path / "m.gguf", "llama", state, vocabulary=None)
    with pytest.raises(CheckpointError, match=r"m\.gguf: no tokenizer.*tokenizer\.json beside"):
        load_tokenizer(open_checkpoint(tmp_path))
    byte_level_tokenizer().save_pretrained(tmp_path)
    got = load_tokenizer(open_checkpoint(tmp_path))
    assert got("the cat").input_ids == byte_level_tokenizer()("the cat").input_ids


def test_quantise_from_gguf(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    state = tiny_model("llama").state_dict()
    path = write_gguf(tmp_path / "source" / "m.gguf", "llama", state, {"ffn": Type.Q8_0})
    quantize_checkpoint(path, tmp_path / "out")
    assert names(tmp_path / "source") == ["m.gguf"]
    source, copy = open_checkpoint(path), open_checkpoint(tmp_path / "out")
    assert copy.identity() == source.identity()
    assert copy.config["model_type"] == "llama"
    got = dict(copy.stream())
    for name, tensor in source.stream():
        if f"{name}_scale" in got:
            scale = got[f"{name}_scale"]
            assert ((dequantize(got[name], scale) - tensor).abs() <= 0.5001 * scale).all()
        else:
            assert torch.equal(got[name], tensor)
    tokenizer = load_tokenizer(copy)
    for text in TEXTS:
        assert tokenizer(text).input_ids == byte_level_tokenizer()(text).input_ids
    assert tokenizer.chat_template == byte_level_tokenizer().chat_template


def real_files() -> Iterator[Any]:
    """GGUF files to compare with transformers: DEJAVU_TEST_GGUF=path,path."""
    for path in filter(None, os.environ.get("DEJAVU_TEST_GGUF", "").split(",")):
        yield pytest.param(Path(path), id=Path(path).name)


@pytest.mark.parametrize("path", [None, *real_files()])
def test_transformers_reads_the_same_weights(tmp_path: Path, path: Path | None) -> None:
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    if path is None:
        state = tiny_model("llama").state_dict()
        types = {"ffn": Type.Q8_0, "attn_q.": Type.Q4_0, "attn_k.": Type.F16}
        path = write_gguf(tmp_path / "m.gguf", "llama", state, types)
    checkpoint = open_checkpoint(path)
    parsed = load_gguf_checkpoint(str(path))["config"]
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**parsed)
        model = transformers.AutoModelForCausalLM.from_config(config)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    assert set(checkpoint.tensor_names()) == set(theirs)
    for name, tensor in checkpoint.stream():
        assert torch.equal(tensor.float(), theirs[name].float()), name
    for field in ("hidden_size", "rms_norm_eps", "tie_word_embeddings", "head_dim"):
        assert checkpoint.config[field] == getattr(config, field), field

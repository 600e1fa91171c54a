"""`dejavu bench --memory-limit`: neurons from a file against memory and against reading it all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dejavu.bench.subject import Subject
    from dejavu.weights.bundle import Bundle

_WARM = 256  # tokens before the clock starts: until then the memory is still filling
_LEAST_WARM = 8
_WINDOWS = 2  # of text, whose true active sets are replayed


def bench_flash(
    model: str,
    plan: str,
    level: str | None,
    bundle: str | None,
    memory_limit: str,
    dtype: str,
    threads: int | None,
    new_tokens: int,
    json_file: Path | None,
) -> None:
    """Replay embedded held-out text in every arm and print what each cost. bundle: default, the one
    beside the plan.

    The limit sets how many neurons the flash arm keeps, as it would in `dejavu generate`; the other
    arms take what they need, in the same process.
    """
    from dejavu.bench.flash import bench_flash as measure
    from dejavu.bench.flash import true_sets
    from dejavu.embedded import HELDOUT_TEXT, model_path
    from dejavu.engine.codec import Codec
    from dejavu.flash.memory import parse_size
    from dejavu.flash.model import find_bundle, load_flash
    from dejavu.load import load_model
    from dejavu.predictor.plan import load_plan
    from dejavu.weights.tokenizer import load_tokenizer

    source = model_path(model)
    flash = load_flash(source, bundle or find_bundle(source, plan, dtype), dtype=dtype)
    loaded_plan = load_plan(plan)
    loaded_plan.selector(flash.loaded, level)  # in memory before the rest is shared out
    share = _share(memory_limit)
    if share is None:
        limit = parse_size(memory_limit)
        store, _ = flash.within(limit, max_batch=1, max_model_len=None)
    else:
        store = flash.store(round(share * sum(flash.bundle.neurons)))
    context = flash.loaded.model.config.context_length
    warm, wanted = _lengths(new_tokens, context)
    codec = Codec(load_tokenizer(flash.loaded.checkpoint))
    text = HELDOUT_TEXT.read_text(encoding="utf-8")
    words = codec.encode(text[: 16 * _WINDOWS * wanted])
    windows = [words[i * wanted : (i + 1) * wanted] for i in range(_WINDOWS)]
    whole = load_model(source, dtype=dtype)
    result = measure(
        whole.model,
        flash.loaded.model,
        store,
        lambda: loaded_plan.selector(whole, level),
        windows[0],
        warm=warm,
        threads=threads,
        tell=_tell,
    )
    result |= {"model": model, "plan": plan, "level": level or loaded_plan.default_level}
    if whole.model.activation.is_sparse:
        _tell("true active sets")
        result["true_active_sets"] = true_sets(
            whole.model, flash.loaded.model, store, windows, warm=warm, threads=threads
        )
    _report(result, memory_limit, threads, json_file)


def bench_flash_shape(
    shape: str,
    bundle: str | None,
    memory_limit: str,
    dtype: str,
    threads: int | None,
    new_tokens: int,
    look_ahead: float,
    rank: int | None,
    json_file: Path | None,
) -> None:
    """The same for a shape with random weights and a recorded trace of selections.

    The weights go into `bundle`, or a temporary folder that is removed afterwards. The limit is
    that of a process that holds the flash arm alone.
    """
    from dataclasses import replace

    from dejavu.bench.flash import bench_flash as measure
    from dejavu.bench.subject import open_subject
    from dejavu.bench.trace import Replayed, record_trace
    from dejavu.embedded import HELDOUT_TEXT, MODEL
    from dejavu.engine.codec import Codec
    from dejavu.flash.memory import resident_bytes
    from dejavu.flash.store import FlashStore, placeholders
    from dejavu.load import load_model
    from dejavu.models.base import DecoderLM
    from dejavu.weights.tokenizer import load_tokenizer

    recorded = load_model(MODEL)
    warm, wanted = _lengths(new_tokens, recorded.model.config.context_length)
    codec = Codec(load_tokenizer(recorded.checkpoint))
    ids = codec.encode(HELDOUT_TEXT.read_text(encoding="utf-8"))
    before = resident_bytes()
    _tell("random weights")
    subject = open_subject(shape, dtype=dtype)
    model = subject.loaded.model
    _tell("recording selections")
    trace = record_trace(recorded.model, ids, model.config, wanted)
    with _packed(subject, bundle) as opened:
        matrices = placeholders(opened)
        blocks = []
        for layer, block in enumerate(model.weights.blocks):
            parts = {
                part: replace(
                    getattr(block.mlp, part), weight=matrices[f"layers.{layer}.mlp.{part}.weight"]
                )
                for part in opened.parts
            }
            blocks.append(replace(block, mlp=replace(block.mlp, **parts)))
        outside = DecoderLM(model.config, replace(model.weights, blocks=tuple(blocks)))
        store = FlashStore(opened, _slots(memory_limit, opened, model, before), matrices)
        result = measure(
            model,
            outside,
            store,
            lambda: Replayed(model.config, trace, rank=rank, look_ahead=look_ahead),
            ids[:wanted],
            warm=warm,
            threads=threads,
            tell=_tell,
        )
    result |= {
        "shape": shape,
        "weights": "random",
        "dtype": subject.loaded.dtype,
        "look_ahead": look_ahead,
        "trace": {
            "of": "neurons of relu-30m that are not zero, its held-out books",
            "stretches": trace.stretches,
            "density": trace.density,
            "repeated_from_the_token_before": trace.repeated,
            "jaccard": trace.jaccard,
        },
    }
    _report(result, memory_limit, threads, json_file)


def _lengths(new_tokens: int, context: int) -> tuple[int, int]:
    """(tokens before the clock starts, tokens in all) within a context."""
    from dejavu.errors import InputError

    warm = min(_WARM, context - new_tokens)
    if warm < _LEAST_WARM:
        raise InputError(f"--new-tokens {new_tokens} leaves no context to warm up: {context}")
    return warm, warm + new_tokens


def _share(memory_limit: str) -> float | None:
    """`50%` as 0.5: of the MLPs' bytes, whatever the rest takes; None: a size."""
    from dejavu.cli.sources import share
    from dejavu.errors import InputError

    if not memory_limit.strip().endswith("%"):
        return None
    found = share("--memory-limit", memory_limit)
    if not 0 < found <= 1:
        raise InputError(f"--memory-limit: {memory_limit!r} is not a share of the MLPs' bytes")
    return found


def _slots(memory_limit: str, bundle: Bundle, model: Any, before: int) -> int:
    """Neurons that a process may keep that holds this model without its MLPs and nothing else."""
    from dejavu.flash.memory import parse_size
    from dejavu.flash.model import need_of
    from dejavu.flash.store import least_slots
    from dejavu.models.kv_cache import KVCache

    share = _share(memory_limit)
    if share is not None:
        return round(share * sum(bundle.neurons))
    w = model.weights
    attention = sum(
        affine.weight.nbytes
        for block in w.blocks
        for affine in (
            block.attention.q,
            block.attention.k,
            block.attention.v,
            block.attention.o,
        )
    )
    tables = {id(m): m.nbytes for m in (w.embed_tokens, w.lm_head, w.embed_positions) if m}
    resident = before + attention + sum(tables.values()) + bundle.resident_bytes
    keys = model.config.context_length * KVCache.token_bytes(model.config, model.cache_dtype)
    need = need_of(model, bundle, resident, keys)
    return need.slots(parse_size(memory_limit), bundle.record_bytes, least_slots(bundle))


@contextmanager
def _packed(subject: Subject, bundle: str | None) -> Iterator[Bundle]:
    """A subject's neurons in a file: the one named, made if it is not there, or a temporary one."""
    from tempfile import TemporaryDirectory

    from dejavu.models.neurons import ModelNeurons
    from dejavu.weights.bundle import open_bundle, write_bundle

    identity = f"random {subject.name} {subject.loaded.dtype}"
    with TemporaryDirectory(prefix="dejavu-flash-") as folder:
        path = Path(folder) / "neurons.flash" if bundle is None else Path(bundle)
        if not path.exists():
            _tell("packing")
            source = ModelNeurons(subject.loaded.model, name=subject.name, identity=identity)
            write_bundle(path, source)
        yield open_bundle(path, identity=identity)


def _tell(line: str) -> None:
    from dejavu.cli.output import console

    console(stderr=True).print(f"{line} ...")


def _report(
    result: dict[str, Any], memory_limit: str, threads: int | None, json_file: Path | None
) -> None:
    from dataclasses import asdict

    from dejavu.bench.machine import origin, this_machine
    from dejavu.cli.output import console, quiet, write_json
    from dejavu.kernels.compiled import default_threads

    result |= {
        "memory_limit": memory_limit,
        "threads": threads or default_threads(),
        "machine": this_machine().to_json(),
        "origin": asdict(origin()),
    }
    if not quiet(json_file):
        _print(result, console().print)
    write_json(result, json_file)


def _print(result: dict[str, Any], line: Callable[[str], None]) -> None:
    line(
        f"{result['neurons_in_memory']} of {result['neurons']} neurons in memory, "
        f"{result['tokens']} tokens after {result['warm']}"
    )
    if "trace" in result:
        trace = result["trace"]
        line(
            f"selections: {trace['of']}; density {trace['density']:.1%}, of a token's neurons the "
            f"one before had {trace['repeated_from_the_token_before']:.1%}"
        )
    for arm in result["arms"]:
        rate = arm["gigabytes_per_second"]
        line(
            f"{arm['name']:>15}  {arm['ms_per_token']:8.2f} ms/token  "
            f"wanted {arm['wanted_bytes'] / 1e6:8.3f} MB  read {arm['read_bytes'] / 1e6:8.3f} "
            f"MB ({arm['fresh']:.2%} of the MLPs)  hits {arm['hit_rate']:.1%}"
            + (f"  {rate:.3f} GB/s" if rate else "")
        )
    if (true := result.get("true_active_sets")) is not None:
        line(
            f"{'true sets':>15}  {true['density']:.1%} of the neurons, {true['fresh']:.2%} of the "
            f"MLPs' bytes fresh, hits {true['hit_rate']:.1%}, {true['tokens']} tokens"
        )
    for rate in result["device"]:
        line(
            f"   the disk: {rate['gigabytes_per_second']:.3f} GB/s in reads of {rate['size']} "
            f"bytes, {rate['depth']} outstanding"
        )
    line(f"   the reader: {result['reader_over_device']:.0%} of the disk's random reads")
    line(
        f"   flash: {result['bound']['flash_over_larger']:.2f} x the larger of memory and reading "
        f"({result['bound_beside_each_other']['flash_over_larger']:.2f} with both at once); "
        + ", ".join(f"{n:.1f} x {name}" for name, n in result["times_as_fast_as"].items())
    )

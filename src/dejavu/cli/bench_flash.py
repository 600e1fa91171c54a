"""`dejavu bench --memory-limit`: neurons from a file against memory and against reading it all."""

from __future__ import annotations

from pathlib import Path


def bench_flash(
    model: str,
    plan: str,
    level: str,
    bundle: str,
    memory_limit: str,
    dtype: str,
    threads: int | None,
    new_tokens: int,
    json_file: Path | None,
) -> None:
    """Replay embedded held-out text in every arm and print what each cost.

    The limit sets how many neurons the flash arm keeps, as it would in `dejavu generate`; the other
    arms take what they need, in the same process.
    """
    from dejavu.bench.flash import bench_flash as measure
    from dejavu.cli.output import console, quiet, write_json
    from dejavu.embedded import HELDOUT_TEXT, model_path
    from dejavu.engine.codec import Codec
    from dejavu.errors import InputError
    from dejavu.flash.memory import parse_size
    from dejavu.flash.model import load_flash
    from dejavu.load import load_model
    from dejavu.predictor.plan import load_plan
    from dejavu.weights.tokenizer import load_tokenizer

    limit = parse_size(memory_limit)
    source = model_path(model)
    flash = load_flash(source, bundle, dtype=dtype)
    loaded_plan = load_plan(plan)
    loaded_plan.selector(flash.loaded, level)  # in memory before the rest is shared out
    store, _ = flash.within(limit, max_batch=1, max_model_len=None)
    warm = 128
    codec = Codec(load_tokenizer(flash.loaded.checkpoint))
    text = HELDOUT_TEXT.read_text(encoding="utf-8")
    wanted = min(flash.loaded.model.config.context_length, warm + new_tokens)
    if wanted <= warm:
        raise InputError(f"--memory-limit needs a context of more than {warm} tokens")
    ids = codec.encode(text[: 16 * wanted])[:wanted]
    whole = load_model(source, dtype=dtype)
    result = measure(
        whole.model,
        flash.loaded.model,
        store,
        lambda: loaded_plan.selector(whole, level),
        ids,
        warm=warm,
        threads=threads,
    )
    result |= {"model": model, "plan": plan, "level": level, "memory_limit": limit}
    if not quiet(json_file):
        console().print(
            f"{result['neurons_in_memory']} of {result['neurons']} neurons in memory, "
            f"{result['tokens']} tokens of held-out text after {warm}"
        )
        for arm in result["arms"]:
            rate = arm["gigabytes_per_second"]
            console().print(
                f"{arm['name']:>13}  {arm['ms_per_token']:8.2f} ms/token  "
                f"wanted {arm['wanted_bytes'] / 1e6:8.3f} MB  read {arm['read_bytes'] / 1e6:8.3f} "
                f"MB ({arm['fresh']:.2%} of the MLPs)  hits {arm['hit_rate']:.1%}"
                + (f"  {rate:.3f} GB/s" if rate else "")
            )
        for rate in result["device"]:
            console().print(
                f"   the disk: {rate['gigabytes_per_second']:.3f} GB/s in reads of {rate['size']} "
                f"bytes, {rate['depth']} outstanding"
            )
    write_json(result, json_file)

"""Results as tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from dejavu.bench.result import ArmResult, BenchResult

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from dejavu.bench.gpu_kernels import GPUKernelBench
    from dejavu.bench.kernels import KernelBench

_Cell = Callable[[ArmResult, BenchResult], str]
_NONE = "-"


def decode_table(result: BenchResult) -> RenderableType:
    """Two lines an arm, how fast it was and what it read, each table in 80 columns; the conditions
    above and every warning below."""
    from rich.console import Group
    from rich.text import Text

    speed = _arms_table(result, _SPEED, title=_title(result))
    reads = _arms_table(result, _READS, caption=_caption(result))
    return Group(speed, reads, *(Text(line, style="yellow") for line in _remarks(result)))


def _arms_table(
    result: BenchResult, columns: Mapping[str, _Cell], title: str | None = None, caption: str = ""
) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    cells = {title: [cell(arm, result) for arm in result.arms] for title, cell in columns.items()}
    known = [title for title, texts in cells.items() if any(text != _NONE for text in texts)]
    table.add_column("arm", overflow="fold")  # the one to be broken where all do not fit
    for column in known:
        table.add_column(column, justify="right", no_wrap=True)
    for place, arm in enumerate(result.arms):
        name = arm.name + ("*" if arm.lopsided else "")
        table.add_row(name, *(cells[column][place] for column in known))
    return table


def kernel_table(result: KernelBench) -> RenderableType:
    """One line a density."""
    from rich.table import Table

    shape = result.shape
    kind = "gated MLP" if shape.gated else "MLP"
    table = Table(
        title=f"{kind} {shape.hidden_size}/{shape.intermediate_size}, {result.dtype}, one row, "
        f"{result.threads} threads ({result.isa}); read bandwidth {result.read_bandwidth:.1f} GB/s",
        title_justify="left",
    )
    for column in ("density", "us", "p10-p90", "GB/s", "of bandwidth", "vs dense", "warm us"):
        table.add_column(column, justify="right")
    for one in result.results:
        table.add_row(
            "dense" if one.density == 1.0 else f"{one.density:.0%}",
            f"{one.us.median:.1f}" + ("" if one.cold else " (cache)"),
            f"{one.us.p10:.1f}-{one.us.p90:.1f}",
            f"{one.gb_per_second:.1f}",
            f"{one.of_bandwidth:.0%}",
            f"{one.speedup:.2f}x",
            f"{one.warm_us.median:.1f}",
        )
    return table


def gpu_kernel_table(result: GPUKernelBench) -> RenderableType:
    """One line for each way to compute the MLP."""
    from rich.table import Table

    shape, gpu = result.shape, result.machine.gpu
    table = Table(
        title=f"MLP {shape.hidden_size}/{shape.intermediate_size}, {result.dtype}, one row, "
        f"{result.device if gpu is None else gpu.name}; read bandwidth "
        f"{result.read_bandwidth:.1f} GB/s; predictor of rank {result.rank}",
        title_justify="left",
    )
    table.add_column("kernel")
    others = ("cuBLAS", "dense", "index_select")
    for column in ("density", "us", "p10-p90", "GB/s", "of bandwidth"):
        table.add_column(column, justify="right")
    for column in (*(f"vs {other}" for other in others), "warm us"):
        table.add_column(column, justify="right")
    for one in result.results:
        ratios = (one.faster_than.get(other) for other in others)
        table.add_row(
            one.name,
            "all" if one.density == 1.0 else f"{one.density:.1%}",
            f"{one.us.median:.1f}" + ("" if one.cold else " (cache)"),
            f"{one.us.p10:.1f}-{one.us.p90:.1f}",
            f"{one.gb_per_second:.0f}",
            f"{one.of_bandwidth:.0%}",
            *("-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
            f"{one.warm_us.median:.1f}",
        )
    return table


def _title(result: BenchResult) -> str:
    c = result.conditions
    weights = ", random weights" if result.random_weights else ""
    return (
        f"{result.name}{weights}: {c.dtype}, batch {c.batch}, {c.prompt_tokens} prompt and "
        f"{c.new_tokens} new tokens x {c.repeats}, {c.runs_on}"
    )


def _caption(result: BenchResult) -> str:
    rate = f"read {result.read_bandwidth:.1f} GB/s"
    gpu = result.machine.gpu
    bandwidth = f"{result.machine.cpu if gpu is None else gpu.name}, {rate}"
    if result.roofline_ms is None:
        return bandwidth
    return f"{bandwidth}, dense roofline {result.roofline_ms:.2f} ms/token"


def _share(value: float | None) -> str:
    return _NONE if value is None else f"{value:.0%}"


def _remarks(result: BenchResult) -> Iterator[str]:
    yield from result.warnings
    for arm in result.arms:
        for difference in arm.lopsided:
            yield f"* {arm.name}: {difference}"
        for note in arm.notes:
            yield f"{arm.name}: {note}"
    for missing in result.missing:
        yield f"{missing.name} is missing: {missing.reason}"


_SPEED: dict[str, _Cell] = {
    "weights": lambda arm, _: arm.dtype,
    "ms/token": lambda arm, _: f"{arm.ms_per_token.median:.3g}",
    "p10-p90": lambda arm, _: f"{arm.ms_per_token.p10:.3g}-{arm.ms_per_token.p90:.3g}",
    "tokens/s": lambda arm, _: f"{arm.tokens_per_second:.1f}",
    "vs dense": lambda arm, result: (
        f"{result.arms[0].ms_per_token.median / arm.ms_per_token.median:.2f}x"
    ),
}
_READS: dict[str, _Cell] = {
    "bytes": lambda arm, result: (
        f"{arm.bytes_per_token * result.conditions.batch / result.dense_bytes:.1%}"
    ),
    "neurons": lambda arm, _: _NONE if arm.density is None else f"{arm.density.neurons:.1%}",
    "heads": lambda arm, _: _NONE if arm.density is None else f"{arm.density.groups:.0%}",
    "GB/s": lambda arm, _: f"{arm.gb_per_second:.1f}",
    "of best\nread": lambda arm, _: _share(arm.of_bandwidth),
    "of read\nthen": lambda arm, _: _share(arm.of_bandwidth_then),
    "of dense\nroofline": lambda arm, _: _share(arm.of_roofline),
}

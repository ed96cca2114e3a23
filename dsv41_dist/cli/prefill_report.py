"""What the parts of `bench prefill` say the whole may gain, and the plot."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

__all__ = ["draw", "expected"]


def expected(mode: str, stock_us: float, parts: dict[str, Any], sublayers: int, world: int) -> dict[str, float | None]:
    """`bound` and `parts`: stock's time over what a mode's could be.

    bound: the row-local work falls to 1 / world (comm: stays), reduce-scatter and all-gather cost what the all-reduce
    does, since they move the same bytes; exact pays its gathers on top. Nothing else changes.
    parts: the same with every part at the time measured alone, the gather at the exit included.
    None where the parts alone took longer than stock's whole: the machine's mood, not a bound.
    """
    row, gather = parts["row_work_us"], parts["all_gather_us"]
    swap = sublayers * (parts["reduce_scatter_us"] + gather - parts["all_reduce_us"])
    saved = row - parts["row_work_shard_us"]
    ideal = row * (1 - 1 / world)
    if mode == "comm":
        least, measured = stock_us, stock_us + swap
    elif mode == "fast":
        least, measured = stock_us - ideal, stock_us - saved + swap + gather
    else:
        least, measured = stock_us - ideal + sublayers * gather, stock_us - saved + (sublayers + 1) * gather
    return {name: round(stock_us / us, 3) if us > 0 else None for name, us in (("bound", least), ("parts", measured))}


def draw(results: dict[str, Any], file: str) -> None:
    """Stock over each mode for the whole stack (with its bound) and for the row part; memory and bytes sent."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    series: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in results["rows"]:
        if row["op"] == "prefill":
            series[row["transport"], row["mode"]].append(row)
    modes = list(dict.fromkeys(mode for _, mode in series))
    marks = dict(zip(dict.fromkeys(carrier for carrier, _ in series), "os^v", strict=False))
    figure, axes = plt.subplots(1, 3, figsize=(16, 5.5), layout="constrained")
    for (carrier, mode), rows in series.items():
        x = [row["rows"] for row in rows]
        style: dict[str, Any] = {"color": f"C{modes.index(mode)}", "marker": marks.get(carrier, ".")}
        if mode != "stock":
            axes[0].plot(x, [row["over_stock"] for row in rows], **style)
            axes[0].plot(x, [row["bound"] or float("nan") for row in rows], linestyle=":", color=style["color"])
            axes[1].plot(x, [row["row_part_over_stock"] for row in rows], **style)
        axes[2].plot(x, [row["peak_bytes"] / 2**20 if row["peak_bytes"] else float("nan") for row in rows], **style,
                     label=f"{mode}, {carrier}")  # fmt: skip
        axes[2].plot(x, [row["sent_bytes"] / 2**20 for row in rows], linestyle=":", color=style["color"])
    for carrier, mark in marks.items():
        alone = [row for row in results["rows"] if row["op"] == "prefill parts" and row["transport"] == carrier]
        axes[1].plot([row["rows"] for row in alone], [row["row_work_ratio"] for row in alone], f"k{mark}-")
    titles = (
        "whole stack: stock / mode (dotted: the bound)",
        "row part: stock / mode (black: row-local work alone)",
        "peak memory, and bytes sent by a rank (dotted), MiB",
    )
    for axis, title in zip(axes, titles, strict=True):
        axis.set(xlabel="rows", title=title)
        axis.set_xscale("log", base=2)
        axis.grid(True, which="both", alpha=0.3)
    axes[2].set(yscale="log")
    for axis in axes[:2]:
        axis.axhline(1.0, color="black", linewidth=0.8)
    figure.legend(*axes[2].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    env, first = results["env"], results["rows"][0]
    where = f"{env['gpus'][0]} x{env['world_size']}" if env.get("gpus") else f"{env['world_size']} CPU ranks"
    what = f"{first['layers']} layers of hidden {first['hidden']}"
    figure.suptitle(f"dsv41_dist bench prefill: {where}, {what}, torch {env['versions']['torch']}", fontsize="medium")
    figure.savefig(file, dpi=130)
    plt.close(figure)

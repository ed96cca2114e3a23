"""What the times of `bench split` say: from which width a split layer is the faster one, and the plot."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

__all__ = ["break_even", "draw", "lines_of"]

_NOT_SPLIT = ("stock", "mixed")


def break_even(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each dtype, variant and row count: the smallest measured width from which the split is never slower.

    Rows whose bytes kept the layer whole are left out: their time is the whole layer's. Each entry has dtype, what, m,
    `columns` (that width, or None), `below` (the largest measured width that is slower, or None), and `estimate`: where
    the ratio crosses 1 between the two, on a straight line over the logarithms.
    """
    series: dict[tuple[str, str, int], list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        if row["layer"] == "linear" and "whole_over_this" in row and row.get("verdict") not in _NOT_SPLIT:
            series[row["dtype"], row["what"], row["m"]].append((row["n"], row["whole_over_this"]))
    out: list[dict[str, Any]] = []
    for (dtype, what, m), points in series.items():
        points.sort()
        slower = [n for n, ratio in points if ratio < 1]
        below = max(slower, default=None)
        above = [(n, ratio) for n, ratio in points if below is None or n > below]
        columns = above[0][0] if above else None
        estimate = None
        if above and below is not None:
            estimate = _crossing((below, dict(points)[below]), above[0])
        out.append({"dtype": dtype, "what": what, "m": m, "columns": columns, "below": below, "estimate": estimate})
    return out


def _crossing(a: tuple[int, float], b: tuple[int, float]) -> int:
    """Where log(ratio) is 0 on the line through two points over log(width)."""
    (n0, r0), (n1, r1) = a, b
    share = -math.log(r0) / (math.log(r1) - math.log(r0)) if r1 != r0 else 1.0
    return round(n0 * (n1 / n0) ** share)


def lines_of(evens: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[str]:
    """The break-even in words, one line each."""
    lines: list[str] = []
    for even in evens:
        what = f"{even['what']}, {even['dtype']}, m={even['m']}"
        if even["columns"] is None:
            lines.append(f"break-even, {what}: above {even['below']} columns, every width that was split is slower")
        elif even["below"] is None:
            lines.append(
                f"break-even, {what}: at or below {even['columns']} columns, every width that was split is faster"
            )
        else:
            between = f"between {even['below']} and {even['columns']} columns, about {even['estimate']}"
            lines.append(f"break-even, {what}: {between}")
    kept = sorted({(r["n"], r["m"]) for r in rows if r.get("verdict") in _NOT_SPLIT})
    if kept:
        listed = ", ".join(f"n={n} m={m}" for n, m in kept)
        lines.append(f"kept whole, on all ranks, because a narrower matrix gave other bits: {listed}")
    return lines


def draw(results: dict[str, Any], file: str) -> None:
    """Time over rows, whole and split, and whole over split, for each width."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 6), layout="constrained")
    series: dict[tuple[str, int, int, str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in results["rows"]:
        series[row["layer"], row["n"], row["k"], row["dtype"], row["what"]].append(row)
    colours = {shape: f"C{at}" for at, shape in enumerate(dict.fromkeys(key[:4] for key in series))}
    for key, rows in series.items():
        m = [row["m"] for row in rows]
        name = f"{key[0]} {key[1]}x{key[2]} {key[3]}: {key[4]}"
        whole = "whole_over_this" not in rows[0]
        style = {"color": colours[key[:4]], "linestyle": ":" if whole else ("--" if "compact" in key[4] else "-")}
        axes[0].plot(m, [row["p50_us"] for row in rows], marker="." if whole else "o", label=name, **style)
        if not whole:
            axes[1].plot(m, [row["whole_over_this"] for row in rows], marker="o", label=name, **style)
            kept = [row for row in rows if row.get("verdict") in _NOT_SPLIT]
            axes[1].plot([r["m"] for r in kept], [r["whole_over_this"] for r in kept], "kx", markersize=9)
    axes[1].axhline(1.0, color="black", linewidth=0.8)
    axes[0].set(xscale="log", yscale="log", xlabel="rows (m)", ylabel="p50 (us)", title="whole (dotted) and split")
    axes[1].set(
        xscale="log", xlabel="rows (m)", ylabel="whole / split", title="above 1 the split is faster; x: kept whole"
    )
    for axis in axes:
        axis.grid(True, which="both", alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=7)
    env = results["env"]
    where = f"{env['gpus'][0]} x{env['world_size']}" if env.get("gpus") else f"{env['world_size']} CPU ranks"
    figure.suptitle(f"dsv41_dist bench split: {where}, torch {env['versions']['torch']}", fontsize="medium")
    figure.savefig(file, dpi=130)
    plt.close(figure)

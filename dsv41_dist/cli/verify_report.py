"""The plot of `bench verify`: expected tokens over agreement, the block's gain, and what a verified row is worth."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

__all__ = ["draw"]


def draw(results: dict[str, Any], file: str) -> None:
    """Three panels at the temperature nearest 1 and the tau nearest 1 (the second: every temperature)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in results["rows"] if row["op"] == "verify"]
    kernels = [row for row in results["rows"] if row["op"] == "verify kernel"]
    tau = min({row["tau"] for row in rows}, key=lambda value: abs(value - 1))
    shown = min({row["temperature"] for row in rows}, key=lambda value: abs(value - 1))
    at = [row for row in rows if row["tau"] == tau]
    routers = [row for row in results["rows"] if row["op"] == "verify router"]
    panels = 3 + bool(kernels) + bool(routers)
    figure, axes = plt.subplots(1, panels, figsize=(16 + 5 * (panels - 3), 5), layout="constrained")

    series: dict[tuple[str, str | None], list[dict[str, Any]]] = defaultdict(list)
    for row in at:
        if row["temperature"] == shown:
            series[row["rule"], row["cap"]].append(row)
    colours = {cap: f"C{index}" for index, cap in enumerate(dict.fromkeys(cap for _, cap in series))}
    for (rule, cap), lines in series.items():
        name = rule if cap is None else f"{rule}, cap {cap}"
        style = {"color": colours[cap], "linestyle": "-" if rule == "block" else "--", "marker": "o"}
        x = [line["agreement"] for line in lines]
        axes[0].plot(x, [line["tokens"] for line in lines], label=name, **style)
        axes[2].plot(x, [line["tokens_per_row"] for line in lines], label=name, **style)
    axes[0].set(xlabel="agreement", ylabel="expected tokens a step", title=f"T = {shown}, tau = {tau}")
    axes[2].set(xlabel="agreement", ylabel="tokens per verified row", title=f"T = {shown}, tau = {tau}")

    gain: dict[float, list[tuple[float, float]]] = defaultdict(list)
    token = {(r["temperature"], r["agreement"]): r["tokens"] for r in at if r["rule"] == "token" and r["cap"] is None}
    for row in at:
        if row["rule"] == "block" and row["cap"] is None:
            share = row["tokens"] / token[row["temperature"], row["agreement"]] - 1
            gain[row["temperature"]].append((row["agreement"], 100 * share))
    for temperature, points in gain.items():
        axes[1].plot(*zip(*points, strict=True), marker="o", label=f"T = {temperature}")
    axes[1].set(xlabel="agreement", ylabel="block over token, %", title=f"gain in expected tokens, tau = {tau}")

    if kernels:
        by_kernel: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in kernels:
            by_kernel[row["kernel"]].append(row)
        for index, (name, lines) in enumerate(by_kernel.items()):
            x = [line["requests"] for line in lines]
            axes[3].plot(x, [line["p50_us"] for line in lines], marker="o", color=f"C{index}", label=name)
            axes[3].plot(x, [line["twin_p50_us"] for line in lines], ":", color=f"C{index}")
        axes[3].set(xscale="log", yscale="log", xlabel="requests", ylabel="us a step", title="kernels; twins dotted")
    if routers:
        x = [line["requests"] for line in routers]
        for path, name, style in (
            ("stock", "stock", "C0-"),
            ("copy_half", "stock + row copy, half live", "C1-"),
            ("copy_all", "stock + row copy, all live", "C1:"),
            ("live_half", "router_live, half live", "C2-"),
            ("live_all", "router_live, all live", "C2:"),
        ):
            axes[-1].plot(x, [line[f"{path}_p50_us"] for line in routers], style, marker="o", label=name)
        axes[-1].set(xscale="log", xlabel="requests", ylabel="us a layer", ylim=(0, None), title="router")
    for axis in axes:
        axis.grid(True, alpha=0.3)
        axis.legend(fontsize=7)
    env = results["env"]
    first = rows[0]
    where = env["gpus"][0] if env.get("gpus") else env["cpu"]
    figure.suptitle(f"dsv41_dist bench verify: {first['pairs']} pairs, exact enumeration; {where}", fontsize="medium")
    figure.savefig(file, dpi=130)
    plt.close(figure)

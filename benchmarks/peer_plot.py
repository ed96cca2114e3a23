"""Latency and bus bandwidth over size, log-log, all transports: peer_plot.py IN.json OUT.png, from peer_bench.py."""

import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OPS = ("all_gather", "all_reduce", "reduce_scatter", "all_gather_columns", "broadcast")
COLOURS = {
    "nccl": "tab:gray",
    "nccl_pad_cat": "tab:gray",
    "torch_one_shot": "tab:orange",
    "torch_two_shot": "tab:red",
    "peer": "tab:blue",
}

with open(sys.argv[1]) as file:
    found = json.load(file)
rows, env = found["rows"], found["env"]
figure, axes = plt.subplots(2, len(OPS), figsize=(4.2 * len(OPS), 7.5), sharex=True)
for column, op in enumerate(OPS):
    mine = [row for row in rows if row["op"] == op]
    for transport in dict.fromkeys(row["transport"] for row in mine):
        line = sorted((r["bytes"], r["p50_us"], r["busbw_gbps"]) for r in mine if r["transport"] == transport)
        for axis, value in ((axes[0][column], 1), (axes[1][column], 2)):
            axis.plot(
                [r[0] for r in line], [r[value] for r in line], "o-", ms=3, label=transport, color=COLOURS[transport]
            )
    axes[1][column].axhline(478, color="black", lw=0.8, ls=":")
    axes[0][column].set_title(op)
    axes[1][column].set_xlabel("bytes one rank sends")
    axes[0][column].legend(fontsize=8)
for axis in axes.flat:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.grid(True, which="major", alpha=0.3)
axes[0][0].set_ylabel("us per call (median, slowest rank)")
axes[1][0].set_ylabel("bus bandwidth, GB/s (dotted: 478, NV18)")
where = "in CUDA graphs" if rows[0]["graph"] else "eager"
versions = env["versions"]
libraries = f"NCCL {versions['nccl']}, torch {versions['torch']}, multicast off"
figure.suptitle(f"{env['world_size']} x {env['gpus'][0]}, bf16, {where}; {libraries}")
figure.tight_layout()
figure.savefig(sys.argv[2], dpi=110)

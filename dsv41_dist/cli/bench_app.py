"""`bench` is a group of commands; the collectives need no name: `bench all_reduce`, but `bench split`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
import typer.core

from ..comm.errors import ArgumentError

__all__ = ["bench_app", "rank_count"]

_COLLECTIVES = "collectives"
#: Parameters of `collectives` that --routes reads.
_ROUTES = ("routes", "min_bytes", "max_bytes", "factor", "transport", "device", "ranks", "json_file")


class _Group(typer.core.TyperGroup):
    """What is no command's name is the arguments of the collectives."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and args[0] in self.commands else [_COLLECTIVES, *args])


bench_app = typer.Typer(cls=_Group, pretty_exceptions_enable=False, help="Time collectives, layers and kernels.")

Iterations = Annotated[str, typer.Option("-n", "--iters", help="timed calls per line")]
Warmup = Annotated[str, typer.Option("-w", "--warmup_iters", help="untimed calls before")]
Dtype = Annotated[str, typer.Option("-d", "--datatype", "--dtype", help="a type, a list a,b, or all")]
Check = Annotated[str, typer.Option("-c", "--check", help="1: every element is checked; 0: none")]
Graphs = Annotated[str, typer.Option("-G", "--cudagraph", help="replays of a CUDA graph of -n calls; 0: none")]
Transport = Annotated[str, typer.Option(help="auto, process_group, mpi, peer, ...")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda")]
RankCount = Annotated[str | None, typer.Option(help="ranks to start here (4); not under torchrun or mpirun")]
JsonFile = Annotated[str | None, typer.Option("--json", help="write results to FILE ('-': stdout)")]
Plot = Annotated[str | None, typer.Option(help="draw FILE.png or FILE.svg")]
FlipByte = Annotated[str | None, typer.Option(help="corrupt one byte of this rank's payload (tests the check)")]


def rank_count(text: str | None) -> int | None:
    """--ranks as a number. Raises ArgumentError."""
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ArgumentError(f"--ranks {text!r}: allowed is an integer from 1 to 16") from None


def _refuse_what_routes_do_not_take(ctx: typer.Context) -> None:
    """Raise ArgumentError for the first argument that --routes would leave unread."""
    for option in ctx.command.params:
        source = ctx.get_parameter_source(option.name or "")
        if option.name in _ROUTES or source is None or source.name == "DEFAULT":
            continue
        value = ctx.params[option.name or ""]
        name, text = ("OP", ",".join(value)) if option.name == "ops" else (option.opts[0], value)
        raise ArgumentError(
            f"{name} {text!r}: not with --routes, which takes -b, -e, -f, --transport, --device, --ranks and --json"
        )


@bench_app.command(_COLLECTIVES)
def collectives(
    ctx: typer.Context,
    ops: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OP...",
            help="all_reduce, all_gather, all_gather_columns, reduce_scatter, broadcast, agree, seqpar",
        ),
    ] = None,
    min_bytes: Annotated[str, typer.Option("-b", "--minbytes", help="smallest size (8, 64K, 1M)")] = "1K",
    max_bytes: Annotated[str, typer.Option("-e", "--maxbytes", help="largest size")] = "1M",
    factor: Annotated[str, typer.Option("-f", "--stepfactor", help="factor between sizes")] = "4",
    iterations: Iterations = "20",
    warmup: Warmup = "5",
    dtype: Dtype = "bfloat16",
    redop: Annotated[str, typer.Option("-o", "--op", "--redop", help="sum, prod, min, max, a list, or all")] = "sum",
    check: Check = "1",
    graphs: Graphs = "0",
    tokens: Annotated[str | None, typer.Option(help="rows instead of sizes: 1,6,48,96")] = None,
    hidden: Annotated[str, typer.Option(help="columns of a row")] = "5120",
    transport: Transport = "auto",
    device: Device = "auto",
    ranks: RankCount = None,
    json_file: JsonFile = None,
    plot: Plot = None,
    baseline: Annotated[str | None, typer.Option(help="fail below 0.9 times the speed in this results FILE")] = None,
    routes: Annotated[bool, typer.Option("--routes", help="measure which transport is fastest at which size")] = False,
    flip_byte: FlipByte = None,
) -> None:
    """Time collectives in isolation, checking every element. Exit 1 on any wrong one.

    Layers and kernels instead: bench split --help, bench prefill --help, bench verify --help.
    """
    from .bench import plan_bench, plan_routes
    from .bench_run import run_bench
    from .routes import run_routes
    from .session import run

    if routes:
        _refuse_what_routes_do_not_take(ctx)
        table_plan, place = plan_routes(
            ranks=rank_count(ranks),
            min_bytes=min_bytes,
            max_bytes=max_bytes,
            factor=factor,
            transport=transport,
            device=device,
            json_file=json_file,
        )
        raise typer.Exit(run(place, run_routes, table_plan))
    if not ops:
        raise ArgumentError("OP: none given; name at least one operation, such as all_reduce (see bench --help)")
    plan, place = plan_bench(
        ops,
        ranks=rank_count(ranks),
        min_bytes=min_bytes,
        max_bytes=max_bytes,
        factor=factor,
        iterations=iterations,
        warmup=warmup,
        dtype=dtype,
        redop=redop,
        check=check,
        graphs=graphs,
        tokens=tokens,
        hidden=hidden,
        transport=transport,
        device=device,
        json_file=json_file,
        plot_file=plot,
        baseline=baseline,
        flip=flip_byte,
    )
    raise typer.Exit(run(place, run_bench, plan))


@bench_app.command()
def split(
    tokens: Annotated[str, typer.Option(help="row counts: decode, verify, and up to the adapter's maximum")] = (
        "1,6,16,48,96"
    ),
    hidden: Annotated[str | None, typer.Option(help="input columns of the layers [5120; on a CPU 1024]")] = None,
    columns: Annotated[
        str | None, typer.Option(help="output widths [1792,5120,10240,25600; on a CPU 512,1792]")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="WIDTHxINPUTS of the draft's projection, or none [5120x15360; on a CPU 512x256]")
    ] = None,
    dtype: Dtype = "bfloat16",
    iterations: Iterations = "20",
    warmup: Warmup = "3",
    check: Check = "1",
    graphs: Annotated[
        str | None, typer.Option("-G", "--cudagraph", help="replays of a CUDA graph of -n calls [30; on a CPU 0]")
    ] = None,
    transport: Transport = "auto",
    device: Device = "auto",
    ranks: RankCount = None,
    json_file: JsonFile = None,
    plot: Plot = None,
    flip_byte: FlipByte = None,
) -> None:
    """Time replicated layers whole and split over the ranks, comparing bytes, and say from which width it pays.

    Exit 1 when a split layer's bytes differ from the whole layer's.
    """
    from .bench_split import plan_split, run_split
    from .session import run

    plan, place = plan_split(
        tokens=tokens,
        hidden=hidden,
        columns=columns,
        draft=draft,
        dtype=dtype,
        ranks=rank_count(ranks),
        transport=transport,
        device=device,
        iterations=iterations,
        warmup=warmup,
        check=check,
        graphs=graphs,
        json_file=json_file,
        plot_file=plot,
        flip=flip_byte,
    )
    raise typer.Exit(run(place, run_split, plan))


@bench_app.command()
def verify(
    vocab: Annotated[str, typer.Option(help="tokens of the synthetic pairs")] = "4",
    drafts: Annotated[str, typer.Option(help="drafts a step, 1 to 5")] = "5",
    temperatures: Annotated[
        str, typer.Option("--temperature", help="list of request temperatures")
    ] = "0.3,0.6,1.0,1.5",
    agreements: Annotated[
        str, typer.Option("--agreement", help="list of correlations of the draft's logits with the target's")
    ] = "0,0.5,0.8,0.9,0.95,1",
    taus: Annotated[str, typer.Option("--draft-tau", help="list of draft temperatures, of the request's")] = "1.0",
    caps: Annotated[
        str | None,
        typer.Option(help="caps as in DSV41_VERIFY_CAP, with spaces between [3, or all drafts, and conf:0.5]"),
    ] = None,
    pairs: Annotated[str, typer.Option(help="random pairs that a line is the mean of")] = "8",
    requests: Annotated[
        str | None, typer.Option(help="batch sizes of the kernels' times, or none [1,4,8,16,32,64; on a CPU none]")
    ] = None,
    kernel_vocab: Annotated[str, typer.Option(help="vocabulary of the kernels' times")] = "129280",
    iterations: Iterations = "10",
    graphs: Annotated[
        str | None, typer.Option("-G", "--cudagraph", help="replays of a CUDA graph of -n calls [30; on a CPU 0]")
    ] = None,
    device: Device = "auto",
    json_file: JsonFile = None,
    plot: Plot = None,
    drawn_at: Annotated[
        str,
        typer.Option(help="draw the drafts at this many times the temperature they are tested with (tests the check)"),
    ] = "1",
) -> None:
    """What token-wise, block and capped verification accept, by enumeration, and the kernels' times on a GPU.

    One process. Exit 1 when a law or a length is not what it must be, or a kernel decides other than its twin.
    """
    from .bench_verify import plan_verify, run_verify

    raise typer.Exit(
        run_verify(
            plan_verify(
                vocab=vocab,
                drafts=drafts,
                temperatures=temperatures,
                agreements=agreements,
                taus=taus,
                caps=caps,
                pairs=pairs,
                drawn_at=drawn_at,
                device=device,
                requests=requests,
                kernel_vocab=kernel_vocab,
                iterations=iterations,
                graphs=graphs,
                json_file=json_file,
                plot_file=plot,
            )
        )
    )


@bench_app.command()
def prefill(
    tokens: Annotated[
        str | None, typer.Option(help="rows of the chunk [2048,4096,8192,16384; on a CPU 256,512]")
    ] = None,
    hidden: Annotated[str | None, typer.Option(help="columns of a row [5120; on a CPU 256]")] = None,
    layers: Annotated[str | None, typer.Option(help="decoder layers [2]")] = None,
    modes: Annotated[str, typer.Option(help="comm, fast, exact, or a list; stock is always run")] = "comm,fast,exact",
    iterations: Annotated[str | None, typer.Option("-n", "--iters", help="timed passes [10; on a CPU 3]")] = None,
    warmup: Warmup = "1",
    check: Check = "1",
    graphs: Graphs = "0",
    transport: Transport = "auto",
    device: Device = "auto",
    ranks: RankCount = None,
    json_file: JsonFile = None,
    plot: Plot = None,
    flip_byte: FlipByte = None,
) -> None:
    """Time V4.1-shaped decoder layers with rows whole and in shards: the whole stack, its row part, bytes and memory.

    Exit 1 when `exact` has not the bytes of stock, or another mode is further from it than an order of sums can be.
    """
    from .bench_prefill import plan_prefill, run_prefill
    from .session import run

    plan, place = plan_prefill(
        tokens=tokens,
        hidden=hidden,
        depth=layers,
        modes=modes,
        ranks=rank_count(ranks),
        transport=transport,
        device=device,
        iterations=iterations,
        warmup=warmup,
        check=check,
        graphs=graphs,
        json_file=json_file,
        plot_file=plot,
        flip=flip_byte,
    )
    raise typer.Exit(run(place, run_prefill, plan))

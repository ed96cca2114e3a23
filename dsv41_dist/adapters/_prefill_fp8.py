"""DSV41_PREFILL_SP_FP8: normed rows gathered as the e4m3 values and scales that a linear would make of them.

A block-fp8 linear first rounds its input to e4m3, with a scale for each row and group of columns. Where nothing else
reads the gathered rows, every rank does that to the rows it holds, with the engine's own function, and the ranks gather
values and scales: 5760 bytes a row of 5120 columns with fp32 scales for groups of 32, where bf16 has 10240.

That is so for attention in a layer without a compressor and without an indexer, whose rows go into `wqkv_a` (or `wq_a`
and `wkv`) and nowhere else. A compressor, an indexer's weights and the router of an MoE read the rows as they are:
those gathers stay bf16 and are counted, as are all of a layer whose linear makes, or takes, no such pair.

Rounding is per row, so that the linear has the bytes of its own rounding. At the first chunk of each size of a layer
its output is compared with that from rows gathered in bf16, and the ranks agree with MIN: fp8 on all of them, or bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..comm import SelfCheck
from ._split_group import exchanged

if TYPE_CHECKING:
    from ..comm import Communicator
    from ..engine.state import AdapterState
    from ._prefill_chunk import Chunk

__all__ = ["COMPRESSOR", "ROUTER", "Form", "Fp8Gathers", "form_of"]

ROUTER, COMPRESSOR = "the router reads the rows", "its compressor reads the rows"
_DECIDES, _FAILED = "first of their size", "did not check out"
_LABEL = "prefill_sp:attn"
_SWIZZLED_ROWS = 128
_MIB = 1 << 20


class Form(NamedTuple):
    """How a linear rounds its input.

    quantize: bf16 [rows, k] -> (e4m3 [rows, k], scales), where the scales of rows put together are the scales of all
    rows put together, for a multiple of `multiple` rows. join: makes the two what the linear takes for its input.
    """

    name: str
    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    join: Callable[[torch.Tensor, torch.Tensor], Any]
    multiple: int = 1


class _Site(NamedTuple):
    """A layer's attention. form: of its linears, or why its rows are gathered in bf16."""

    layer: int
    linears: Sequence[Any]
    form: Form | str


def form_of(linear: Any) -> Form | str:
    """How this linear rounds its input, or why it is not one that takes rounded input for the same output.

    `linear`: the engine's ReplicatedLinear after its weights were processed (0.5.21 to 0.5.23).
    """
    from sglang.srt.layers.quantization import fp8_utils  # pyright: ignore[reportMissingImports]

    method: Any = linear.quant_method
    if type(method).__name__ != "Fp8LinearMethod":
        return f"{type(method).__name__} rounds no input"
    if method.use_marlin or not method.block_quant:
        return "its input has no scales by groups"
    if method.use_mxfp8 or (method.block_fp8_as_mxfp8 and linear.block_fp8_mxfp8_ready):
        return _mxfp8_form(method, fp8_utils)
    if getattr(linear, "_block_fp8_bf16_weight", None) is not None:
        return "a bf16 copy of its weight serves unrounded input only"
    gemm = method.w8a8_block_fp8_linear
    function = getattr(gemm, "func", gemm)
    powers = bool(getattr(gemm, "keywords", {}).get("act_scale_ue8m0"))
    deep = function is fp8_utils.deepgemm_w8a8_block_fp8_linear_with_fallback
    if function is not fp8_utils.triton_w8a8_block_fp8_linear and not (
        # Elsewhere DeepGEMM has scales by columns, in a layout that depends on the number of rows.
        deep and powers and fp8_utils.get_platform().is_sm90
    ):
        return (
            f"{getattr(function, '__name__', function)} makes scales that cannot be put together from those of shards"
        )
    group = method.weight_block_size[1]

    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if powers:
            return fp8_utils.sglang_per_token_group_quant_fp8(x, group, scale_ue8m0=True)
        return fp8_utils.per_token_group_quant_fp8(x, group, column_major_scales=False)

    kind = "power-of-two" if powers else "fp32"
    return Form(f"{kind} scales of {group} columns", quantize, lambda values, scales: (values, scales))


def _mxfp8_form(method: Any, fp8_utils: Any) -> Form | str:
    from sglang.srt.layers.quantization.mxfp8_input import (  # pyright: ignore[reportMissingImports]
        Mxfp8SwizzledInput,
    )

    backend = method.mxfp8_dense_backend
    if not (backend.is_flashinfer_cutlass() or backend.is_flashinfer_cutedsl()):
        return f"the MXFP8 backend {backend.value} has a layout of its own for scales"
    quantize = partial(fp8_utils.flashinfer_mxfp8_quantize, is_sf_swizzled_layout=True, alignment=32)
    # 128 rows are one contiguous run of the layout.
    return Form("MXFP8, scales in 128x4", quantize, Mxfp8SwizzledInput, _SWIZZLED_ROWS)


class Fp8Gathers:
    """The sites of one model, the verdicts on them, and what was gathered how. Collective over the group.

    gathers: how many were fp8; sent, in_bf16: bytes of them that this rank sent, and would have in bf16.
    kept: gathers of normed rows in bf16, by reason.
    """

    def __init__(self, comm: Communicator, model: Any, state: AdapterState) -> None:
        self.comm = comm
        self.gathers = self.sent = self.in_bf16 = 0
        self.kept: dict[str, int] = {}
        self.check = SelfCheck(comm.agreement, "prefill_sp:fp8")
        self._state = state
        self._named: set[int] = set()
        self._sites = self._agreed({id(layer.self_attn): _site(layer.self_attn) for layer in model.layers})
        self._say_sites()
        self._note = len(state.notes)
        state.notes.append("")
        self.say()

    def rows(self, chunk: Chunk, attention: Any, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A layer's normed rows for its attention: x [held, hidden] -> (rows [rows, hidden], pair or None).

        With a pair, which goes where the engine takes quantized rows, `rows` has the shape and nothing but NaN: no
        reader of the rows is known, and one that is not known must not go unseen.
        """
        site = self._sites[id(attention)]
        form = site.form
        if isinstance(form, str):
            return self._bf16(chunk, x, form)
        if chunk.scope.held % form.multiple:
            return self._bf16(chunk, x, f"shards not a multiple of {form.multiple} rows")
        key = (site.layer, chunk.scope.rows)
        verdict = self.check.verdict(key)
        if verdict is None:
            return self._decide(chunk, site, form, key, x)
        if not verdict:
            return self._bf16(chunk, x, _FAILED)
        values, scales = form.quantize(x.contiguous())
        self.gathers += 1
        self.sent += values.nbytes + scales.nbytes
        self.in_bf16 += x.nbytes
        pair = form.join(_together(chunk, values), _together(chunk, scales))
        if chunk.debug is not None:
            chunk.debug.fp8_gather(
                chunk, site.layer, lambda: _project(site, pair), lambda: _project(site, chunk.gather(x, _LABEL))
            )
        shape = (chunk.scope.rows, *x.shape[1:])
        return x.new_full((1,) * x.dim(), float("nan")).expand(shape), pair

    def in_bf16_for(self, reason: str) -> None:
        """Count a gather of normed rows that something needs in bf16."""
        self.kept[reason] = self.kept.get(reason, 0) + 1

    def say(self) -> None:
        kept = ", ".join(f"{count} {reason}" for reason, count in self.kept.items())
        text = f"{self.gathers} gathers in fp8, {self.sent / _MIB:.2f} MiB sent by each rank"
        text += f" instead of {self.in_bf16 / _MIB:.2f}; {sum(self.kept.values())} in bf16"
        self._state.notes[self._note] = f"{text}: {kept}" if kept else text

    def _bf16(self, chunk: Chunk, x: torch.Tensor, reason: str) -> tuple[torch.Tensor, None]:
        self.in_bf16_for(reason)
        return chunk.gather(x, _LABEL), None

    def _decide(
        self, chunk: Chunk, site: _Site, form: Form, key: tuple[int, int], x: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """The first chunk of a size: both gathers, the linears' outputs compared on every rank, agreed. Gives bf16."""
        full, _ = self._bf16(chunk, x, _DECIDES)
        failure: Exception | None = None
        mine: tuple[torch.Tensor, torch.Tensor] | None = None
        try:
            mine = form.quantize(x.contiguous())
        except Exception as error:
            failure = error
        pair: Any = None
        if self.comm.agreement.agree(failure is None, label="prefill_sp:fp8:quantized") and mine is not None:
            pair = form.join(*(_together(chunk, part) for part in mine))

        # Without a pair a rank could not round, and its vote decides: the linears, which may be collective, do not run.
        def outputs(rows: Any) -> Any:
            return None if pair is None else _project(site, rows)

        def from_fp8(_: torch.Tensor) -> Any:
            if failure is not None:
                raise failure
            return outputs(pair)

        with chunk.whole():
            self.check.run(key, outputs, from_fp8, full)
        if not self.check.verdict(key) and site.layer not in self._named:
            self._named.add(site.layer)  # the sizes after it are counted
            why = self.check.reasons[key]
            self._state.notes.append(f"layer {key[0]} attention at {key[1]} rows: gathered in bf16, {why}")
        return full, None

    def _agreed(self, sites: dict[int, _Site]) -> dict[int, _Site]:
        """A site is fp8 where it has the same form on every rank; what is said of the others is the same everywhere."""
        forms = {
            str(site.layer): site.form if isinstance(site.form, str) else site.form.name for site in sites.values()
        }
        said = exchanged(self.comm, forms, "prefill_sp:fp8:forms")
        return {
            at: site
            if isinstance(site.form, Form) and said[str(site.layer)] == site.form.name
            else site._replace(form=said[str(site.layer)])
            for at, site in sites.items()
        }

    def _say_sites(self) -> None:
        """Which gathers can be fp8, and why the others cannot."""
        said: dict[bool, dict[str, list[str]]] = {True: {}, False: {}}
        for site in self._sites.values():
            fp8 = isinstance(site.form, Form)
            text = site.form.name if isinstance(site.form, Form) else site.form
            said[fp8].setdefault(text, []).append(str(site.layer))
        texts = {
            fp8: [f"attention of layer{'s' * (len(of) > 1)} {', '.join(of)} ({why})" for why, of in layers.items()]
            for fp8, layers in said.items()
        }
        kept = ", ".join([*texts[False], f"experts of every layer ({ROUTER})"])
        self._state.notes.append(f"fp8 gathers: {', '.join(texts[True]) or 'none'}; in bf16: {kept}")


def _site(attention: Any) -> _Site:
    layer = attention.layer_id
    linears = [attention.wqkv_a] if attention.fuse_wqa_wkv else [attention.wq_a, attention.wkv]
    if attention.compressor is not None:
        return _Site(layer, linears, COMPRESSOR)
    if attention.indexer is not None:
        return _Site(layer, linears, "its indexer reads the rows")
    forms = [form_of(linear) for linear in linears]
    for form in forms:
        if isinstance(form, str):
            return _Site(layer, linears, form)
    if len({form.name for form in forms if isinstance(form, Form)}) > 1:
        return _Site(layer, linears, "its two projections round their input in different ways")
    return _Site(layer, linears, forms[0])


def _together(chunk: Chunk, part: torch.Tensor) -> torch.Tensor:
    """Values or scales of all rows. A flat buffer of scales has as many for each row, if not beside one another."""
    return chunk.gather(part.reshape(chunk.scope.held, -1), _LABEL).view(-1, *part.shape[1:])


def _project(site: _Site, rows: Any) -> tuple[torch.Tensor, ...]:
    return tuple(linear(rows)[0] for linear in site.linears)

"""The engine's router kernel with live lengths, made from the installed source. Torch-free until it is imported.

Nothing of the engine's text is kept here beyond the few lines that are looked for. Each must occur exactly once.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import stat
import sys
import tempfile
import types
from pathlib import Path

__all__ = ["ANCHORS", "load", "transform"]

_PADDING = (
    "    live_m = mask_m\n    if HAS_PADDING:\n        live_m = live_m & (offs_m < tl.load(num_token_non_padded_ptr))\n"
)
_IDS = "            input_ids_ptr + offs_m * stride_input_ids, mask=live_m, other=0\n"
_ROW = "    row_ptr = scores_ptr + offs_m[:, None] * stride_sm + offs_n[None, :] * stride_sn\n"
# The row to read from: its own, or its request's anchor when it is past the live length. It comes after the wait of
# programmatic dependent launch, as `live` is written by the draft; outputs and the padding mask stay on the own row.
_SOURCE = (
    "    src_m = offs_m\n"
    "    if LIVE_STRIDE > 0:\n"
    "        live_n = tl.load(live_ptr + offs_m // LIVE_STRIDE, mask=mask_m, other=LIVE_STRIDE)\n"
    "        src_m = tl.where(offs_m % LIVE_STRIDE >= live_n, (offs_m // LIVE_STRIDE) * LIVE_STRIDE, offs_m)\n"
)

# (text of the installed source, what takes its place)
ANCHORS: tuple[tuple[str, str], ...] = (
    (
        "    num_token_non_padded_ptr,\n    out_weights_ptr,",
        "    num_token_non_padded_ptr,\n    live_ptr,\n    out_weights_ptr,",
    ),
    (
        "    USE_PDL: tl.constexpr,\n    stride_bias,",
        "    USE_PDL: tl.constexpr,\n    LIVE_STRIDE: tl.constexpr,\n    stride_bias,",
    ),
    (_PADDING, _PADDING + _SOURCE),
    (_IDS, _IDS.replace("offs_m", "src_m")),
    (_ROW, _ROW.replace("offs_m[:, None]", "src_m[:, None]")),
    (
        "    sqrtsoftplus_log1p: bool = False,\n) -> Tuple[torch.Tensor, torch.Tensor]:",
        "    sqrtsoftplus_log1p: bool = False,\n    live: Optional[torch.Tensor] = None,\n    live_stride: int = 0,\n"
        ") -> Tuple[torch.Tensor, torch.Tensor]:",
    ),
    (
        "        num_token_non_padded,\n        weights,\n        indices,",
        "        num_token_non_padded,\n        live,\n        weights,\n        indices,",
    ),
    (
        "        USE_PDL=use_pdl,\n        stride_bias=",
        "        USE_PDL=use_pdl,\n        LIVE_STRIDE=live_stride if live is not None else 0,\n        stride_bias=",
    ),
)


def transform(source: str) -> str:
    """The source of moe_fused_gate.py with the arguments `live` and `live_stride`. Raises ValueError on drift."""
    for number, (old, new) in enumerate(ANCHORS, start=1):
        found = source.count(old)
        if found != 1:
            line = old.strip().splitlines()[0]
            raise ValueError(f"anchor {number} of {len(ANCHORS)} ({line!r}) occurs {found} times in moe_fused_gate.py")
        source = source.replace(old, new)
    return source


def load(source: str) -> types.ModuleType:
    """Import the transformed source from a real file: Triton reads a kernel's text from where it was defined."""
    text = transform(source)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    name = f"dsv41_dist_moe_fused_gate_live_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    file = _folder() / f"moe_fused_gate_live_{digest}.py"
    _write(file, text)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _folder() -> Path:
    """A folder of this user alone: code is imported from it, so nobody else may write there."""
    folder = Path(tempfile.gettempdir()) / f"dsv41_dist-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} must be a folder of user {os.getuid()} that no one else can write to")
    return folder


def _write(file: Path, text: str) -> None:
    """Ranks race here: each writes a file of its own and renames it, so that a reader sees a whole one."""
    if file.is_file() and not file.is_symlink() and file.read_text("utf-8") == text:
        return
    handle, partial = tempfile.mkstemp(dir=file.parent, prefix=file.stem, suffix=".partial")
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        out.write(text)
    os.replace(partial, file)

"""Both doors. With this folder on PYTHONPATH every Python started there calls `arm`; the engine's plug-in loader
calls it too, by the entry point `sglang.srt.plugins`. A sitecustomize that this one shadows is run as well, first."""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def arm():
    """Arm what the gates ask for, or end the process. Imports nothing when no gate is set; boot, once it is there, is
    asked all the same: it sees that a gate was unset."""
    is_set = any(name.startswith(("DSV41_", "SPARK_PREFILL_")) for name in os.environ)
    if not is_set and "dsv41_dist.engine.boot" not in sys.modules:
        return
    root = os.path.dirname(os.path.dirname(_HERE))
    try:
        if root not in sys.path:
            sys.path.append(root)
        import dsv41_dist
        from dsv41_dist.adapters import REGISTRY
        from dsv41_dist.engine import boot

        found = os.path.dirname(os.path.dirname(os.path.realpath(dsv41_dist.__file__)))
        if found != os.path.realpath(root):
            raise ImportError(f"this door is of {root}, but dsv41_dist is imported from {found}")
        boot.arm(REGISTRY)
    except Exception as error:
        # Python and the engine both report an exception here and go on: a gate that is set must not be lost so.
        from contextlib import suppress

        with suppress(OSError, ValueError):  # a stderr that cannot be written
            print(f"dsv41_dist cannot be armed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error


def _chain():
    from importlib.machinery import PathFinder

    # Only what this folder shadows: two copies of this file must not call each other in a circle.
    folders = [os.path.abspath(entry or ".") for entry in sys.path]
    later = sys.path[folders.index(_HERE) + 1 :] if _HERE in folders else []
    spec = PathFinder.find_spec("sitecustomize", later)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        # The name belongs to the earlier one; ours has no attributes that anybody needs.
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    try:
        _chain()
    finally:
        arm()

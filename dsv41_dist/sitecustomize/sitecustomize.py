"""Put this folder on PYTHONPATH: every Python started there arms dsv41_dist if a gate is set. A sitecustomize that was
there before is run as well, first."""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


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


def _arm():
    if not any(name.startswith(("DSV41_", "SPARK_PREFILL_")) for name in os.environ):
        return
    root = os.path.dirname(os.path.dirname(_HERE))
    try:
        if root not in sys.path:
            sys.path.append(root)
        import dsv41_dist
        from dsv41_dist.adapters import arm

        found = os.path.dirname(os.path.dirname(os.path.realpath(dsv41_dist.__file__)))
        if found != os.path.realpath(root):
            raise ImportError(f"this sitecustomize is of {root}, but dsv41_dist is imported from {found}")
    except Exception as error:
        # Python reports an exception in sitecustomize in one line and goes on: a gate that is set must not be lost so.
        print(f"dsv41_dist cannot be armed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error
    arm()


try:
    _chain()
finally:
    _arm()

"""The hook against a toy engine, each case in a fresh interpreter: all of it installs, or the process ends."""

from __future__ import annotations

import textwrap

import pytest


def passes(result) -> None:
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().endswith("done"), result.stderr


def refuses(result, *words: str) -> None:
    assert result.returncode == 1, (result.stdout, result.stderr)
    assert "done" not in result.stdout
    assert result.stderr.count("dsv41_dist refuses to go on") >= 1, result.stderr
    for word in words:
        assert word in result.stderr


def test_a_module_is_patched_right_after_it_executed(toy):
    passes(
        toy.run(
            """
            hook = armed_hook(Tag("a", "scale", "Layer.forward", "Layer.shape", "Layer.build", relied=["other"]))
            import sglang.ops as ops, sglang.user as user
            assert ops.scale(1) == 102 and ops.scale.__name__ == "scale" and ops.scale.__wrapped__(1) == 2
            assert ops.Layer().forward(1) == 203
            assert ops.Layer.shape(3) == (3,) and ops.Layer().shape(3) == (3,)
            assert ops.Layer.build(3) == (ops.Layer, 3)
            assert user.call(1) == (102,) * 5
            assert ops.__spec__.loader is ops.__loader__ and "Hook" not in repr(ops.__loader__)
            assert hook.verify() == [] and hook.states[0].status() == "fired"
            assert set(hook.states[0].patched.values()) == {1} and len(hook.states[0].patched) == 4
            print("done")
            """
        )
    )


def test_order_within_a_module_is_registry_order(toy):
    passes(
        toy.run(
            """
            class Times(Tag):
                def install(self, patch):
                    patch.wrap("scale", lambda original: lambda x: original(x) * self.add)
            armed_hook(Tag("plus", "scale", add=1), Times("times", "scale", add=10))
            from sglang.ops import scale
            assert scale(1) == (2 + 1) * 10, scale(1)
            print("done")
            """
        )
    )


def test_already_imported_modules_are_patched_at_once_and_stale_copies_are_rebound(toy):
    passes(
        toy.run(
            """
            import sglang.user as user, sglang.ops as ops
            assert user.call(1) == (2,) * 5
            hook = armed_hook(Tag("a", "scale"), Tag("b", "Layer.shape"))
            assert ops.scale(1) == 102
            assert user.call(1) == (102,) * 5, user.call(1)
            assert user.KEYED[ops.scale] == "by function"
            # global, TABLE, CHAIN, CHOSEN, KEYED, Holder.method, Holder.hooks, Holder.static
            assert [state.rebound for state in hook.states] == [8, 0]
            print("done")
            """
        )
    )


def test_copies_made_while_the_module_was_executing_are_rebound(toy):
    (toy.root / "sglang/registry.py").write_text("KNOWN = {}\n")
    toy.edit("sglang/ops.py", "class Layer:", "from .registry import KNOWN\nKNOWN['scale'] = scale\n\n\nclass Layer:")
    passes(
        toy.run(
            """
            import sglang.registry
            armed_hook(Tag("a", "scale"))
            import sglang.ops
            assert sglang.registry.KNOWN["scale"](1) == 102
            print("done")
            """
        )
    )


def test_a_module_that_re_exports_the_target_before_the_hook(toy):
    (toy.root / "sglang/facade.py").write_text("from .ops import scale as public, Layer\nfrom . import ops\n")
    passes(
        toy.run(
            """
            from sglang.facade import Layer
            import sglang.facade
            armed_hook(Tag("a", "scale", "Layer.forward"))
            assert sglang.facade.public(1) == 102 and Layer().forward(1) == 203
            print("done")
            """
        )
    )


def test_a_copy_that_cannot_be_rebound_is_a_refusal(toy):
    result = toy.run(
        """
        import sglang.frozen_user
        armed_hook(Tag("a", "scale"))
        print("done")
        """
    )
    refuses(result, "sglang.frozen_user.FROZEN (tuple)")


DRIFT = """
    armed_hook(Tag("a", "scale"))
    {body}
    print("done")
"""


def drifted(toy, body: str):
    toy.edit("sglang/ops.py", "return x * by", "return x * by + 0")
    return toy.run(textwrap.dedent(DRIFT).replace("{body}", textwrap.dedent(body)))


def test_drift_is_a_refusal_with_the_line_and_what_to_do(toy):
    result = drifted(toy, "import sglang.ops")
    refuses(result, "a cannot be installed: sglang.ops:scale differs", "+    return x * by + 0", "doctor")


def test_an_engine_that_catches_exception_does_not_catch_a_refusal(toy):
    body = """
try:
    import sglang.ops
except (ImportError, Exception):
    import sglang.ops
"""
    refuses(drifted(toy, body))


def test_an_engine_that_swallows_even_systemexit_meets_the_latch(toy):
    body = """
for attempt in range(3):
    try:
        import sglang.ops
    except BaseException as error:
        assert type(error).__name__ == "Refusal" and "differs" in str(error), error
    else:
        raise AssertionError("imported")
    assert "sglang.ops" not in sys.modules
try:
    import sglang.user
except BaseException as error:
    assert type(error).__name__ == "Refusal", error
else:
    raise AssertionError("imported")
import sglang.ops
"""
    refuses(drifted(toy, body))


def test_a_refusal_on_an_already_imported_module_is_latched_too(toy):
    toy.edit("sglang/ops.py", "return x * by", "return x * by + 0")
    result = toy.run(
        """
        import sglang.ops
        try:
            armed_hook(Tag("a", "scale"))
        except BaseException:
            pass
        from sglang import ops
        print("done")
        """
    )
    refuses(result)


def test_a_refusal_that_cannot_be_written_is_one(toy):
    body = """
sys.stderr = open("/dev/full", "w")
for attempt in range(2):
    try:
        import sglang.ops
    except Exception:
        print("swallowed")
"""
    result = drifted(toy, body)
    assert (result.returncode != 0, result.stdout) == (True, "")


def test_a_relied_on_symbol_that_drifted_refuses_too(toy):
    toy.edit("sglang/ops.py", "return x + 1", "return x + 2")
    refuses(toy.run('armed_hook(Tag("a", "scale", relied=["other"]))\nimport sglang.ops\nprint("done")'), "other")
    passes(toy.run('armed_hook(Tag("a", "scale"))\nimport sglang.ops\nprint("done")'))


def test_an_unknown_release_refuses(toy):
    (toy.root / "sglang/_version.py").write_text("__version__ = '9.9.2'\n")
    refuses(
        toy.run('armed_hook(Tag("a", "scale"))\nimport sglang.ops\nprint("done")'), "release 9.9.2 is not among 9.9.1"
    )


@pytest.mark.parametrize(
    ("install", "words"),
    [
        ('patch.wrap("scale", lambda f: f); raise ValueError("half way")', "ValueError: half way"),
        ("pass", "b left scale unpatched"),
        ('patch.wrap("other", lambda f: f)', "not a declared target"),
    ],
)
def test_an_install_that_fails_half_way_refuses(toy, install, words):
    result = toy.run(
        f"""
        class Bad(Tag):
            def install(self, patch):
                {install}
        armed_hook(Tag("a", "Layer.forward"), Bad("b", "scale"))
        try:
            import sglang.ops
        except Exception:
            pass
        print("done")
        """
    )
    refuses(result, words)


def test_a_target_that_another_plugin_replaced_refuses_and_one_it_wrapped_is_accepted(toy):
    before = """
        import functools, sglang.ops as ops
        stock = ops.scale
        def scale(x):
            return stock(x) + 1000
        ops.scale = {made}
        armed_hook(Tag("a", "scale"))
        assert ops.scale(1) == 1102
        print("done")
    """
    passes(toy.run(before.replace("{made}", "functools.wraps(stock)(scale)")))
    refuses(toy.run(before.replace("{made}", "scale")), "was replaced by one of")


def test_verify_sees_what_happened_after_the_installation(toy):
    passes(
        toy.run(
            """
            import functools
            hook = armed_hook(Tag("a", "scale"))
            import sglang.ops as ops
            ours = ops.scale
            ops.scale = functools.wraps(ours)(lambda x: ours(x))
            assert hook.verify() == []
            ops.scale = lambda x: x
            assert hook.verify() == ["sglang.ops:scale was replaced after it was patched"], hook.verify()
            ops.scale = ours
            fresh = sys.modules.pop("sglang.ops")
            sys.meta_path.remove(hook)
            import sglang.ops
            assert hook.verify()[0] == "sglang.ops was imported past the hook", hook.verify()
            print("done")
            """
        )
    )


def test_verify_looks_at_what_the_module_holds_now(toy):
    passes(
        toy.run(
            """
            hook = armed_hook(Tag("a", "Layer.forward", "Layer.shape", "Layer.build"))
            import sglang.ops as ops
            names = ["Layer.forward", "Layer.shape", "Layer.build"]
            stock, ops.Layer = ops.Layer, type("Layer", (ops.Layer,), {})
            assert hook.verify() == []
            class Other(stock):
                forward = shape = build = lambda *args: "stock"
            for ops.Layer in (Other, type("Empty", (), {}), None):
                assert hook.verify() == [f"sglang.ops:{name} was replaced after it was patched" for name in names]
            del ops.Layer
            assert len(hook.verify()) == 3
            print("done")
            """
        )
    )


def test_a_reload_is_patched_again(toy):
    passes(
        toy.run(
            """
            hook = armed_hook(Tag("a", "scale"))
            import sglang.ops
            importlib.reload(sglang.ops)
            assert sglang.ops.scale(1) == 102, sglang.ops.scale(1)
            assert hook.states[0].patched == {"sglang.ops:scale": 2} and hook.verify() == []
            print("done")
            """
        )
    )


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_every_start_method_are_patched(toy, method):
    (toy.root / "armed_worker.py").write_text(
        "import driver_setup\n\n\ndef work(queue):\n    from sglang.ops import scale\n    queue.put(scale(1))\n"
    )
    from tests.unit.engine.toy import PRELUDE

    setup = PRELUDE.format(releases=str(toy.releases)) + '\nHOOK = armed_hook(Tag("a", "scale"))\n'
    (toy.root / "driver_setup.py").write_text(setup)
    passes(
        toy.run(
            f"""
            import multiprocessing
            from armed_worker import work
            if __name__ == "__main__":
                context = multiprocessing.get_context({method!r})
                queue = context.Queue()
                workers = [context.Process(target=work, args=(queue,)) for _ in range(2)]
                [worker.start() for worker in workers]
                got = [queue.get(timeout=30) for _ in workers]
                [worker.join(30) for worker in workers]
                assert got == [102, 102], got
                print("done")
            """
        )
    )


def test_concurrent_imports_from_two_threads_patch_once(toy):
    toy.edit("sglang/ops.py", '"""Functions of many kinds."""', '"""Slow."""\nimport time\n\ntime.sleep(0.3)')
    passes(
        toy.run(
            """
            import threading
            hook = armed_hook(Tag("a", "scale"))
            got, gate = [], threading.Barrier(4)
            def work():
                gate.wait()
                from sglang.ops import scale
                got.append(scale(1))
            threads = [threading.Thread(target=work) for _ in range(4)]
            [t.start() for t in threads]; [t.join(30) for t in threads]
            assert got == [102] * 4, got
            assert hook.states[0].patched == {"sglang.ops:scale": 1}
            print("done")
            """
        )
    )


def test_arming_while_another_thread_imports_waits_for_it(toy):
    toy.edit("sglang/ops.py", '"""Functions of many kinds."""', '"""Slow."""\nimport time\n\ntime.sleep(0.5)')
    passes(
        toy.run(
            """
            import threading, time
            def work():
                import sglang.ops
            thread = threading.Thread(target=work)
            thread.start()
            while "sglang.ops" not in sys.modules:
                time.sleep(0.01)
            hook = armed_hook(Tag("a", "scale"))
            import sglang.ops
            assert sglang.ops.scale(1) == 102
            thread.join(30)
            assert hook.states[0].patched == {"sglang.ops:scale": 1}
            print("done")
            """
        )
    )


def test_a_refusal_in_a_thread_is_latched_for_the_main_thread(toy):
    toy.edit("sglang/ops.py", "return x * by", "return x * by + 0")
    result = toy.run(
        """
        import threading
        armed_hook(Tag("a", "scale"))
        def work():
            import sglang.ops
        thread = threading.Thread(target=work)
        thread.start(); thread.join(30)
        import sglang.ops
        print("done")
        """
    )
    refuses(result)

"""`logical_rows`: the shard's height stands for the chunk's, on the thread that opened it and nowhere else."""

import threading

import pytest

from dsv41_dist.engine.logical_rows import logical_rows, sharded_rows, whole_rows


def test_outside_a_chunk_rows_are_themselves():
    assert [logical_rows(n) for n in (0, 1, 512, 4096)] == [0, 1, 512, 4096]


def test_inside_only_the_shard_is_the_chunk():
    with sharded_rows(512, 2048):
        assert [logical_rows(n) for n in (0, 1, 512, 2048)] == [0, 1, 2048, 2048]
    assert logical_rows(512) == 512


def test_an_exception_closes_the_chunk():
    with pytest.raises(RuntimeError), sharded_rows(2, 8):
        raise RuntimeError
    assert logical_rows(2) == 2


def test_another_thread_does_not_see_it():
    seen = []
    with sharded_rows(2, 8):
        thread = threading.Thread(target=lambda: seen.append(logical_rows(2)))
        thread.start()
        thread.join()
    assert seen == [2]


@pytest.mark.parametrize(("shard", "rows"), [(0, 8), (3, 8), (16, 8), (-2, 8)])
def test_a_shard_must_divide_the_chunk(shard, rows):
    with pytest.raises(ValueError, match=f"shard={shard}, rows={rows}"), sharded_rows(shard, rows):
        pass


def test_chunks_do_not_nest():
    with sharded_rows(2, 8):
        with pytest.raises(ValueError, match="already open"), sharded_rows(1, 2):
            pass
        assert logical_rows(2) == 8


def test_inside_gathered_operators_rows_are_themselves():
    with sharded_rows(2, 8):
        with whole_rows(), whole_rows():
            assert logical_rows(2) == 2
        assert logical_rows(2) == 8
        with pytest.raises(RuntimeError), whole_rows():
            raise RuntimeError
        assert logical_rows(2) == 8

"""`KVPool` on a real Mooncake: what depends on the transport, and on who owns master and memory."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mooncrate import CacheGroup, KVPool, Namespace, PoolLimits, StoreConfig, mooncake
from mooncrate.master import MasterProcess
from mooncrate.results import SkipReason
from processes import is_running, wait_until
from toy_engine import ToyEngine, prompt, to_load, to_save

MIB = 1 << 20
GROUP = CacheGroup.full_attention(16)


@contextmanager
def peer(master: MasterProcess, num_bytes: int) -> Iterator[None]:
    """Another process that gives memory to the pool."""
    command = [sys.executable, str(Path(__file__).with_name("pool_peer.py")), master.address, str(num_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield
        finally:
            process.communicate()


def test_rule_36_8192_chunks_of_64_regions_go_both_ways_between_two_processes(master: MasterProcess) -> None:
    num_chunks, num_regions, block_bytes = 8192, 64, 1024
    memory = torch.empty(num_regions, num_chunks + 1, block_bytes, dtype=torch.uint8)
    period = (torch.arange(block_bytes + 251) % 251).to(torch.uint8)
    for region in range(num_regions):
        offsets = (torch.arange(num_chunks + 1) * 7 + region * 13) % 251
        memory[region] = period.unfold(0, block_bytes, 1)[offsets]
    wanted = memory.clone()
    hashes = prompt("both ways", num_chunks)
    block_ids = [list(range(num_chunks, 0, -1))]
    caches = {f"layer {region}": memory[region] for region in range(num_regions)}
    with (
        peer(master, 768 * MIB),
        mooncake.connect(master.address) as store,
        KVPool.open(model_name="both ways", groups=[GROUP], store=store) as pool,
    ):
        pool.register_kv_caches(caches, num_chunks + 1)
        saved = pool.save(to_save(hashes, block_ids, num_chunks * 16)).result()
        assert (saved.num_saved, saved.num_bytes, saved.failed) == (num_chunks, num_chunks * num_regions * 1024, ())
        assert pool.lookup(num_chunks * 16 + 1, hashes) == num_chunks * 16
        memory[:, 1:].zero_()
        loaded = pool.load(to_load(hashes, block_ids, num_chunks * 16)).result()
        assert (loaded.num_tokens, loaded.num_bytes, loaded.is_complete) == (num_chunks * 16, saved.num_bytes, True)
        assert torch.equal(memory, wanted)
        pool.reset()


def test_rule_36_a_queue_that_was_not_made_longer_is_not_overrun(master: MasterProcess) -> None:
    script = f"""
import torch
from mooncrate import CacheGroup, KVPool, mooncake
from toy_engine import ToyEngine, prompt, to_load, to_save
engine = ToyEngine([CacheGroup.full_attention(16)], num_blocks=129, num_layers=64)
hashes, ids = prompt("short queue", 128), [list(range(1, 129))]
engine.compute(hashes, ids)
with mooncake.connect({master.address!r}) as store:
    with KVPool.open(model_name="short queue", groups=engine.groups, store=store) as pool:
        engine.register(pool)
        assert pool.save(to_save(hashes, ids, 2048)).result().is_complete
        engine.wipe()
        jobs = [pool.load(to_load(hashes[:64], [ids[0][:64]], 1024)), pool.load(to_load(hashes, ids, 2048, 1024))]
        assert [job.result().num_tokens for job in jobs] == [1024, 2048]
        assert all(engine.holds(hashes, ids, 0, chunk) for chunk in range(128))
        print(pool._budget.limit, pool._budget.most_in_flight)
        pool.reset()
"""
    directory = str(Path(__file__).parent)
    environment = {**os.environ, mooncake.QUEUE_VARIABLE: "1024", "PYTHONPATH": directory}
    with peer(master, 64 * MIB):
        ran = subprocess.run(
            [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True, timeout=120, check=True
        )
    assert ran.stdout == "2048 2048\n"


def test_an_embedded_pool_serves_and_leaves_nothing_behind() -> None:
    engine, hashes = ToyEngine([GROUP]), prompt("embedded", 4)
    config = StoreConfig.embedded(global_segment_size="32MiB")
    with KVPool.open(config, model_name="m", groups=[GROUP]) as pool:
        assert pool._connection is not None
        master = pool._connection.master
        assert master is not None
        pid = master.pid
        engine.register(pool)
        engine.compute(hashes, [[1, 2, 3, 4]])
        assert pool.lookup(65, hashes) == 0
        assert pool.save(to_save(hashes, [[1, 2, 3, 4]], 64)).result().num_saved == 4
        assert pool.lookup(65, hashes) == 64
        assert pool.load(to_load(hashes, [[5, 6, 7, 8]], 64)).result().num_tokens == 64
        assert all(engine.holds(hashes, [[5, 6, 7, 8]], 0, chunk) for chunk in range(4))
        assert is_running(pid)
    assert not is_running(pid)


def test_rule_31_and_33_a_pool_outlives_its_master_and_closes_without_it() -> None:
    engine, hashes = ToyEngine([GROUP]), prompt("dead", 3)
    with MasterProcess() as master, mooncake.connect(master.address, segment_bytes=32 * MIB) as store:
        pool = KVPool.open(model_name="m", groups=[GROUP], store=store)
        engine.register(pool)
        engine.compute(hashes, [[1, 2, 3]])
        assert pool.save(to_save(hashes, [[1, 2, 3]], 48)).result().is_complete
        ports = master.rpc_port, master.metrics_port
        master.stop()
        assert pool.lookup(49, hashes) == 0
        assert [chunk.code for chunk in pool.save(to_save(hashes, [[1, 2, 3]], 48)).result().failed] == [-900] * 3
        assert pool.load(to_load(hashes, [[4, 5, 6]], 48)).result().failed_block_ids == (frozenset({4, 5, 6}),)
        with MasterProcess(*ports):
            wait_until(lambda: pool.save(to_save(hashes, [[1, 2, 3]], 48)).result().is_complete, "saving again")
            assert pool.lookup(49, hashes) == 48
        assert pool.lookup(49, hashes) == 0
        queued = [pool.load(to_load(hashes, [[4, 5, 6]], 48)) for _ in range(20)]
        pool.close(timeout=12.0)
        assert all(job.result(timeout=0).num_tokens == 0 for job in queued)


def test_rule_32_reset_speaks_the_regular_expressions_of_the_store(master: MasterProcess) -> None:
    engine, hashes = ToyEngine([GROUP]), prompt("reset", 2)
    names = ["a.b", "aXb", "a+b(c)[d]{e}|^$", "müller/ä b", "a.b2", "x-y_z~!#&'"]
    with mooncake.connect(master.address, segment_bytes=32 * MIB) as store:
        pools = [KVPool.open(model_name=name, groups=[GROUP], store=store) for name in names]
        pools += [KVPool.open(model_name="a.b", groups=[GROUP], store=store, namespace=Namespace())]
        for pool in pools:
            engine.register(pool)
            pool.save(to_save(hashes, [[1, 2]], 32)).result()
            pool.register_kv_caches([{"other": torch.zeros(4, 8)}], 4)  # so that the next pool can register the first
        for number, pool in enumerate(pools):
            if pool.namespace is not None:
                engine_again = ToyEngine([GROUP])
                engine_again.register(pool)
            assert pool.reset() == 2, names[number] if number < len(names) else "namespace"
            assert [one.lookup(33, hashes) for one in pools[:number]] == [0] * number
            assert [one.lookup(33, hashes) for one in pools[number + 1 : len(names)]] == [32] * (
                len(names) - number - 1
            )
        for pool in pools:
            pool.close()


def test_rule_24_a_pool_that_is_full_makes_room_and_saving_goes_on() -> None:
    engine = ToyEngine([GROUP], num_blocks=17, num_layers=1, block_bytes=MIB)
    limits = PoolLimits(max_batch_integers=8)
    with (
        KVPool.open(
            StoreConfig.embedded(global_segment_size="32MiB"), model_name="m", groups=[GROUP], limits=limits
        ) as pool,
    ):
        engine.register(pool)
        ids = [list(range(1, 17))]
        results = []
        for number in range(4):
            hashes = prompt(f"full {number}", 16)
            results.append(pool.save(to_save(hashes, ids, 256)).result())
        assert SkipReason.PRESSURE in [result.skipped for result in results]
        last = prompt("after", 2)
        wait_until(lambda: pool.save(to_save(last, [[1, 2]], 32)).result().is_complete, "saving after pressure")

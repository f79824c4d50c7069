"""`MooncrateConnector` as vLLM makes and calls it, both roles in one process, with a real Mooncake pool."""

from __future__ import annotations

import inspect
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from connector_parts import (
    NUM_BLOCKS,
    Blocks,
    cache_config,
    connector_module,
    full_spec,
    make_request,
    make_step,
    mamba_spec,
    sliding_spec,
    vllm_config,
)
from mooncake_pool import MooncakePool
from mooncrate.errors import ConfigError, LayoutError, MooncrateError
from vllm_import import import_vllm

pytestmark = pytest.mark.vllm_version("0.32.0")

BASE: Final = "distributed.kv_transfer.kv_connector.v1.base"
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakePool]:
    with MooncakePool(tmp_path_factory.mktemp("pool")) as pool:
        yield pool


@pytest.fixture
def make(objects: MooncakePool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes connectors of a role, as the only rank."""
    objects.clear()
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(objects.config_path))
    monkeypatch.setattr(import_vllm("distributed"), "get_tensor_model_parallel_rank", lambda: 0)
    made = []

    def make(side: str, *specs: Any, **config: Any) -> Any:  # noqa: ANN401
        connector_class = connector_module("connector").MooncrateConnector
        roles = import_vllm(BASE).KVConnectorRole
        connector = connector_class(vllm_config(**config), roles[side], cache_config(*(specs or [full_spec()])))
        made.append(connector)
        return connector

    yield make
    for connector in made:
        connector.shutdown()


def test_vllm_finds_it_by_the_names_that_operators_write() -> None:
    factory = import_vllm("distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    found = factory.get_connector_class(vllm_config().kv_transfer_config)
    assert found is connector_module("connector").MooncrateConnector
    assert import_vllm(BASE).supports_hma(found)
    assert not inspect.isabstract(found)


def test_a_request_is_saved_by_one_engine_step_and_loaded_by_another(make: Make, objects: MooncakePool) -> None:
    scheduler, worker = make("SCHEDULER"), make("WORKER")
    blocks, request = Blocks(), make_request("a", 100)
    caches = {
        name: torch.arange(NUM_BLOCKS * 64, dtype=torch.float32).reshape(NUM_BLOCKS, 1, 16, 4) + 1e6 * index
        for index, name in enumerate(("group 0 layer 0", "group 0 layer 1"))
    }
    scheduler.bind_gpu_block_pool(blocks.pool)
    worker.register_kv_caches(caches)

    def run(step: Any) -> Any:  # noqa: ANN401
        """One step of an engine, the metadata pickled on its way to the worker."""
        worker.bind_connector_metadata(pickle.loads(pickle.dumps(scheduler.build_connector_meta(step))))
        worker.start_load_kv(None)
        worker.wait_for_save()
        while worker.num_jobs:
            worker._worker_side.wait_for_any()
        results = worker.get_transfer_results(set())
        assert worker.get_block_ids_with_load_errors() == set()
        output = import_vllm("v1.outputs").KVConnectorOutput(
            finished_recving=results.finished_recving,
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
            kv_cache_events=worker.get_kv_connector_kv_cache_events(),
        )
        worker.clear_connector_metadata()
        scheduler.update_connector_output(output)
        return results

    def matched(request: Any) -> tuple[int, bool]:  # noqa: ANN401
        while (answer := scheduler.get_num_new_matched_tokens(request, 0))[0] is None:
            scheduler.build_connector_meta(make_step(blocks))  # the next step has time to wait again
        return answer[0], answer[1]

    assert matched(request) == (0, False)
    scheduler.update_state_after_alloc(request, blocks.allocate("a", 100), 0)
    step = make_step(blocks, new={"a": (100, 0, 100)})
    first = blocks.ids("a")[0]
    run(step)
    assert len(objects.keys()) == 6
    assert (scheduler.has_pending_push_work(), scheduler.num_jobs, scheduler.num_referenced_blocks) == (False, 0, 0)
    assert scheduler.request_finished_all_groups(request, blocks.ids("a")) == (False, None)

    again = make_request("b", 100)
    assert matched(again) == (96, True)
    tables = blocks.allocate("b", 96)
    second = blocks.ids("b")[0]
    before = {name: cache.clone() for name, cache in caches.items()}
    for cache in caches.values():
        cache[second] = -1
    scheduler.update_state_after_alloc(again, tables, 96)
    assert run(make_step(blocks)).finished_recving == {"b"}
    for name, cache in caches.items():
        assert torch.equal(cache[second], before[name][first[:6]])

    counts = worker.get_kv_connector_stats().data["counts"]
    assert (counts["saved_keys"], counts["loaded_keys"], counts["loaded_bytes"]) == (6, 6, 6 * 2 * 256)
    assert scheduler.get_kv_connector_stats().data["counts"]["hit_tokens"] == 96
    assert scheduler.get_kv_connector_stats() is None
    assert scheduler.reset_cache() is True
    assert worker.reset_cache() is None
    assert objects.keys() == set()


def test_an_engine_that_gives_memory_alone_moves_nothing(make: Make) -> None:
    config = {"role": "kv_consumer", "extra": {"enable_lookup": False}}
    scheduler, worker = make("SCHEDULER", **config), make("WORKER", **config)
    request = make_request("a", 100)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    worker.register_kv_caches({})
    worker.bind_connector_metadata(scheduler.build_connector_meta(make_step(Blocks())))
    worker.start_load_kv(None)
    worker.wait_for_save()
    assert worker.get_transfer_results(set()).finished_recving == set()
    assert worker.build_connector_worker_meta() is None
    assert worker.get_kv_connector_stats() is None
    assert worker._connection is not None


def test_a_scheduler_gives_no_memory(make: Make) -> None:
    scheduler = make("SCHEDULER")
    assert scheduler._connection is not None
    assert scheduler._worker_side is None
    assert scheduler.build_connector_worker_meta() is None


def test_shutdown_may_come_twice(make: Make) -> None:
    for role in ("SCHEDULER", "WORKER"):
        connector = make(role)
        connector.shutdown()
        connector.shutdown()


def test_nobody_waits_for_this_connector_to_deliver(make: Make) -> None:
    assert make("SCHEDULER", role="kv_producer").requires_kv_delivery is False


@pytest.mark.parametrize("specs", [(full_spec, lambda: sliding_spec(33)), (lambda: sliding_spec(33),)])
def test_loads_within_the_step_are_refused_where_their_failure_could_not_be_mended(make: Make, specs: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match="load_async: false: not supported for models with several"):
        make("SCHEDULER", *(spec() for spec in specs), extra={"load_async": False})
    make("SCHEDULER", extra={"load_async": False})


def test_refusals_come_before_the_pool_is_reached(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH")
    with pytest.raises(LayoutError, match="does not support KV cache group 0: MambaSpec"):
        make("WORKER", mamba_spec())
    with pytest.raises(ConfigError, match="MOONCAKE_CONFIG_PATH is not set"):
        make("WORKER")


def test_a_master_that_is_not_there_is_said_at_start(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, objects: MooncakePool
) -> None:
    config = json.loads(objects.config_path.read_text())
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps(config | {"master_server_address": "127.0.0.1:1"}))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))
    with pytest.raises(MooncrateError, match=r"no Mooncake master answers at 127\.0\.0\.1:1"):
        make("SCHEDULER")


@pytest.mark.parametrize(("text", "number"), [("", 2), ("5", 5)])
def test_load_threads_are_those_of_vllms_connector(monkeypatch: pytest.MonkeyPatch, text: str, number: int) -> None:
    monkeypatch.setenv("VLLM_MOONCAKE_LOAD_RECV_THREADS", text)
    assert connector_module("connector")._num_load_threads() == number


def test_a_number_of_load_threads_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MOONCAKE_LOAD_RECV_THREADS", "0")
    with pytest.raises(ConfigError, match="VLLM_MOONCAKE_LOAD_RECV_THREADS: '0'"):
        connector_module("connector")._num_load_threads()

"""The store that ranks share: it is used again after a restart, and holds the first failure."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from python_process import PATIENCE
from torch._C._distributed_c10d import HashStore, TCPStore

from runner.distributed import store as ranks_store

FAILURE = ("rank 1 failed:", "ValueError: the cause")


def test_restarted_ranks_share_the_previous_store(run_ranks: Any):
    """Ranks must tell the attempts apart without a count, because only one of two nodes may count the restart."""

    def program():
        import os
        import time

        from turns import say, wait_for

        from runner.distributed.environment import keep_across_restarts
        from runner.distributed.local_ranks import ranks

        own = ranks()
        seed = int(os.environ["SEED"])
        if own.rank == 0:
            wait_for(f"calls1-{seed}", f"calls2-{seed}")
            time.sleep(0.5)  # the other ranks read the keys of the previous attempt meanwhile
            folder = keep_across_restarts("folder", lambda: f"folder{seed}")
            with own.sharing({"seed": seed, "run_dir": folder}):
                wait_for(f"has1-{seed}", f"has2-{seed}")
        else:
            say(f"calls{own.rank}-{seed}")
            job = next(own.receive())
            print(job["seed"], job["run_dir"])
            say(f"has{own.rank}-{seed}")

    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_PORT": str(agent.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    for seed in (5, 6):
        finished = run_ranks(program, 3, env={**shared, "SEED": str(seed)})
        assert [rank.stdout.split() for rank in finished[1:]] == [[str(seed), "folder5"]] * 2


def test_errors_that_follow_from_a_failure_are_replaced_by_the_first_failure(run_ranks: Any):
    def program():
        import os

        from turns import say, wait_for

        from runner import Event, Timestamp
        from runner.distributed.store import current_store, first_failure, group_store
        from runner.failures.facts import add_raiser, facts_of

        current_store()
        rank = int(os.environ["RANK"])
        group_store()
        if rank == 1:
            try:
                raise ValueError("the cause")
            except ValueError as error:
                add_raiser(error, "mine", Event.BATCH_END, Timestamp(batch=3))
                assert first_failure(error) is error
            say("failed")
            wait_for("read0", "read2")
            return
        wait_for("failed")
        for error in (RuntimeError("connection closed"), ValueError("of its own"), KeyboardInterrupt()):
            print(type(first_failure(error)).__name__)
        facts = facts_of(first_failure(RuntimeError("connection closed")))
        assert facts.raisers == (("mine", Event.BATCH_END, Timestamp(batch=3)),)
        print(first_failure(RuntimeError("connection closed")))
        say(f"read{rank}")
        wait_for("read0", "read2")  # rank 0 hosts the store

    finished = run_ranks(program, 3)
    for rank in (finished[0], finished[2]):
        lines = rank.stdout.splitlines()
        assert lines[:3] == ["RankFailed", "ValueError", "KeyboardInterrupt"]
        assert (lines[3], lines[-1]) == FAILURE


def test_a_rank_does_not_wait_for_a_failed_rank(run_ranks: Any):
    def program():
        import os
        import time

        from turns import say, wait_for

        from runner.distributed.store import current_store, first_failure, group_store
        from runner.failures.errors import RankFailed

        current_store()
        if os.environ["RANK"] == "1":
            wait_for("waits")
            time.sleep(0.5)
            first_failure(ValueError("the cause"))
            start = time.monotonic()
            wait_for("left")
            assert time.monotonic() - start < 60
        else:
            say("waits")
            try:
                group_store()
            except RankFailed as failure:
                print(failure)
            say("left")

    finished = run_ranks(program, 2)
    assert tuple(finished[0].stdout.splitlines()) == FAILURE


def test_a_failure_does_not_affect_the_next_job(run_ranks: Any):
    def program():
        import os

        from turns import say, wait_for

        from runner.distributed.store import begin_job, current_store, first_failure, group_store

        current_store()
        begin_job(1)
        first_failure(ValueError(os.environ["RANK"]))
        begin_job(2)
        group_store()
        if os.environ["RANK"] == "0":
            error = RuntimeError("a new one")
            assert first_failure(error) is error
        say("done" + os.environ["RANK"])
        wait_for("done0", "done1")

    run_ranks(program, 2)


def test_a_failure_without_a_signature_is_ignored():
    store = HashStore()
    ranks_store.begin_job(1)
    store.set("job/1/failure", json.dumps([1, "a lie"]))
    assert ranks_store.find_failure(store) is None
    assert str(ranks_store.report_failure(store, 0, "the truth")) == "rank 0 failed:\nthe truth"
    assert str(ranks_store.report_failure(store, 1, "what follows")) == "rank 0 failed:\nthe truth"


@pytest.mark.parametrize("kind", ["AcceleratorError", "OutOfMemoryError"])
def test_the_failure_of_a_device_is_reported_immediately(monkeypatch: pytest.MonkeyPatch, caplog: Any, kind: str):
    """It does not wait for another rank's report, because NCCL may end the process meanwhile."""
    store = HashStore()
    monkeypatch.setattr(ranks_store, "_round", store)
    monkeypatch.setattr(ranks_store, "SETTLE", PATIENCE)
    start_time = time.monotonic()
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    ranks_store.begin_job(1)
    error = getattr(torch, kind)("the cause")
    assert ranks_store.first_failure(error) is error is ranks_store.first_failure(error)
    assert time.monotonic() - start_time < PATIENCE
    failure = ranks_store.find_failure(store)
    assert failure is not None and failure.rank == 1 and failure.trace.endswith("Error: the cause")
    messages = [record.getMessage() for record in caplog.records]
    assert messages == (["rank 1 cannot continue: its device failed"] if kind == "AcceleratorError" else [])

"""A job reaches other processes as JSON, and is the same there."""

from __future__ import annotations

import json
from dataclasses import asdict

from runner.cli.command import Command, parse
from runner.distributed.threads import Threads
from runner.records.job import Job


def test_a_job_is_the_same_on_other_ranks():
    command = parse(["fork", "run", "ba5", "--allow-targets", "own.*,other.Net", "--allow-divergence", "seed=1", "-m"])
    whole = Job({"seed": 1, "callbacks": {"a": [1, None]}}, "/folder", "name", command, "/x", threads=Threads(2, True))
    for job in (whole, Job({}, "", "", Command.of("eval")), Job({}, "", "")):
        assert Job.from_message(json.loads(json.dumps(asdict(job)))) == job


def test_a_job_is_called_by_what_was_typed_for_it():
    assert Job({}, "", "", overrides=["seed=1", "model=mlp"]).title == "seed=1 model=mlp"
    assert Job({}, "", "").title == "the default run"

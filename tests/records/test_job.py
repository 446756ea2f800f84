"""A job is sent to other processes as JSON without loss."""

from __future__ import annotations

import json
from dataclasses import asdict

from composed_configs import small_experiment

from runner.cli.command import Command, parse
from runner.distributed.threads import Threads
from runner.records.job import Job


def test_a_job_survives_json():
    command = parse(["fork", "run", "ba5", "--allow-targets", "own.*,other.Net", "--allow-divergence", "seed=1", "-m"])
    full = Job(
        small_experiment(seed=1, vars={"a": [1, None]}),
        "/folder",
        "name",
        command,
        "/x",
        threads=Threads(2, True),
        parent=small_experiment(seed=2),
    )
    for job in (full, Job(small_experiment(), "", "", Command.of("eval")), Job(small_experiment(), "", "")):
        assert Job.from_message(json.loads(json.dumps(asdict(job)))) == job


def test_the_title_of_a_job_is_its_overrides():
    assert Job(small_experiment(), "", "", overrides=["seed=1", "model=mlp"]).title == "seed=1 model=mlp"
    assert Job(small_experiment(), "", "").title == "the default run"

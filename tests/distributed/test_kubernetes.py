"""The Kubernetes manifest in docs/distributed.md is valid for Kubeflow's Trainer. No cluster runs it here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


@pytest.fixture
def parse() -> Any:
    """Parses a manifest with Kubeflow's own classes, which drop unknown keys, and returns it as a dict."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    return lambda manifest: models.TrainerV1alpha1TrainJob.from_dict(manifest).to_dict()


def test_the_manifest_of_the_docs_is_a_train_job(parse: Any):
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (text,) = (block for block in blocks if "TrainJob" in block)
    manifest = yaml.safe_load(text)
    assert parse(manifest) == manifest
    misspelled = {**manifest, "spec": {**manifest["spec"], "trainr": {}}}
    assert parse(misspelled) == manifest, "a misspelled key would not be detected"

"""The manifest on the page of clusters is one that Kubeflow's Trainer knows. No cluster runs it here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


@pytest.fixture
def known() -> Any:
    """Returns what Kubeflow's own classes know of a manifest, made from the definitions of its API."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    return lambda manifest: models.TrainerV1alpha1TrainJob.from_dict(manifest).to_dict()


def test_the_manifest_is_a_train_job(known: Any):
    (text,) = (one for one in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL) if "TrainJob" in one)
    manifest = yaml.safe_load(text)
    assert known(manifest) == manifest
    misspelt = {**manifest, "spec": {**manifest["spec"], "trainr": {}}}
    assert known(misspelt) == manifest, "a misspelled key went unnoticed"

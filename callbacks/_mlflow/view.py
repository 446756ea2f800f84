"""The saved view of an experiment, which the UI offers under Views: a list of runs with the columns that matter."""

from __future__ import annotations

import json
from collections.abc import Sequence

from mlflow import MlflowClient

from runner.callbacks._mlflow.spool import now_ms

VIEW = "mlflow.sharedViewState.runner"  # tag of an experiment
SHARED_VIEW = "viewStateShareKey=runner"  # query of a link that opens it
MOST = 20  # columns
LONGEST = 120  # characters of a column, as a tag of an experiment has 5000


def add_to_view(client: MlflowClient, experiment_id: str, columns: Sequence[str]) -> None:
    """Add columns to the view that is named 'Results', which is created if the experiment has none.

    Columns have the UI's names, such as "params.`optimizer.lr`".
    """
    before = client.get_experiment(experiment_id).tags.get(VIEW)
    try:
        saved = json.loads(before or "")
        state = json.loads(saved["state"])
        shown = [str(one) for one in state["selectedColumns"]]
    except (ValueError, TypeError, KeyError):
        saved = {"name": "Results", "createdAt": now_ms()}
        state = {}
        shown = []
    wanted = list(dict.fromkeys([*shown, *(one for one in map(str, columns) if len(one) <= LONGEST)]))[:MOST]
    if wanted != shown:
        state["selectedColumns"] = wanted
        view = {**saved, "updatedAt": now_ms(), "state": json.dumps(state)}
        client.set_experiment_tag(experiment_id, VIEW, json.dumps(view))

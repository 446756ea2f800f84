"""Find, load and serve the model that a run logged to MLflow."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def model_folder(folder: Path) -> Path:
    """Return the folder of the model that a run logged; `folder` is the working directory of the run."""
    return next((folder / "outputs" / "mlartifacts").rglob("MLmodel")).parent


def load(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing MLflow causes warnings
        import mlflow.pyfunc

    return mlflow.pyfunc.load_model(str(model_folder(folder)))


@contextmanager
def serving(folder: Path) -> Iterator[Callable[[Any], tuple[int, Any]]]:
    """Serve the model, and yield a function that posts rows and returns the status and content of the response."""
    # Unprepared, transformers cannot be imported beside a torchvision without operators, as with a CPU build of torch.
    (folder / "site").mkdir()
    prepare = "from runner.libraries.targets import prepare_import\nprepare_import('transformers')\n"
    (folder / "site" / "sitecustomize.py").write_text(prepare)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", str(model_folder(folder)), "-p", str(port)]
    scripts = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    environment["PYTHONPATH"] = f"{folder / 'site'}{os.pathsep}{Path(__file__).parents[2]}"
    server = subprocess.Popen(
        [*command, "--env-manager", "local", "-h", "127.0.0.1"], env=environment, start_new_session=True
    )
    try:
        yield lambda rows: _post(port, rows)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def _post(port: int, rows: Any) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/invocations", json.dumps(rows).encode(), {"Content-Type": "application/json"}
    )
    deadline = time.monotonic() + 240
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())
        except OSError:  # the server is not up yet
            if time.monotonic() > deadline:
                raise
            time.sleep(1)

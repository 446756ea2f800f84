"""Models from the Hub, which a local server replaces; the cache is in the folder of the test."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from random_models import save_random_model

transformers: Any = pytest.importorskip("transformers")

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RUN = ("model=hf_causal_lm", "model.module.name=owner/tiny", "data=stdlib_text", "data.context=32", "data.batch_size=4")
RUN += ("data.eval_bytes=1024", "optimizer=adamw", "algorithms=none", "callbacks=[checkpoint_saver]")


class Hub:
    """A server with the model `owner/tiny` and the gated model `owner/gated`.

    Attributes:
        requests: method and path of each request, in order.
        env: environment of processes that use this server as the Hub.
    """

    def __init__(self, files: Path, cache: Path) -> None:
        self.requests: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub.requests.append(f"{self.command} {self.path}")
                name, _, rest = self.path.removeprefix("/").partition("/resolve/")
                revision, _, rest = rest.partition("/")
                file = files / rest
                if name == "owner/gated":
                    self.answer(403, error="GatedRepo")
                elif name != "owner/tiny":
                    self.answer(404, error="RepoNotFound")
                elif revision not in ("main", COMMIT):
                    self.answer(404, error="RevisionNotFound")
                elif not rest or not file.is_file():
                    self.answer(404, error="EntryNotFound")
                else:
                    self.answer(200, file.read_bytes())

            do_GET = do_HEAD

            def answer(self, status: int, content: bytes = b"", error: str | None = None) -> None:
                self.send_response(status)
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
                self.send_header("Content-Length", str(len(content)))
                if error is not None:
                    self.send_header("X-Error-Code", error)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.env = {
            "HF_ENDPOINT": f"http://127.0.0.1:{self.server.server_port}",
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    hub = Hub(save_random_model(config, tmp_path / "files"), tmp_path / "cache")
    yield hub
    hub.close()


@pytest.mark.slow
def test_a_model_is_downloaded_once_and_resumed_without_a_request(hub: Hub, run_app):
    trained = run_app(*RUN, "trainer.max_duration=2ba", "hydra.run.dir=run", env=hub.env)
    assert trained.stderr == "INFO: looking for 'owner/tiny' on the Hub\n"
    assert "[transformers]" not in trained.stdout
    downloads = [request for request in hub.requests if request.startswith("GET")]
    assert sum(request.endswith("model.safetensors") for request in downloads) == 1
    hub.requests.clear()
    run_app("resume", "run", "trainer.max_duration=4ba", env=hub.env)
    assert hub.requests == []


LOAD_MODELS = """
import sys
from runner.models.hf.causal_lm import HFCausalLM
for name in sys.argv[1:]:
    try:
        HFCausalLM(*name.split("@")[:1], revision=name.partition("@")[2] or None)
    except FileNotFoundError as error:
        print(error)
"""


@pytest.mark.slow
def test_unknown_and_gated_models_and_unknown_revisions_have_an_error_of_one_line(hub: Hub):
    names = ["owner/tyni", "owner/gated", "owner/tiny@v9"]
    command = [sys.executable, "-W", "error", "-c", LOAD_MODELS, *names]
    ended = subprocess.run(command, env=os.environ | hub.env, capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    assert ended.stdout.splitlines() == [
        "name='owner/tyni': neither a folder nor a model that the Hub shows you; check the name, or log in with "
        "`hf auth login`",
        "name='owner/gated': accept its terms at https://huggingface.co/owner/gated first, and log in with "
        "`hf auth login`",
        "name='owner/tiny': the Hub has no revision='v9' of it; give another revision, or none",
    ]


def test_a_command_with_an_unknown_model_ends_with_the_error(hub: Hub, run_app):
    ended = run_app(*RUN, "model.module.name=owner/tyni", env=hub.env, exit_code=2)
    first, last = ended.stderr.splitlines()
    assert first == "INFO: looking for 'owner/tyni' on the Hub"
    assert last.startswith("error: model.module.name='owner/tyni': neither a folder nor a model that the Hub shows")

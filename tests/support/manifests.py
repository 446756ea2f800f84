"""Changes the manifests of checkpoints."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path


def seal(file: Path) -> None:
    """Make the manifest of a checkpoint match a file in it, as the author of a malicious checkpoint would."""
    manifest = file.parent / "manifest.json"
    facts, content = json.loads(manifest.read_text()), file.read_bytes()
    facts["files"][file.name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest.write_text(json.dumps(facts))

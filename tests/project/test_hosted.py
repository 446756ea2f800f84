"""Checks and workflows of the hosted repository: installed packages, trusted actions and permissions."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TOOLS = ("bash", "cat", "dirname", "env", "grep", "mktemp", "rm", "tee", "timeout")


def checks(folder: Path, **environment: str) -> list[str]:
    """Return the output of `.ci/run` with only basic programs, and with stand-ins for make and apt-get."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    (folder / ".ci").mkdir(exist_ok=True)
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci")
    for name in TOOLS:
        (programs / name).unlink(missing_ok=True)
        (programs / name).symlink_to(str(shutil.which(name)))
    for name, line in {"id": "echo 0", "make": 'echo "make $*"', "apt-get": 'echo "apt-get $*" >>installed'}.items():
        (programs / name).write_text(f"#!{programs}/bash\n{line}\n")
        (programs / name).chmod(0o755)
    variables = {"PATH": str(programs), **environment}
    done = subprocess.run([str(folder / ".ci" / "run")], env=variables, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


def test_checks_announce_what_apt_installs_and_a_variable_prevents_it(tmp_path: Path):
    installed = tmp_path / "installed"
    lines = checks(tmp_path, RUNNER_CI_APT="0")
    assert not installed.exists()
    assert lines[:3] == [
        "not installed, so its tests are skipped: Slurm (slurm-wlm slurmctld slurmd slurm-client munge)",
        "not installed, so its tests are skipped: a browser (chromium chromium-driver)",
        "make test",
    ]
    lines = checks(tmp_path)
    assert lines[0].startswith("apt-get installs Slurm: slurm-wlm ") and "RUNNER_CI_APT=0" in lines[0]
    assert lines[1].startswith("apt-get installs a browser: chromium chromium-driver ")
    last_words = [line.split()[-1] for line in installed.read_text().splitlines()]
    assert last_words == ["update", "munge", "update", "chromium-driver"]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_pin_actions_by_hash_and_have_few_permissions(file: Path):
    text = file.read_text()
    uses = re.findall(r"uses: (.+)", text)
    assert uses and all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+( # zizmor: .+)?", line) for line in uses)
    workflow: dict[str, Any] = yaml.safe_load(text)
    allowed = [{}, {"contents": "read"}, {"id-token": "write"}, {"contents": "write"}]
    rights = [workflow["permissions"], *(job.get("permissions", {}) for job in workflow["jobs"].values())]
    assert all(right in allowed for right in rights)


def test_hosted_checks_run_the_script_of_contributors():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["jobs"]["checks"]["steps"][-1] == {"run": ".ci/run"}

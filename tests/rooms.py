"""Print which share of the statements of each room the tests ran, from the file of `coverage json`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path


def main(report: Path) -> None:
    """Print a line for each room, the least covered first."""
    statements: Counter[str] = Counter()
    covered: Counter[str] = Counter()
    for path, file in json.loads(report.read_text())["files"].items():
        parts = Path(path).parts
        room = "/".join(parts[:2] if parts[0] == "runner" and len(parts) > 2 else parts[:1])
        for name in (room, "all"):
            statements[name] += file["summary"]["num_statements"]
            covered[name] += file["summary"]["covered_lines"]
    shares = {name: covered[name] / statements[name] for name in statements if statements[name]}
    for name in sorted(shares, key=lambda name: shares[name]):
        print(f"{name:22} {statements[name]:6} statements {shares[name]:7.1%}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

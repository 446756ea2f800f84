"""Finds which jobs of a sweep train alike up to which batch: a tree, derived from their configs before anything trains.

Settings that act from the first batch must be equal. Functions of time are evaluated batch by batch: jobs diverge after
the last batch up to which all values agree. A job with unknown effects is trained alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from runner.config.command_line import key_of
from runner.runs.changes import find_changes
from runner.runs.recording import fingerprint
from runner.sweeps.plan import PlannedJob
from runner.sweeps.sharing.foresight import START, Foreseen, next_moment
from runner.time import Timestamp

LEAST = 0.05
"""Part of a run below which another checkpoint would cost more than it saves."""


@dataclass
class Branch:
    """One job in the tree of a sweep.

    Attributes:
        job: number of the job, from 0.
        identity: hash of its config, see `identify`.
        overrides: the overrides specific to it.
        end: last batch of the job; None if unknown.
        parent: the number of the job from which it branches off; None if it starts from scratch.
        start: the batch after which it begins.
        why: keys that differ from then on, or the reason why the job trains alone.
    """

    job: int
    identity: str
    overrides: list[str]
    end: int | None = None
    parent: int | None = None
    start: int = 0
    why: str = ""


@dataclass
class Node:
    """A state of training from which several jobs continue.

    Attributes:
        batch: the batch after which it is saved.
        head: number of the first of its jobs.
        lengths: `max_duration` of each job that trains alike up to there, by identity.
        epoch: number of complete epochs by then.
        batch_in_epoch: batches of the current epoch.
        length: batches of an epoch.
    """

    batch: int
    head: int
    lengths: dict[str, str]
    epoch: int
    batch_in_epoch: int
    length: int


@dataclass
class Tree:
    """The tree of what jobs of a sweep share: a branch for each, in order, and the nodes between, early ones first."""

    branches: list[Branch]
    nodes: list[Node] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the tree in plain containers."""
        known = [one for one in self.branches if one.end is not None]
        alone = sum(one.end or 0 for one in known)
        return {
            "batches": alone - sum(one.start for one in known),
            "batches_alone": alone,
            "jobs": [asdict(one) for one in self.branches],
            "nodes": [asdict(one) for one in self.nodes],
        }


def plan_tree(jobs: Sequence[PlannedJob]) -> Tree:
    """Return what the jobs of a sweep share, and what they do not."""
    found = [Foreseen(number, one.config) for number, one in enumerate(jobs)]
    tree = Tree([Branch(one.number, one.identity, jobs[one.number].overrides, one.end) for one in found])
    alike: dict[str, list[Foreseen]] = {}
    for one in found:
        alike.setdefault(f"alone {one.number}" if one.unknown else fingerprint(one.fixed), []).append(one)
    for group in alike.values():
        if len(group) > 1:
            _divide(tree, group, START, None)
    heads = {one.parent for one in tree.branches}
    for one in found:
        branch = tree.branches[one.number]
        if branch.parent is None:
            typed = [key_of(override) for override in branch.overrides]
            branch.why = "" if one.number in heads else one.unknown or branch.why or _difference(one, found, typed)
    tree.nodes.sort(key=lambda one: one.batch)
    return tree


def _difference(job: Foreseen, others: Sequence[Foreseen], typed: Sequence[str]) -> str:
    """Return the keys in which a job differs from the most similar one: only typed keys, if any of them were typed."""
    found = [[one.key for one in find_changes(other.fixed, job.fixed)] for other in others if other is not job]
    nearest = min(found, key=len, default=[])
    return ", ".join([one for one in nearest if one in typed] or nearest)


def _divide(tree: Tree, group: Sequence[Foreseen], now: Timestamp, above: Node | None) -> None:
    """Follow jobs that train alike from some moment until they diverge, and then each group that still agrees.

    There are at least two jobs, which parted from others at the node `above`, if any.
    """
    varying = [name for name in group[0].effects if len({fingerprint(one.effects[name][0]) for one in group}) > 1]
    rates_vary = len({fingerprint(one.rate[0]) for one in group}) > 1
    length = group[0].moment.train_dataloader_len
    previous = now
    now = next_moment(now, length) if now.batch else now
    while True:
        seen = [one.look(varying, rates_vary, previous, now) for one in group]
        is_over = all(now.batch >= (one.end or 0) for one in group)
        acts = any(done != seen[0][0] for done, _ in seen)
        if is_over or acts or any(rate != seen[0][1] for _, rate in seen):
            break
        previous = now
        now = next_moment(now, length)
    # What is done at the end of a batch belongs to it; the next rate, and the end of an epoch, come after it.
    batch = now.batch if not is_over and (not acts or now.batch_in_epoch == 0) else max(0, now.batch - 1)
    begun = 0 if above is None else above.batch
    if batch - begun < LEAST * min(one.end or 0 for one in group):
        batch = begun
    node = above
    if batch > begun:
        lengths = {one.identity: str(one.moment.max_duration) for one in group}
        epoch = (batch - 1) // length
        node = Node(batch, group[0].number, lengths, epoch, batch - epoch * length, length)
        tree.nodes.append(node)
    parts = [[one] for one in group] if is_over else _partition(group, seen)
    differing = [
        name for place, name in enumerate(varying) if any(done[place] != seen[0][0][place] for done, _ in seen)
    ]
    for part in parts[node is not None :]:
        branch = tree.branches[part[0].number]
        branch.why = ", ".join(differing) or ("nothing that trains" if is_over else "scheduler")
        if node is not None:
            branch.parent = node.head
            branch.start = batch
    for part in parts:
        if len(part) > 1:
            _divide(tree, part, now, node)


def _partition(group: Sequence[Foreseen], seen: Sequence[Any]) -> list[list[Foreseen]]:
    """Return the jobs by what was seen of them, in order."""
    parts: list[tuple[Any, list[Foreseen]]] = []
    for one, its in zip(group, seen, strict=True):
        found = next((part for value, part in parts if value == its), None)
        if found is None:
            parts.append((its, [one]))
        else:
            found.append(one)
    return [part for _, part in parts]

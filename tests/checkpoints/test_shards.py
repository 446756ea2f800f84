"""Sharded checkpoints: ranks write and read their own shards; damaged or wrong shards are not used."""

from __future__ import annotations

import itertools
import json
import re
import resource
import shutil
import signal
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from manifests import seal
from rank_runs import program_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sharded_runs import CASES, OPTIMIZERS, difference, make_trainer, on_ranks, train
from torch import Tensor

from runner import Callback, get_global_rank
from runner.checkpoints.files import find_checkpoint, read_file, verify
from runner.checkpoints.hashing import digest
from runner.checkpoints.manifest import MANIFEST
from runner.checkpoints.shards import DTYPES, should_shard, write_safetensors
from runner.checkpoints.writing import write_checkpoint
from runner.distributed.saved_tensor import IndexRange, Piece, SavedTensor, ShardLayout
from runner.distributed.sharding import like, local, whole
from runner.distributed.together import gather_objects
from runner.records.run_files import unpacked
from runner.timing.time import Timestamp


class CountingFile:
    """A tensor in a file that counts the elements that are read."""

    def __init__(self, content: Tensor):
        self.content = content
        self.count = 0

    def __getitem__(self, index: Any) -> Tensor:
        self.count += self.content[index].numel()
        return self.content[index]


def read_own_part(weight: Tensor) -> None:
    """Assert that a rank reads only its elements of a weight, from two files that were cut elsewhere."""
    content = torch.arange(float(weight.numel())).view(weight.shape)
    files = [CountingFile(content[:2]), CountingFile(content[2:])]
    pieces = [Piece((start, 0), tuple(file.content.shape), file) for start, file in zip((0, 2), files, strict=True)]
    loaded = like(SavedTensor(content.to("meta"), pieces), weight)
    assert torch.equal(whole(loaded), content)
    assert sum(file.count for file in files) == local(weight).numel() < content.numel()


def save_and_resume_in_both_layouts() -> None:
    """Save gathered and in shards, and resume with replicas and shards; read own parts; refuse an altered shard."""
    with on_ranks():
        case, options = CASES["text: ema"], {"optimizers": OPTIMIZERS["adamw"]}
        plain = train(case, Path("run"), save=Path("gathered"), parallel="fsdp", **options)
        sharded = train(case, Path("run"), save=Path("sharded"), sharded=True, parallel="fsdp", **options)
        assert difference(plain, sharded) == 0
        for parallel in ("fsdp", "ddp"):
            resumed = train(case, Path("run"), parallel=parallel, resume_path="sharded", **options)
            assert difference(plain, resumed) == 0, parallel
        with make_trainer("text", folder=Path("run"), parallel="fsdp") as trainer:
            weights = dict(trainer.state.unwrapped_model.named_parameters())
            assert len(weights["module.token_embedding.weight"]) == 11  # rows, which two ranks cannot share equally
            read_own_part(weights["module.token_embedding.weight"])
            assert not should_shard(trainer.state, None)  # the whole state fits in memory
            huge = torch.zeros(1).expand(1 << 45)
            trainer.state.optimizers[0].state[weights["module.token_embedding.weight"]]["huge"] = huge
            assert should_shard(trainer.state, None) and not should_shard(trainer.state, False)
        if get_global_rank() == 0:
            shutil.copytree("sharded", "altered/ba1")
            shard = Path("altered/ba1/shard-00001-of-00002.safetensors")
            shard.write_bytes(shard.read_bytes()[:-1] + b"!")
        dist.barrier()
        faults = gather_objects(verify("altered/ba1", get_global_rank(), 2))
        assert len([fault for fault in faults if fault]) == 1  # a single rank hashes each file
        with pytest.raises(ValueError, match=r"ba1' cannot be used: shard-00001-of-00002.safetensors was modified"):
            train(case, Path("run"), parallel="fsdp", resume_path="altered/ba1", **options)
        with pytest.raises(FileNotFoundError, match="altered"):
            train(case, Path("run"), parallel="fsdp", resume_path="altered", **options)


def test_two_ranks_resume_sharded_checkpoints_with_shards_or_replicas_bit_for_bit(run_ranks, tmp_path: Path):
    run_ranks(program_of("checkpoints/test_shards", "save_and_resume_in_both_layouts"), 2)
    gathered, sharded = tmp_path / "gathered", tmp_path / "sharded"
    assert verify(sharded) is None
    assert {path.name for path in sharded.iterdir()} >= {f"shard-0000{rank}-of-00002.safetensors" for rank in (0, 1)}
    assert digest(read_file(gathered, "model.pt")) == digest(read_file(sharded, "model.pt"))
    states = [read_file(path, "state.pt") for path in (gathered, sharded)]
    for part in ("model", "optimizers", "algorithms"):
        assert digest(states[0][part]) == digest(states[1][part]), part


def save_split_layers() -> None:
    """Save gathered and in shards with tensor parallelism, combined with DDP and FSDP; resume from the shards."""
    with on_ranks():
        case = CASES["text: ema"]
        for parallel in ("ddp", "fsdp"):
            options = {"optimizers": OPTIMIZERS["adamw"], "tensor_parallel": 2, "parallel": parallel}
            plain = train(case, Path("run"), save=Path(parallel, "gathered"), **options)
            train(case, Path("run"), save=Path(parallel, "sharded"), sharded=True, **options)
            assert difference(plain, train(case, Path("run"), resume_path=f"{parallel}/sharded", **options)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_layers_split_by_tensor_parallelism_are_saved_in_shards(run_ranks, tmp_path: Path, ranks: int):
    run_ranks(program_of("checkpoints/test_shards", "save_split_layers"), ranks)
    for parallel in ("ddp", "fsdp"):
        gathered, sharded = (tmp_path / parallel / kind for kind in ("gathered", "sharded"))
        assert verify(sharded) is None, parallel  # no part is saved twice, although ranks may have replicas
        assert digest(read_file(gathered, "model.pt")) == digest(read_file(sharded, "model.pt")), parallel
        states = [read_file(path, "state.pt") for path in (gathered, sharded)]
        for part in ("optimizers", "algorithms"):
            assert digest(states[0][part]) == digest(states[1][part]), (parallel, part)


# Files, in a single process


WHOLE = torch.arange(35.0).view(5, 7)
WHOLE_LAYOUT = ShardLayout((5, 7), ((IndexRange(0, 0, 5),), (IndexRange(0, 0, 7),)), True)


def write_shards(path: Path, shards: dict[str, dict[str, Tensor]], save: str = "1") -> None:
    """Write a checkpoint of `WHOLE` with shards of other ranks and a manifest that matches them."""
    part = torch.zeros(0)
    layout = ShardLayout((5, 7), ((), ()), False)  # this rank has no part of it
    write_checkpoint(
        {"timestamp": Timestamp(batch=1).state_dict(), "model.pt": {"a": part}, "layouts": {id(part): layout}}, path
    )
    (path / MANIFEST).write_text(json.dumps(json.loads((path / MANIFEST).read_text()) | {"save": "1"}))
    for name, tensors in shards.items():
        save_file(tensors, path / name, {"save": save})  # written by the library, not by this project
        seal(path / name)


def test_any_part_of_a_tensor_is_read_from_shards_that_were_cut_elsewhere(tmp_path: Path):
    cuts = ((slice(0, 2), slice(0, 7)), (slice(2, 5), slice(0, 3)), (slice(2, 5), slice(3, 7)))
    parts = {f"model.pt['a']@{rows.start},{columns.start}": WHOLE[rows, columns].clone() for rows, columns in cuts}
    write_shards(tmp_path / "ba1", {f"{number}.safetensors": {key: parts[key]} for number, key in enumerate(parts)})
    assert verify(tmp_path / "ba1") is None
    saved = read_file(tmp_path / "ba1", "model.pt")["a"]
    assert isinstance(saved, SavedTensor) and saved.shape == (5, 7) and saved.dtype == torch.float32
    for top, left in itertools.product(range(5), range(7)):
        for height, width in itertools.product(range(6 - top), range(8 - left)):
            part = saved.read_part((top, left), (height, width))
            assert torch.equal(part, WHOLE[top : top + height, left : left + width])
    with pytest.raises(ValueError, match=r"\(5, 7\) has no part \(2, 7\) at \(4, 0\)"):
        saved.read_part((4, 0), (2, 7))


def test_the_part_of_a_rank_may_consist_of_several_blocks(tmp_path: Path):
    """The parts of layers that join several matrices do, such as a projection to queries, keys and values."""
    layout = ShardLayout(
        (5, 7), ((IndexRange(0, 0, 1), IndexRange(3, 1, 2)), (IndexRange(1, 0, 2), IndexRange(5, 2, 1))), True
    )
    part = WHOLE[[0, 3, 4]][:, [1, 2, 5]].clone()
    write_checkpoint(
        {"timestamp": Timestamp().state_dict(), "model.pt": {"a": part}, "layouts": {id(part): layout}}, tmp_path / "a"
    )
    assert "are not a whole tensor (5, 7)" in (verify(tmp_path / "a") or "")  # no other rank has written its part
    write_shards(tmp_path / "ba1", {"0.safetensors": {"model.pt['a']@0,0": WHOLE}})
    saved = read_file(tmp_path / "ba1", "model.pt")["a"]
    assert torch.equal(saved.read_shard(layout), part)
    with safe_open(tmp_path / "a/shard-00000-of-00001.safetensors", framework="pt") as file:
        written = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no dict
    blocks = {"0,1": WHOLE[:1, 1:3], "0,5": WHOLE[:1, 5:6], "3,1": WHOLE[3:, 1:3], "3,5": WHOLE[3:, 5:6]}
    for start, block in blocks.items():
        assert torch.equal(written[f"model.pt['a']@{start}"], block)
    with pytest.raises(ValueError, match=r"saved tensor has shape \(5, 7\) instead of \(5, 8\)"):
        saved.read_shard(layout._replace(shape=(5, 8)))


def test_a_saved_tensor_is_read_whole_when_it_is_used_in_a_computation(tmp_path: Path):
    write_shards(tmp_path / "ba1", {"0.safetensors": {"model.pt['a']@0,0": WHOLE}})
    saved = read_file(tmp_path / "ba1", "model.pt")["a"]
    assert torch.equal(saved + 1, WHOLE + 1) and type(saved + 1) is Tensor
    assert torch.equal(torch.zeros(5, 7).copy_(saved), WHOLE)
    assert digest({"a": saved}) == digest({"a": WHOLE})
    average = saved.mul_(2)  # in place, as for averages of weights
    assert torch.equal(average, 2 * WHOLE) and torch.equal(saved + 0, 2 * WHOLE)


KEY = "model.pt['a']"
ABOVE, BELOW = WHOLE[:2].clone(), WHOLE[2:].clone()
WRONG: dict[str, tuple[dict[str, Tensor], str]] = {
    "missing": ({}, r"the shards of model.pt\['a'\] are not a whole tensor \(5, 7\), torch.float32"),
    "gap": ({f"{KEY}@3,0": BELOW[1:]}, "are not a whole"),
    "overlapping": ({f"{KEY}@1,0": BELOW}, "are not a whole"),
    "overlapping and gap": ({f"{KEY}@1,0": WHOLE[1:2], f"{KEY}@3,0": BELOW[1:]}, "are not a whole"),
    "beyond the end": ({f"{KEY}@3,0": BELOW}, "are not a whole"),
    "other columns": ({f"{KEY}@2,1": BELOW}, "are not a whole"),
    "another number of dimensions": ({f"{KEY}@14": BELOW.flatten()}, "are not a whole"),
    "another dtype": ({f"{KEY}@2,0": BELOW.double()}, "are not a whole"),
    "negative start": ({f"{KEY}@2,-1": BELOW}, "which is not the name of a part"),
    "no start": ({KEY: BELOW}, "which is not the name of a part"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_shards_that_do_not_make_up_a_tensor_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: str):
    """Their hashes are right, as those of a malicious checkpoint would be."""
    tensors, message = WRONG[wrong]
    shards = {"0.safetensors": {f"{KEY}@0,0": ABOVE}, "1.safetensors": {f"{KEY}@2,0": BELOW}}
    write_shards(tmp_path / "ba1", shards)
    shards["1.safetensors"] = {name: tensor.clone() for name, tensor in tensors.items()}
    write_shards(tmp_path / "ba2", shards)
    fault = verify(tmp_path / "ba2")
    assert fault is not None and re.search(message, fault)
    assert find_checkpoint(tmp_path) == tmp_path / "ba1"
    assert caplog.messages == [f"checkpoint {tmp_path / 'ba2'} is not used: {fault}"]
    with pytest.raises(ValueError, match=r"ba2' cannot be used"):
        find_checkpoint(tmp_path / "ba2")


def test_truncated_altered_and_foreign_shards_are_not_used(tmp_path: Path):
    path, shard = tmp_path / "ba1", tmp_path / "ba1" / "0.safetensors"
    write_shards(path, {shard.name: {f"{KEY}@0,0": WHOLE}})
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    assert verify(path) == "the size of 0.safetensors differs from its manifest"
    shard.write_bytes(content[:-1] + b"\1")
    assert verify(path) == "0.safetensors was modified: its SHA-256 differs from its manifest"
    shard.unlink()
    assert verify(path) == "0.safetensors is missing"
    write_shards(path, {shard.name: {f"{KEY}@0,0": WHOLE}}, save="2")
    assert verify(path) == "0.safetensors belongs to another checkpoint"
    shard.write_bytes(b"\xff" * len(content))
    seal(shard)
    assert (verify(path) or "").startswith("0.safetensors is not a safetensors file (")


def test_a_tensor_that_occurs_several_times_is_written_once_and_loaded_as_the_same_object(tmp_path: Path):
    part = WHOLE.clone()
    content = {"tied": [part, part], "more": (1, part), "other": torch.ones(2)}
    write_checkpoint(
        {"timestamp": Timestamp().state_dict(), "model.pt": content, "layouts": {id(part): WHOLE_LAYOUT}},
        tmp_path / "a",
    )
    loaded = read_file(tmp_path / "a", "model.pt")
    assert loaded["tied"][0] is loaded["tied"][1] is loaded["more"][1]
    assert digest(loaded) == digest(content)
    with safe_open(tmp_path / "a/shard-00000-of-00001.safetensors", framework="pt") as file:
        assert [*file.keys()] == ["model.pt['tied'][0]@0,0"]


def test_shards_can_be_read_from_an_unpacked_crash_bundle(tmp_path: Path):
    part = WHOLE.clone()
    content = {"timestamp": Timestamp().state_dict(), "model.pt": {"a": part}, "layouts": {id(part): WHOLE_LAYOUT}}
    write_checkpoint(content, tmp_path / "run/checkpoints/ba1")
    (tmp_path / "run/config.yaml").write_text("{}")
    with zipfile.ZipFile(tmp_path / "crash.zip", "w") as file:
        for path in filter(Path.is_file, (tmp_path / "run").rglob("*")):
            file.write(path, path.relative_to(tmp_path / "run"))
    run = unpacked(tmp_path / "crash.zip")
    assert torch.equal(read_file(run / "checkpoints/ba1", "model.pt")["a"] + 0, WHOLE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_safetensors_library_reads_files_that_we_write(tmp_path: Path, dtype: torch.dtype):
    tensor = torch.arange(6).view(2, 3).to(dtype)
    with (tmp_path / "a.safetensors").open("wb") as file:
        write_safetensors(file.write, {"a": tensor, "none": tensor[:0], "t": tensor.t()}, {"save": "é"})
    loaded = load_file(tmp_path / "a.safetensors")
    assert digest(loaded) == digest({"a": tensor, "none": tensor[:0], "t": tensor.t()})
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert file.metadata() == {"save": "é"}


# The saver, on two ranks


def save_with_saver() -> None:
    """Save in the foreground and in the background, then with a full disk and with an infinite weight on rank 1."""
    from runner.callbacks import CheckpointSaver

    class Disturb(Callback):
        """After the first batch, limits the files of rank 1 to 1 kB until the third, or makes a weight infinite."""

        def __init__(self, disturbance: str):
            self.disturbance = disturbance

        def batch_end(self, state, logger):
            if state.timestamp.batch == 1 and get_global_rank() == 1:
                if self.disturbance == "full":
                    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
                if self.disturbance == "infinite":
                    block: Any = state.unwrapped_model.get_submodule("module.blocks.1")
                    local(block.mlp.up.weight)[0, 0] = float("inf")

        def batch_start(self, state, logger):
            if state.timestamp.batch == 2 and self.disturbance == "full":
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    with on_ranks():
        for asynchronous, disturbance in ((False, ""), (True, ""), (True, "full"), (True, "infinite")):
            saver = CheckpointSaver("1ba", keep=2, monitor="loss", asynchronous=asynchronous, sharded=True)
            folder = Path(f"{'background' if asynchronous else 'foreground'} {disturbance}".strip())
            callbacks = [saver, Disturb(disturbance)]
            with make_trainer(
                "text", folder=folder, parallel="fsdp", optimizers=OPTIMIZERS["adamw"], callbacks=callbacks
            ) as trainer:
                trainer.fit()
        with pytest.raises(ValueError, match=r"sharded=True: each rank has the whole model; set trainer.parallel=fsdp"):
            make_trainer("text", folder=Path("run"), callbacks=[CheckpointSaver(sharded=True)])


def test_the_saver_keeps_checkpoints_that_all_ranks_have_written(run_ranks, tmp_path: Path):
    ranks = run_ranks(program_of("checkpoints/test_shards", "save_with_saver"), 2)
    for folder in ("foreground", "background", "background full"):
        checkpoints = tmp_path / folder / "checkpoints"
        assert {path.name for path in checkpoints.iterdir()} == {"ep1-ba3", "ep2-ba4", "latest", "best"}, folder
        assert [verify(checkpoints / name) for name in ("ep1-ba3", "latest", "best")] == [None] * 3
        assert (checkpoints / "latest").resolve().name == "ep2-ba4"
    for checkpoint in ("ep1-ba3", "ep2-ba4"):
        foreground, background = (
            read_file(tmp_path / name / "checkpoints" / checkpoint, "model.pt") for name in ("foreground", "background")
        )
        assert all(isinstance(weight, SavedTensor) for weight in foreground.values())
        assert digest(foreground) == digest(background)
    assert not [*tmp_path.glob("background infinite/checkpoints/*")]
    assert ranks[0].stderr.splitlines() == [
        "checkpoint background full/checkpoints/ep0-ba1 was not written: [Errno 27] File too large (rank 1)",
        "checkpoint background infinite/checkpoints/ep0-ba1 was not written: the weights are not finite: "
        "'module.blocks.1.mlp.up.weight'; newest checkpoint: none",
        "the loss of the last batch is nan: lower the learning rate, or look for nan in the data; NaNMonitor ends such "
        "a run at once",
    ]
    assert not ranks[1].stderr


def die_while_saving() -> None:
    """Let the kernel kill rank 1 while it writes the checkpoint after the second batch."""
    from runner.callbacks import CheckpointSaver

    class Die(Callback):
        def batch_end(self, state, logger):
            if state.timestamp.batch == 2 and get_global_rank() == 1:
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))

    with on_ranks():
        saver = CheckpointSaver("1ba", sharded=True)
        with make_trainer("text", folder=Path("run"), parallel="fsdp", callbacks=[saver, Die()]) as trainer:
            trainer.fit()


def test_a_rank_killed_while_it_writes_leaves_the_previous_checkpoint(run_ranks, tmp_path: Path):
    first, second = run_ranks(program_of("checkpoints/test_shards", "die_while_saving"), 2, check=False)
    assert second.returncode == -signal.SIGXFSZ and first.returncode not in (0, -signal.SIGKILL)
    assert {path.name for path in (tmp_path / "run/checkpoints").iterdir()} == {"ep0-ba1", "latest"}
    assert find_checkpoint(tmp_path / "run") == tmp_path / "run/checkpoints/ep0-ba1"

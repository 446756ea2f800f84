"""Puts faults into a copy of the product, one at a time, and says which tests catch them.

    python tests/mutations.py                 # all, two at a time: a table; exit code 1 if one is not caught
    python tests/mutations.py order uneven    # those whose names hold one of these words

Each fault is first tried on the tests next to it, those of the second tier last, and if they miss it, on the whole
first tier, which must catch it.
Add a fault with each new promise.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("runner", "callbacks", "algorithms", "conf", "tests", "benchmarks", "docs", ".editable")
FILES = (
    "pyproject.toml",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "Makefile",
    "LICENSE",
    "constraints.txt",
)
AT_ONCE = 2
NO_TESTS = 5  # pytest's exit code where none is selected
TIMEOUT = 1800.0  # seconds for the whole first tier


class Fault(NamedTuple):
    """A change of one file, and the tests next to it."""

    name: str
    file: str
    before: str
    after: str
    tests: str
    """Paths below `tests/`, with blanks between them."""


LOOP = "runner/training/loop.py"
ACCUMULATION = "runner/training/accumulation.py"
LOSS = "runner/models/loss.py"
ORDER = "runner/data/order.py"
SHARD_ORDER = "runner/data/shards/order.py"
PREFETCH = "runner/device/prefetch.py"
FAULTS = (
    # runner check
    Fault(
        "peak memory: a rank gets the batch of all",
        "runner/trials/dry_run.py",
        "-(-data.order.batch_size // (ranks // split))",
        "data.order.batch_size",
        "trials/test_peak_memory.py",
    ),
    Fault(
        "peak memory: the first step, before optimizers have their state, is the last",
        "runner/trials/peak_memory.py",
        "Event.BATCH_END and state.timestamp.batch > 1:",
        "Event.BATCH_END:",
        "trials/test_peak_memory.py",
    ),
    Fault(
        "peak memory: weights that were gathered stay",
        "runner/trials/live_bytes.py",
        "            self._follow(storage)\n            return",
        "            return",
        "trials/test_peak_memory.py",
    ),
    Fault(
        "peak memory: weights that were gathered take memory",
        "runner/trials/peak_memory.py",
        "prod(args[0]) >= 1 << 20",
        "False",
        "trials/test_peak_memory.py",
    ),
    Fault(
        "peak memory: a sharded model is trained whole",
        "runner/trials/peak_memory.py",
        "_pretended(1 if is_replica else ranks)",
        "_pretended(1)",
        "trials/test_peak_memory.py",
    ),
    Fault(
        "peak memory: tied weights count twice",
        "runner/trials/peak_memory.py",
        "if id(tensor) not in replaced:",
        "if True:",
        "trials/test_peak_memory.py",
    ),
    Fault(
        "attempts: an attempt goes on in the log of the one before",
        "runner/records/folder.py",
        "if log.exists():",
        "if False:",
        "distributed/test_slurm.py",
    ),
    Fault(
        "programs: what a hook refuses has no key",
        "runner/trials/diagnosis.py",
        "return WrongConfig(text, at=facts.key or _section(error), allowed=facts.allowed)",
        "return WrongConfig(text)",
        "promises/test_programs.py",
    ),
    Fault(
        "programs: a fix of a list that grows replaces it",
        "runner/config/errors.py",
        'fix = f"+{fix}"',
        "pass",
        "promises/test_programs.py",
    ),
    Fault(
        "programs: a file that cannot be used is nobody's",
        "runner/config/errors.py",
        "at=key or facts.section or _key_of_file(error, overrides))",
        "at=key or facts.section)",
        "promises/test_programs.py",
    ),
    Fault(
        "programs: of one of several names nobody is told the others",
        "runner/failures/checks.py",
        'raise wrong_argument(name, value, reason, allowed=listed, meant="".join(near[:1]))',
        "raise wrong_argument(name, value, reason)",
        "promises/test_programs.py",
    ),
    Fault(
        "table: a folder's name can end a comment",
        "runner/verbs/table.py",
        "re.sub('-(?=-)', '- ', comment)",
        "comment.replace('--', '- -')",
        "verbs/test_table.py",
    ),
    Fault(
        "verdict: what is drawn in blocks depends on them",
        "runner/comparing/decision.py",
        "rows -= block",
        "rows -= block + 1 if rows > block else block",
        "comparing/test_decision.py",
    ),
    Fault(
        "verdict: resamples of few values count alike, however many orders draw them",
        "runner/comparing/decision.py",
        " / math.factorial(copies)",
        "",
        "comparing/test_decision.py",
    ),
    # mirrors of checkpoints
    Fault(
        "mirror: what was uploaded is not read back",
        "runner/checkpoints/mirror.py",
        'if _copy(source, facts["size"]) != facts:',
        "if False:",
        "callbacks/test_checkpoint_saver_mirror.py",
    ),
    Fault(
        "mirror: a file may lead out of the folder",
        "runner/checkpoints/mirror.py",
        "if not _is_inside(name):",
        "if False:",
        "history/test_mirrored.py",
    ),
    Fault(
        "ranks: a warning does not say which rank it comes from",
        "runner/program/job.py",
        "%(levelname)s: rank {ranks.rank}: ",
        "%(levelname)s: ",
        "distributed/test_local_ranks.py",
    ),
    Fault(
        "checkpoints: each rank reports a damaged one",
        "runner/checkpoints/files.py",
        "if fault is not None and get_global_rank() == 0:",
        "if fault is not None:",
        "records/test_cut_off.py",
    ),
    Fault(
        "mirror: a failed upload keeps its room there",
        "runner/checkpoints/mirror.py",
        "                self._remove(name)\n            raise",
        "                pass\n            raise",
        "callbacks/test_checkpoint_saver_mirror.py",
    ),
    Fault(
        "mirror: a checkpoint that cannot be used is left out without a word",
        "runner/checkpoints/mirror.py",
        "report(name, error)",
        "pass",
        "history/test_mirrored.py",
    ),
    Fault(
        "mirror: another run's checkpoints are replaced",
        "runner/checkpoints/mirror.py",
        "if known != owner and not overwrite:",
        "if False:",
        "callbacks/test_checkpoint_saver_mirror.py",
    ),
    Fault(
        "mirror: a trial uploads",
        "runner/config/build.py",
        'if not uploads and hasattr(callback, "mirror"):',
        "if False:",
        "history/test_mirrored.py",
    ),
    # commands and sweeps
    Fault(
        "programs: a killed data worker is no failure of the machine",
        "runner/failures/facts.py",
        "|DataLoader worker .* signal: Killed",
        "",
        "promises/test_programs.py",
    ),
    Fault(
        "honesty board: marks know nothing of the other rows",
        "benchmarks/algorithms.py",
        "verdicts = decide([Samples(_by_seed(plain), _by_seed(errors), seeds) for errors in changed])",
        "verdicts = [decide([Samples(_by_seed(plain), _by_seed(errors), seeds)])[0] for errors in changed]",
        "benchmarks/test_algorithms.py",
    ),
    Fault(
        "one job: a config file of the user's own cannot make it a sweep",
        "runner/config/one_job.py",
        "(mode|searchpath|callbacks)",
        "(mode|callbacks)",
        "config/test_one_job.py",
    ),
    Fault(
        "commands: an option that is given again forgets the names of the first",
        "runner/cli/command.py",
        "return (*(() if before == option.default else before), *names)",
        "return tuple(names)",
        "cli/test_command.py",
    ),
    Fault(
        "commands: the folder of a run that has a = in its name is a key",
        "runner/cli/command_line.py",
        "return os.path.exists(argument)",
        "return False",
        "cli/test_command.py",
    ),
    Fault(
        "ladder: the rung that is held out is fitted too",
        "runner/sweeps/ladder/rungs.py",
        "    *fitted, last = (rung for rung in rungs if rung.settings)",
        "    fitted = [rung for rung in rungs if rung.settings]\n    last = fitted[-1]",
        "sweeps/ladder/test_rungs.py",
    ),
    Fault(
        "power law: a floor that the values do not show is part of it",
        "runner/sweeps/ladder/power_law.py",
        "if floor[0] <= LEAST_FLOOR * min(means):",
        "if not law.floor:",
        "sweeps/ladder/test_power_law.py",
    ),
    Fault(
        "threads: a short step takes one thread though a user asked for more",
        "runner/distributed/threads.py",
        "    if _scope.may_lower:\n",
        "    if True:\n",
        "distributed/test_threads.py",
    ),
    Fault(
        "threads: the operations of a whole epoch count",
        "runner/config/short_steps.py",
        "flops_per_batch(next(loader.first(1)))",
        "flops_per_batch(loader.tensors)",
        "config/test_short_steps.py",
    ),
    Fault(
        "budget: the operations of one rank only are counted",
        "runner/trials/measure.py",
        "operations_of(state) * get_data_parallel_size()",
        "operations_of(state)",
        "trials/test_measure.py",
    ),
    Fault(
        "launch: rank 0 ends before the others have heard that it does",
        "runner/distributed/launch.py",
        "while keys and not",
        "while False and not",
        "distributed/test_launch.py",
    ),
    # gradients over ranks
    Fault(
        "compile: a fused rest keeps Muon's matrices from being compiled",
        "algorithms/compile.py",
        'if all(group.get("fused")',
        'if any(group.get("fused")',
        "algorithms/test_compile.py",
    ),
    Fault(
        "averages: each tensor of each batch leaves autograd by itself",
        "runner/distributed/sharding.py",
        "def local(tensor: Any) -> Tensor:",
        "@torch.no_grad()\ndef local(tensor: Any) -> Tensor:",
        "promises/test_operations.py",
    ),
    Fault(
        "compile: the Trainer compiles again, in another mode, what Compile has compiled",
        "algorithms/compile.py",
        "if any(module._compiled_call_impl is not call for",
        "if False and any(module._compiled_call_impl is not call for",
        "algorithms/test_compile.py",
    ),
    Fault(
        "ddp: options do not reach DDP",
        "runner/distributed/collectives.py",
        "options = {**options, ",
        "options = {",
        "algorithms/test_ddp.py",
    ),
    Fault(
        "ddp: a search for unused parameters that a static graph ignores is accepted",
        "algorithms/ddp.py",
        "if static_graph and find_unused_parameters:",
        "if False:",
        "algorithms/test_ddp.py",
    ),
    Fault(
        "device: training starts where tensors hold no values",
        "runner/config/build.py",
        'if section.get("device") == "meta":',
        "if False:",
        "config/test_build.py",
    ),
    Fault(
        "ddp: compressed gradients are summed and not averaged",
        "algorithms/ddp.py",
        ".to(dtype).div_(dist.get_world_size())",
        ".to(dtype)",
        "algorithms/test_ddp.py",
    ),
    Fault(
        "gradients over ranks: a collective for each",
        "runner/distributed/gradients.py",
        ">= BUCKET_BYTES",
        ">= 0",
        "distributed/test_collectives.py",
    ),
    Fault(
        "hf_dataset: images cross to the GPU as floating point",
        "runner/data/hf/columns.py",
        "return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)",
        "return torch.from_numpy(numpy.array(image)).permute(2, 0, 1).float()",
        "data/hf/test_dataset.py",
    ),
    Fault(
        "speed: batches count that a GPU has not computed yet",
        "callbacks/_clock.py",
        "while self._laps and self._laps[0][1].query():",
        "while self._laps:",
        "callbacks/test_speed_monitor.py",
    ),
    Fault(
        "cuda graph: weights that autocast has cast stay as they were when a step was recorded",
        "algorithms/_recording.py",
        "cache_enabled=False",
        "cache_enabled=True",
        "algorithms/test_cuda_graph.py",
    ),
    Fault(
        "cuda graph: a loss that is read back later is that of a later batch",
        "algorithms/_recording.py",
        "return self._total.clone()",
        "return self._total.view(())",
        "algorithms/test_cuda_graph.py",
    ),
    Fault(
        "cuda graph: passes before the recording count in running statistics",
        "algorithms/_recording.py",
        "        buffers.put_back()\n",
        "",
        "algorithms/test_cuda_graph.py",
    ),
    Fault(
        "compile: each learning rate is a number of its own to the compiled step",
        "algorithms/compile.py",
        'group["lr"] = tensors[index].fill_(rate or TINY)',
        "pass",
        "algorithms/test_compile.py",
    ),
    Fault(
        "compile: a rate of 0 as a tensor makes Adam divide by zero",
        "algorithms/compile.py",
        "fill_(rate or TINY)",
        "fill_(rate)",
        "algorithms/test_compile.py",
    ),
    Fault(
        "compile: blocks of several shapes exceed torch's limit, and run uncompiled",
        "algorithms/compile.py",
        "RECOMPILES * len(modules)",
        "RECOMPILES",
        "algorithms/test_compile.py",
    ),
    # numbers
    Fault(
        "tf32: the setting stays after the run",
        "runner/device/numerics.py",
        "        undo.append(lambda: torch.set_float32_matmul_precision(precision))\n",
        "        undo.append(lambda: None)\n",
        "device/test_numerics.py",
    ),
    Fault(
        "cudnn_benchmark: a deterministic run takes it",
        "algorithms/cudnn_benchmark.py",
        "if torch.are_deterministic_algorithms_enabled():",
        "if False:",
        "algorithms/test_cudnn_benchmark.py",
    ),
    # optimizers
    Fault(
        "fused: what the user set is changed",
        "runner/optim/fused.py",
        'group["fused"] is None and group["foreach"] is None',
        'group["foreach"] is None',
        "optim/test_fused.py",
    ),
    Fault(
        "fused: a resumed run steps with the kernels of the run that saved",
        "runner/optim/fused.py",
        '{**saved_group, "fused": group["fused"]} if "fused" in group else saved_group',
        "saved_group",
        "optim/test_fused.py",
    ),
    Fault(
        "checkpoints: half of the staging buffer is passed on before its copies have arrived",
        "runner/device/staging.py",
        "            self.event.synchronize()\n",
        "            pass\n",
        "device/test_staging.py",
    ),
    # data on its way to a GPU
    Fault(
        "prefetch: steps do not wait for the copy of their batch",
        PREFETCH,
        "        steps.wait_stream(self._stream)\n",
        "",
        "device/test_prefetch.py",
    ),
    Fault(
        "prefetch: memory of a batch is given out again before the steps that use it",
        PREFETCH,
        "            moved.record_stream(steps)",
        "            pass",
        "device/test_prefetch.py",
    ),
    Fault(
        "prefetch: batches are copied from pageable memory",
        PREFETCH,
        "pinned(tensor).to(",
        "tensor.to(",
        "device/test_prefetch.py",
    ),
    Fault(
        "prefetch: batches are transformed before they travel",
        PREFETCH,
        "    return loader.untransformed, lambda",
        "    return partial(iter, loader), lambda",
        "training/test_dataloader.py",
    ),
    Fault(
        "data in memory: moved to the device however little room it has",
        "runner/data/loaders.py",
        "size > RESIDENT_SHARE * free",
        "size > free",
        "data/test_loaders.py",
    ),
    Fault(
        "collation: a column of differing samples is taken for a whole batch",
        "runner/data/collation.py",
        "and all(map(operator.is_, tensors, rows))",
        "and tensors[0] is rows[0]",
        "data/test_collation.py",
    ),
    Fault(
        "collation: samples are kept until they are stacked",
        "runner/data/collation.py",
        "return self._copy_row(value) if is_plain(value) and value.nbytes >= LARGE else value",
        "return value",
        "data/test_collation.py",
    ),
    Fault(
        "collation: workers read into memory of their own",
        "runner/data/collation.py",
        "if get_worker_info() is None:",
        "if get_worker_info() is None or size:",
        "data/test_collation.py",
    ),
    Fault(
        "workers: small tensors are sent through shared memory",
        "runner/data/workers.py",
        "    send_small_by_value()\n",
        "",
        "data/test_small_tensors.py",
    ),
    Fault(
        "workers: tensors that share memory are sent apart",
        "runner/data/small_tensors.py",
        "and tensor.nbytes == tensor.untyped_storage().nbytes()",
        "and True",
        "data/test_small_tensors.py",
    ),
    # which samples, in which order
    Fault(
        "order of samples: each epoch has the first one's",
        ORDER,
        '"order", epoch)',
        '"order", 0)',
        "data/test_order.py",
    ),
    Fault(
        "uneven ranks: what does not divide is left out",
        ORDER,
        "stop = first + size * (self.rank + 1) // self.world_size",
        "stop = start + size // self.world_size",
        "data/test_order.py",
    ),
    Fault(
        "samples in lists: their channels are counted",
        "runner/device/batch.py",
        "else len(lists[0])",
        "else max(counts)",
        "device/test_batch.py",
    ),
    Fault(
        "resume: an epoch begins again",
        "runner/training/dataloader.py",
        "loader.seek(epoch, batch)",
        "loader.seek(epoch, 0)",
        "training/test_dataloader.py checkpoints/test_snapshot.py",
    ),
    Fault(
        "growing pool: the length of the first epoch is kept",
        "runner/training/loop.py",
        "    state.train_dataloader_len = stream.length\n    evaluates",
        "    evaluates",
        "training/test_loop_lengths.py shapes/test_growing_pool.py",
    ),
    Fault(
        "growing pool: a resumed run takes the length of another epoch",
        "runner/training/loop.py",
        "    stream.seek(state.timestamp.epoch, state.timestamp.batch_in_epoch)\n",
        "",
        "training/test_loop_lengths.py",
    ),
    Fault(
        "generators of a data set's own: two have the same draws",
        "runner/data/generator_seeding.py",
        'f"sample/{path}"',
        '"sample"',
        "data/test_generator_seeding.py",
    ),
    # data in shards, and documents packed into windows
    Fault(
        "shards: each epoch has the order of the first one",
        SHARD_ORDER,
        'stream_seed(self.seed, "order", *counters)',
        'stream_seed(self.seed, "order")',
        "data/shards/test_order.py",
    ),
    Fault(
        "shards: a group of them is not done before the next",
        SHARD_ORDER,
        "samples[order]}",
        "samples}",
        "data/shards/test_order.py data/shards/test_shards.py",
    ),
    Fault(
        "shards: another mixture goes on within an epoch",
        "runner/checkpoints/snapshot.py",
        '"seed", "blocks")',
        '"seed")',
        "data/shards/test_shard_commands.py",
    ),
    Fault(
        "shards: a short download is taken for the file",
        "runner/data/shards/files.py",
        "!= self.size:",
        "< 0:",
        "data/shards/test_addresses.py",
    ),
    Fault(
        "shards: a file at an address may change during a run",
        "runner/data/shards/files.py",
        "        with_retries(self.address, fetch)\n        self.check()\n",
        "        with_retries(self.address, fetch)\n",
        "data/shards/test_addresses.py",
    ),
    Fault(
        "shards: other content of the same size is taken",
        "runner/data/shards/dataset.py",
        "known != digest and",
        "known == '' and",
        "data/shards/test_addresses.py",
    ),
    Fault(
        "shards: a server that fails once is given up",
        "runner/data/shards/files.py",
        "if wait is None or status in LASTING:",
        "if True:",
        "data/shards/test_addresses.py",
    ),
    Fault(
        "shards: the cache grows without bound",
        "runner/data/shards/cache.py",
        "                path.unlink(missing_ok=True)\n                taken -= size\n",
        "                taken -= size\n",
        "data/shards/test_shards.py data/shards/test_addresses.py data/shards/test_cache.py",
    ),
    Fault(
        "shards: none is fetched ahead",
        "runner/data/shards/dataset.py",
        "self._fetch([*now, *following])",
        "self._fetch([])",
        "data/shards/test_shards.py data/shards/test_addresses.py",
    ),
    Fault(
        "shards: a member of a tar file may be named outside of it",
        "runner/data/shards/formats.py",
        'if name.startswith(("/", "..")) or not member.isreg()',
        "if not member.isreg()",
        "data/shards/test_shards.py",
    ),
    Fault(
        "packing: documents see each other",
        "runner/models/gpt.py",
        "(documents[:, None, :, None] == documents[:, None, None, :]).tril()",
        "(documents[:, None, :, None] >= documents[:, None, None, :]).tril()",
        "data/text/test_packing.py",
    ),
    Fault(
        "packing: the first window with room is taken",
        "runner/data/text/packing.py",
        "room = length + (fitting & -fitting).bit_length() - 1",
        "room = length + fitting.bit_length() - 1",
        "data/text/test_packing.py",
    ),
    # what is known of each sample
    Fault(
        "ledger: samples are numbered by their place in the epoch",
        "callbacks/sample_ledger.py",
        "self._order.permutation(epoch).argsort()",
        "torch.arange(self._order.num_samples)",
        "callbacks/test_sample_ledger.py",
    ),
    Fault(
        "ledger: a checkpoint has the losses of rank 0 alone",
        "callbacks/sample_ledger.py",
        "self._gathered = None if self._losses is None else self._sum_over_ranks()",
        "self._gathered = None",
        "callbacks/test_sample_ledger.py",
    ),
    Fault(
        "ledger: the losses of smoothed targets are kept",
        "callbacks/sample_ledger.py",
        "def after_loss(",
        "def before_loss(",
        "callbacks/test_sample_ledger.py",
    ),
    # spikes
    Fault(
        "spikes: averages keep the weights of a spike",
        "algorithms/spike_guard.py",
        'average.load_state_dict(_put_back(average.state_dict(), good["averages"].get(key, {})))',
        "pass",
        "algorithms/test_spike_guard.py",
    ),
    Fault(
        "spikes: each rank judges by its own values",
        "algorithms/spike_guard.py",
        "dist.broadcast(recent, src=0)",
        "pass",
        "algorithms/test_spike_guard.py",
    ),
    Fault(
        "spikes: batches not yet looked at are forgotten by a resume",
        "algorithms/spike_guard.py",
        'self._count = state["count"]',
        "self._count = 0",
        "algorithms/test_spike_guard.py",
    ),
    # sharded models
    Fault(
        "shards: each rank keeps a part of its own first weights",
        "runner/distributed/sharding.py",
        "        broadcast_tensors(model)\n",
        "",
        "distributed/test_sharding.py",
    ),
    Fault(
        "shards: gradients have the norm of the local part",
        "callbacks/optimizer_monitor.py",
        "return [*map(whole, norms)]",
        "return [getattr(norm, '_local_tensor', norm) for norm in norms]",
        "callbacks/test_optimizer_monitor.py distributed/test_sharding.py",
    ),
    Fault(
        "shards: only rank 0 gathers for a checkpoint",
        "runner/checkpoints/snapshot.py",
        "if get_global_rank() != 0 and not is_sharded(state.unwrapped_model):",
        "if get_global_rank() != 0:",
        "distributed/test_sharding.py",
    ),
    Fault(
        "shards: the padding of uneven shards is saved",
        "runner/distributed/sharding.py",
        "if is_new and storage.nbytes() == gathered.nbytes else",
        "if is_new else",
        "distributed/test_sharding.py",
    ),
    Fault(
        "split layers: what each rank holds whole is saved as it will be later",
        "runner/distributed/sharding.py",
        "if is_new and storage.nbytes() == gathered.nbytes else",
        "if storage.nbytes() == gathered.nbytes else",
        "distributed/test_tensor_parallel.py",
    ),
    Fault(
        "split layers: queries, keys and values are written to a sharded checkpoint as one piece",
        "runner/distributed/saved_tensor.py",
        "if at == 0 or indices[at] != indices[at - 1] + 1]",
        "if at == 0]",
        "distributed/test_tensor_parallel.py",
    ),
    Fault(
        "split layers: each rank sees samples of its own",
        "runner/training/dataloader.py",
        "            order.give_same_samples(group)\n",
        "            pass\n",
        "distributed/test_tensor_parallel.py",
    ),
    Fault(
        "split layers: metrics count each sample once for each rank that sees it",
        "runner/training/metrics.py",
        "part.process_group = get_data_parallel_group()",
        "part.process_group = None",
        "distributed/test_tensor_parallel.py",
    ),
    Fault(
        "split layers: dropout differs between ranks that hold the same activations",
        "runner/core/state.py",
        "return self.rank_zero_seed + get_data_parallel_rank()",
        "import torch.distributed as d; return self.rank_zero_seed + (d.get_rank() if d.is_initialized() else 0)",
        "distributed/test_tensor_parallel.py",
    ),
    Fault(
        "split layers: all ranks drop the attention weights of their heads alike",
        "runner/distributed/tensor_parallel.py",
        "torch.manual_seed(seed + rank)",
        "torch.manual_seed(seed)",
        "distributed/test_tensor_parallel.py",
    ),
    Fault(
        "split layers: queries, keys and values are cut as one",
        "runner/distributed/tensor_parallel.py",
        "split_factor=JOINED",
        "split_factor=1",
        "distributed/test_tensor_parallel.py",
    ),
    Fault(
        "split layers: a tied head trains a weight of its own",
        "runner/distributed/tensor_parallel.py",
        "            module.register_parameter(key, getattr(first, name))\n",
        "            pass\n",
        "distributed/test_tensor_parallel.py",
    ),
    Fault(
        "split layers: surgery that a plan does not know trains with wrong gradients",
        "runner/distributed/tensor_parallel.py",
        "or type(module).__name__ in PER_HEAD",
        "or True",
        "distributed/test_tensor_parallel.py",
    ),
    Fault(
        "split layers: adaptive clipping takes the norm of a part",
        "algorithms/gradient_clipping.py",
        "return added_up(torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.ndim)), keepdim=True))",
        "return torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.ndim)), keepdim=True)",
        "distributed/test_tensor_parallel.py",
    ),
    Fault(
        "shards: loaded ones keep the whole tensor in memory",
        "runner/distributed/sharding.py",
        "return placed.clone()",
        "return placed",
        "distributed/test_sharding.py",
    ),
    Fault(
        "shards: a sum of gradients that knows nothing of them",
        "algorithms/nan_guard.py",
        "gradients = [numbers_of(local(parameter.grad))",
        "gradients = [numbers_of(parameter.grad)",
        "distributed/test_sharding.py",
    ),
    Fault(
        "fsdp: a rank with fewer microbatches is not there when others gather",
        "runner/training/accumulation.py",
        "rounds = max_over_ranks(rounds)",
        "rounds = len(microbatches)",
        "distributed/test_sharding.py",
    ),
    Fault(
        "shards: what one rank cannot write is no failure of the others",
        "runner/distributed/together.py",
        'raise OSError(*outcome["error"])',
        'outcome["result"] = {}',
        "checkpoints/test_shards.py",
    ),
    Fault(
        "shards: each rank looks for NaN in its own part alone",
        "callbacks/checkpoint_saver.py",
        "gather_objects(fault, self._group)",
        "[fault]",
        "checkpoints/test_shards.py",
    ),
    Fault(
        "shards: parts may overlap where sizes add up",
        "runner/checkpoints/shards.py",
        " and not _overlap(pieces)",
        "",
        "checkpoints/test_shards.py",
    ),
    Fault(
        "checkpoints: one whose files cannot be loaded counts as intact",
        "runner/checkpoints/files.py",
        "read_file(path, name, mapped=True)",
        "pass",
        "checkpoints/test_manifest.py",
    ),
    Fault(
        "shards: those of another checkpoint are taken",
        "runner/checkpoints/shards.py",
        '.get("save") != manifest.save',
        '.get("save") is None',
        "checkpoints/test_shards.py",
    ),
    Fault(
        "shards: a rank reads what other ranks keep, too",
        "runner/distributed/sharding.py",
        "if isinstance(value, SavedTensor):",
        "if False:",
        "checkpoints/test_shards.py",
    ),
    Fault(
        "shards: rank 0 gathers what it has no memory for",
        "runner/checkpoints/shards.py",
        "2 * size > psutil.virtual_memory().available",
        "False",
        "checkpoints/test_shards.py",
    ),
    Fault(
        "shards: what was half written stays",
        "runner/checkpoints/writing.py",
        "        if is_first:\n            shutil.rmtree(hidden, ignore_errors=True)\n",
        "",
        "checkpoints/test_shards.py checkpoints/test_files.py",
    ),
    Fault(
        "shards: a rank hashes nothing of what it takes up",
        "runner/checkpoints/files.py",
        "verify(path, get_global_rank(), get_world_size())",
        "verify(path, -1, 0x7FFFFFFF)",
        "checkpoints/test_shards.py",
    ),
    Fault(
        "weights by name: all are drawn alike",
        "runner/models/by_name.py",
        'f"weights.{name}"',
        '"weights"',
        "models/test_by_name.py",
    ),
    Fault(
        "weights by name: surgery before they have values is lost",
        "runner/distributed/deferred.py",
        "(draw is None or parameter._version)",
        "draw is None",
        "models/test_by_name.py",
    ),
    Fault(
        "weights by name: ranks keep parts of weights of their own",
        "runner/distributed/sharding.py",
        "            dist.broadcast(value, src=0)\n",
        "",
        "models/test_by_name.py",
    ),
    Fault(
        "weights by name: pretrained ones are drawn",
        "runner/models/by_name.py",
        " and not is_deferred(weight)",
        "",
        "models/hf/test_deferred_weights.py",
    ),
    Fault(
        "weights by name: a rank reads whole weights",
        "runner/distributed/sharding.py",
        "        value = draws[name]()\n",
        "        value = as_plain(draws[name]())\n",
        "models/hf/test_deferred_weights.py",
    ),
    # budgets
    Fault(
        "budgets: a run may train a batch less than was measured",
        "runner/config/length.py",
        "(batches + 0.5)",
        "batches",
        "config/test_length.py",
    ),
    Fault(
        "budgets: a rerun measures again",
        "runner/trials/measure.py",
        "if budget is None or budget.batches is not None:",
        "if budget is None:",
        "trials/test_measure.py",
    ),
    Fault(
        "learning rates: a fall after the minimum is suggested",
        "runner/trials/rising_rate.py",
        "for index in range(1, lowest)",
        "for index in range(1, len(values) - 1)",
        "trials/test_rising_rate.py",
    ),
    # what a step asks of the device
    Fault(
        "memory: the last outputs live beside the next forward pass",
        ACCUMULATION,
        "    state.drop_outputs()\n    run.forward_stream",
        "    run.forward_stream",
        "promises/test_operations.py",
    ),
    Fault(
        "operations: the loss is copied for each step",
        "runner/training/metrics.py",
        '"loss/train/total": state.total_loss,',
        '"loss/train/total": state.total_loss.clone(),',
        "promises/test_operations.py",
    ),
    Fault(
        "moves: a batch counts as moved wherever it is",
        "runner/device/batch.py",
        "type(item) is not Tensor or item.device != device",
        "type(item) is not Tensor",
        "device/test_batch.py",
    ),
    Fault(
        "accuracy: of images of classes only the images are counted",
        "runner/models/top1_accuracy.py",
        "targets.numel()",
        "len(targets)",
        "models/test_top1_accuracy.py",
    ),
    Fault(
        "auto microbatches: metrics count the attempts that failed",
        "runner/device/attempts.py",
        "setattr(part, name, value)",
        "pass",
        "training/test_metrics.py",
    ),
    Fault(
        "auto microbatches: each batch is copied, whether it had fit or not",
        ACCUMULATION,
        "has_fit = shapes is not None and",
        "has_fit = False and",
        "training/test_accumulation.py",
    ),
    Fault(
        "auto microbatches: memory in use is no reason to copy again",
        ACCUMULATION,
        "used <= self._fit.get((state.fitting_size, shapes), -1)",
        "(state.fitting_size, shapes) in self._fit",
        "training/test_accumulation.py",
    ),
    Fault(
        "auto microbatches: a batch of which nothing was copied is done again",
        ACCUMULATION,
        "is_only_attempt = has_fit and",
        "is_only_attempt = False and",
        "training/test_accumulation.py",
    ),
    Fault(
        "auto microbatches: a rank without copies does its part again with the others",
        ACCUMULATION,
        "            if is_only_attempt:\n                continue",
        "            if False:\n                continue",
        "training/test_accumulation.py",
    ),
    Fault(
        "rotary embedding: tables stay those of the first length",
        "algorithms/_gpt.py",
        "if self._value is None or key != self._key:",
        "if self._value is None:",
        "algorithms/test_rotary_embedding.py",
    ),
    Fault(
        "label smoothing: evaluations are smoothed too",
        "algorithms/label_smoothing.py",
        "        self._original = None\n        self.close(state, logger)",
        "        self._original = None",
        "algorithms/test_label_smoothing.py",
    ),
    Fault(
        "augmentation: images come back in the order of their operations",
        "algorithms/_image_operations.py",
        "torch.empty_like(images).index_copy_(0, index, torch.cat(changed))",
        "torch.cat(changed)",
        "algorithms/test_image_operations.py algorithms/test_augmix.py",
    ),
    # gradients
    Fault(
        "accumulation: microbatches count alike",
        ACCUMULATION,
        "part * share()",
        "share() / len(parts)",
        "models/test_loss.py",
    ),
    Fault(
        "DDP weights: ranks wait for the sum of their weights before they compute",
        LOSS,
        "    @cache\n",
        "    work.wait()\n\n    @cache\n",
        "training/test_accumulation.py",
    ),
    Fault(
        "loaders on ranks: what declares nothing is accepted unless it is a DataLoader",
        "runner/distributed/shares.py",
        "    if dividing_sampler is None and reading is None:\n",
        "    if dividing_sampler is None and reading is None and hasattr(loader, 'dataset'):\n",
        "distributed/test_loader_shares.py distributed/test_collectives.py",
    ),
    Fault(
        "DDP weights: targets that an algorithm leaves out count",
        "runner/distributed/shares.py",
        "return is_declared and active.isdisjoint(map(id, state.algorithms))",
        "return is_declared",
        "distributed/test_collectives.py",
    ),
    Fault(
        "DDP weights: unequal targets are declared equal",
        "runner/distributed/shares.py",
        'getattr(state.train_dataloader, "equal_targets", False)',
        "True",
        "distributed/test_collectives.py",
    ),
    Fault(
        "DDP weights: ranks count alike",
        LOSS,
        "known = samples * ranks / all_samples if ranks > 1 else 1.0",
        "known = 1.0",
        "distributed/test_collectives.py",
    ),
    Fault(
        "gradients of an own training_step are not averaged",
        "runner/optim/steps.py",
        "if self.averages_gradients:",
        "if False:",
        "distributed/test_collectives.py",
    ),
    Fault(
        "gradients of the last batch stay",
        LOOP,
        "        parameter.grad = None\n    run.accumulate",
        "        pass\n    run.accumulate",
        "training/test_loop_batch.py models/test_loss.py",
    ),
    Fault(
        "an optimizer imports torch's compiler",
        "runner/optim/param_groups.py",
        "    spare_compiler()\n",
        "",
        "libraries/test_optimizers.py",
    ),
    Fault(
        "the step of an optimizer imports torch's compiler",
        "runner/libraries/optimizers.py",
        'getattr(inner, "__code__", None) is _GRAD_MODE',
        "False",
        "libraries/test_optimizers.py",
    ),
    Fault(
        "an event for TensorBoard keeps values of the record before",
        "callbacks/_event_file.py",
        "            value.simple_value = number\n",
        "            value.simple_value = value.simple_value or number\n",
        "callbacks/test_tensorboard_logger.py",
    ),
    Fault(
        "the hooks of an optimizer are left out",
        "runner/libraries/optimizers.py",
        '        or getattr(optimizer, "_optimizer_step_pre_hooks", True)\n',
        "",
        "libraries/test_optimizers.py",
    ),
    Fault(
        "a module of torchmetrics comes without its package",
        "runner/libraries/torchmetrics.py",
        '        del vars(package)["__path__"]',
        '        vars(package)["__path__"]',
        "libraries/test_torchmetrics.py",
    ),
    Fault(
        "fp16: gradients are clipped before they are unscaled",
        "runner/optim/steps.py",
        "            self.scaler.unscale_(optimizer)",
        "            pass",
        "training/test_precision.py",
    ),
    Fault(
        "match and apply are not asked",
        "runner/core/engine.py",
        '("run_event", "match", "apply")',
        '("run_event",)',
        "core/test_engine_hooks.py",
    ),
    # checkpoints
    Fault(
        "a checkpoint is overwritten by the next one before it is written",
        "callbacks/checkpoint_saver.py",
        "        self._wait()\n        logger.flush()",
        "        logger.flush()",
        "callbacks/test_checkpoint_saver.py",
    ),
    Fault(
        "a checkpoint's averaged weights are copied after the others are back",
        "runner/checkpoints/snapshot.py",
        "        copies.finish()\n    return {name",
        "        pass\n    return {name",
        "callbacks/test_checkpoint_saver.py",
    ),
    Fault(
        "a checkpoint is copied into the memory of another kind of tensor",
        "runner/checkpoints/copies.py",
        "out.shape != tensor.shape or ",
        "",
        "checkpoints/test_copies.py",
    ),
    Fault(
        "a checkpoint is copied into new memory each time",
        "runner/checkpoints/copies.py",
        "self._free = deque(self._used)",
        "self._free = deque()",
        "checkpoints/test_copies.py",
    ),
    Fault(
        "a checkpoint of weights that are not finite",
        "callbacks/_soundness.py",
        "for name in weights.keys() & trained:",
        "for name in ():",
        "callbacks/test_checkpoint_saver_not_finite.py",
    ),
    Fault(
        "a run that has diverged ends well",
        "runner/verbs/train.py",
        'if not job.command.options["allow_divergence"]:',
        "if False:",
        "records/test_diverged.py",
    ),
    # time, schedules, intervals
    Fault(
        "schedule: one batch late",
        LOOP,
        "        rates.step(state.progress)\n",
        "        pass\n",
        "optim/test_scheduled_rates.py training/test_trainer.py",
    ),
    Fault(
        "schedule: off by one",
        "runner/optim/scheduled_rates.py",
        "multiplier_at(timestamp)",
        "multiplier_at(timestamp.to_next_batch(1))",
        "optim/test_scheduled_rates.py",
    ),
    Fault(
        "time counts this rank's samples only",
        LOOP,
        "to_next_batch(all_samples, tokens",
        "to_next_batch(samples, tokens",
        "distributed/test_collectives.py",
    ),
    Fault(
        "intervals: due one batch early",
        "runner/timing/time.py",
        "lambda timestamp: timestamp[index] * parts // length",
        "lambda timestamp: (timestamp[index] + 1) * parts // length",
        "timing/test_time.py",
    ),
    # randomness
    Fault(
        "dropout does not depend on the batch",
        ACCUMULATION,
        "forward_stream.start(state.timestamp.batch, index)",
        "forward_stream.start(0, 0)",
        "core/test_randomness.py",
    ),
    Fault(
        "resume: torch's generators go on as they stand",
        ACCUMULATION,
        "    run.forward_stream.start(state.timestamp.batch, index)",
        "    pass",
        "core/test_randomness.py checkpoints/test_snapshot.py",
    ),
    Fault(
        "MixUp: the weight of a partner may be above one half",
        "algorithms/mixup.py",
        "return min(b, 1 - b)",
        "return b",
        "algorithms/test_mixup.py",
    ),
    # evaluation
    Fault(
        "evaluation: what stands in for an empty share counts",
        "runner/training/evaluation.py",
        "counts=samples > 0",
        "counts=True",
        "training/test_evaluation.py distributed/test_collectives.py",
    ),
    Fault(
        "evaluation: twice at the end",
        "runner/training/evaluation.py",
        "evaluator.evaluated_at = state.timestamp.batch",
        "evaluator.evaluated_at = -1",
        "training/test_loop_evaluation.py",
    ),
    Fault(
        "evaluation: draws within it depend on those of callbacks",
        "runner/training/evaluation.py",
        "        run.eval_stream.start(state.eval_timestamp.batch, 0)\n",
        "",
        "training/test_evaluation.py",
    ),
    Fault(
        "prediction: draws within it depend on those of callbacks",
        "runner/training/evaluation.py",
        "            run.eval_stream.start(state.predict_timestamp.batch, 0)\n",
        "",
        "training/test_evaluation.py",
    ),
    Fault(
        "evaluation: the mean loss keeps a value of every batch",
        "runner/training/metrics.py",
        "if len(self._terms) == MOST_TERMS:",
        "if False:",
        "training/test_metrics.py",
    ),
    Fault(
        "evaluation: averages stay in the model",
        "algorithms/_averaging.py",
        "        copy_all(live, trained)",
        "        pass",
        "algorithms/test_ema.py",
    ),
    # events
    Fault(
        "dispatch: brackets do not nest",
        "runner/core/engine.py",
        "algorithms[::-1] if event.closes_bracket else algorithms",
        "algorithms",
        "core/test_engine.py",
    ),
    Fault(
        "a backward pass imports SymPy",
        "runner/libraries/backward.py",
        "type(loss) is Tensor and _runs_as_expected()",
        "False",
        "libraries/test_backward.py",
    ),
    Fault(
        "another torch, without a private name of optimizers, cannot be used",
        "runner/libraries/optimizers.py",
        "except (ImportError, AttributeError):",
        "except ImportError:",
        "libraries/test_optimizers.py",
    ),
    Fault(
        "dispatch: destinations come last at INIT",
        "runner/core/engine.py",
        "kinds[::-1] if event is Event.INIT else kinds",
        "kinds",
        "core/test_engine.py",
    ),
    Fault(
        "closing ends at the first failure",
        "runner/core/engine.py",
        '                    first.add_note(f"while closing, {owner}',
        '                    return\n                    first.add_note(f"while closing, {owner}',
        "core/test_engine_errors.py",
    ),
    Fault(
        "closing leaves metrics unwritten",
        "runner/core/engine.py",
        '            ("logger", "close", self.logger.close),\n',
        "",
        "core/test_logger.py core/test_engine_closing.py",
    ),
    Fault(
        "early stop: one epoch early",
        "callbacks/early_stopper.py",
        "<= self.patience.value",
        "< self.patience.value",
        "callbacks/test_early_stopper.py",
    ),
    # what survives
    Fault(
        "checkpoint: not synced",
        "runner/checkpoints/writing.py",
        "            sync_file(raw)\n",
        "",
        "checkpoints/test_files.py",
    ),
    Fault(
        "checkpoint: its digests are not looked at",
        "runner/checkpoints/files.py",
        '_hash(path / name) != facts["sha256"]',
        '_hash(path / name) == ""',
        "checkpoints/test_files.py",
    ),
    Fault(
        "checkpoint: unpickled",
        "runner/checkpoints/files.py",
        "weights_only=True",
        "weights_only=False",
        "checkpoints/test_files.py history/test_foreign_runs.py",
    ),
    Fault(
        "checkpoint: the optimizer's state is lost",
        "runner/checkpoints/snapshot.py",
        '"optimizers": [optimizer.state_dict() for',
        '"optimizers": [{**optimizer.state_dict(), "state": {}} for',
        "checkpoints/test_snapshot.py",
    ),
    Fault(
        "signal ignored",
        "runner/training/run.py",
        "ending(self.clock.signal) if self.clock.signal else self.state.interruption",
        "self.state.interruption",
        "distributed/test_signals.py",
    ),
    Fault(
        "restarts: a newer checkpoint does not reset their count",
        "runner/distributed/restarts.py",
        "1 if batch > trained else used + 1",
        "used + 1",
        "distributed/test_restarts.py",
    ),
    Fault(
        "restarts: a signal of the user is answered by one",
        "runner/distributed/restarts.py",
        " and not was_asked_to_end()",
        "",
        "survival/test_restarts.py",
    ),
    Fault(
        "restarts: an attempt begins a new run",
        "runner/distributed/environment.py",
        "from_attempts[key] if key in from_attempts else keep_across_requeues(key, make)",
        "keep_across_requeues(key, make)",
        "distributed/test_restarts.py",
    ),
    Fault(
        "workers: torch's handler of SIGCHLD stays",
        "runner/data/workers.py",
        "signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)",
        "pass",
        "data/test_dead_workers.py",
    ),
    Fault(
        "Slurm: a job that runs again has forgotten its run",
        "runner/distributed/slurm.py",
        "for name, value in read_object(_file()).items()} if restarts() else {}",
        "for name, value in read_object(_file()).items()} if not restarts() else {}",
        "distributed/test_slurm.py",
    ),
    Fault(
        "Slurm: submitit requeues a job before its checkpoint is written",
        "runner/distributed/session.py",
        "handlers = {number: signal.signal(number, signal.SIG_DFL) for number in OF_SCHEDULERS}",
        "handlers = {number: signal.getsignal(number) for number in OF_SCHEDULERS}",
        "distributed/test_slurm.py",
    ),
    Fault(
        "Slurm: a run that nothing will requeue says nothing",
        "runner/program/job.py",
        "if launch.requeue and not is_slurm_job()",
        "if launch.requeue and is_slurm_job()",
        "distributed/test_slurm.py",
    ),
    Fault(
        "signal to a process that waits in torch: it waits on",
        "runner/distributed/endings.py",
        "        if not poll.poll(",
        "        if False and not poll.poll(",
        "distributed/test_endings.py",
    ),
    Fault(
        "a rank that is interrupted alone leaves the others waiting",
        "runner/distributed/watch.py",
        "agreed_to_end.wait(AGREED)",
        "True",
        "distributed/test_local_ranks.py",
    ),
    Fault(
        "a full log ends the run",
        "runner/terminal/output.py",
        "        except OSError as error:\n            if not self._has_warned",
        "        except InterruptedError as error:\n            if not self._has_warned",
        "terminal",
    ),
    Fault(
        "messages between ranks: anybody's are taken",
        "runner/distributed/launch_secret.py",
        "if not hmac.compare_digest(signed(name, text).encode(), stored):",
        "if False:",
        "distributed/test_launch_secret.py",
    ),
    Fault(
        "MLflow: a line of each call is lost",
        "callbacks/_mlflow/delivery.py",
        "sink.send_metrics(metrics)",
        "sink.send_metrics(metrics[1:])",
        "callbacks/test_mlflow_logger.py",
    ),
    Fault(
        "MLflow: what was sent is marked only now and then",
        "callbacks/_mlflow/delivery.py",
        "<= METRICS_PER_CALL",
        "<= 100 * METRICS_PER_CALL",
        "callbacks/test_mlflow_large_runs.py",
    ),
    Fault(
        "MLflow: the last value of a thinned run is lost",
        "callbacks/_mlflow/thinning.py",
        "self.left_out[key] = [value, step, now]",
        "pass",
        "callbacks/test_mlflow_large_runs.py",
    ),
    Fault(
        "MLflow: the writer does not learn how many values to send",
        "callbacks/mlflow_logger.py",
        '"max_values_per_second": self._max_values_per_second',
        '"max_values_per_second": None',
        "callbacks/test_mlflow_large_runs.py",
    ),
    Fault(
        "MLflow: a model comes before the values of its step that were held back",
        "callbacks/_mlflow/delivery.py",
        'LAST = {"status", "model"}',
        'LAST = {"status"}',
        "callbacks/test_mlflow_models.py",
    ),
    Fault(
        "MLflow: batches that are trained for the third time are logged again",
        "callbacks/_mlflow/spool.py",
        "if not is_ahead:\n",
        "if False:\n",
        "callbacks/test_mlflow_large_runs.py",
    ),
    Fault(
        "MLflow: long lines of a checkpoint's batch are written twice",
        "callbacks/_mlflow/spool.py",
        "return self._step_start if self._step >= batch else self.size",
        "return self.size",
        "callbacks/test_mlflow_large_runs.py",
    ),
    Fault(
        "MLflow: a backlog after an outage looks like values that are logged too fast",
        "callbacks/_mlflow/thinning.py",
        "unsent: float = math.inf",
        "unsent: float = 0",
        "callbacks/test_mlflow_large_runs.py",
    ),
    Fault(
        "MLflow: a store that loses its note gets all again",
        "callbacks/_mlflow/delivery.py",
        "if end > self._known_end:",
        "if True:",
        "callbacks/test_mlflow_large_runs.py",
    ),
    Fault(
        "MLflow: the latest value in a list of runs is the first",
        "runner/libraries/mlflow_rows.py",
        "max(latest.get(",
        "min(latest.get(",
        "libraries/test_mlflow_rows.py",
    ),
    Fault(
        "MLflow: what was sent is sent again",
        "callbacks/_mlflow/delivery.py",
        "sent.offset = offset",
        "sent.offset = 0",
        "callbacks/test_mlflow_logger.py",
    ),
    Fault(
        "MLflow: the run says FINISHED whatever came of it",
        "callbacks/_mlflow/session.py",
        'else "FAILED"',
        'else "FINISHED"',
        "callbacks/test_mlflow_logger.py callbacks/test_mlflow_failures.py",
    ),
    # what a run leaves, and who shares a machine with it
    Fault(
        "record: the modules kept with a run are not signed",
        "runner/records/record.py",
        "return [part for name in sorted(modules)",
        "return [] and [part for name in sorted(modules)",
        "records/test_kept_code.py",
    ),
    Fault(
        "mirror: what a run has not uploaded is removed",
        "runner/checkpoints/mirror.py",
        "for name in self._own.intersection(self.names()) - kept:",
        "for name in {*self.names()} - kept:",
        "callbacks/test_checkpoint_saver_mirror.py",
    ),
    Fault(
        "git: filters of a repository run",
        "runner/files/git.py",
        "for name in filters(folder) for key, value in off.items()",
        "for name in () for key, value in off.items()",
        "files/test_git.py",
    ),
    Fault(
        "record: somebody else's command runs if it is given by position",
        "runner/records/arguments.py",
        "in_order[index] if index < len(in_order) else None, value",
        "in_order[0], value",
        "history/test_foreign_runs.py",
    ),
    Fault(
        "record: an allowed package allows all that it imports",
        "runner/records/trust.py",
        'return home.startswith(f"{name.rpartition',
        'return True or home.startswith(f"{name.rpartition',
        "history/test_foreign_runs.py",
    ),
    Fault(
        "record: a patch that leaves out bytes",
        "runner/records/patch.py",
        '"--binary", ',
        "",
        "records/test_record.py",
    ),
    Fault(
        "an epoch's end that failed is not made up for",
        "runner/training/epochs.py",
        "run.engine.fire_unhandled()",
        "pass",
        "callbacks/test_checkpoint_saver_failures.py",
    ),
    Fault(
        "evaluation: what was in flight does not come back",
        "runner/training/evaluation.py",
        "setattr(state, name, before[name])",
        "pass",
        "training/test_evaluation.py",
    ),
    Fault(
        "imports: garbage of the jobs before stays in memory",
        "runner/libraries/importing.py",
        "@cache",
        "",
        "libraries/test_importing.py",
    ),
    Fault(
        "GPUs: a job takes what another has",
        "runner/distributed/gpus.py",
        'lock_file(folder / gpu.replace("/", "-"), mode=0o600)',
        '(folder / gpu.replace("/", "-")).open("a")',
        "distributed/test_gpus.py",
    ),
    # the house, and what a user types
    Fault(
        "layers: an engine's room knows the Trainer",
        "runner/device/batch.py",
        "from __future__ import annotations\n",
        "from __future__ import annotations\n\nif False:\n    from runner.training.trainer import Trainer\n",
        "project/test_layers.py",
    ),
    Fault(
        "a wrong key is accepted",
        "runner/config/signatures.py",
        "if not open_ended and (",
        "if False and (",
        "config/test_signatures.py",
    ),
    Fault(
        "who raised an exception is not among its facts",
        "runner/core/engine.py",
        "        add_raiser(error, name, event, now)\n",
        "",
        "core/test_engine_errors.py",
    ),
    Fault(
        "the facts of another rank's failure are lost",
        "runner/distributed/store.py",
        "Facts.from_data(facts)",
        "UNKNOWN",
        "distributed/test_store.py",
    ),
    # which is better
    Fault(
        "verdict: a difference in one direction only",
        "runner/comparing/decision.py",
        "return float(np.mean(np.abs(sums) >= observed))",
        "return float(np.mean(sums >= observed))",
        "comparing/test_decision.py",
    ),
    # pruning
    Fault(
        "pruning: a job that was pruned and revived is pruned again",
        "callbacks/sweep_pruner.py",
        "        if study.was_pruned:",
        "        if study.was_pruned and False:",
        "sweeps/test_pruning.py",
    ),
    Fault(
        "pruning: a pruned job is trained again with the sweep",
        "runner/sweeps/sweep.py",
        "return is_pruned or result.status in",
        "return result.status in",
        "sweeps/test_pruning.py",
    ),
    Fault(
        "pruning: the last batch of an epoch is not the end",
        "runner/training/loop.py",
        "        run.end_if_interrupted()  # only if interrupted at FIT_START",
        "        # at FIT_START",
        "sweeps/test_pruning.py training/test_loop_stops.py",
    ),
    Fault(
        "pruning: what a killed process left of a line stays in the journal",
        "callbacks/_pruning_study.py",
        'end - len(tail) + tail.rfind(b"\\n") + 1',
        "end",
        "callbacks/test_sweep_pruner.py",
    ),
    Fault(
        "pruning: settings are compared over unequal seeds",
        "callbacks/_pruning_study.py",
        "if own and own.keys() <= other.keys():",
        "if own:",
        "callbacks/test_sweep_pruner.py",
    ),
    Fault(
        "verdict: the leader of a sweep has ties as if it had been chosen beforehand",
        "runner/comparing/decision.py",
        "> LEVEL / len(samples)",
        "> LEVEL",
        "comparing/test_decision.py sweeps",
    ),
    Fault(
        "verdict: an evaluation counts as a trained run",
        "runner/comparing/candidates.py",
        "if run.verb in TRAINING]",
        "]",
        "verbs/test_verdict.py",
    ),
    Fault(
        "verdict: other evaluation data are let through",
        "runner/comparing/candidates.py",
        "if any(first[pair] != second[pair] for pair in pairs) or",
        "if",
        "verbs/test_verdict.py",
    ),
    # what people read
    Fault(
        "plateau: the state depends on how long the run took",
        "algorithms/reduce_on_plateau.py",
        "state.timestamp._replace(total_wct=0.0, epoch_wct=0.0, batch_wct=0.0)",
        "state.timestamp",
        "algorithms/test_reduce_on_plateau.py",
    ),
    Fault(
        "plateau: rates fall below every bound",
        "algorithms/reduce_on_plateau.py",
        "(old - new) > self.eps",
        "(old - new) >= 0",
        "algorithms/test_reduce_on_plateau.py",
    ),
    Fault(
        "speed: a slice of a GPU has the peak of all of it",
        "callbacks/_peak_flops.py",
        're.fullmatch(f"{_BRAND}({pattern})", device_name)',
        "re.search(pattern, device_name)",
        "callbacks/test_speed_monitor.py",
    ),
    Fault(
        "logger: images of any type are let through",
        "runner/core/logged.py",
        "array.dtype != np.uint8 or ",
        "",
        "core/test_logger.py",
    ),
    Fault(
        "composer: a fraction of an epoch is cut off",
        "runner/compat/composer/time.py",
        "and not number.is_integer()",
        "and False",
        "compat/test_composer_time.py",
    ),
    Fault(
        "seconds: a run's time does not count",
        "runner/records/recording.py",
        "result.seconds += time.perf_counter() - began",
        "pass",
        "records/test_recording.py",
    ),
    Fault(
        "speed: what follows the last evaluation counts as training",
        "callbacks/console_summary.py",
        "self._seconds = self._seconds_of(state)",
        "self._seconds = time.perf_counter() - (self._began or 0.0)",
        "callbacks/test_console_summary.py",
    ),
    Fault(
        "files: a wrong value does not name its file",
        "runner/config/errors.py",
        'facts.key, " and ".join(files) or None)',
        "facts.key)",
        "config/test_own_conf.py",
    ),
    Fault(
        "replay: it begins at the newest checkpoint of all",
        "runner/checkpoints/history.py",
        "if trained < batch]",
        "]",
        "verbs/test_replay.py",
    ),
    Fault(
        "replay: the record of the last session stands for all of them",
        "runner/records/record.py",
        "if record.began_after < batch]",
        "]",
        "verbs/test_replay.py",
    ),
    Fault(
        "replay: samples that were left out keep their numbers",
        "runner/trials/replayed.py",
        "                self._follow(rows, _rows(state))",
        "                pass",
        "verbs/test_replay.py",
    ),
    Fault(
        "forks: the checkpoint stays with the parent",
        "runner/trials/forking.py",
        "copy_function=link_or_copy",
        "copy_function=os.symlink",
        "history/test_forks.py",
    ),
    Fault(
        "forks: the parent's last batches are trained with the fork's config",
        "runner/trials/forking.py",
        "experiment = job.parent.without",
        "experiment = job.experiment.without",
        "history/test_forks.py",
    ),
    Fault(
        "forks: a fork between checkpoints has no curves of its parent",
        "runner/trials/forking.py",
        "if callback.target == CURVES",
        "if not callback",
        "history/test_forks.py",
    ),
    Fault(
        "forks: a fork is trained again from the start",
        "runner/trials/standing.py",
        "if checkpoint is None and (start := forked_after(run)):",
        "if start := 0:",
        "history/test_forks.py",
    ),
    Fault(
        "forks: a resumed fork forgets its parent",
        "runner/records/recording.py",
        'job.tags.get(PARENT, before.parent if before is not None else "")',
        'job.tags.get(PARENT, "")',
        "history/test_forks.py",
    ),
    Fault(
        "crash: a bundle holds the checkpoint of the moment that failed",
        "callbacks/crash_bundle.py",
        "trained if facts_of(error).event in SAVING else trained + 1",
        "trained + 1",
        "callbacks/test_crash_bundle.py",
    ),
    Fault(
        "crash: names in a bundle are not checked",
        "runner/records/run_files.py",
        "or not _NAMES.fullmatch(entry.filename) ",
        "",
        "callbacks/test_crash_bundle.py",
    ),
    Fault(
        "crash: modules of somebody else's bundle are imported unasked",
        "runner/history/saved_run.py",
        'may_run = record.is_own or command.options["allow_code"]',
        "may_run = True",
        "callbacks/test_crash_bundle.py",
    ),
    Fault(
        "verify: versions of a user's own dependencies are not recorded",
        "runner/records/environment.py",
        'sorted(own - {"runner"})',
        "()",
        "verbs/test_verify.py",
    ),
    Fault(
        "verify: what the run kept is compared with itself",
        "runner/verbs/verify.py",
        'now = {line["batch"]: line for line in again}',
        'now = {line["batch"]: line for line in kept}',
        "verbs/test_verify.py",
    ),
    Fault(
        "verify: the recorded code is used",
        "runner/cli/verbs.py",
        """uses_run="retrain",
        on_all_ranks=True,
        judges=True,
""",
        """uses_run="retrain",
        on_all_ranks=True,
        judges=True,
        imports_kept_code=True,
""",
        "verbs/test_verify.py",
    ),
)


def apply(fault: Fault, tree: Path) -> None:
    """Put a fault into a tree, in which the text that it changes must occur exactly once."""
    path = tree / fault.file
    text = path.read_text()
    if text.count(fault.before) != 1:
        raise SystemExit(f"{fault.name}: {fault.before!r} stands {text.count(fault.before)} times in {fault.file}")
    path.write_text(text.replace(fault.before, fault.after))


def copy_tree(tree: Path) -> None:
    """Copy what the tests need."""
    tree.mkdir()
    for name in COPIED:
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, tree)


def run_tests(tree: Path, tier: str, *arguments: str) -> tuple[str | None, float]:
    """Return the first test of a tier, by its marks, that failed or hung, None if all passed, and seconds."""
    began = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", tier, "-p", "no:cacheprovider", *arguments],
        cwd=tree,
        env=environment | {"PYTHONPATH": str(tree)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    failed = re.findall(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", done.stdout, re.MULTILINE)
    if done.returncode and not failed:  # conftest.py ends a process that hangs and prints where it is
        failed = [f"{file}::{name}" for file, name in re.findall(r'/tests/(\S+)", line \d+ in (test_\w+)', done.stderr)]
    if done.returncode not in (0, NO_TESTS) and not failed:
        raise RuntimeError(f"the tests could not be run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return failed[0] if failed else None, time.monotonic() - began


def try_out(fault: Fault, trees: queue.SimpleQueue[Path]) -> tuple[bool, str]:
    """Return whether the tests catch a fault, and its row of the table.

    Args:
        fault: the fault.
        trees: copies of the product that are free, as they were; one is taken, and put back.
    """
    tree = trees.get()
    whole = (tree / fault.file).read_text()
    apply(fault, tree)
    try:
        near = [f"tests/{path}" for path in fault.tests.split()]
        where, (failed, seconds) = "next to it", run_tests(tree, "not slow", *near)
        if failed is None:
            where, (failed, seconds) = "next to it, slow", run_tests(tree, "slow", *near)
        if failed is None:  # without the test that each fault fits the code
            found = run_tests(tree, "not slow", "-n", "2", "--ignore=tests/project/test_mutations.py", "tests")
            where, (failed, seconds) = "first tier", found
    finally:
        (tree / fault.file).write_text(whole)
        trees.put(tree)
    return failed is not None, f"| {fault.name} | {where if failed else 'NOT CAUGHT'} | {failed} | {seconds:.0f} s |"


def main() -> int:
    """Try the faults that were asked for, and print the table."""
    words = sys.argv[1:]
    chosen = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    for fault in chosen:  # before anything is run
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / fault.file).parent.mkdir(parents=True)
            shutil.copy(ROOT / fault.file, Path(folder) / fault.file)
            apply(fault, Path(folder))
    print("| fault | caught | by | time |\n|---|---|---|---|")
    trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        for number in range(AT_ONCE):
            copy_tree(Path(folder) / str(number))
            trees.put(Path(folder) / str(number))
        rows = []
        for row in pool.map(try_out, chosen, repeat(trees)):
            rows.append(row)
            print(row[1], flush=True)
    missed = sum(not caught for caught, _ in rows)
    print(f"{len(rows) - missed} of {len(rows)} faults are caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())

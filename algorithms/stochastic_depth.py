"""Stochastic depth: residual blocks are left out at random in training, the later ones more often."""

from __future__ import annotations

import torch
from torch import nn

from runner import Algorithm, Logger, State, Time, stream_seed
from runner.algorithms._stochastic_block import DISTRIBUTIONS, METHODS, StochasticBlock, draw_kept, drop_rates
from runner.algorithms._surgery import LAYER_SURGERY, operate
from runner.model import in_eval_mode


class StochasticDepth(Algorithm):
    """Takes x in place of f(x) at some residual blocks f; evaluation takes the mean of what training takes.

    A block is one whose output has the shape of its input, with its shortcut within itself; others of the class stay
    as they are. What is drawn is a function of (seed, config key, batch) alone, one draw per batch however many
    microbatches. Weights of a block that is left out get gradients of 0, so that decay and momentum go on. To learn
    which blocks change shape, the first microbatch is also evaluated once.

    Args:
        target_block: name of the block's class, such as 'BasicBlock', or with its module, 'runner.models.BasicBlock'
            as it says itself.
        method: 'block': left out for the whole batch, on all ranks alike, which saves its time; 'sample': for each
            sample by itself.
        drop_rate: probability with which the last block is left out, in [0, 1].
        drop_distribution: 'linear': the probability rises evenly from block to block; 'uniform': the same for all.
        drop_warmup: time in which probabilities rise from 0, in any unit.
        allow_no_match: leave a model without such blocks as it is, rather than refuse it.

    Raises:
        ValueError: an argument is out of range; at INIT, the model has no such block.
        TypeError: while training, a block returns no tensor.

    Evidence:
        Strong for deep networks (Huang et al. 2016, "Deep Networks with Stochastic Depth", arXiv:1603.09382) and for
        vision transformers with many epochs; none for a few blocks.
    """

    runs_after = LAYER_SURGERY

    def __init__(
        self,
        target_block: str,
        method: str = "block",
        drop_rate: float = 0.2,
        drop_distribution: str = "linear",
        drop_warmup: str | Time = "0dur",
        allow_no_match: bool = False,
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"method={method!r}: must be one of {', '.join(map(repr, METHODS))}")
        if not 0 <= drop_rate <= 1:
            raise ValueError(f"drop_rate={drop_rate!r}: must be a probability from 0 to 1")
        if drop_distribution not in DISTRIBUTIONS:
            raise ValueError(
                f"drop_distribution={drop_distribution!r}: must be one of {', '.join(map(repr, DISTRIBUTIONS))}"
            )
        self.target_block = target_block
        self.method = method
        self.drop_rate = drop_rate
        self.drop_distribution = drop_distribution
        self.drop_warmup = Time.parse(drop_warmup, "drop_warmup")
        self.allow_no_match = allow_no_match
        self._blocks: list[StochasticBlock] = []
        self._rates: list[float] = []
        self._kept = torch.empty(0, 0, dtype=torch.bool)
        self._probed = False

    def init(self, state: State, logger: Logger) -> None:
        def is_target(module: nn.Module) -> bool:
            kind = type(module)
            return self.target_block in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")

        wanted = f"block of class {self.target_block!r}"
        made = operate(
            self, state, {is_target: lambda block, index: StochasticBlock(block)}, wanted, self.allow_no_match
        )
        self._probed = False
        self._blocks = [block for block in made.values() if isinstance(block, StochasticBlock)]
        self._rates = drop_rates(len(self._blocks), self.drop_rate, self.drop_distribution)

    def after_load(self, state: State, logger: Logger) -> None:
        # With each step of time, not at BATCH_START: evaluations and averages of weights run the model in between.
        warmup, risen = self.drop_warmup, 1.0
        if warmup.value:
            risen = min(1.0, state.progress.elapsed_in(warmup.unit) / warmup.value)
        for block, rate in zip(self._blocks, self._rates, strict=True):
            block.rate = rate * risen

    fit_start = batch_end = epoch_end = iteration_end = after_load

    def batch_start(self, state: State, logger: Logger) -> None:
        rates = [block.rate for block in self._blocks]
        if self.method == "block":
            seed = stream_seed(state.rank_zero_seed, self.config_key, state.timestamp.batch)
            for block, kept in zip(self._blocks, draw_kept(rates, 1, seed)[:, 0].tolist(), strict=True):
                block.kept = kept
        else:
            seed = stream_seed(state.seed, self.config_key, state.timestamp.batch)
            self._kept = draw_kept(rates, state.unwrapped_model.num_samples(state.batch), seed).to(
                state.device, non_blocking=True
            )

    def before_forward(self, state: State, logger: Logger) -> None:
        if not self._probed:
            self._probe(state)
        if self.method == "sample":
            start = state.microbatch_start
            stop = start + state.unwrapped_model.num_samples(state.microbatch)
            for block, kept in zip(self._blocks, self._kept, strict=True):
                block.kept = kept[start:stop]

    @torch.no_grad()
    def _probe(self, state: State) -> None:
        """Let each block find out whether it keeps the shape of its input, and change nothing else."""
        with in_eval_mode(state.unwrapped_model):
            state.precision.autocast(state.device)(state.unwrapped_model)(state.microbatch)
        self._probed = True

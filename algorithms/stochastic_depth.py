"""Stochastic depth: training skips residual blocks at random, later ones more often."""

from __future__ import annotations

import torch
from torch import nn

from runner import Algorithm, Logger, State, Time, stream_seed
from runner.algorithms._stochastic_block import DISTRIBUTIONS, METHODS, StochasticBlock, draw_kept, drop_rates
from runner.algorithms._surgery import LAYER_SURGERY, operate
from runner.failures.checks import check_number, check_one_of
from runner.models.model import in_eval_mode
from runner.models.surgery import Policy, Selector


class StochasticDepth(Algorithm):
    """Skips residual blocks at random in training: x replaces f(x). Evaluation returns their expected outputs.

    With the linear distribution, block l of L is skipped with the probability p l / L, because the first blocks extract
    features that all later ones need (Huang et al. 2016); training then runs L - p (L + 1) / 2 blocks on average. A
    block must contain its own shortcut and return the shape of its input; other blocks of the class stay unchanged. The
    draws depend only on (seed, config key, batch), with one draw per batch for any number of microbatches. The weights
    of a skipped block get gradients of 0, so that weight decay and momentum continue. To find the blocks that change
    the shape, the first microbatch is also evaluated once.

    Args:
        target_block: name of the blocks' class, such as 'BasicBlock', or its full name, such as
            'runner.models.BasicBlock', as the class itself reports it.
        method: the unit for which a block is skipped: 'block' for the whole batch, on all ranks alike, which saves its
            time; 'sample' for each sample separately.
        drop_rate: probability of skipping the last block, in [0, 1].
        drop_distribution: distribution of the probability over blocks: 'linear' rises from block to block, 'uniform' is
            the same for all.
        drop_warmup: time over which probabilities rise from 0, a time string in any unit such as '0.1dur'.
        allow_no_match: whether to leave a model without such blocks unchanged instead of raising an error.

    Raises:
        ValueError: an argument is out of range; or, at INIT, the model has no such block.
        TypeError: during training, a block does not return a tensor.

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
        check_one_of("method", method, METHODS)
        check_number("drop_rate", drop_rate, "[0, 1]", "a probability")
        check_one_of("drop_distribution", drop_distribution, DISTRIBUTIONS)
        self.target_block = target_block
        self.method = method
        self.drop_rate = drop_rate
        self.drop_distribution = drop_distribution
        self.drop_warmup = Time.parse(drop_warmup, "drop_warmup")
        self.allow_no_match = allow_no_match
        self._blocks: list[StochasticBlock] = []
        self._rates: list[float] = []
        self._kept = torch.empty(0, 0, dtype=torch.bool)
        self._is_probed = False

    def init(self, state: State, logger: Logger) -> None:
        def is_target(module: nn.Module) -> bool:
            kind = type(module)
            return self.target_block in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")

        target = f"block of class {self.target_block!r}"
        policies: dict[Selector, Policy] = {is_target: lambda block, index: StochasticBlock(block)}
        replaced = operate(self, state, policies, target, self.allow_no_match)
        self._is_probed = False
        self._blocks = [block for block in replaced.values() if isinstance(block, StochasticBlock)]
        self._rates = drop_rates(len(self._blocks), self.drop_rate, self.drop_distribution)

    def after_load(self, state: State, logger: Logger) -> None:
        # Called whenever time advances, not at BATCH_START: evaluations and weight averages run the model in between.
        warmup = self.drop_warmup
        fraction = 1.0
        if warmup.value:
            fraction = min(1.0, state.progress.elapsed_in(warmup.unit) / warmup.value)
        for block, rate in zip(self._blocks, self._rates, strict=True):
            block.rate = rate * fraction

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
        if not self._is_probed:
            self._probe(state)
        if self.method == "sample":
            start = state.microbatch_start
            stop = start + state.unwrapped_model.num_samples(state.microbatch)
            for block, kept in zip(self._blocks, self._kept, strict=True):
                block.kept = kept[start:stop]

    @torch.no_grad()
    def _probe(self, state: State) -> None:
        """Run the model once, so that each block learns whether it keeps the shape of its input."""
        with in_eval_mode(state.unwrapped_model):
            state.precision.autocast(state.device)(state.unwrapped_model)(state.microbatch)
        self._is_probed = True

from runner.algorithms.activation_checkpointing import ActivationCheckpointing
from runner.algorithms.alibi import ALiBi
from runner.algorithms.augmix import AugMix
from runner.algorithms.batch_augment import BatchAugment
from runner.algorithms.batch_size_warmup import BatchSizeWarmup
from runner.algorithms.blurpool import BlurPool
from runner.algorithms.channels_last import ChannelsLast
from runner.algorithms.colout import ColOut
from runner.algorithms.compile import Compile
from runner.algorithms.cuda_graph import CUDAGraph
from runner.algorithms.cudnn_benchmark import CudnnBenchmark
from runner.algorithms.cutmix import CutMix
from runner.algorithms.cutout import CutOut
from runner.algorithms.ddp import DDP
from runner.algorithms.ema import EMA
from runner.algorithms.factorize import Factorize
from runner.algorithms.float8 import Float8
from runner.algorithms.gated_linear_units import GatedLinearUnits
from runner.algorithms.ghost_batch_norm import GhostBatchNorm
from runner.algorithms.gradient_clipping import GradientClipping
from runner.algorithms.gyro_dropout import GyroDropout
from runner.algorithms.info_batch import InfoBatch
from runner.algorithms.label_smoothing import LabelSmoothing
from runner.algorithms.lawa import LAWA
from runner.algorithms.layer_freezing import LayerFreezing
from runner.algorithms.logit_softcap import LogitSoftcap
from runner.algorithms.low_precision_group_norm import LowPrecisionGroupNorm
from runner.algorithms.low_precision_layer_norm import LowPrecisionLayerNorm
from runner.algorithms.mixup import MixUp
from runner.algorithms.nan_guard import NaNGuard
from runner.algorithms.ngram_embedding import NGramEmbedding
from runner.algorithms.no_op_model import NoOpModel
from runner.algorithms.progressive_resizing import ProgressiveResizing
from runner.algorithms.qk_norm import QKNorm
from runner.algorithms.rand_augment import RandAugment
from runner.algorithms.reduce_on_plateau import ReduceOnPlateau
from runner.algorithms.rotary_embedding import RotaryEmbedding
from runner.algorithms.sam import SAM
from runner.algorithms.schedule_free import ScheduleFree
from runner.algorithms.selective_backprop import SelectiveBackprop
from runner.algorithms.seq_length_warmup import SeqLengthWarmup
from runner.algorithms.spike_guard import SpikeGuard
from runner.algorithms.squeeze_excite import SqueezeExcite
from runner.algorithms.stochastic_depth import StochasticDepth
from runner.algorithms.swa import SWA
from runner.algorithms.trivial_augment import TrivialAugment
from runner.algorithms.value_embedding import ValueEmbedding
from runner.algorithms.weight_standardization import WeightStandardization

__all__ = [
    "DDP",
    "EMA",
    "LAWA",
    "SAM",
    "SWA",
    "ALiBi",
    "ActivationCheckpointing",
    "AugMix",
    "BatchAugment",
    "BatchSizeWarmup",
    "BlurPool",
    "CUDAGraph",
    "ChannelsLast",
    "ColOut",
    "Compile",
    "CudnnBenchmark",
    "CutMix",
    "CutOut",
    "Factorize",
    "Float8",
    "GatedLinearUnits",
    "GhostBatchNorm",
    "GradientClipping",
    "GyroDropout",
    "InfoBatch",
    "LabelSmoothing",
    "LayerFreezing",
    "LogitSoftcap",
    "LowPrecisionGroupNorm",
    "LowPrecisionLayerNorm",
    "MixUp",
    "NGramEmbedding",
    "NaNGuard",
    "NoOpModel",
    "ProgressiveResizing",
    "QKNorm",
    "RandAugment",
    "ReduceOnPlateau",
    "RotaryEmbedding",
    "ScheduleFree",
    "SelectiveBackprop",
    "SeqLengthWarmup",
    "SpikeGuard",
    "SqueezeExcite",
    "StochasticDepth",
    "TrivialAugment",
    "ValueEmbedding",
    "WeightStandardization",
]

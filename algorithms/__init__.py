"""Changes of training, one class a file; loaded on first use, so that importing one imports no other."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from algorithms.activation_checkpointing import ActivationCheckpointing
    from algorithms.alibi import ALiBi
    from algorithms.augmix import AugMix
    from algorithms.batch_augment import BatchAugment
    from algorithms.batch_size_warmup import BatchSizeWarmup
    from algorithms.blurpool import BlurPool
    from algorithms.channels_last import ChannelsLast
    from algorithms.colout import ColOut
    from algorithms.compile import Compile
    from algorithms.cutmix import CutMix
    from algorithms.cutout import CutOut
    from algorithms.ema import EMA
    from algorithms.factorize import Factorize
    from algorithms.gated_linear_units import GatedLinearUnits
    from algorithms.ghost_batch_norm import GhostBatchNorm
    from algorithms.gradient_clipping import GradientClipping
    from algorithms.gyro_dropout import GyroDropout
    from algorithms.info_batch import InfoBatch
    from algorithms.label_smoothing import LabelSmoothing
    from algorithms.lawa import LAWA
    from algorithms.layer_freezing import LayerFreezing
    from algorithms.logit_softcap import LogitSoftcap
    from algorithms.low_precision_group_norm import LowPrecisionGroupNorm
    from algorithms.low_precision_layer_norm import LowPrecisionLayerNorm
    from algorithms.mixup import MixUp
    from algorithms.nan_guard import NaNGuard
    from algorithms.ngram_embedding import NGramEmbedding
    from algorithms.no_op_model import NoOpModel
    from algorithms.progressive_resizing import ProgressiveResizing
    from algorithms.qk_norm import QKNorm
    from algorithms.rand_augment import RandAugment
    from algorithms.rotary_embedding import RotaryEmbedding
    from algorithms.sam import SAM
    from algorithms.schedule_free import ScheduleFree
    from algorithms.selective_backprop import SelectiveBackprop
    from algorithms.seq_length_warmup import SeqLengthWarmup
    from algorithms.squeeze_excite import SqueezeExcite
    from algorithms.stochastic_depth import StochasticDepth
    from algorithms.swa import SWA
    from algorithms.trivial_augment import TrivialAugment
    from algorithms.value_embedding import ValueEmbedding
    from algorithms.weight_standardization import WeightStandardization

__all__ = [
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
    "ChannelsLast",
    "ColOut",
    "Compile",
    "CutMix",
    "CutOut",
    "Factorize",
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
    "RotaryEmbedding",
    "ScheduleFree",
    "SelectiveBackprop",
    "SeqLengthWarmup",
    "SqueezeExcite",
    "StochasticDepth",
    "TrivialAugment",
    "ValueEmbedding",
    "WeightStandardization",
]

_MODULES = {
    "ALiBi": "alibi",
    "ActivationCheckpointing": "activation_checkpointing",
    "AugMix": "augmix",
    "BatchAugment": "batch_augment",
    "BatchSizeWarmup": "batch_size_warmup",
    "BlurPool": "blurpool",
    "ChannelsLast": "channels_last",
    "ColOut": "colout",
    "Compile": "compile",
    "CutMix": "cutmix",
    "CutOut": "cutout",
    "EMA": "ema",
    "Factorize": "factorize",
    "GatedLinearUnits": "gated_linear_units",
    "GhostBatchNorm": "ghost_batch_norm",
    "GradientClipping": "gradient_clipping",
    "GyroDropout": "gyro_dropout",
    "InfoBatch": "info_batch",
    "LAWA": "lawa",
    "LabelSmoothing": "label_smoothing",
    "LayerFreezing": "layer_freezing",
    "LogitSoftcap": "logit_softcap",
    "LowPrecisionGroupNorm": "low_precision_group_norm",
    "LowPrecisionLayerNorm": "low_precision_layer_norm",
    "MixUp": "mixup",
    "NGramEmbedding": "ngram_embedding",
    "NaNGuard": "nan_guard",
    "NoOpModel": "no_op_model",
    "ProgressiveResizing": "progressive_resizing",
    "QKNorm": "qk_norm",
    "RandAugment": "rand_augment",
    "RotaryEmbedding": "rotary_embedding",
    "SAM": "sam",
    "SWA": "swa",
    "ScheduleFree": "schedule_free",
    "SelectiveBackprop": "selective_backprop",
    "SeqLengthWarmup": "seq_length_warmup",
    "SqueezeExcite": "squeeze_excite",
    "StochasticDepth": "stochastic_depth",
    "TrivialAugment": "trivial_augment",
    "ValueEmbedding": "value_embedding",
    "WeightStandardization": "weight_standardization",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'algorithms' has no attribute {name!r}; it has {', '.join(_MODULES)}")
    value = getattr(importlib.import_module(f"algorithms.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})

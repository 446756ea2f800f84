"""Data loaders, and the data sets that come with the runner: functions that return training and evaluation loaders."""

from runner.data.fake import FakeLoader, faked_by
from runner.data.images.digits import load_digits
from runner.data.images.normalization import Normalization
from runner.data.images.synthetic_images import load_synthetic_images
from runner.data.loaders import DatasetLoader, OrderedLoader, TensorLoader
from runner.data.order import SampleOrder
from runner.data.rank_wrappers import Replicated, Sharded
from runner.data.text.stdlib_text import load_stdlib_text
from runner.data.text.synthetic_tokens import load_synthetic_tokens

__all__ = [
    "DatasetLoader",
    "FakeLoader",
    "Normalization",
    "OrderedLoader",
    "Replicated",
    "SampleOrder",
    "Sharded",
    "TensorLoader",
    "faked_by",
    "load_digits",
    "load_stdlib_text",
    "load_synthetic_images",
    "load_synthetic_tokens",
]

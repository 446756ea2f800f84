"""Networks as plain modules, models that add a loss and metrics to them, and surgery that replaces their layers."""

from runner.models.gpt import GPT
from runner.models.mlp import MLP
from runner.models.resnet8 import BasicBlock, ResNet8
from runner.models.resnet18 import ResNet18
from runner.models.timm_model import timm_model
from runner.models.torchvision_model import torchvision_model, torchvision_segmentation

__all__ = [
    "GPT",
    "MLP",
    "BasicBlock",
    "ResNet8",
    "ResNet18",
    "timm_model",
    "torchvision_model",
    "torchvision_segmentation",
]

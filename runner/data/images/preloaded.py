"""Imports torchvision for all workers, which takes seconds, in the process that they are forked from."""

from runner.libraries.torchvision import import_torchvision

import_torchvision("torchvision.transforms.v2")

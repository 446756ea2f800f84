"""Imports torchvision, which takes seconds, once for all workers, in the process from which they are forked."""

from runner.libraries.torchvision import import_torchvision

import_torchvision("torchvision.transforms.v2")

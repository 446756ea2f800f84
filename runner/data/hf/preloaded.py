"""Imports datasets for all workers, which takes seconds, in the process that they are forked from."""

from runner.libraries.hugging_face import import_hf

import_hf("datasets")

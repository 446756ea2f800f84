"""Imports `datasets`, which takes seconds, once for all workers, in the process from which they are forked."""

from runner.libraries.hugging_face import import_hf

import_hf("datasets")

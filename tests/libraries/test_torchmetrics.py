"""Importing torchmetrics does not import the slow packages that it needs only for some metrics."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import make_tokenizer


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_our_metric_imports_only_the_base_class_and_the_rest_on_demand():
    out = run_python(
        "import sys, torch\n"
        "from runner.models.top1_accuracy import Top1Accuracy\n"
        "metric = Top1Accuracy()\n"
        "metric.update(torch.eye(3), torch.tensor([0, 1, 1]))\n"
        "rest = ('matplotlib', 'scipy', 'torchvision', 'torchmetrics.functional', 'torchmetrics.utilities.plot')\n"
        "print(round(metric.compute().item(), 3), [name for name in rest if name in sys.modules])\n"
        "import torchmetrics.aggregation\n"  # imports the whole package, as usual
        "print('torchmetrics.classification' in sys.modules, type(torchmetrics) is type(sys))\n"
        "print(torchmetrics.Metric in Top1Accuracy.__mro__, torchmetrics.metric.Metric is torchmetrics.Metric)\n"
        "print(torchmetrics.utilities.plot.__name__, torchmetrics.__version__ > '1')\n"
        "print(sorted(torchmetrics.MetricCollection({'a': Top1Accuracy()}).keys()))\n"
        "print(*(type(part).__name__ for part in metric._plot(torch.tensor(0.5))))\n"
    )
    expected = ["0.667 []", "True True", "True True", "torchmetrics.utilities.plot True", "['a']", "Figure Axes"]
    assert out.splitlines() == expected


@pytest.mark.slow
def test_torchmetrics_imports_no_scipy_signal_and_it_can_be_imported_later():
    out = run_python(
        "import sys\n"
        "from runner.libraries.torchmetrics import import_torchmetrics\n"
        "torchmetrics = import_torchmetrics()\n"
        "print('scipy.signal' in sys.modules, 'scipy.signal._signaltools' in sys.modules)\n"
        "assert torchmetrics is sys.modules['torchmetrics']\n"
        "assert torchmetrics.MeanMetric()(2.0) == 2.0\n"
        "import scipy, scipy.signal\n"
        "print(scipy.signal.convolve([1, 2], [1, 1]).tolist(), scipy.signal is sys.modules['scipy.signal'])\n"
    )
    assert out.splitlines() == ["False False", "[1, 3, 2] True"]


@pytest.mark.slow
def test_transformers_is_imported_only_if_a_metric_needs_it(tmp_path: Path):
    transformers: Any = pytest.importorskip("transformers")
    make_tokenizer(tmp_path)
    config = transformers.BertConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    out = run_python(
        "import sys\n"
        "from runner.libraries.torchmetrics import import_torchmetrics\n"
        "torchmetrics = import_torchmetrics()\n"
        "print([name for name in ('transformers', 'torchvision', 'scipy.signal') if name in sys.modules])\n"
        "import warnings; warnings.simplefilter('ignore')\n"
        "from torchmetrics.functional.text.bert import AutoModel\n"
        f"network = AutoModel.from_pretrained({str(tmp_path)!r})\n"
        "import transformers\n"
        "print(type(network) is transformers.BertModel, transformers.AutoModel.__module__)\n"
    )
    assert out.splitlines() == ["[]", "True transformers.models.auto.modeling_auto"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "use",
    [
        "from torchmetrics.functional.image.dists import vgg16; assert vgg16() == []",
        "prepare_import('torchmetrics.detection.IntersectionOverUnion')",
    ],
    ids=["a function that torchmetrics imports", "a metric that imports it in its methods"],
)
def test_torchvision_without_operators_is_imported_when_a_metric_needs_it(tmp_path: Path, use: str):
    """The usual wheel, beside a CPU build of torch, registers functions for operators that do not exist."""
    for name, content in {
        "": "import torch\n@torch.library.register_fake('torchvision::nms')\ndef fake(dets, scores, threshold): ...\n",
        "models": "VGG16_Weights, resnet50, vgg16 = None, None, list\n",
        "transforms": "",
    }.items():
        (tmp_path / "torchvision" / name).mkdir()
        (tmp_path / "torchvision" / name / "__init__.py").write_text(content)
    out = run_python(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from runner.libraries.targets import prepare_import\n"
        "prepare_import('torchmetrics.MeanMetric')\n"
        "from torchmetrics import MeanMetric\n"
        "print(MeanMetric()(2.0).item(), 'torchvision' in sys.modules)\n"
        f"{use}\n"
        "print(sys.modules['torchvision'].fake.__name__)\n"
    )
    assert out.splitlines() == ["2.0 False", "fake"]


@pytest.mark.slow
def test_a_scipy_signal_imported_before_is_kept():
    out = run_python(
        "import sys, scipy.signal\n"
        "before = sys.modules['scipy.signal']\n"
        "from runner.libraries.torchmetrics import import_torchmetrics\n"
        "import_torchmetrics()\n"
        "print(sys.modules['scipy.signal'] is before)\n"
    )
    assert out == "True"


@pytest.mark.slow
def test_models_and_data_import_no_slow_packages():
    out = run_python(
        "import sys, runner.models.model, runner.data, runner.models\n"
        "runner.data.load_digits()\n"
        "print([name for name in ('torchmetrics', 'sklearn', 'scipy', 'mlflow') if name in sys.modules])\n"
    )
    assert out == "[]"


@pytest.mark.slow
def test_two_ranks_import_a_metric_of_the_config(run_here: Any):
    """Only rank 0 checks the config, which prepares imports; this matters if torchvision does not load."""
    short = ("data.batch_size=400", "data.eval_batch_size=300", "trainer.max_duration=1ba", "callbacks=none")
    run_here(*short, "model=supervised", "algorithms=none", "launch.nproc_per_node=2", code=0)

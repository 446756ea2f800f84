"""Sections of a config are checked against the signatures of their targets before anything is built."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from runner.config.signatures import check_signature, locate

HERE = "signature_targets"
SOURCE = """
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor


class Plain:
    def __init__(self, needed: int, rate: float = 0.1, *, name: str | None = None, flag: bool = False) -> None: ...


def typed(
    rate: float | Tensor = 0.1,
    mode: Literal["min", "max"] = "min",
    sizes: Sequence[int] = (),
    pair: tuple[float, float] = (0.0, 0.0),
    table: Mapping[str, int] | None = None,
    path: str | Path | None = None,
    implicit: int = None,
    anything: Any = None,
    bare=None,
    thing: Plain | None = None,
): ...


def open_ended(first: int, **others: int): ...


def unresolved(first: NotThere = None): ...


VALUE = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{HERE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)


def section(target: str, /, **keys: Any) -> dict[str, Any]:
    return {"_target_": f"{HERE}.{target}", **keys}


@pytest.mark.parametrize(
    "fitting",
    [
        section("Plain", needed=1),
        section("Plain", needed=1, rate=1, name="x", flag=True),
        section("Plain", _partial_=True),
        section("Plain", _partial_=True, _convert_="all", rate=2),
        section("Plain", _args_=[1]),
        section("typed", rate=1, mode="max", sizes=[1, 2], pair=[0.1, 0.2], table={"a": 1}, path="x", bare={"x": 1}),
        section("typed", implicit=None, anything=[{}], thing=section("Plain", needed=1), table=None),
        section("open_ended", first=1, second=2),
        section("unresolved", first="whatever"),
        {"_target_": "builtins.dict", "a": 1},
    ],
    ids=str,
)
def test_a_section_that_fits_its_signature_passes(fitting: Mapping[str, Any]):
    check_signature("group.key", fitting)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (section("Plain"), f"group.key.needed: {HERE}.Plain needs this argument; set it with \\+group.key.needed=..."),
        (section("open_ended"), "group.key.first: .* if it is passed in training, add \\+group.key._partial_=true"),
        (section("Plain", needed=1, rat=2), "group.key.rat: .* has no such argument; did you mean 'rate'\\? Allowed: "),
        (section("Plain", needed=1, self=2), "group.key.self: .* has no such argument"),
        (
            section("Plain", needed="1"),
            f"group.key.needed='1': {HERE}.Plain takes a whole number; an environment variable is text",
        ),
        (section("Plain", needed=1.5), "needed=1.5: .* takes a whole number$"),
        (section("Plain", needed=True), "needed=True: .* takes a whole number$"),
        (section("Plain", needed=None), "needed=None: .* takes a whole number$"),
        (section("Plain", needed=1, rate="fast"), "rate='fast': .* takes a number$"),
        (section("Plain", needed=1, name=3), "name=3: .* takes text or null$"),
        (section("Plain", needed=1, flag="maybe"), "flag='maybe': .* takes true or false$"),
        (section("Plain", _partial_=True, rate="fast"), "rate='fast'"),
        (section("typed", path="None"), "path='None': write null for no value$"),
        (section("typed", rate="fast"), "rate='fast': .* takes a number$"),
        (section("typed", mode="best"), "mode='best': .* takes 'min' or 'max'$"),
        (section("typed", sizes=3), "sizes=3: .* takes a list$"),
        (section("typed", pair=3), "pair=3: "),
        (section("typed", table=[1]), "table=\\[1\\]: "),
        (section("open_ended", first="x"), "first='x': "),
    ],
    ids=str,
)
def test_an_argument_that_does_not_fit_is_named(wrong: Mapping[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        check_signature("group.key", wrong)


def test_arguments_that_code_supplies_are_neither_missing_nor_allowed():
    check_signature("group", section("Plain"), ["needed"])
    with pytest.raises(ValueError, match="group.needed: is built from the other groups"):
        check_signature("group", section("Plain", needed=1), ["needed"])
    with pytest.raises(ValueError, match="Allowed: flag, name, rate$"):
        check_signature("group", section("Plain", nam=1), ["needed"])


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere.Mine", "x._target_='nowhere.Mine': there is no module 'nowhere'"),
        ("Mine", "needs its module too"),
        (f"{HERE}.Plian", f"{HERE} has no 'Plian'; did you mean 'Plain'\\?"),
        ("torch.optim.SDG", "torch.optim has no 'SDG'; did you mean 'SGD'\\?"),
        ("torch.otpim.SGD", "torch has no 'otpim'"),
        (f"{HERE}.Plain.nothing", f"{HERE}.Plain has no 'nothing'"),
        (f"{HERE}.VALUE", "is a int, not a class or function"),
        ("needy.Mine", "importing it needs the package 'not_there_at_all', which is not installed"),
        ("needy_package.inner.Mine", "importing it needs the package 'not_there_at_all'"),
        ("torn.Mine", "importing it failed with SyntaxError"),
        ("", "must name a class or function"),
        ("...", "must name a class or function"),
        (3, "_target_=3: must name a class or function"),
    ],
)
def test_a_target_that_cannot_be_imported_says_why(target: Any, message: str, tmp_path: Path):
    (tmp_path / "needy.py").write_text("import not_there_at_all\n")
    (tmp_path / "torn.py").write_text("class Mine(:\n")
    (tmp_path / "needy_package").mkdir()
    (tmp_path / "needy_package" / "__init__.py").touch()
    (tmp_path / "needy_package" / "inner.py").write_text("import not_there_at_all\n")
    with pytest.raises(ValueError, match=message):
        locate("x", target)


def test_locate_returns_the_imported_object():
    assert locate("x", "pathlib.Path") is Path
    assert locate("x", "collections.abc.Mapping") is Mapping
    assert locate("x", "pathlib.Path.cwd")() == Path.cwd()


def test_annotations_that_are_not_strings_are_checked():
    sgd = {"_target_": "torch.optim.SGD", "_partial_": True}
    check_signature("optimizer", {**sgd, "lr": 1, "nesterov": True})
    with pytest.raises(ValueError, match=r"optimizer.lr='fast': torch.optim.SGD takes a number$"):
        check_signature("optimizer", {**sgd, "lr": "fast"})


def test_a_target_called_in_training_must_be_partial():
    with pytest.raises(
        ValueError, match="optimizer: torch.optim.SGD gets params only during training.*'_partial_: true'"
    ):
        check_signature("optimizer", {"_target_": "torch.optim.SGD", "lr": 1})


@pytest.mark.parametrize("module", ["my_models.Net", {"width": 3}])
def test_a_module_without_a_target_is_refused(module: Any):
    wrong = {"_target_": "runner.ClassificationModel", "num_classes": 2, "module": module}
    with pytest.raises(ValueError, match="model.module=.* takes nn.Module$"):
        check_signature("model", wrong)

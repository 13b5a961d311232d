"""`ringdance recipes`, and the presets that come with a recipe."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from ringdance.errors import ArgumentError
from ringdance.recipes.deepfm import rates
from ringdance.recipes.models import about_model
from ringdance.recipes.resnet50 import presets
from ringdance.tools.cli import main


def test_a_copy_is_complete_and_overwrites_only_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target = tmp_path / "job"
    assert main(["recipes", "copy", "resnet50", str(target)]) == 0
    names = sorted(path.name for path in target.iterdir())
    package = Path(presets.__file__).parent
    files = {path.name for directory in (package, package.parent) for path in directory.glob("*.py")}
    assert names == sorted(files - {"__init__.py"})
    (target / "presets.py").write_text("# changed by hand\n")
    capsys.readouterr()
    assert main(["recipes", "copy", "resnet50", str(target)]) == 2
    stderr = capsys.readouterr().err
    assert "presets.py" in stderr
    assert "--force" in stderr
    assert (target / "presets.py").read_text() == "# changed by hand\n"
    assert main(["recipes", "copy", "resnet50", str(target), "--force"]) == 0
    assert (target / "presets.py").read_bytes() == (package / "presets.py").read_bytes()


# Public modules, and the names that copies still import from inside Ringdance.
PUBLIC = {"ringdance.data", "ringdance.errors", "ringdance.keras", "ringdance.numpy", "ringdance.torch"}
INTERNAL = {
    "options.py": {"ringdance.launch.parser"}, "models.py": {"ringdance.data.files", "ringdance.host.files"},
    "score.py": {"ringdance.data.prepare.clean"}, "coco.py": {"ringdance.data.images"},
    "train.py": {"ringdance.training.gradients.cores"},
}  # fmt: skip


@pytest.mark.parametrize("recipe", ["resnet50", "detection", "deepfm"])
def test_a_copy_imports_public_modules_and_its_own_files(recipe: str, tmp_path: Path) -> None:
    assert main(["recipes", "copy", recipe, str(tmp_path)]) == 0
    own = {path.stem for path in tmp_path.iterdir()}
    for path in tmp_path.iterdir():
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        modules = {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
        modules |= {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
        inside = {name for name in modules if name.startswith("ringdance")} - PUBLIC
        assert inside == INTERNAL.get(path.name, set()), path.name
        package = Path(presets.__file__).parent.with_name(recipe)
        local = {file.stem for directory in (package, package.parent) for file in directory.glob("*.py")}
        assert modules & local <= own, path.name


def test_a_file_where_the_directory_should_be_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("")
    assert main(["recipes", "copy", "resnet50", str(tmp_path / "file")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_list_names_each_file_and_loads_no_framework():
    code = "import sys; from ringdance.tools.cli import main; main(['recipes', 'list']); " \
           "assert not {'torch', 'tensorflow', 'keras'} & set(sys.modules)"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for name in ("train_torch.py", "train_keras.py", "presets.py"):
        assert name in done.stdout


def test_presets_say_where_they_are_from_and_are_complete():
    for name, preset in presets.PRESETS.items():
        assert preset.source, name
        assert preset.expected, name
        assert 0 <= preset.warmup_epochs < preset.epochs, name
        assert preset.optimizer in ("sgd", "lars"), name
        assert (preset.schedule == "step") == bool(preset.milestones), name
        if name.startswith("mlperf-"):
            assert preset.batch_size * preset.devices == int(name.removeprefix("mlperf-")), name


def test_the_rate_scales_with_the_batch():
    assert presets.PRESETS["256"].rate == pytest.approx(3.2)
    assert presets.PRESETS["256"].rate_for(256) == pytest.approx(0.1)
    assert presets.PRESETS["8xV100"].rate_for(256) == pytest.approx(0.256)


def test_the_rate_goes_with_another_batch_size():
    given = Namespace(epochs=3, batch_size=32, optimizer=None, precision=None, image_size=None, accumulate=1)
    # 256 images per device; a rate of 2.048 for a batch of 2,048
    preset = presets.PRESETS["8xV100"].overridden(given)
    assert (preset.epochs, preset.batch_size, preset.optimizer) == (3, 32, "sgd")
    assert preset.rate_for(8 * 32) == pytest.approx(0.256)


def test_milestones_go_with_the_length_of_a_training():
    options = Namespace(epochs=30, batch_size=None, accumulate=1)
    preset = presets.PRESETS["256"].overridden(options)
    assert preset.milestones == pytest.approx((10, 20, 80 / 3))


def test_deepfm_has_one_set_of_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change in rates.py changes the recipes and every strategy of the comparison."""
    for path in (Path(rates.__file__).parent, Path(__file__).parents[2] / "benchmarks" / "strategies"):
        monkeypatch.syspath_prepend(str(path))
    monkeypatch.setattr(sys, "argv", ["train_torch.py", "DATA"])
    monkeypatch.setitem(sys.modules, "rates", rates)
    for name in ("loop", "strategies"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    names = [name for name in vars(rates) if name.isupper()]
    for number, name in enumerate(names):
        monkeypatch.setattr(rates, name, number + 7)
    defaults = vars(importlib.import_module("loop").options("")).items()
    names.remove("BATCH")  # BATCH is not an option, because rates are relative to it
    assert {name.upper(): value for name, value in defaults if name.upper() in names} == {
        name: getattr(rates, name) for name in names
    }
    sizes = importlib.import_module("strategies").Sizes(50, 3, batch_size=10)
    assert sizes.first_sum == rates.FIRST_SUM
    assert sizes.rate == pytest.approx(rates.RATE * (10 / rates.BATCH) ** rates.SCALE_RATE)
    assert sizes.table_rate == pytest.approx(rates.TABLE_RATE * (10 / rates.BATCH) ** (-rates.SCALE_RATE / 2))
    assert sizes.accumulator == pytest.approx(rates.FIRST_SUM / 100)
    for name in ("loop", "strategies"):  # so that other tests import their own modules
        del sys.modules[name]


@pytest.mark.parametrize(("name", "batch", "first"), [
    ("256", 8192, 0.1), ("256", 64, 0.025),  # Goyal's 0.1, or the peak if it is lower
    ("mlperf-4096", 4096, 10.0 / (5 * 12_000 / 4096)), ("laptop", 16, 0.02 / (2 * 12_000 / 16)),
])
def test_the_warm_up_begins_above_0(
    name: str, batch: int, first: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(presets.__file__).parent))
    shared = importlib.import_module("shared")
    preset = presets.PRESETS[name]
    schedule = shared.schedule_of(preset, Namespace(rate=None), 12_000, batch)
    assert schedule(0) == pytest.approx(first)
    assert schedule(preset.warmup_epochs) == pytest.approx(preset.rate_for(batch))


@pytest.mark.parametrize(("words", "told"), [
    ("--rate nan", "--rate: nan: must be at least 0"),
    ("--epochs 4 --preset 256", "warm-up takes 5 epochs, but training only 4. Change --epochs or"),
    ("--label-smoothing 1", "--label-smoothing: 1: must be at least 0 and less than 1"),
    ("--lr 1", "unrecognized arguments: --lr"),
    ("--width 8 --model resnet18", "Omit it or --model"),
    ("--evaluate", "--evaluate needs either --checkpoints DIR or --weights FILE"),
])
def test_what_cannot_be_done_is_refused(
    words: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(presets.__file__).parent))
    monkeypatch.setattr(sys, "argv", ["train_torch.py", "--synthetic", *words.split()])
    shared = importlib.import_module("shared")
    with pytest.raises(SystemExit):
        shared.read(shared.parser(""))
    assert told in capsys.readouterr().err


def test_the_page_has_the_table_of_the_presets():
    page = (Path(__file__).parents[2] / "docs" / "howto" / "training" / "recipes.md").read_text()
    rows = [
        f"| `{name}` | {preset.batch_size * preset.devices:,} = {preset.devices} × {preset.batch_size} | "
        f"{preset.optimizer}, {preset.rate:g} | {preset.schedule}, {preset.epochs:g} "
        f"({preset.warmup_epochs:g}) | {preset.weight_decay:.3g} | {preset.expected} |\n"
        for name, preset in presets.PRESETS.items()
    ]
    assert "".join(rows) in page


@pytest.mark.parametrize("about", ["", "null", "[]", "{}", "[" * 100_000, None])
def test_a_damaged_model_is_named(about: str | None, tmp_path: Path) -> None:
    if about is not None:
        (tmp_path / "model.json").write_text(about)
    with pytest.raises(ArgumentError) as problem:
        about_model(tmp_path)
    assert str(tmp_path) in str(problem.value)

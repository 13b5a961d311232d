"""The script benchmarks/scaling.py, and the gradients that it knows."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from ringdance.tools.plan.models import models
from ringdance.tools.plan.simulator import Machine, simulate

# Tensors and parameters of torchvision's models and of BertModel, as published. Detectors: trained ones only.
KNOWN = {
    "resnet50": (161, 25_557_032), "resnet101": (314, 44_549_160), "vgg16": (32, 138_357_544),
    "inception_v3": (284, 23_834_568), "bert-base": (199, 109_482_240),
    "faster_rcnn": (72, 41_532_886), "mask_rcnn": (84, 44_178_993),
}  # fmt: skip


@pytest.mark.parametrize("model", KNOWN)
def test_gradients_of_a_model(model):
    gradients = replace(models()[model], forward=1 / 3).gradients(0.3)
    assert (len(gradients), sum(nbytes for nbytes, _ in gradients)) == (KNOWN[model][0], 4 * KNOWN[model][1])
    times = [ready for _, ready in gradients]
    assert times == sorted(times)
    assert 0.0999 < times[0] < times[-1] == pytest.approx(0.3)


@pytest.mark.parametrize(("model", "side", "others"), [("resnet50", 224, 3), ("vgg16", 224, 0)])
def test_the_table_has_what_the_modules_of_bench_train_have(model, side, others):
    """Elements and positions match, except for the stride of the recipe's ResNet blocks."""
    torch = pytest.importorskip("torch")
    from ringdance.tools.plan.torch_models import build

    positions = {}

    def saw(layer, given, result):
        positions[layer.weight] = result.shape[2:].numel() if result.ndim == 4 else 1

    with torch.device("meta"):
        module = build(model, side).eval()
        for layer in module.modules():
            if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
                layer.register_forward_hook(saw)
        module(torch.zeros(1, 3, side, side))
    expected = [(parameter.numel(), positions.get(parameter, 0)) for parameter in module.parameters()]
    listed = models()[model].parameters
    assert [elements for elements, _ in listed] == [elements for elements, _ in expected]
    assert (Counter(expected) - Counter(listed)).total() == others


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3] / "benchmarks"))
    return importlib.import_module("scaling")


SMALL = ("--hosts", "1,2,4", "--ranks-per-host", "2", "--gbits", "10,100")


def test_a_table(script, capsys):
    assert script.main([*SMALL, "--wire", "float32,bfloat16"]) == 0
    out = capsys.readouterr().out
    assert "resnet50, 102 MB in float32" in out
    assert "resnet50, 51 MB in bfloat16" in out
    assert len([line for line in out.splitlines() if line.split()[:1] == ["ring"]]) == 4


def test_json_and_a_plot(script, capsys, tmp_path):
    assert script.main([*SMALL, "--json", "--plot", str(tmp_path / "e.svg"), "--set", "latency=1e-3"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["gbits"], row["ranks"]) for row in rows] == [(g, n) for g in (10, 100) for n in (2, 4, 8)]
    assert all(0 < row["engine"] <= 1 for row in rows)
    assert rows[1]["engine"] < rows[4]["engine"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.svg"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hosts", "2,0"], "'2,0' is not a list of positive integers"),
        (["--hosts", "2,99999999999"], "799,999,999,992 ranks. The maximum is 1,000,000"),
        (["--step", "inf"], "inf: must be a finite number greater than 0"),
        (["--ranks-per-host", "x"], "invalid int value: 'x'"),
        (["--gbits", "inf"], "inf: must be a finite number greater than 0"),
        (["--wire", "int8"], "'int8' is not one of float32, bfloat16, float16"),
        (["--set", "latency"], "'latency': NAME=VALUE is expected"),
        (["--set", "bandwidth=3"], "one of latency, "),
        (["--set", "latency=-1"], "at least 0 otherwise"),
        (["--set", "memory_bandwidth=0"], "above 0 for memory_bandwidth"),
        (["--set", "ranks_per_core=0.5"], "at least 1 for ranks_per_core"),
        (["--model", "resnet51"], "did you mean resnet50?"),
    ],
)
def test_what_is_refused(words, message, script, capsys):
    assert script.main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_settings_count(script, capsys, monkeypatch):
    words = ["--hosts", "2", "--ranks-per-host", "2", "--gbits", "10", "--json"]

    def messages(**environ):
        with monkeypatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            assert script.main(words) == 0
        return json.loads(capsys.readouterr().out)[0]["messages"]

    assert messages(RINGDANCE_CHUNK_BYTES="65536") > 2 * messages() > messages(RINGDANCE_WINDOW="0") > 0
    monkeypatch.setenv("RINGDANCE_CHUNK_BYTES", "x")
    assert script.main(words) == 2
    assert "RINGDANCE_CHUNK_BYTES='x' cannot be used" in capsys.readouterr().err


def test_the_plot_shows_efficiency_in_percent_as_the_table_does(script, tmp_path, monkeypatch, capsys):
    panels = {}
    monkeypatch.setattr(script.svg, "write", lambda file, drawn, *rest, **more: panels.update(drawn))
    assert script.main([*SMALL, "--plot", str(tmp_path / "plot.svg"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert panels["10 Gbit/s, float32"]["ringdance"][0][1] == pytest.approx(100 * rows[0]["engine"])


def test_bounds(script):
    machine = Machine(bandwidth=1e9, latency=1e-3)
    assert script.ring_bound(machine, 4, 1_000_000) == pytest.approx(6 * (250_000 / 1e9 + 1e-3))
    assert script.tree_bound(machine, 4, 1_000_000) == pytest.approx(2 * (1_000_000 / 1e9 + 2e-3))
    assert script.ring_bound(machine, 1, 1000) == script.tree_bound(machine, 1, 1000) == 0.0
    step = simulate(machine, 3, 2, [(32 << 20, 0.0)], 0.01)
    assert step.seconds >= script.ring_bound(replace(machine, latency=0.0), 3, 32 << 20)

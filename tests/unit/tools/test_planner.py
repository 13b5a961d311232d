"""Plans compared with published runs, for machines, deadlines and budgets, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from sampled import sampled

from ringdance.errors import LaunchError
from ringdance.submit.instances import Instance, instance, instances
from ringdance.tools.plan import cli as plan_cli
from ringdance.tools.plan.models import curves, models
from ringdance.tools.plan.planner import (
    HOST_SPREAD,
    RANK_SPREAD,
    PlanOptions,
    Row,
    Workload,
    choose,
    from_bench,
    from_model,
    from_run,
    machine,
    predict,
)
from ringdance.tools.plan.simulator import expected_largest

PAGE = Path(__file__).resolve().parents[3] / "docs" / "explanation" / "plan.md"
IMAGES = 1281167
INSTANCES = {  # as the page describes them
    "p100": "cores = 32\ngbits = 25\ngpus = 4\n",
    "p100-roce": "cores = 32\ngbits = 25\ngpus = 4\nrdma = true\n",
    "edr": "cores = 24\ngbits = 100\ngpus = 8\nnvlink = 150\nrdma = true\n",
}


@dataclass(frozen=True)
class Run:
    """A published run: its name, the command of its plan, and the published result."""

    name: str
    command: str
    published: float
    kind: str = "samples_per_second"

    @property
    def shown(self) -> Callable[[float], str]:
        return {"hours": clock, "efficiency": "{:.0%}".format}.get(self.kind, "{:,.0f}".format)


def clock(hours: float) -> str:
    minutes = round(hours * 60)
    return f"{minutes // 60} h {minutes % 60:02}"


def detection(model: str, name: str, of_8: str, of_24: str) -> Run:
    """Return a run on 24 GPUs, based on the run on 8. Times are hours and minutes, such as "8 26"."""
    first, published = (int(h) + int(m) / 60 for h, m in (of_8.split(), of_24.split()))
    rate = 117266 * 26 / first / 3600
    command = f"--model {model} --images-per-second {rate} --of 8 --instance {name} --np 24 --epochs 26"
    return Run(f"24 V100, {model}, {name}", command, published, "hours")


def pascal(model: str, one: float, tcp: float, rdma: float) -> list[Run]:
    """Return the runs on 16 P100, based on the run on one."""
    command = f"--model {model} --images-per-second {one} --np 16 --synthetic --instance"
    return [
        Run(f"16 P100, {model}, TCP", f"{command} p100", tcp),
        Run(f"16 P100, {model}, RDMA", f"{command} p100-roce", rdma),
    ]


def edr(
    model: str, batch: int, rate: float, of: int, *published: tuple[int, float], more: str = ""
) -> list[Run]:
    """Return runs on several V100, based on a run on fewer."""
    command = f"--model {model} --batch {batch} --images-per-second {rate} --of {of} --instance edr {more}"
    name = f"V100, {model}, EDR, {rate} of {of}"
    return [Run(f"{ranks} {name}", f"{command} --np {ranks}", found) for ranks, found in published]


RESNET = "--model resnet50 --instance p3.16xlarge --wire float16"
P100 = "--instance p100-roce --synthetic --np 512"
ROCE = f"{P100} --model resnet101 --images-per-second 1656.82 --of 16"
FITTED = [
    Run("8 V100, resnet50", f"{RESNET} --synthetic --images-per-second 3012 --of 4 --np 8", 5874),
    Run("64 V100, resnet50", f"{RESNET} --images-per-second 5874 --of 8 --np 64", 38400),
    Run("256 V100, resnet50", f"{RESNET} --images-per-second 5874 --of 8 --np 256", 155500),
    detection("faster_rcnn", "p3.16xlarge", "8 26", "4 58"),
    detection("faster_rcnn", "p3dn.24xlarge", "7 27", "3 37"),
    detection("mask_rcnn", "p3.16xlarge", "10 28", "5 34"),
    detection("mask_rcnn", "p3dn.24xlarge", "8 41", "4 02"),
    *pascal("inception_v3", 134.4, 1990.7, 2022.6),
    *pascal("resnet101", 119.4, 1685.1, 1746.2),
    *pascal("vgg16", 130.9, 1308.7, 1787.4),
    Run("512 P100, resnet101", ROCE, 0.9, "efficiency"),
    Run("512 P100, vgg16", f"{P100} --model vgg16 --images-per-second 154", 0.68, "efficiency"),
    *edr("resnet50", 128, 362.44, 1, (8, 2721.98)),
    *edr("resnet50", 128, 2721.98, 8, (16, 5099.42), (32, 9514.64)),
    *edr("bert-base", 32, 112.76, 1, (8, 855.45)),
    *edr("bert-base", 32, 855.45, 8, (16, 1576.88), (32, 2727.9)),
]
UNSEEN = [
    *edr("bert-base", 64, 1452.59, 8, (16, 2653.74), (32, 5189.07), more="--wire float16"),
    *edr("bert-base", 64, 3112.73, 8, (16, 5050.86), (32, 9409.2), more="--wire float16"),
    Run("16 V100, resnet50, cloud", f"{RESNET} --images-per-second 5100 --of 8 --np 16", 9860),
    Run("64 V100, resnet50, cloud", f"{RESNET} --images-per-second 5100 --of 8 --np 64", 37000),
    *edr("resnet50", 224, 6826.68, 8, (16, 11045.94), more="--wire float16"),
]
MET = [(run, most) for runs, most in ((FITTED, 0.12), (UNSEEN, 0.2)) for run in runs]


@pytest.mark.limit(250)
@pytest.mark.parametrize("case", sampled("published runs", MET, 1), ids=lambda case: case[0].name)
def test_a_published_run_is_met(
    case: tuple[Run, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page's command, with one set of constants, predicts a published run. Its row is in the page."""
    run, most = case
    words = run.command.split()
    place = words.index("--instance") + 1
    if words[place] in INSTANCES:
        (tmp_path / f"{words[place]}.toml").write_text(INSTANCES[words[place]])
        words[place] = str(tmp_path / f"{words[place]}.toml")
    assert plan_cli.main([*words, "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)["rows"][0][run.kind]
    row = f"| {run.shown(run.published)} | {run.shown(predicted)} | {predicted / run.published - 1:+.1%} |"
    print(run.name, row)
    assert abs(predicted / run.published - 1) < most
    assert row in PAGE.read_text()


MEASURED: dict[str, Any] = {
    "model": "small", "framework": "torch", "gradient_dtype": "float32", "batch": 32,
    "sizes": [{
        "ranks": ranks, "hosts": 1, "cores": 4, "threads": 4, "ranks_per_host": ranks, "gpus": 0,
        "images_per_second": 320,
        "step_seconds": {"ringdance": 0.11, "alone": 0.1 * ranks}, "exposed_share": 0.1, "efficiency": 0.9,
        "single_steps": [0.1, 0.1055, 0.0945] * 4, "bound": 0.95,
        "gradients": [{"name": "b", "bytes": 4_000_000, "seconds": 0.05},
                      {"name": "a", "bytes": 8_000_000, "seconds": 0.09}],
    } for ranks in (2, 1)],
}  # fmt: skip
CPUS = Instance("cpus", 8, 10, price=2.0, as_of="2026-11")


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    (tmp_path / "bench.json").write_text(json.dumps(MEASURED))
    (tmp_path / "two.toml").write_text("cores = 2\ngbits = 10\n")
    return tmp_path / "bench.json"


def test_a_measurement_is_planned_from_what_fills_a_host(tmp_path: Path) -> None:
    sizes = [{**size, "threads": 2} for size in MEASURED["sizes"]]
    (tmp_path / "two.json").write_text(json.dumps({**MEASURED, "sizes": sizes}))
    load = from_bench(tmp_path / "two.json")
    assert (load.ranks, load.compute, load.cores) == (2, 0.2, 2)
    # With four cores, none is idle, so the exchange follows the backward pass. With eight, both overlap.
    full, idle = (predict(load, replace(CPUS, cores=cores), 2, PlanOptions(2)) for cores in (4, 8))
    assert full.exposed_seconds > 2 * idle.exposed_seconds


def test_a_measurement_is_planned_from_ranks_that_have_their_cores(bench: Path) -> None:
    load = from_bench(bench)
    assert (load.ranks, load.compute, load.cores, load.bytes) == (1, 0.1, 4, 12_000_000)
    assert PlanOptions().per_host(load, CPUS) == 2
    single, eight, slow = (
        predict(load, on, ranks, options) for on, ranks, options in (
            (CPUS, 1, PlanOptions()), (CPUS, 8, PlanOptions()),
            (CPUS, 8, PlanOptions(ranks_per_host=4)),  # on two cores each instead of four
        )
    )  # fmt: skip
    assert single.samples_per_second == pytest.approx(320)
    assert (eight.hosts, slow.hosts) == (4, 2)
    assert 0.5 < eight.efficiency < 0.9
    assert slow.step_seconds > 2 * load.compute
    slower = replace(CPUS, gbits=1)
    full, half = (predict(load, slower, 8, PlanOptions(wire=wire)) for wire in ("float32", "float16"))
    assert eight.step_seconds < half.step_seconds < full.step_seconds


def test_a_rate_of_several_ranks_contains_their_exchange(
    bench: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --from and with --model, the given rate is predicted for the same number of ranks."""
    rate = ("--images-per-second", "2000", "--of", "16")
    slow = ("--gbits", "1", "--np", "16", "--json")
    for words in (("--from", str(bench), *COMMON), ("--from", str(bench), "--instance", "c5.9xlarge"),
                  ("--model", "resnet50", *COMMON)):  # fmt: skip
        assert plan_cli.main([*words, *rate, *slow]) == 0
        row = json.loads(capsys.readouterr().out)["rows"][0]
        assert row["samples_per_second"] == pytest.approx(2000, rel=0.02)
        assert row["efficiency"] < 0.97
    # One rank with half the cores that it was measured on: the rate applies to these cores.
    assert plan_cli.main(["--from", str(bench), "--instance", str(bench.with_name("two.toml")), "--np", "1",
                          "--images-per-second", "160", "--json"]) == 0  # fmt: skip
    assert json.loads(capsys.readouterr().out)["rows"][0]["samples_per_second"] == pytest.approx(160)


def test_hosts_deviate_by_their_input_and_not_within() -> None:
    model, on = models()["inception_v3"], Instance("own", 32, 100, 8, rdma=True)
    kinds = [PlanOptions(), PlanOptions(host_spread=HOST_SPREAD)]

    def skews(ranks: int) -> list[float]:
        return [
            predict(load, on, ranks, options).skew_seconds / load.compute
            for options in kinds if (load := from_model(model, 100, 64, on, options))
        ]  # fmt: skip

    assert skews(8) == pytest.approx([RANK_SPREAD * 1.42] * 2, rel=0.02)
    assert skews(32) == pytest.approx([RANK_SPREAD * 2.07, RANK_SPREAD * 2.07 + HOST_SPREAD * 1.03], rel=0.02)


def test_nccl_over_tcp_gets_less() -> None:
    load = from_model(models()["vgg16"], 131, 64, instance("p3.16xlarge"), PlanOptions())
    got = {
        (gbits, rdma): machine(load, Instance("own", 32, gbits, 4, rdma=rdma), 4).bandwidth * 8e-9
        for gbits in (10, 25, 100) for rdma in (False, True)
    }  # fmt: skip
    assert got[10, False] < got[10, True] < 10
    assert got[25, False] == got[100, False] == pytest.approx(11)
    assert got[100, True] == pytest.approx(80)
    own = replace(instance("p3dn.24xlarge"), tcp_gbits=50)
    assert machine(load, own, 8).bandwidth == pytest.approx(50e9 / 8)


def test_efficiency_is_said_by_rank_and_by_host(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "inception_v3", "--images-per-second", "100", *COMMON, "--np", "1,8,32")
    assert plan_cli.main([*words, "--json"]) == 0
    single, host, four = json.loads(capsys.readouterr().out)["rows"]
    assert (single["efficiency"], single["host_efficiency"], host["host_efficiency"]) == (1, None, 1)
    assert four["host_efficiency"] == pytest.approx(four["efficiency"] / host["efficiency"])
    assert four["efficiency"] < host["efficiency"] < 1
    assert plan_cli.main(list(words)) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "by rank by host" in text
    assert "Tested on GPUs so far: PyTorch on one GPU" in text
    assert "Not tested: several GPUs" in text


def test_the_best_number_of_hosts(bench: Path) -> None:
    load = from_bench(bench)
    options = PlanOptions(samples=1_000_000, epochs=10)

    def of_hosts(hosts: int) -> Row:
        return predict(load, CPUS, 2 * hosts, options)

    every = [of_hosts(hosts) for hosts in range(1, 33)]
    for hours in (2.0, 1.1):
        best, _ = choose(of_hosts, 32, deadline=hours)
        assert best == next(row for row in every if (row.hours or 0) <= hours)
    costs = [row.money or 0.0 for row in every]
    budget = (costs[4] + costs[20]) / 2
    best, _ = choose(of_hosts, 32, budget=budget)
    assert best == max((row for row in every if (row.money or 0) <= budget), key=lambda row: row.hosts)
    assert choose(of_hosts, 32, deadline=1e-3)[0] is choose(of_hosts, 32, budget=0.01)[0] is None


def test_epochs_by_the_reference_points() -> None:
    curve = curves()["resnet50"]
    assert curve.epochs(256) == 35
    assert curve.epochs(8192) == pytest.approx(42)
    assert curve.epochs(65536) == pytest.approx(84)
    assert 45 < (curve.epochs(16384) or 0) < 56
    assert curve.epochs(65537) is None
    on, model = instance("p3.16xlarge"), models()["resnet50"]
    options = PlanOptions(samples=IMAGES, curve=curve)
    load = from_model(model, 700, 256, on, options)
    some, beyond = (predict(load, on, ranks, options) for ranks in (8, 512))
    assert some.hours == pytest.approx(IMAGES * (curve.epochs(2048) or 0) / some.samples_per_second / 3600)
    assert some.money == pytest.approx((some.hours or 0) * 24.48)
    assert beyond.hours is None


def test_models_and_instances_are_complete() -> None:
    for model in models().values():
        times = [ready for _, ready in model.gradients(1.0)]
        assert times == sorted(times)
        assert model.forward - 1e-9 <= times[0] < times[-1] == pytest.approx(1.0)
    assert all(machine_.price and machine_.as_of for machine_ in instances().values())


COMMON = ("--instance", "p3.16xlarge")
KNOWN = ("--model", "resnet50", "--images-per-second", "395", *COMMON)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "resnet50"), "--instance"),
        (COMMON, "--from bench.json"),
        (("--model", "resnet5", *COMMON), "Known models: resnet50"),
        (("--model", "resnet50", *COMMON), "--images-per-second R"),
        ((*KNOWN, "--from", "x.json"), "--from bench.json, or --model"),
        ((*KNOWN[:4], "--instance", "p3.16xlarg"), "did you mean p3.16xlarge?"),
        ((*KNOWN, "--np", "8,x"), "positive integers, such as 1,2,4"),
        ((*KNOWN, "--np", "0"), "'0' is not a list of positive integers"),
        ((*KNOWN, "--deadline", "2"), "for example 2h"),
        ((*KNOWN, "--deadline", "2h"), "--epochs"),
        ((*KNOWN, "--epochs", "9", "--deadline", "2h", "--budget", "9"), "not allowed with"),
        ((*KNOWN, "--to-accuracy", "76.5"), "75.9 of resnet50"),
        ((*KNOWN, "--wire", "int8"), "float16"),
        ((*KNOWN, "--price", "-1"), "greater than 0"),
        ((*KNOWN, "--of", "0"), "0: must be at least 1"),
        (("--from", "{bench}", *COMMON), "was measured on CPUs"),
        ((*KNOWN, "--ranks-per-host", "32"), "p3.16xlarge has 8 GPUs, and each rank needs one"),
        ((*KNOWN, "--samples", "9"), "--samples and --price need --epochs N"),
        (("--from", "{bench}", "--instance", "c5.9xlarge", "--epochs", "9"), "for small is not known"),
        (("--from", "{bench}", "--instance", "c5.9xlarge", "--of", "2"), "--of 2 needs the total rate"),
        (("--model", "vgg16", "--images-per-second", "9e6", "--of", "16", *COMMON), "exchanges alone take"),
        (("--from", "{bench}", "--instance", "c5.9xlarge", "--batch", "8"), "train --model small --batch 8"),
        (("--from", "{other}", "--instance", "c5.9xlarge"), "not a measurement"),
        (("--from", "nowhere.json", "--instance", "c5.9xlarge"), "No such file"),
        ((*KNOWN, "--np", "99999999999"), "100,000,000,000 ranks. The maximum is 1,000,000"),
        ((*KNOWN[:4], "--instance", "nowhere.toml"), "No such file"),
    ],
)
def test_what_is_refused(
    words: tuple[str, ...], said: str, bench: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = bench.with_name("other.json")
    other.write_text('{"sizes": [{"ranks": 1}]}')
    code = plan_cli.main([word.format(bench=bench, other=other) for word in words])
    error = capsys.readouterr().err
    assert code == 2
    assert said in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "change",
    [
        {"single_steps": [0.1, float("nan"), 0.1]},
        {"step_seconds": {"alone": float("inf")}},
        {"threads": -1},
        {"gradients": [{"name": "a", "bytes": -4, "seconds": 0.1}]},
        {"gradients": [{"name": "a", "bytes": 4, "seconds": -0.1}]},
    ],
)
def test_numbers_that_cannot_be_are_no_measurement(
    change: dict[str, Any], bench: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(bench.read_text())
    for row in content["sizes"]:
        row.update(change)
    bench.write_text(json.dumps(content))
    assert plan_cli.main(["--from", str(bench), "--instance", "c5.9xlarge"]) == 2
    assert f"{bench} is not a measurement" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cores = 4", "gbits is missing"),
        ("cores = 4\ngbits = 0", "gbits is 0; expected a number greater than 0"),
        ("cores = 4.5\ngbits = 1", "cores is 4.5; expected a whole number"),
        ("cores = 4\ngbits = 1\nprise = 2", "'prise' is not a field of a machine type. The fields are cores"),
        ("cores = 4\ngbits = 1\nrdma = 7", "expected true or false"),
        ("cores: 4", "is not valid TOML"),
        ("cores = 4\ngbits = nan", "expected a number"),
    ],
)
def test_a_machine_of_ones_own_is_checked(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.toml").write_text(text)
    assert plan_cli.main([*KNOWN[:4], "--instance", str(tmp_path / "own.toml")]) == 2
    assert said in capsys.readouterr().err


def test_the_output_has_all_assumptions(
    bench: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    words = ["--instance", str(tmp_path / "own.toml"), "--np", "8", "--samples", "1000000", "--epochs", "10"]
    (tmp_path / "own.toml").write_text("cores = 8\ngbits = 10\nprice = 1\nas_of = 2026-11-01\n")
    words = ["--from", str(bench), *words, "--price", "2.5", "--budget", "12"]
    assert plan_cli.main(words) == 0
    text = capsys.readouterr().out
    assert "$2.5 per hour (as of --price)" in text
    assert "Take " in text
    assert text.count("Assumptions") == 1
    assert plan_cli.main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["rows"][0]["hosts"] == 4
    assert plan["best"]["money"] <= 12
    assert len(plan["assumptions"]) == 7
    faster = ["--from", str(bench), "--instance", "p3.16xlarge", "--images-per-second", "3200"]
    assert plan_cli.main([*faster, "--np", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["step_seconds"] == pytest.approx(0.01, rel=0.7)


def test_advice_far_beyond_the_measurement_says_so(bench: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--from", str(bench), "--instance", str(bench.parent / "two.toml"), "--samples", "1000000"]
    for deadline, far in (("1d", False), ("2m", True)):
        assert plan_cli.main([*words, "--epochs", "1", "--deadline", deadline, "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert (plan["best"]["ranks"] > 64) == far
        assert ("times the ranks measured. Measure on more ranks." in plan["verdict"]) == far


def test_what_was_measured_beside_other_programs_is_no_advice(
    bench: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    used = MEASURED["sizes"][0]  # other programs were seen only in the run with a single rank
    sizes = [{**used, "ranks": 1, "ranks_per_host": 1, "others": 0.4}, {**used, "others": 0.1}]
    bench.write_text(json.dumps({**MEASURED, "sizes": sizes}))
    words = ["--from", str(bench), "--instance", str(bench.parent / "two.toml"), "--samples", "1000000"]
    assert plan_cli.main([*words, "--epochs", "1", "--deadline", "1d", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["best"] is None
    assert "No advice: other programs used 40% of the cores" in plan["verdict"]


def test_a_workload_scales_as_a_whole() -> None:
    load = Workload("m", 1, 0.1, ((4, 0.05),), 0.01, 1, 1.0, "").slower(2)
    assert (load.compute, load.gradients, load.spread) == (0.2, ((4, 0.1),), 0.02)


def test_a_plan_is_compared_with_what_was_measured(bench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PAGE.parents[2] / "benchmarks"))
    rows = __import__("plan_check").rows(bench, bench, 100.0, 1)
    assert [(row["ranks"], row["measured"], row["slower_alone"]) for row in rows] == [(2, 0.11, 2.0)]
    assert rows[0]["ratio"] == pytest.approx(rows[0]["predicted"] / 0.11)


def write_run(directory: Path, exposed: list[float], gradients: int = 20_000_000, **values: Any) -> Path:
    """Write the metrics of ranks, two per host, which wait for a share of their time. Steps take 0.1 s."""
    directory.mkdir(exist_ok=True)
    for rank, share in enumerate(exposed):
        text = ""
        for second in range(5, 35, 5):
            row = {
                "time": 1000.0 + second, "rank": rank, "host": f"node{rank // 2}", "pid": 100 + rank,
                "size": len(exposed), "steps": 10 * second, "bytes": 10 * second * gradients,
                "exposed_seconds": share * second, "cpu_seconds": 1.0 * second, "rss_bytes": 1 << 30,
                "host_cpu_percent": 95.0, "host_cores": 2, "last_step_time": 1000.0 + second, **values,
            }  # fmt: skip
            text += json.dumps(row) + "\n"
        with (directory / f"metrics-{rank // 2 * 2}.jsonl").open("a") as file:
            file.write(text)
    return directory


def test_the_step_of_a_run(tmp_path: Path) -> None:
    load = from_run(write_run(tmp_path / "run", [0.2, 0.5, 0.5, 0.5]), 32)
    assert (load.batch, load.ranks, load.cores) == (32, 4, 1.0)
    assert load.model == f"run {tmp_path / 'run'}"  # not a known model, whatever its directory is called
    assert load.compute == pytest.approx(0.08)
    assert load.spread == pytest.approx(0.03 / expected_largest(4))
    assert load.bytes == pytest.approx(20_000_000, rel=1e-3)
    assert load.gradients[-1][1] == pytest.approx(load.compute)
    assert from_run(write_run(tmp_path / "gpu", [0.2] * 2, gpu_percent=97.0), 32).cores == 0
    assert from_run(write_run(tmp_path / "all", [1.0] * 2), 32).compute == pytest.approx(0.001)


def test_a_run_without_gradients_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="A plan needs a run on at least two ranks"):
        from_run(write_run(tmp_path / "run", [0.0], gradients=0), 32)


def test_more_hosts_than_a_run_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(write_run(tmp_path / "run", [0.02] * 4, gpu_percent=97.0))
    (tmp_path / "two.toml").write_text("cores = 2\ngbits = 25\ngpus = 2\nrdma = true\n")
    words = ["--from", run, "--instance", str(tmp_path / "two.toml"), "--np", "4,8", "--json"]
    assert plan_cli.main(words) == 2
    assert "needs the samples per rank and step. Pass --batch N" in capsys.readouterr().err

    def gain(gbits: str) -> float:
        assert plan_cli.main([*words, "--batch", "32", "--gbits", gbits]) == 0
        four, eight = json.loads(capsys.readouterr().out)["rows"]
        return float(eight["samples_per_second"] / four["samples_per_second"])

    assert gain("1") < gain("25") < 2
    assert plan_cli.main(["--from", str(tmp_path), *words[2:], "--batch", "32"]) == 2
    assert "--output-filename" in capsys.readouterr().err

"""For options of other launchers and mistyped options, the error says what to write instead, if anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod.runner.options import parse_args
from ringdance.launch.spec import refuse_launcher, resolve_command
from ringdance.tools.cli import main

HOSTS, ALL = "write -H h1:4,h2:4, the hosts and their slots", "write -np N, the total number of ranks"
EACH, MPIRUN = "write -np N, the total number of ranks on all hosts, or -H", "use `ringdance mpirun`"
OUT = "remove it: this command, run on one host"
SETTING, ELASTIC = "write -x NAME=VALUE; `ringdance settings`", "remove it: the number of ranks (-np N) and"
RUN = {
    # torchrun and torch.distributed.launch
    "--nproc_per_node 4 train.py": EACH,
    "--nproc-per-node=4 train.py": EACH,
    "--nnodes 2 train.py": HOSTS,
    "--nnodes=1:4 train.py": HOSTS,
    "--standalone train.py": OUT,
    "--rdzv-backend c10d train.py": OUT,
    "--rdzv_endpoint=h1:29400 train.py": OUT,
    "--master_addr h1 train.py": OUT,
    "--master-port=29500 train.py": OUT,
    "--node_rank 0 train.py": OUT,
    "--max-restarts 3 train.py": ELASTIC,
    "-m package.train": "write python -m MODULE as the command",
    # Open MPI's mpirun, MPICH's and Intel MPI's mpiexec
    "-hostfile hosts train.py": "did you mean --hostfile?",
    "-machinefile hosts train.py": "write --hostfile FILE",
    "-f hosts train.py": "write --hostfile FILE",
    "--host h1,h2 train.py": HOSTS,
    "-hosts h1,h2 train.py": "did you mean --hosts?",
    "-N 2 train.py": HOSTS,
    "-npernode 2 train.py": EACH,
    "-ppn 2 train.py": EACH,
    "-perhost 2 train.py": EACH,
    "-verbose train.py": "did you mean --verbose?",
    "-pernode train.py": EACH,
    "--mca btl tcp,self train.py": MPIRUN,
    "-mca pml ob1 train.py": MPIRUN,
    "--bind-to none train.py": MPIRUN,
    "-map-by slot train.py": MPIRUN,
    "--oversubscribe train.py": OUT,
    "--allow-run-as-root train.py": OUT,
    "-wdir /data train.py": "write --chdir DIR",
    "-genv A 1 train.py": SETTING,
    "-iface eth0 train.py": "write --network-interface A,B",
    "-output-filename logs train.py": "did you mean --output-filename?",
    # srun
    "--ntasks 8 train.py": ALL,
    "--ntasks-per-node=4 train.py": EACH,
    "--nodes=2 train.py": HOSTS,
    "--nodelist=h[1-4] train.py": HOSTS,
    "-w h1 train.py": HOSTS,
    "--mpi=pmix train.py": OUT,
    # horovodrun
    "--min-np 2 train.py": ELASTIC,
    "--max-np 4 train.py": ELASTIC,
    "--host-discovery-script ./hosts train.py": ELASTIC,
    "--gloo train.py": OUT,
    "--fusion-threshold-mb 32 train.py": SETTING,
    "--cycle-time-ms 1 train.py": SETTING,
    "--log-level INFO train.py": SETTING,
    "--network-interfaces eth0 train.py": "write --network-interface A,B",
    # mistyped
    "--hostfiles hosts train.py": "did you mean --hostfile?",
    "--outputfilename logs train.py": "did you mean --output-filename?",
    "--output_filename logs train.py": "did you mean --output-filename?",
    "--timelines t.json train.py": "did you mean --timeline?",
    "--num_proc 2 train.py": "did you mean --num-proc?",
    "--np 2 train.py": "did you mean -np?",
    "--ssh_port 22 train.py": "did you mean --ssh-port?",
    "--dryrun train.py": "did you mean --dry-run?",
    "--detatch train.py": "did you mean --detach?",
    "--start_timeout=9 train.py": "did you mean --start-timeout?",
    # no option here is similar
    "--mem 4G train.py": "",
    "--preserve train.py": "",
    "--version train.py": "",
    "--exclusive train.py": "",
    "--merge train.py": "",
    "--partition gpu train.py": "",
}
OTHERS = {
    "bench train --model mlp -hostfile hosts": "did you mean --hostfile?",
    "bench train --model mlp --nproc_per_node 2": EACH,
    "bench input --nnodes 2 -- true": HOSTS,
    "bench input --mca a b -- true": "",
    "tune threads -machinefile hosts -- true": "write --hostfile FILE",
    "search space.yaml --nproc-per-node 2 -- true": "",
    "doctor -hostfile hosts": "did you mean --hostfile?",
    "hosts copy -machinefile hosts": "write --hostfile FILE",
    "explain --nodelist h1": HOSTS,
    "status --oversubscribe": "",
}


def said(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert not out
    unknown, _, hint = err.splitlines()[-1].partition("unrecognized arguments: ")[2].partition("; ")
    return unknown, hint


@pytest.mark.parametrize("line", [*(f"run {line}" for line in RUN), *OTHERS])
def test_the_answer_names_the_right_option_or_none(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    unknown, hint = said(line, capsys)
    assert unknown.startswith("-")
    meant = RUN[line.removeprefix("run ")] if line.startswith("run ") else OTHERS[line]
    assert hint.startswith(meant) if meant else not hint


def test_several_options_get_an_answer_each(capsys: pytest.CaptureFixture[str]) -> None:
    line = "run --standalone --nnodes=1 --nproc_per_node 4 --master_port 1 --foo train.py --nnodes 3"
    unknown, hints = said(line, capsys)
    assert unknown == "--standalone --nnodes --nproc_per_node --master_port"
    first, *others = [hint.partition(": ") for hint in hints.split("; ")]
    assert first[0] == "--standalone"
    assert first[2].startswith(OUT)
    assert [answer[0] for answer in others] == ["--nnodes", "--nproc_per_node", "--master_port"]


@pytest.mark.parametrize(
    "line",
    ["-np 1 {0} -c pass --nnodes 2", "-np1 -xA=-1 {0} -c pass -hostfile x", "-np 1 -- {0} -c pass --gloo"],
)
def test_what_belongs_to_the_command_is_left_alone(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--dry-run", "--no-check", *line.format("python").split()]) == 0
    assert "python" in capsys.readouterr().out


def test_horovodrun_answers_too_and_keeps_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    args = parse_args(["-np", "2", "-hostfile", "x", "--gloo", "--min-np", "1", "--output", "logs", "true"])
    assert (args.hostfile, args.use_gloo, args.min_num_proc, args.output_filename) == ("x", True, 1, "logs")
    for word, hint in (("--nproc_per_node=4", EACH), ("--hostfiles=x", "did you mean --hostfile?")):
        with pytest.raises(SystemExit):
            parse_args([word, "true"])
        assert f"; {hint}" in capsys.readouterr().err


@pytest.mark.parametrize("inner", [
    "mpirun -np 2", "/usr/bin/mpiexec -n 2", "srun", "torchrun --nproc-per-node 2 x.py --out nnodes2",
    "torchrun --nnodes=1", "torchrun --nnodes 1 --rdzv-backend=c10d",
])  # fmt: skip
@pytest.mark.parametrize("outer", ["run -np 2", "k8s manifest --image i"])
def test_a_launcher_in_a_job_is_refused(
    outer: str, inner: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each rank would start its own job, and each of these jobs would succeed."""
    assert main([*outer.split(), "--", *inner.split(), "python", "train.py"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "starts ranks itself, so each rank would run its own job" in err


def test_a_launcher_that_joins_its_like_or_runs_alone_is_not_refused(tmp_path: Path) -> None:
    joining = ("--nnodes=2 --master-addr h1", "--nnodes 1:4", "--nnodes=$NODES", "--rdzv_endpoint h1:1")
    words = [f"torchrun {options} train.py" for options in joining]
    for line in (*words, "-- python mpirun.py", ""):
        refuse_launcher(line.split())
    # A trial of `ringdance search` may start its ranks itself.
    (tmp_path / "mpirun").write_text("#!/bin/sh\n")
    (tmp_path / "mpirun").chmod(0o755)
    assert resolve_command([str(tmp_path / "mpirun"), "-np", "2"])[1:] == ["-np", "2"]


def test_a_value_that_begins_with_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sagemaker", "submit", "--mpi-options", "-x A=1", "train.py"]) == 2
    assert "to pass a value that starts with -, write --mpi-options=-x" in capsys.readouterr().err

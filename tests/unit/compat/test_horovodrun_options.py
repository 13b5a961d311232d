"""The command line of horovodrun: accepted options, the variables they set, and the configuration file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from horovod.runner.common.util import config_parser
from horovod.runner.launch import parse_args


def variables(*words: str, **own: str) -> dict[str, str]:
    """Return the environment that these options make of ``own``."""
    env = dict(own)
    config_parser.set_env_from_args(env, parse_args(["-np", "2", *words, "python", "train.py"]))
    return env


@pytest.fixture
def config(tmp_path: Path):
    """Return a function that writes a configuration file and returns the options to read it."""

    def write(text: str) -> list[str]:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return ["--config-file", str(path)]

    return write


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--fusion-threshold-mb", "10"], {"HOROVOD_FUSION_THRESHOLD": str(10 << 20)}),
        (["--fusion-threshold-mb", "0"], {"HOROVOD_FUSION_THRESHOLD": "0"}),
        (["--cycle-time-ms", "20"], {"HOROVOD_CYCLE_TIME": "20.0"}),
        (["--cache-capacity", "512"], {"HOROVOD_CACHE_CAPACITY": "512"}),
        (["--hierarchical-allreduce"], {"HOROVOD_HIERARCHICAL_ALLREDUCE": "1"}),
        (["--no-hierarchical-allreduce"], {"HOROVOD_HIERARCHICAL_ALLREDUCE": "0"}),
        (["--hierarchical-allgather"], {"HOROVOD_HIERARCHICAL_ALLGATHER": "1"}),
        (["--no-hierarchical-allgather"], {"HOROVOD_HIERARCHICAL_ALLGATHER": "0"}),
        (["--torus-allreduce"], {"HOROVOD_TORUS_ALLREDUCE": "1"}),
        (["--no-torus-allreduce"], {"HOROVOD_TORUS_ALLREDUCE": "0"}),
        (["--timeline-filename", "/t.json"], {"HOROVOD_TIMELINE": "/t.json"}),
        (
            ["--timeline-filename", "/t.json", "--timeline-mark-cycles"],
            {"HOROVOD_TIMELINE": "/t.json", "HOROVOD_TIMELINE_MARK_CYCLES": "1"},
        ),
        (["--timeline-mark-cycles"], {}),
        (["--no-stall-check"], {"HOROVOD_STALL_CHECK_DISABLE": "1"}),
        (["--stall-check"], {"HOROVOD_STALL_CHECK_DISABLE": "0"}),
        (
            ["--stall-check-warning-time-seconds", "10", "--stall-check-shutdown-time-seconds", "20"],
            {"HOROVOD_STALL_CHECK_TIME_SECONDS": "10", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "20"},
        ),
        (["--mpi-threads-disable"], {"HOROVOD_MPI_THREADS_DISABLE": "1"}),
        (["--no-mpi-threads-disable"], {"HOROVOD_MPI_THREADS_DISABLE": "0"}),
        (["--num-nccl-streams", "2"], {"HOROVOD_NUM_NCCL_STREAMS": "2"}),
        (["--thread-affinity", "1"], {"HOROVOD_THREAD_AFFINITY": "1"}),
        (["--thread-affinity", "0,1"], {"HOROVOD_THREAD_AFFINITY": "0,1"}),
        (["--gloo-timeout-seconds", "60"], {"HOROVOD_GLOO_TIMEOUT_SECONDS": "60"}),
        (["--log-level", "INFO"], {"HOROVOD_LOG_LEVEL": "INFO"}),
        (["--log-with-timestamp"], {"HOROVOD_LOG_HIDE_TIME": "0"}),
        (["--log-without-timestamp"], {"HOROVOD_LOG_HIDE_TIME": "1"}),
        (["--tcp"], {"NCCL_IB_DISABLE": "1"}),
        (["--network-interfaces", "eth1,eth0"], {"NCCL_SOCKET_IFNAME": "eth0,eth1"}),
        ([], {}),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_an_option_sets_its_variable_and_nothing_else(words, expected):
    assert variables(*words) == expected


def test_every_option_and_key_is_in_the_table():
    """The parser, the configuration file and the environment all use one table, so no option is forgotten."""
    args = parse_args(["-np", "2", "true"])
    assert all(getattr(args, setting.dest) is None for setting in config_parser.SETTINGS)
    assert len({setting.variable for setting in config_parser.SETTINGS}) == len(config_parser.SETTINGS) == 23


def test_the_callers_environment_holds_where_no_option_is_given():
    own = {"HOROVOD_CYCLE_TIME": "7", "HOROVOD_HIERARCHICAL_ALLREDUCE": "1", "HOROVOD_LOG_LEVEL": "debug"}
    assert variables("--cache-capacity", "5", **own) == {**own, "HOROVOD_CACHE_CAPACITY": "5"}
    assert variables("--cycle-time-ms", "2", **own)["HOROVOD_CYCLE_TIME"] == "2.0"
    assert variables("--no-hierarchical-allreduce", **own)["HOROVOD_HIERARCHICAL_ALLREDUCE"] == "0"


AUTOTUNE = [
    "--autotune-log-file=/a.csv", "--autotune-warmup-samples=1", "--autotune-steps-per-sample=5",
    "--autotune-bayes-opt-max-samples=10", "--autotune-gaussian-process-noise=0.2",
]  # fmt: skip


def test_autotune_with_its_own_options():
    assert variables("--autotune", *AUTOTUNE) == {
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE_LOG": "/a.csv",
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "5",
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "10",
        "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.2",
    }
    assert variables(*AUTOTUNE) == {}
    assert variables("--no-autotune", *AUTOTUNE) == {"HOROVOD_AUTOTUNE": "0"}


def test_autotune_with_fixed_parameters():
    environment = variables("--autotune", "--cache-capacity", "1024", "--no-hierarchical-allgather")
    assert environment == {
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_CACHE_CAPACITY": "1024",
        "HOROVOD_HIERARCHICAL_ALLGATHER": "0",
    }


CONFIG = """
controller: mpi
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 20
  cache_capacity: 2048
  hierarchical_allreduce: true
  hierarchical_allgather: false
  torus_allreduce: false
autotune:
  enabled: true
  log_file: /a.txt
  warmup_samples: 5
  steps_per_sample: 20
  bayes_opt_max_samples: 50
  gaussian_process_noise: 0.9
timeline:
  filename: /t.json
  mark_cycles: true
stall_check:
  enabled: false
  warning_time_seconds: 120
  shutdown_time_seconds: 240
library_options:
  mpi_threads_disable: true
  num_nccl_streams: 2
  thread_affinity: 1
  gloo_timeout_seconds: 60
logging:
  level: INFO
  with_timestamp: false
"""


def test_the_configuration_file(config):
    args = parse_args(["-np", "2", *config(CONFIG), "python"])
    assert args.use_mpi
    assert not args.use_gloo
    assert config_parser.set_env_from_args({}, args) == {
        "HOROVOD_FUSION_THRESHOLD": str(32 << 20),
        "HOROVOD_CYCLE_TIME": "20.0",
        "HOROVOD_CACHE_CAPACITY": "2048",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "1",
        "HOROVOD_HIERARCHICAL_ALLGATHER": "0",
        "HOROVOD_TORUS_ALLREDUCE": "0",
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE_LOG": "/a.txt",
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "5",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "20",
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "50",
        "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.9",
        "HOROVOD_TIMELINE": "/t.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "120",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "240",
        "HOROVOD_MPI_THREADS_DISABLE": "1",
        "HOROVOD_NUM_NCCL_STREAMS": "2",
        "HOROVOD_THREAD_AFFINITY": "1",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "60",
        "HOROVOD_LOG_LEVEL": "INFO",
        "HOROVOD_LOG_HIDE_TIME": "1",
    }


@pytest.mark.parametrize("first", [True, False])
def test_the_command_line_wins_over_the_file_wherever_it_stands(config, first):
    own = ["--fusion-threshold-mb", "10", "--no-hierarchical-allreduce", "--stall-check", "--gloo"]
    words = [*own, *config(CONFIG)] if first else [*config(CONFIG), *own]
    args = parse_args(["-np", "2", *words, "python"])
    environment = config_parser.set_env_from_args({}, args)
    assert environment["HOROVOD_FUSION_THRESHOLD"] == str(10 << 20)
    assert environment["HOROVOD_HIERARCHICAL_ALLREDUCE"] == "0"
    assert environment["HOROVOD_STALL_CHECK_DISABLE"] == "0"
    assert environment["HOROVOD_CYCLE_TIME"] == "20.0"
    assert (args.use_gloo, args.use_mpi) == (True, False)


def test_keys_of_the_file_that_mean_nothing_are_found(config):
    (_, path) = config("params: {cycle_tme: 5}\nlogging:\n  hide_timestamp: true\nother: 3\nstall_check:\n")
    content = config_parser.read_config(path)
    assert list(config_parser.unknown_keys(content)) == [
        "params.cycle_tme",
        "logging.hide_timestamp",
        "other",
    ]
    parse_args(["-np", "2", "--config-file", path, "python"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("controller: smoke", "controller=smoke must be one of gloo, mpi"),
        ("params: {fusion_threshold_mb: -1}", "fusion_threshold_mb=-1 must be >= 0"),
        ("params: {cycle_time_ms: fast}", "params.cycle_time_ms=fast must be a number"),
        (
            "params: {hierarchical_allreduce: maybe}",
            "params.hierarchical_allreduce=maybe must be true or false",
        ),
        ("params: 3", "params: expected keys with values"),
        ("- a\n- b", "expected sections"),
        ("params: [", "is not YAML"),
        ("logging: {level: LOUD}", "log_level=LOUD must be one of TRACE"),
        (
            "autotune: {gaussian_process_noise: 2}",
            "autotune_gaussian_process_noise=2.0 must be between 0 and 1",
        ),
    ],
)
def test_mistakes_in_the_file(config, text, message):
    with pytest.raises(ValueError) as caught:
        parse_args(["-np", "2", *config(text), "python"])
    assert message in str(caught.value)


def test_a_file_that_is_not_there():
    with pytest.raises(ValueError, match=r"--config-file /no/such.yaml: No such file"):
        parse_args(["-np", "2", "--config-file", "/no/such.yaml", "python"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fusion-threshold-mb", "-1"], "fusion_threshold_mb=-1 must be >= 0"),
        (["--cycle-time-ms", "-1"], "cycle_time_ms=-1.0 must be >= 0"),
        (["--cache-capacity", "-1"], "cache_capacity=-1 must be >= 0"),
        (["--autotune-warmup-samples", "-1"], "autotune_warmup_samples=-1 must be >= 0"),
        (["--autotune-gaussian-process-noise", "1.5"], "autotune_gaussian_process_noise=1.5 must be between"),
        (["--stall-check-warning-time-seconds", "-1"], "stall_check_warning_time_seconds=-1 must be >= 0"),
        (["--num-nccl-streams", "-1"], "num_nccl_streams=-1 must be >= 0"),
        (["--gloo-timeout-seconds", "-1"], "gloo_timeout_seconds=-1 must be >= 0"),
        (["--thread-affinity", "a"], "thread_affinity=a must be core numbers"),
        (["--start-timeout", "0"], "start_timeout=0 must be > 0"),
        (["--min-np", "3"], "min_num_proc=3 must be <= num_proc=2"),
        (["--max-np", "1"], "num_proc=2 must be <= max_num_proc=1"),
        (["--slots", "0"], "slots=0 must be > 0"),
        (["--reset-limit", "-1"], "reset_limit=-1 must be >= 0"),
        (["--blacklist-cooldown-range", "5", "2"], "1 <= MIN <= MAX <= 3600"),
        (["-p", "0"], "ssh_port=0 must be a port"),
        (["-i", "/no/such/key"], "ssh_identity_file=/no/such/key must be a file"),
    ],
)
def test_values_that_cannot_be_used(words, message):
    with pytest.raises(ValueError) as caught:
        parse_args(["-np", "2", *words, "python"])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["--gloo", "--mpi"],
        ["--mpi", "--jsrun"],
        ["-H", "localhost:2", "-hostfile", "x"],
        ["-H", "localhost:2", "--host-discovery-script", "x"],
        ["--stall-check", "--no-stall-check"],
        ["--log-with-timestamp", "-prefix-timestamp"],
        ["--fusion-threshold-mb", "many"],
        ["--no-such-option"],
    ],
    ids=" ".join,
)
def test_what_argparse_refuses(words, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_args(["-np", "2", *words, "python"])
    assert caught.value.code == 2
    assert "usage: horovodrun" in capsys.readouterr().err


def test_other_names_of_options():
    args = parse_args(
        ["-np", "2", "--min-num-proc", "1", "--max-num-proc", "4", "--slots", "3", "-hostfile", "f",
         "-prefix-timestamp", "-p", "2222", "--mpi-args=--report-bindings -x A", "python", "-np", "7"]
    )  # fmt: skip
    assert (args.num_proc, args.min_num_proc, args.max_num_proc, args.slots) == (2, 1, 4, 3)
    assert args.hostfile == "f"
    assert args.prefix_output_with_timestamp
    assert args.ssh_port == 2222
    assert args.mpi_args == "--report-bindings -x A"
    assert args.command == ["python", "-np", "7"]


def test_no_arguments_means_the_process_s_own(monkeypatch):
    monkeypatch.setattr("sys.argv", ["horovodrun", "--num-proc", "3", "-H", "a:3", "python", "x.py"])
    args = parse_args()
    assert (args.num_proc, args.hosts, args.command) == (3, "a:3", ["python", "x.py"])


@pytest.mark.parametrize(
    ("words", "dest", "value"),
    [
        (["--log-hide-timestamp"], "log_with_timestamp", False),
        (["--no-log-hide-timestamp"], "log_with_timestamp", True),
        (["--network-interface", "a,b"], "nics", {"a", "b"}),
    ],
)
def test_deprecated_forms_warn_and_work(words, dest, value):
    with pytest.warns(DeprecationWarning, match=words[0]):
        args = parse_args(["-np", "2", *words, "python"])
    assert getattr(args, dest) == value


def test_interfaces_add_up():
    words = ["--network-interface", "a", "--network-interfaces", "b,c", "--network-interface", "b"]
    assert parse_args(["-np", "2", *words, "python"]).nics == {"a", "b", "c"}


def test_the_start_timeout_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv("HOROVOD_START_TIMEOUT", raising=False)
    assert parse_args(["-np", "2", "python"]).start_timeout == 30
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "45")
    assert parse_args(["-np", "2", "python"]).start_timeout == 45
    assert parse_args(["-np", "2", "--start-timeout", "5", "python"]).start_timeout == 5
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="HOROVOD_START_TIMEOUT=soon"):
        parse_args(["-np", "2", "python"])


@pytest.mark.parametrize("option", ["-v", "--version"])
def test_version(option, capsys):
    import horovod

    with pytest.raises(SystemExit) as caught:
        parse_args([option])
    assert caught.value.code == 0
    assert capsys.readouterr().out == horovod.__version__ + "\n"


def test_names_of_variables_are_there_for_scripts():
    assert config_parser.HOROVOD_FUSION_THRESHOLD == "HOROVOD_FUSION_THRESHOLD"
    assert config_parser.HOROVOD_STALL_SHUTDOWN_TIME_SECONDS == "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"


def test_parsing_leaves_the_environment_alone(monkeypatch):
    before = dict(os.environ)
    variables("--autotune", "--log-level", "DEBUG")
    assert dict(os.environ) == before

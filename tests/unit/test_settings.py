"""Settings: where values come from, which values are rejected, and what is reported."""

from __future__ import annotations

import dataclasses
import warnings

import pytest

from ringdance.errors import SettingError
from ringdance.settings import SETTINGS, Settings, SettingWarning, load, show
from ringdance.settings.parse import STEPS

NUMBERS = [setting for setting in SETTINGS if setting.legacy and type(setting.default) in (int, float)]


def quiet(environ: dict[str, str]) -> Settings:
    """Call ``load()`` and fail if it warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", SettingWarning)
        return load(environ)


def notes(environ: dict[str, str]) -> tuple[Settings, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings = load(environ)
    return settings, [str(w.message) for w in caught]


def test_an_empty_environment_gives_the_defaults_silently():
    settings = quiet({})
    assert settings == Settings()
    for setting in SETTINGS:
        assert getattr(settings, setting.name) == setting.default
        assert settings.origin(setting.name) == "default"


def test_the_defaults_that_were_agreed():
    settings = Settings()
    assert settings.fusion_threshold == 134217728
    assert settings.cycle_time == 1.0
    assert settings.cache_capacity == 1024
    assert settings.chunk_bytes == 768 << 10
    assert settings.small_bytes == 16384
    assert settings.stall_check_time == 4.0
    assert settings.init_timeout == 120.0


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_each_setting_is_whole(setting):
    """Parsing a setting's default as it is displayed gives the default."""
    assert setting.doc.endswith(".")
    assert type(setting.default) is type(getattr(Settings(), setting.name))
    written = show(setting, setting.default).removesuffix(f" {setting.unit}")
    if written != "(empty)":
        assert setting.parser.parse(written) == setting.default


def test_names_are_unique():
    names = [name for setting in SETTINGS for name in (setting.own, setting.legacy) if name]
    assert len(names) == len(set(names))


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().cycle_time = 2.0  # type: ignore[misc]


def test_origin_of_an_unknown_setting_is_an_error():
    with pytest.raises(KeyError):
        Settings().origin("no_such_setting")


def test_own_name_wins_over_the_legacy_one():
    settings = quiet({"RINGDANCE_CYCLE_TIME": "2.5", "HOROVOD_CYCLE_TIME": "7"})
    assert settings.cycle_time == 2.5
    assert settings.origin("cycle_time") == "environment variable RINGDANCE_CYCLE_TIME"


def test_legacy_name_alone():
    settings = quiet({"HOROVOD_STALL_CHECK_TIME_SECONDS": "60"})
    assert settings.stall_check_time == 60.0
    assert settings.origin("stall_check_time") == "environment variable HOROVOD_STALL_CHECK_TIME_SECONDS"


def test_empty_text_counts_as_not_set():
    settings = quiet({"RINGDANCE_CYCLE_TIME": " ", "HOROVOD_CYCLE_TIME": "7", "RINGDANCE_WINDOW": ""})
    assert settings.cycle_time == 7.0
    assert settings.origin("window") == "default"


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("524288", 524288), ("512K", 524288), ("512 KiB", 524288), ("64M", 1 << 26), ("1gb", 1 << 30)],
)
def test_bytes(text, value):
    assert quiet({"RINGDANCE_FUSION_THRESHOLD": text}).fusion_threshold == value


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("Yes", True), ("on", True), ("0", False), ("FALSE", False)]
)
def test_switches(text, value):
    assert quiet({"RINGDANCE_WINDOW": text}).window is value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("FUSION_THRESHOLD", "-1"),
        ("FUSION_THRESHOLD", "12 parsecs"),
        ("CYCLE_TIME", "nan"),
        ("CYCLE_TIME", "-1"),
        ("CACHE_CAPACITY", "1.5"),
        ("STALL_CHECK_TIME", "0"),
        ("INIT_TIMEOUT", "inf"),
        ("WINDOW", "maybe"),
        ("WINDOW", "2"),
        ("OVERLAP", "sometimes"),
        ("LOG_LEVEL", "loud"),
    ],
)
def test_unusable_text_names_variable_value_and_what_is_expected(name, text):
    with pytest.raises(SettingError) as caught:
        load({f"RINGDANCE_{name}": text})
    message = str(caught.value)
    assert f"RINGDANCE_{name}={text!r}" in message
    assert "expected" in message
    assert "Default:" in message


@pytest.mark.parametrize(
    ("name", "text", "setting", "value"),
    [
        *((one.legacy, text, one.name, one.default) for one in NUMBERS for text in ("abc", "-1", "nan")),
        ("HOROVOD_STALL_CHECK_DISABLE", "true", "stall_check_disable", False),
    ],
)
def test_unusable_legacy_text_leaves_the_default_and_is_said(name, text, setting, value):
    settings, warned = notes({name: text})
    assert getattr(settings, setting) == value
    assert len(warned) == 1
    assert f"{name}={text!r} cannot be used" in warned[0]


@pytest.mark.parametrize(("text", "value"), [("1", True), ("7", True), ("0", False), ("-3", False)])
def test_legacy_switches_are_numbers(text, value):
    assert quiet({"HOROVOD_LOG_HIDE_TIME": text}).log_hide_time is value


def test_a_setting_without_effect_says_why_when_it_is_changed():
    changed = {"HOROVOD_CCL_CACHE": "1", "RINGDANCE_TORUS_ALLREDUCE": "on", "HOROVOD_CONTROLLER": "GLOO"}
    _, warned = notes(changed)
    assert warned == [
        "RINGDANCE_TORUS_ALLREDUCE=on has no effect: PyTorch sets up NCCL.",
        "HOROVOD_CCL_CACHE=1 has no effect: oneCCL is not used.",
        "HOROVOD_CONTROLLER=GLOO has no effect: Gloo is not used; MPI connects the ranks.",
    ]
    quiet({"HOROVOD_CCL_CACHE": "0", "HOROVOD_NUM_NCCL_STREAMS": "1", "HOROVOD_CONTROLLER": "mpi"})


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("RINGDANCE_CYCLETIME", "RINGDANCE_CYCLE_TIME"),
        ("RINGDANCE_STALL_CHECK_TIME_SECONDS", "RINGDANCE_STALL_CHECK_TIME"),
        ("HOROVOD_FUSION_TRESHOLD", "HOROVOD_FUSION_THRESHOLD"),
    ],
)
def test_an_unknown_name_warns_with_the_nearest(name, near):
    _, warned = notes({name: "1"})
    assert warned == [f"{name} is not a Ringdance setting; did you mean {near}?"]


def test_an_unknown_name_like_nothing_else():
    _, warned = notes({"RINGDANCE_XYZZY": "1"})
    assert warned == ["RINGDANCE_XYZZY is not a Ringdance setting; `ringdance settings` lists all names."]


def test_names_of_builds_and_launchers_are_no_mistakes():
    quiet(
        {"HOROVOD_WITH_PYTORCH": "1", "HOROVOD_RANK": "0", "RINGDANCE_LOCAL_RANK": "0", "HOROVOD_GPU": "CUDA"}
    )


def test_other_ranks_keep_quiet():
    environ = {"RINGDANCE_XYZZY": "1", "OMPI_COMM_WORLD_RANK": "1"}
    assert notes(environ)[1] == []
    assert len(notes(environ | {"OMPI_COMM_WORLD_RANK": "0"})[1]) == 1


def test_a_shutdown_time_below_the_check_time_is_ignored():
    settings, warned = notes({"RINGDANCE_STALL_SHUTDOWN_TIME": "3"})
    assert settings.stall_shutdown_time == 0.0
    assert settings.origin("stall_shutdown_time") == "default"
    assert "RINGDANCE_STALL_SHUTDOWN_TIME" in warned[0]
    assert quiet({"RINGDANCE_STALL_SHUTDOWN_TIME": "5"}).stall_shutdown_time == 5.0


def test_every_working_setting_can_be_set_by_its_own_name():
    """Every setting accepts its displayed default: no setting has a name that ``load()`` does not read."""
    for setting in SETTINGS:
        written = show(setting, setting.default).removesuffix(f" {setting.unit}")
        if written == "(empty)":
            written = "1:2" if setting.parser is STEPS else "1"
        settings = quiet({setting.own: written})
        assert settings.origin(setting.name) == f"environment variable {setting.own}"

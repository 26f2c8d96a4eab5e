"""One check for all classes of settings: whatever is given, there are settings within their ranges, or a RejectedError."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Literal, get_args, get_origin

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltarefit.checked import Range, base_kind, fields_of
from deltarefit.errors import RejectedError
from deltarefit.runtime.settings import (
    ObservationSettings,
    PublisherSettings,
    ReceiverAgentSettings,
    RelayServiceSettings,
)
from deltarefit.source import SourceSettings

STRUCTS = (ObservationSettings, PublisherSettings, ReceiverAgentSettings, RelayServiceSettings)
KINDS = (*STRUCTS, SourceSettings)
FIELDS = [(kind, name) for kind in KINDS for name in fields_of(kind)]
NUMBERS = [(kind, name) for kind, name in FIELDS if base_kind(fields_of(kind)[name]) in (int, float)]
ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(10**400), 10**400),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=4),
    st.lists(st.integers(), max_size=2),
    st.just(Path("x")),
    st.just(10**5000),
)


def range_of(kind, name):
    (found,) = (rule for rule in get_args(fields_of(kind)[name]) if isinstance(rule, Range))
    return found


def make(kind, **values):
    """Settings with room for any single value: one bound of PublisherSettings is another's value."""
    if kind is PublisherSettings:
        values = {"group_timeout_s": 366 * 86400.0, **values}
    return kind(**values)


def outcome(work):
    """The settings, or why there are none."""
    try:
        return work(), ""
    except RejectedError as error:
        return None, str(error)


def assert_sound(settings):
    if settings is None:
        return
    for name, hint in fields_of(type(settings)).items():
        value = getattr(settings, name)
        if base_kind(hint) in (int, float):
            found = range_of(type(settings), name)
            assert math.isfinite(value)
            assert found.low <= value <= found.high
            assert type(value) is int or base_kind(hint) is float
        elif get_origin(hint) is Literal:
            assert value in get_args(hint)
        else:
            assert isinstance(value, (str, bool, Path, type(None)))


@pytest.mark.parametrize(("kind", "name"), NUMBERS, ids=lambda value: getattr(value, "__name__", value))
def test_every_number_has_a_range_whose_ends_hold_and_no_more(kind, name):
    found = range_of(kind, name)
    step = 1 if base_kind(fields_of(kind)[name]) is int else 1e-9
    inside = [found.low + step if found.is_open else found.low]
    if name not in ("join_timeout_s", "reply_timeout_s"):  # these are below group_timeout_s besides
        inside.append(found.high)
    for value in inside:
        if (kind, name) != (PublisherSettings, "group_timeout_s"):
            assert getattr(make(kind, **{name: value}), name) == value
    outside = [found.low if found.is_open else found.low - step, found.high + max(step, 1), math.nan, math.inf, -math.inf]
    for value in (*outside, "1", None, True):
        with pytest.raises(RejectedError, match=rf"^{kind.__name__}: {name}: expected .*, got "):
            make(kind, **{name: value})


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=lambda value: getattr(value, "__name__", value))
@given(value=ANYTHING)
def test_a_value_is_sound_or_refused_by_name(kind, name, value):
    settings, error = outcome(lambda: make(kind, **{name: value}))
    assert_sound(settings)
    assert settings is not None or (name in error and "expected" in error and len(error) < 500)


@pytest.mark.parametrize("kind", STRUCTS)
@given(values=st.one_of(ANYTHING, st.dictionaries(st.one_of(st.text(max_size=8), st.integers(), st.none()), ANYTHING)))
def test_any_mapping_is_sound_or_refused(kind, values):
    settings, error = outcome(lambda: kind.from_mapping(values, source="somewhere"))
    assert_sound(settings)
    assert settings is not None or error.startswith("somewhere: ")


@pytest.mark.parametrize("kind", STRUCTS)
@given(data=st.data())
def test_any_texts_in_the_environment_are_sound_or_refused(kind, data):
    name = data.draw(st.sampled_from(kind.__struct_fields__))
    value = data.draw(st.one_of(st.text(max_size=12), st.integers().map(str), st.floats().map(str), st.just("9" * 6000)))
    settings, error = outcome(lambda: kind.from_environment({f"X_{name.upper()}": value, "PATH": "/bin"}, "X_"))
    assert_sound(settings)
    assert settings is not None or (error.startswith("environment, X_") and name in error)


@pytest.mark.parametrize("kind", STRUCTS)
@given(data=st.binary(max_size=60))
def test_any_bytes_in_a_file_are_sound_or_refused(kind, data, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(data)
    settings, error = outcome(lambda: kind.from_toml(path, "table"))
    assert_sound(settings)
    assert settings is not None or str(path) in error


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"publisher = 3", r"expected a table \[publisher\], got 3"),
        (b"[[publisher]]", r"expected a table \[publisher\]"),
        (b"[publisher", "expected a TOML file"),
        (b"\xff", "expected a TOML file"),
        (b"[publisher]\nmin_receivers = []", r"min_receivers: expected a whole number from 0 to 1000000, got \[\]"),
        (b"[publisher]\nbucket_nbytes = 3.5", "bucket_nbytes: expected a whole number"),
        (b"[publisher]\nbucket_nbytes = '3 boxes'", "bucket_nbytes: size '3 boxes'"),
        (b"[publisher]\njoin_timeout_s = nan", "join_timeout_s: expected a number from 0 to"),
        (b"[publisher]\ngroup_timeout_s = 3.5", "group_timeout_s 3.5: expected more than join_timeout_s"),
        (b"[publisher]\nwidth = 1", "'width': no such setting; known settings: .*min_receivers"),
        (b"#" * (2**20 + 1), "at most 1048576 bytes"),
    ],
)
def test_a_file_that_is_wrong_is_named_with_table_and_setting(tmp_path, content, text):
    path = tmp_path / "refit.toml"
    path.write_bytes(content)
    with pytest.raises(RejectedError, match=text) as caught:
        PublisherSettings.from_toml(path, "publisher")
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "absent", "a\0b"):
        with pytest.raises(RejectedError, match="expected a TOML file"):
            PublisherSettings.from_toml(path, "publisher")


def test_texts_are_read_as_what_the_setting_is():
    assert PublisherSettings.from_mapping(
        {"min_receivers": "4", "lease_s": "2.5", "opentelemetry": "true", "bucket_nbytes": "1 MiB", "event_directory": "1"}
    ) == PublisherSettings(min_receivers=4, lease_s=2.5, opentelemetry=True, bucket_nbytes=2**20, event_directory="1")


def test_a_changed_copy_is_checked_too():
    with pytest.raises(RejectedError, match="ReceiverAgentSettings: fetch_threads: expected a whole number from 1 to 1024"):
        msgspec.structs.replace(ReceiverAgentSettings(), fetch_threads=0)
    with pytest.raises(RejectedError, match="SourceSettings: bucket_nbytes"):
        dataclasses.replace(SourceSettings(), bucket_nbytes=0)


@pytest.mark.torch
@pytest.mark.parametrize(
    "wrong",
    [
        {"path": "compiled"},
        {"verify_writes": 1},
        {"may_lack": "*.bias"},
        {"may_ignore": (1,)},
        {"layout_tag": 3},
        {"cross_check": -1},
        {"keep_nbytes": 1.5},
    ],
)
def test_a_ranks_settings_are_checked_alike(wrong):
    settings = pytest.importorskip("deltarefit.receiver").ReceiverSettings
    (name,) = wrong
    with pytest.raises(RejectedError, match=f"^ReceiverSettings: {name}: expected .*, got "):
        settings(**wrong)
    assert settings(layout_tag=lambda: "x", may_lack=("a", "b")).current_tag() == "x"

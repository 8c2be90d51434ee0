"""The error classes carry what the server and the CLI need, and nothing escapes their root."""

from __future__ import annotations

import inspect

import pytest

from gnomon import errors


def error_classes() -> list[type[BaseException]]:
    return [
        value
        for _, value in inspect.getmembers(errors, inspect.isclass)
        if issubclass(value, BaseException)
    ]


def test_one_except_clause_catches_them_all():
    assert len(error_classes()) == 11
    assert all(issubclass(error, errors.GnomonError) for error in error_classes())
    assert issubclass(errors.CheckpointError, errors.ConfigError)
    assert issubclass(errors.MissingLibraryError, errors.UnsupportedError)


def test_request_error_names_field_code_and_status():
    error = errors.RequestError(
        "temperature must be at least 0, got -1", param="temperature", code="out_of_range"
    )
    assert str(error) == "temperature must be at least 0, got -1"
    assert (error.param, error.code, error.status) == ("temperature", "out_of_range", 400)
    assert errors.RequestError("no such model", status=404).status == 404


def test_request_error_takes_no_field_by_place():
    with pytest.raises(TypeError, match="positional"):
        errors.RequestError("message", "temperature")  # type: ignore[misc]  # the point of it


def test_overload_says_when_to_come_back():
    error = errors.OverloadError("queue full: 256 of 256 waiting", 1.5)
    assert error.retry_after_s == 1.5
    assert "256 of 256" in str(error)


def test_every_class_says_what_becomes_of_it():
    """Each docstring names an HTTP status or the CLI's exit code, so no handler has to guess."""
    for error in error_classes():
        assert "HTTP" in (error.__doc__ or ""), error

"""Exceptions that carry one line meant for a person."""

from __future__ import annotations


class DtpError(ValueError):
    """Bad input: names the field, the rule and the value. The command prints it and exits 2."""


class MissingToolError(DtpError):
    """A program that a verb needs is not on this machine. The command prints it and exits 3."""


def must(owner: str, field: str, rule: str, value: object) -> DtpError:
    """The one sentence used for every refused value: ``<owner>.<field> must be <rule>, not <value!r>``."""
    return DtpError(f"{owner}.{field} must be {rule}, not {value!r}")

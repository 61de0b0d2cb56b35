"""A fixture of several files."""

from tests.null_device import null_device  # noqa: F401

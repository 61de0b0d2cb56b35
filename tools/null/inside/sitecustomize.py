"""Imported by Python when it starts, in every process on the null device."""

import null_device

null_device.install()

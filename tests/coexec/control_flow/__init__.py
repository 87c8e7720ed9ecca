"""Tests of control flow on the device."""

"""The record that benchmarks leave."""

import os

import pytest

from benchmarks import record


def test_cores_are_counted_where_the_system_has_no_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= record.hardware()["cores"] <= (os.cpu_count() or 1)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert record.hardware()["cores"] == os.cpu_count()

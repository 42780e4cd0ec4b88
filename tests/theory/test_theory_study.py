"""The tables of the whole study, and what its settings change."""

from __future__ import annotations

import pytest

from theory_study import StudySettings, study


def test_tables_have_the_numbers() -> None:
    few = study(StudySettings(samples=200))
    bias = few.table("bias")
    assert bias.columns == ("t", "token", "CTPO, prefix", "GSPO", "sequence") and len(bias.rows) == 4
    assert max(bias.column("CTPO, prefix")) < 1e-12
    assert bias.rows[0][1] < 1e-12 < 0.01 < bias.rows[3][1]
    rates = {row[:3]: round(row[3], 4) for row in few.table("clip_rates").rows}
    assert rates["widening", "no drift", 8_000] == 0.1787 and rates["widening", "drift", 8_000] == 0.4311
    assert rates["fixed", "no drift", 1_000] == 0.1899 and rates["fixed", "drift", 100] == 0.0275
    assert len(few.curves.rows) > 6 * 20


def test_settings_change_what_is_computed() -> None:
    first, same, other = (study(StudySettings(seed=seed, samples=200)) for seed in (0, 0, 1))
    assert first == same and first.tables != other.tables
    larger = study(StudySettings(vocabulary=2, horizon=6, shift=0.2, sigma=0.05, samples=200))
    assert larger.table("bias").column("t") == [1, 2, 3, 4, 5, 6]
    assert max(larger.table("bias").column("CTPO, prefix")) < 1e-12
    assert larger.table("variance").column("sequence")[0] < first.table("variance").column("sequence")[0]
    assert larger.table("spread").column("sigma sqrt(t)")[0] == pytest.approx(0.5)

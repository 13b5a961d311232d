"""Click logs with a planted signal: independent of the number of rows, and equal in every format."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from criteo_lines import criteo_lines

from ringdance.data import Table, planted
from ringdance.data.tables.auc import auc
from ringdance.tools import cli

pytest.importorskip("pyarrow")


def test_fewer_rows_are_the_first_of_more():
    (few,), (more,) = planted(500, seed=3), planted(2000, seed=3)
    assert criteo_lines(few) == b"".join(criteo_lines(more).splitlines(keepends=True)[:500])
    assert (few.probabilities == more.probabilities[:500]).all()
    (other,) = planted(500, seed=3, day=1)
    assert criteo_lines(few) != criteo_lines(other)
    later = list(planted(20_000, seed=3, start=300))
    assert [len(part.labels) for part in later] == [16_384 - 300, 20_300 - 16_384]
    assert criteo_lines(later[0]).splitlines()[:200] == criteo_lines(few).splitlines()[300:]
    for a, b in zip(later[0].part(0, 200).rows(), few.rows().part(300, 500), strict=True):
        assert a.tobytes() == b.tobytes()


def test_clicks_follow_their_probabilities():
    parts = list(planted(60_000))
    labels = np.concatenate([part.labels for part in parts])
    probabilities = np.concatenate([part.probabilities for part in parts])
    assert abs(labels.mean() - 0.25) < 0.01
    for low in np.arange(0, 1, 0.1):
        chosen = (probabilities >= low) & (probabilities < low + 0.1)
        assert abs(labels[chosen].mean() - probabilities[chosen].mean()) < 0.05


def test_auc_counts_equal_probabilities_half():
    metrics = pytest.importorskip("sklearn.metrics")
    random = np.random.RandomState(0)
    scores, labels = np.round(random.random_sample(2000), 2), random.randint(0, 2, 2000)
    assert auc(scores, labels) == pytest.approx(metrics.roc_auc_score(labels, scores), abs=1e-12)


def test_rows_need_no_pyarrow(tmp_path):
    code = "import sys; sys.modules['pyarrow'] = None; import numpy as np; from ringdance.tools import cli;"
    code += "from ringdance.data import Table; cli.main(['data', 'generate', 'criteo', *sys.argv[1:]]);"
    code += "print(Table.open(sys.argv[1]).read(np.arange(100)).ids.shape)"
    command = [sys.executable, "-c", code, tmp_path, "--rows", "100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("\n(100, 39)\n"), done.stderr


def test_the_command_writes_these_rows(tmp_path, capsys):
    words = ["data", "generate", "criteo", str(tmp_path), "--rows", "3000", "--table-size", "5000"]
    assert cli.main([*words, "--validation", "0.1"]) == 0
    (whole,) = planted(3000)
    for split, start, stop in (("train", 0, 2700), ("validation", 2700, 3000)):
        written = Table.open(tmp_path, split).read(np.arange(stop - start))
        for column, other in zip(written, whole.part(start, stop).rows(5000), strict=True):
            assert column.tobytes() == other.tobytes()
    best = auc(whole.probabilities[:2700], whole.labels[:2700])
    assert f"AUC of the true probabilities {best:.5f}" in capsys.readouterr().out
    assert cli.main(words) == 2
    assert "Use --overwrite to replace it" in capsys.readouterr().err
    assert cli.main([*words, "--overwrite"]) == 0
    assert not (tmp_path / "validation.json").exists()

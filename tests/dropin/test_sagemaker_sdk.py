"""If SageMaker's SDK v2 is installed, it still sends the recorded requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("moto")
sagemaker = pytest.importorskip("sagemaker", reason="SageMaker's SDK v2 is not installed")
if not sagemaker.__version__.startswith("2."):
    pytest.skip("SageMaker's SDK is not version 2", allow_module_level=True)
from sagemaker_cases import CASES, RECORDED, sent_by_the_sdk  # noqa: E402


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_what_the_sdk_sends_is_what_was_recorded(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    (tmp_path / "train.py").write_text("")
    assert sent_by_the_sdk(case, str(tmp_path)) == json.loads(RECORDED.read_text())[case]

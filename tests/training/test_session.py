"""What is checked and told before a cluster is needed."""

from pathlib import Path

import pytest

from g2rpo_ray.training.session import open_session
from tests.states import make_run


@pytest.mark.parametrize(("recorded", "lacks"), [(range(0), 7), (range(1, 6), 2), (range(1, 8), 0)])
def test_a_resumed_run_says_which_iterations_its_record_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recorded: range, lacks: int
) -> None:
    config = make_run(tmp_path / "run")
    lines = [f'{{"iteration": {number}, "kind": "train"}}\n' for number in recorded]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines))
    with open_session(config, "auto"):
        pass
    told = capsys.readouterr().out
    assert "--resume auto goes on after iteration 7" in told
    said = f"metrics.jsonl lacks {lacks} of the 7 iterations before"
    assert (said in told) == (lacks > 0)

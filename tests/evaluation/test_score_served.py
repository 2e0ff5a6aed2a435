"""g2rpo score --ray: the same rows from reward servers as in this process."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from g2rpo_ray.config.scoring import load_scoring
from g2rpo_ray.evaluation.scoring import judges
from g2rpo_ray.evaluation.scoring.pictures import ScoreError
from g2rpo_ray.evaluation.scoring.score import score
from tests.evaluation.scored import folder_of, lines_file, overrides, rows_of

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_served_and_in_process_give_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judges, "ray_cluster", lambda _: nullcontext(False))
    names = [f"{prompt}_{number}.png" for prompt in range(4) for number in range(3)]
    folder = folder_of(tmp_path / "p", names)
    texts = ["well", "raise now", "nothing to say", "well again"]
    rows = [
        {"prompt": text, "words": "HI"} if "well" in text else {"prompt": text} for text in texts
    ]
    prompts = lines_file(tmp_path / "prompts.jsonl", rows)
    settings = overrides("bright") + overrides("group", "Group") + overrides("ocr", wants="words")
    config = load_scoring(None, [], settings)
    found = {}
    for on_ray in (False, True):
        out = tmp_path / f"out{on_ray}"
        assert "| bright | 6 | 6 |" in score(config, folder, prompts, out, on_ray=on_ray)
        found[on_ray] = rows_of(out)
    for name in names:
        here, served = found[False][name], found[True][name]
        assert (here["bright"], here["group"], here["ocr"]) == (
            served["bright"], served["group"], served["ocr"],
        )  # fmt: skip
        assert (here["problem"] is None) == (served["problem"] is None)
    assert found[True]["0_0.png"]["group"] == 3
    assert "ZeroDivisionError: the scorer's own bug" in found[True]["1_0.png"]["problem"]
    assert (
        "bright: no answer (NaN or infinite); metadata of its prompt: none"
        in found[True]["2_0.png"]["problem"]
    )
    assert "no words in the prompt file" in found[True]["2_0.png"]["problem"]


def test_a_served_scorer_says_itself_whether_it_wants_captions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judges, "ray_cluster", lambda _: nullcontext(False))
    folder = folder_of(tmp_path / "p", ["a.png"])
    config = load_scoring(None, [], overrides("bright") + overrides("plain", "Plain"))
    found = []
    for on_ray in (False, True):
        with pytest.raises(ScoreError, match="no picture has a score of bright: it has no prompt"):
            score(config, folder, None, tmp_path / f"out{on_ray}", on_ray=on_ray)
        found.append(rows_of(tmp_path / f"out{on_ray}")["a.png"])
    here, served = found
    assert here["plain"] is not None
    assert served == here
    assert here["problem"] == "bright: it has no prompt"


def test_servers_compute_the_same_bits_where_a_run_is_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judges, "ray_cluster", lambda _: nullcontext(False))
    choosy = ["rewards.choosy.kind=python", "rewards.choosy.cpus_per_replica=0.1"]
    choosy += ["rewards.choosy.options.target='tests.rewards.fakes:ChoosyScorer'"]
    config = load_scoring(None, [], [*choosy, "model.deterministic=true"])
    folder = folder_of(tmp_path / "p", ["a.png"])
    (folder / "a.txt").write_text("a cat")
    score(config, folder, None, tmp_path / "out", on_ray=True)
    assert rows_of(tmp_path / "out")["a.png"]["choosy"] == 1

"""The report of runs in every state: whole, broken off, hostile."""

import json
import re
import shutil
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from PIL import Image

from g2rpo_ray.config.operation import TrackingSection
from g2rpo_ray.tracking.metrics import MetricsLog
from g2rpo_ray.tracking.report.charts import Scale, Series, line_chart, stacked_bars
from g2rpo_ray.tracking.report.live import LEAST_PAUSE_S, LiveReport
from g2rpo_ray.tracking.report.page import write_report
from tests.tracking.fake_run import CONFIG, PROMPTS, add_pictures, make_run

VOID = {"meta", "img"}


class Page(HTMLParser):
    """A report taken apart; a tag that is not closed is an error."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self._open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), f"{tag} has the handler {name}"
            if (tag, name) == ("a", "href"):
                self.links.append(value or "")
            elif name in {"src", "href", "srcset", "data", "xlink:href"}:
                self.references.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.text += data


def read_page(path: Path) -> Page:
    """Parse a report and check that it needs nothing but itself."""
    page = Page(path)
    assert all(reference.startswith("data:image/") for reference in page.references)
    assert all((path.parent / unquote(link)).is_file() for link in page.links)
    assert not {"script", "link", "iframe", "object", "base"} & set(page.tags)
    style = page.source.partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    return page


def test_a_finished_run_is_shown_whole(tmp_path: Path) -> None:
    report = write_report(make_run(tmp_path / "quickstart"))
    page = read_page(report)
    assert report == tmp_path / "quickstart" / "report.html"
    assert "Not everything is here" not in page.text
    for text in (
        "quickstart", "g2rpo", "tiny_world:flux", "40 of 40", "2 min 43 s", "39,840", "6.31 GiB",
        "0.5450", "0.8100", "+0.2650", "not trained on", "9f2c51d07be8a344", "torch 2.14.1",
        "0, 1, 2", "12 of 8 members", "192 decoded and scored",
        "before training", "after iteration 40", "Largest |Δlog p|", "0.250 → 1.000", *PROMPTS,
    ):  # fmt: skip
        assert text in page.text, text
    assert len(page.references) == len(page.links) == 2 * len(PROMPTS)
    assert page.tags.count("svg") == 3 + 2 + 6 + 1
    assert "oracle (not trained on) over clip" in page.text
    assert "held-out mean of hps" in page.text
    assert "which guards lower" not in page.text


def test_untrained_rewards_are_drawn_over_trained_ones(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", iterations=2)
    with (folder / "metrics.jsonl").open("w") as file:
        for n, (clip, oracle) in enumerate([(0.5, 0.9), (0.75, 0.6), (None, 0.5), (1.0, 0.3)]):
            record = {"iteration": n, "kind": "evaluation", "heldout/clip": clip}
            file.write(json.dumps(record | {"heldout/oracle": oracle}) + "\n")
        weights = {"iteration": 1, "kind": "train", "reward/clip/weight": 0.5}
        file.write(json.dumps(weights) + "\n")
    page = read_page(write_report(folder))
    assert "Weights of the trained rewards, which guards lower" in page.text
    (figure,) = [it for it in page.source.split("<figure>") if "oracle (not trained on) over" in it]
    dots = re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', figure)
    xs, ys = ([float(dot[axis]) for dot in dots] for axis in (0, 1))
    # To the right as clip rises, down (a larger y) as the oracle falls; the first is marked.
    assert xs[:3] == sorted(xs[:3])
    assert xs[1] == pytest.approx((xs[0] + xs[2]) / 2, abs=0.01)
    assert ys[:3] == sorted(ys[:3])
    assert dots[3:] == dots[:1]


def test_a_run_that_broke_off_says_what_is_missing(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "broken_off")
    (run_dir / "summary.json").unlink()
    shutil.rmtree(run_dir / "pictures")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(lines[:8]) + lines[8][:40])
    page = read_page(write_report(run_dir))
    assert "There is no summary.json" in page.text
    assert "Only one evaluation was recorded" in page.text
    assert "No pictures of held-out prompts were kept" in page.text
    assert "7 of 40" in page.text


def test_a_run_that_goes_on_compares_with_its_last_evaluation(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "goes_on")
    (run_dir / "summary.json").unlink()
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(lines[:15]))
    page = read_page(write_report(run_dir))
    assert "13 of 40" in page.text
    assert "<th>iteration 10</th>" in page.source
    assert "Only one evaluation" not in page.text


def test_evaluations_are_no_training_time(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    (run_dir / "summary.json").unlink()
    times = {"time/generate_s": 60.0, "time/learn_s": 5.0, "time/sync_s": 1.0}
    line = {"iteration": 1, "kind": "train", "time/evaluate_s": 600.0, "time/iteration_s": 666.0}
    (run_dir / "metrics.jsonl").write_text(json.dumps(line | times) + "\n")
    assert re.search(r"Training time\s*1 min 06 s", read_page(write_report(run_dir)).text)


def test_an_empty_folder_still_gives_a_report(tmp_path: Path) -> None:
    page = read_page(write_report(tmp_path))
    for text in ("no config.yaml", "no summary.json", "No training iteration was recorded",
                 "No evaluation on held-out prompts", "No times were recorded"):  # fmt: skip
        assert text in page.text


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    hostile = [
        '<script>alert("1")</script>',
        "<img src=https://example.org/x onerror=alert(1)>",
        '" onmouseover="alert(1)',
        "</style></article>&lt;b&gt; ]]> -->",
        "一隻紅色的貓 🐈 " + "x" * 4000,
    ]
    run_dir = make_run(tmp_path / "<b>run", prompts=hostile)
    page = read_page(write_report(run_dir))
    for prompt in hostile:
        assert prompt in page.text


def test_null_values_are_gaps(tmp_path: Path) -> None:
    nan = float("nan")
    with MetricsLog(tmp_path, TrackingSection(tensorboard=False), {}) as log:
        log.record(0, {"heldout/hps": nan})
        for iteration in range(1, 4):
            log.record(iteration, {"policy/grad_norm": nan, "reward/hps/mean": nan})
        log.record(3, {"heldout/hps": 0.5})
    page = read_page(write_report(tmp_path))
    assert "nan" not in page.source.lower().partition("</style>")[2]
    assert "No numbers recorded" in page.text


def test_a_picture_that_is_not_there_or_broken_is_named(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    folder = run_dir / "pictures" / "heldout"
    (folder / "iteration_40" / "0_0.png").unlink()
    (folder / "iteration_40" / "1_0.png").write_bytes(b"no picture")
    entries = json.loads((folder / "iteration_40.json").read_text())
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    entries[2]["file"] = "../../../secret.png"
    entries[3]["scores"]["hps"] = None
    (folder / "iteration_40.json").write_text(json.dumps(entries))
    page = read_page(write_report(run_dir))
    assert "0_0.png is missing" in page.text
    assert "1_0.png cannot be read" in page.text
    assert "lies outside the run folder" in page.text
    assert "0.580 → –" in page.text


def test_one_evaluation_shows_one_picture_a_prompt(tmp_path: Path) -> None:
    add_pictures(tmp_path, 0, PROMPTS, blur=True)
    page = read_page(write_report(tmp_path))
    assert len(page.references) == len(PROMPTS)
    assert "after iteration" not in page.text


def test_large_pictures_are_made_small(tmp_path: Path) -> None:
    add_pictures(tmp_path, 0, PROMPTS[:1], blur=True)
    file = tmp_path / "pictures" / "heldout" / "iteration_0" / "0_0.png"
    Image.effect_noise((1024, 1024), 80).save(file)
    report = write_report(tmp_path)
    assert read_page(report).references[0].startswith("data:image/jpeg")
    assert report.stat().st_size < 400_000


@pytest.mark.parametrize("content", ["{", "[1, 2]", "\0"])
def test_a_broken_summary_is_named(tmp_path: Path, content: str) -> None:
    run_dir = make_run(tmp_path / "run")
    (run_dir / "summary.json").write_text(content)
    assert re.search(r"summary\.json (cannot be read|holds)", read_page(write_report(run_dir)).text)


def test_settings_of_another_version_are_listed_without_arithmetic(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    (run_dir / "config.yaml").write_text(json.dumps(CONFIG | {"sampling": {"size": 64}}))
    page = read_page(write_report(run_dir))
    assert "Learner passes" not in page.text
    assert "size: 64" in page.text


def test_templates_and_tables_travel_with_the_package() -> None:
    root = Path(__file__).parents[2]
    packed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent.relative_to(root) for path in root.glob("g2rpo_ray/**/templates/*")}
    assert folders
    for folder in folders:
        assert "templates/*" in packed["package-data"][".".join(folder.parent.parts)]
    # The names of the metrics are read from it.
    assert "*.md" in packed["package-data"]["g2rpo_ray.tracking"]


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0.4, 0.7), (-3e-9, 2e-8), (0, 7), (12_000, 99_000), (-1, 1)]
)
def test_ticks_are_few_and_inside(low: float, high: float) -> None:
    values = Scale(low, high, 0, 1).ticks(5)
    assert 2 <= len(values) <= 6
    slack = 1e-9 * (high - low)
    assert low - slack <= min(values)
    assert max(values) <= high + slack


def test_many_iterations_become_few_bars() -> None:
    points = [(float(x), 2.0) for x in range(1000)]
    chart = stacked_bars("Time", [Series("learn", "#000", points)])
    assert chart.count("<rect") <= 60
    assert "mean of 17 iterations" in chart


def test_one_constant_point_can_be_drawn() -> None:
    assert "<circle" in line_chart("Loss", [Series("loss", "#000", [(1, 0.0)])])


def test_many_large_pictures_become_smaller_ones(tmp_path: Path) -> None:
    """Noise is the worst that a JPEG can be given."""
    prompts = [f"prompt {number}" for number in range(40)]
    run_dir = make_run(tmp_path / "large", prompts=prompts)
    noise = np.random.default_rng(0).integers(0, 256, (720, 720, 3), np.uint8)
    files = sorted((run_dir / "pictures").rglob("*.png"))
    Image.fromarray(noise).save(files[0], compress_level=0)
    for file in files[1:]:
        file.unlink()
        file.hardlink_to(files[0])
    report = write_report(run_dir)
    assert report.stat().st_size < 10 * 10**6
    page = read_page(report)
    assert len(page.references) == 80
    with Image.open(run_dir / unquote(page.links[0])) as picture:
        assert picture.size == (720, 720)


def test_the_report_of_a_run_that_goes_on_loads_itself_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, told = make_run(tmp_path / "live"), list[str]()
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    summary = (run_dir / "summary.json").read_text()
    (run_dir / "summary.json").unlink()
    page = LiveReport(run_dir, told.append)
    page.renew()
    source = (run_dir / "report.html").read_text()
    assert 'http-equiv="refresh"' in source
    assert "Not everything is here" not in source
    (run_dir / "report.html").unlink()
    # Not for every iteration of a fast run.
    now_s += LEAST_PAUSE_S / 2
    page.renew()
    assert not (run_dir / "report.html").exists()
    now_s += LEAST_PAUSE_S
    page.renew()
    page.close()
    # What broke off waits for nothing.
    broken = (run_dir / "report.html").read_text()
    assert 'http-equiv="refresh"' not in broken
    assert "There is no summary.json" in broken
    (run_dir / "summary.json").write_text(summary)
    assert page.write_last().read_text().count("refresh") == 0
    page.close()
    assert told == [f"report, renewed while the run goes on: {run_dir / 'report.html'}"]


def test_a_report_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / "report.html").mkdir()
    page = LiveReport(tmp_path, told.append)
    page.renew()
    page.close()
    assert len(told) == 1
    assert told[0].startswith("warning: the report is not renewed: ")
    with pytest.raises(OSError):
        page.write_last()


def test_a_costly_report_is_written_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, written_at_s = 0.0, list[float]()
    monkeypatch.setattr("time.monotonic", lambda: now_s)

    def write(run_dir: Path, _live: bool) -> Path:
        nonlocal now_s
        written_at_s.append(now_s)
        now_s += 3.0
        return run_dir

    monkeypatch.setattr("g2rpo_ray.tracking.report.live.write_report", write)
    page = LiveReport(tmp_path, print)
    for _ in range(1000):
        page.renew()
        now_s += 1.0
    # Three seconds in each 153.
    assert written_at_s == [pytest.approx(153 * n, abs=2 * n) for n in range(len(written_at_s))]
    assert len(written_at_s) == 7

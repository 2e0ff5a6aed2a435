"""``g2rpo demo``: pictures as ``g2rpo sample`` draws them, bad input in words, a real browser."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import requests
from PIL import Image

from g2rpo_ray.cli import EXIT_INTERRUPTED, EXIT_REQUEUE, main
from g2rpo_ray.common.errors import InputError
from g2rpo_ray.config import Config
from g2rpo_ray.evaluation.demo.page import (
    PASSWORD,
    USER,
    build,
    check_port,
    describe,
    draw_both,
    heldout_page,
    launch,
    read_login,
)
from g2rpo_ray.evaluation.demo.studio import Asked, DemoError, Studio, checkpoints, read_asked
from g2rpo_ray.evaluation.sample import SampleOptions, sample
from g2rpo_ray.evaluation.scoring.judges import Unscored
from g2rpo_ray.learner.checkpoints.folders import checkpoint_folder
from g2rpo_ray.run.scores import save_heldout
from tests.evaluation.browser import CHROMIUM, Tab, browser
from tests.states import make_run
from tests.tiny import CAPTIONS, tiny_config

KINDS = {"full": [], "lora": ["model.lora={rank: 4, alpha: 10.0}"]}


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp(request.param) / "run"
    return make_run(folder, *KINDS[request.param])


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return make_run(tmp_path_factory.mktemp("demo") / "run")


@pytest.fixture(scope="module")
def studio(full: Config) -> Studio:
    return Studio(full)


def asked(prompt: str = CAPTIONS[0], seed: int = 3, trained_steps: int = 4) -> Asked:
    return Asked(prompt, seed, 4, trained_steps, "last")


def nothing(*_: object, **__: object) -> None:
    pass


def test_the_pictures_are_those_of_sample(run: Config, tmp_path: Path) -> None:
    studio, steps = Studio(run), list[int]()
    for checkpoint, trained_steps in (("base", 4), ("last", 4), ("last", 2), ("base", 4)):
        drawn = studio.draw(asked(trained_steps=trained_steps), checkpoint == "last", steps.append)
        options = SampleOptions(
            CAPTIONS[:1], seed=3, checkpoint=checkpoint,
            trained_steps=trained_steps if checkpoint == "last" else None,
        )  # fmt: skip
        (path,) = sample(run, options, tmp_path)
        assert np.array_equal(drawn.picture, np.asarray(Image.open(path)))
        assert drawn.scores.keys() == run.rewards.keys()
    assert steps == [1, 2, 3, 4] * 4


def test_two_users_at_once_get_what_each_would_get_alone(studio: Studio) -> None:
    wanted = [asked(seed=seed) for seed in range(6)]

    def both(one: Asked) -> list[np.ndarray]:
        return [studio.draw(one, trained, nothing).picture for trained in (False, True)]

    alone = [both(one) for one in wanted]
    with ThreadPoolExecutor(6) as users:
        together = list(users.map(both, wanted))
    assert np.array_equal(np.array(alone), np.array(together))


def test_a_prompt_that_is_cut_says_so_beside_its_picture(studio: Studio) -> None:
    most = studio.config.prompts.max_sequence_length
    for text, is_cut in (("a red circle " * most, True), ("a red circle", False)):
        *_, (_, base, _, trained) = draw_both(studio, (text, 0, 1, 1.0, "last"), nothing)
        assert ("prompts.max_sequence_length is" in base) is is_cut
        assert ("prompts.max_sequence_length is" in trained) is is_cut


def test_a_prompt_that_a_reward_cannot_judge_has_pictures_and_says_why(studio: Studio) -> None:
    for prompt in ("\U0001f984 на 木 ❤️‍🔥", "a cat " * 300):
        *_, (_, base, picture, scores) = draw_both(studio, (prompt, 0, 4, 1.0, "last"), nothing)
        assert picture.size == (64, 64)
        assert isinstance(studio.draw(asked(prompt), True, nothing).scores["oracle"], Unscored)
        assert "oracle" in base
        assert "<td>–</td>" in scores
        assert "+" in scores or "-" in scores  # the change of the others


def test_a_checkpoint_that_is_gone_is_a_message_and_a_new_one_is_taken(tmp_path: Path) -> None:
    config = make_run(tmp_path / "run")
    studio, folder = Studio(config), checkpoint_folder(tmp_path / "run", 7)
    assert checkpoints(config) == ["last", "iteration_000007"]
    assert "has not ended" in describe(config)
    want = (CAPTIONS[0], 0, 4, 1.0)
    *_, (_, _, _, scores) = draw_both(studio, (*want, "last"), nothing)
    assert "iteration 7" in scores
    # A run that trains writes the next, and deletes the one before.
    make_run(tmp_path / "other", moved=0.01)
    info = checkpoint_folder(tmp_path / "other", 7) / "state.json"
    info.write_text(info.read_text().replace('"iteration": 7', '"iteration": 8'))
    shutil.move(info.parent, checkpoint_folder(tmp_path / "run", 8))
    shutil.rmtree(folder)
    *_, (_, _, _, scores) = draw_both(studio, (*want, "last"), nothing)
    assert "iteration 8" in scores
    drawing = draw_both(studio, (*want, "iteration_000007"), nothing)
    base, _, none, _ = next(drawing)
    assert base is not None
    assert none is None
    with pytest.raises(InputError, match=r"iteration_000007: not there"):
        next(drawing)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(InputError, match="no checkpoint there yet"):
        list(draw_both(studio, (*want, "last"), nothing))
    assert "no checkpoint yet" in describe(config)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompt": " \n"}, "The prompt is empty"),
        ({"prompt": None}, "The prompt is empty"),
        ({"prompt": "\u200b"}, "The prompt is empty"),
        ({"prompt": "x" * 10_000}, r"10,000 characters; allowed are 2,000"),
        ({"prompt": "a\0b"}, "character that is no text"),
        ({"prompt": "half \ud83e"}, "character that is no text"),
        ({"seed": None}, "Seed: None is no whole number"),
        ({"seed": 0.5}, "no whole number"),
        ({"seed": float("inf")}, "no whole number"),
        ({"steps": 0}, "allowed are 1 to 100"),
        ({"steps": 101}, "allowed are 1 to 100"),
        ({"steps": "many"}, "allowed are 1 to 100"),
        ({"share": 1.01}, "allowed are 0 to 1"),
        ({"share": float("nan")}, "allowed are 0 to 1"),
        ({"checkpoint": "../../etc"}, "choose one of last"),
        ({"checkpoint": "/etc/passwd"}, "choose one of last"),
    ],
)
def test_what_a_browser_may_send_is_refused_in_words(
    tmp_path: Path, changed: dict[str, object], message: str
) -> None:
    sent = {"prompt": "a cat", "seed": 1, "steps": 12, "share": 0.5, "checkpoint": "last"}
    config = tiny_config(tmp_path)
    assert read_asked(config, *sent.values()) == Asked("a cat", 1, 12, 6, "last")
    with pytest.raises(DemoError, match=message):
        read_asked(config, *(sent | changed).values())


def test_beyond_this_machine_only_with_a_login() -> None:
    login = {USER: "me", PASSWORD: "long enough"}
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert read_login(host, {}) is None
        assert read_login(host, login) == ("me", "long enough")
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org", "127.0.0.1.example.org", ""):
        with pytest.raises(DemoError, match=f"needs a login: set {USER} and {PASSWORD}"):
            read_login(host, {})
        assert read_login(host, login) == ("me", "long enough")
    for half in login:
        with pytest.raises(DemoError, match="a login is both"):
            read_login("127.0.0.1", {half: "x"})


def test_a_port_in_use_and_a_missing_gradio_are_told_before_anything_is_loaded(
    full: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRADIO_TEMP_DIR", full.run_dir)  # else the command sets it
    for host, port in (("127.0.0.1", 70_000), ("192.0.2.77", 7860)):
        with pytest.raises(DemoError, match="cannot be listened on"):
            check_port(host, port)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setitem(sys.modules, "gradio", sys)
        assert main(["demo", full.run_dir, "--port", str(taken.getsockname()[1])]) == 2
    assert "Address already in use" in (printed := capsys.readouterr().err)
    assert "Name a --port" in printed
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert main(["demo", full.run_dir]) == 2
    assert "install g2rpo-ray[demo]" in capsys.readouterr().err
    assert main(["demo", "/no/run"]) == 2
    assert "/no/run/config.yaml: no such configuration file" in capsys.readouterr().err


def test_text_of_a_run_is_no_markup(tmp_path: Path) -> None:
    assert "were kept yet" in heldout_page(tmp_path)
    entry = {"prompt_id": 1, "prompt": "<script>alert(1)</script>", "file": "no.png",
             "scores": {"clip": 0.5}}  # fmt: skip
    save_heldout(tmp_path, 0, [])
    (tmp_path / "pictures/heldout/iteration_0.json").write_text(str([entry]).replace("'", '"'))
    page = heldout_page(tmp_path)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "no.png is missing" in page


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_with_a_login_nothing_is_answered_without_it(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gradio", reason="needs g2rpo-ray[demo]")
    monkeypatch.setenv("no_proxy", "example.org")
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    page = build(studio)
    port = free_port()
    launch(page, "127.0.0.1", port, ("me", "secret"))
    try:
        with pytest.raises(DemoError, match="choose another --port"):
            launch(build(studio), "127.0.0.1", port, None)
        client = requests.Session()
        assert client.get(f"{page.local_url}config").status_code == 401
        for password, status in (("guess", 400), ("secret", 200)):
            sent = {"username": "me", "password": password}
            assert client.post(f"{page.local_url}login", sent).status_code == status
        assert client.get(f"{page.local_url}config").status_code == 200
    finally:
        page.close(verbose=False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_it_and_leaves_nothing(
    full: Config, tmp_path: Path, number: signal.Signals
) -> None:
    """While it serves; and once more while it ends."""
    pytest.importorskip("gradio", reason="needs g2rpo-ray[demo]")
    process = subprocess.Popen(
        [sys.executable, "-m", "g2rpo_ray.cli", "demo", full.run_dir, "--port", str(free_port())],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        # What runs the tests may have been started to ignore some: nohup, or a shell's &.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert any("no login" in line for line in process.stdout)
    assert [path.name for path in tmp_path.glob("g2rpo-demo-*")]
    # Who sends it to a group sends it twice.
    for _ in range(1 if number == signal.SIGINT else 2):
        process.send_signal(number)
    assert process.wait(60) == (EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_REQUEUE)
    assert not [path.name for path in tmp_path.glob("g2rpo-demo-*")]


@pytest.fixture(scope="module")
def address(full: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The real command's page, where a proxy leads out, and Gradio's own folder is another's."""
    pytest.importorskip("gradio", reason="needs g2rpo-ray[demo]")
    port, temporary = free_port(), tmp_path_factory.mktemp("tmp")
    (temporary / "gradio").touch()
    nowhere = f"http://127.0.0.1:{free_port()}"
    plain = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    process = subprocess.Popen(
        [sys.executable, "-m", "g2rpo_ray.cli", "demo", full.run_dir, "--port", str(port)],
        env=plain | {"HTTP_PROXY": nowhere, "HTTPS_PROXY": nowhere, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert any("no login" in line for line in process.stdout)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def tab(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    if CHROMIUM is None:
        pytest.skip("no chromium here")
    with browser(tmp_path_factory.mktemp("browser")) as tab:
        tab.open(address)
        tab.wait_for("!!document.querySelector('#prompt textarea')")
        yield tab


BOTH = (
    "['base', 'trained'].every(side => document.querySelector(`#${side} img`)?.naturalWidth == 64 "
    "&& ['clip', 'hps', 'oracle'].every(name => "
    "document.querySelector(`#${side}-scores`).innerText.includes(name)))"
)


def test_in_a_browser_one_types_presses_and_sees_both_pictures_with_their_scores(tab: Tab) -> None:
    pictures = "['base', 'trained'].map(side => document.querySelector(`#${side} img`)?.src)"
    seconds: list[float] = []
    # Other tests may have the machine for a while: one of three presses is answered soon.
    for caption in CAPTIONS[:3]:
        before = json.dumps(tab.evaluate(pictures))
        tab.write("#prompt textarea", caption)
        started_s = time.monotonic()
        tab.click("#draw")
        tab.wait_for(f"{pictures}.every((src, side) => src != {before}[side]) && {BOTH}")
        seconds.append(time.monotonic() - started_s)
        if seconds[-1] < 5:
            break
    print("from press to both pictures with their scores, s:", seconds)
    assert min(seconds) < 5
    assert "iteration 7" in tab.evaluate("document.querySelector('#trained-scores').innerText")
    others = "performance.getEntriesByType('resource').map(e => new URL(e.name).hostname)"
    assert set(tab.evaluate(others)) <= {"127.0.0.1", ""}


def test_in_a_browser_bad_input_is_a_message(tab: Tab) -> None:
    for prompt, message in (("", "The prompt is empty"), ("x" * 10_000, "10,000 characters")):
        tab.write("#prompt textarea", prompt)
        tab.click("#draw")
        tab.wait_for(f"document.body.innerText.includes({message!r})")
    assert "Traceback" not in tab.evaluate("document.body.innerText")

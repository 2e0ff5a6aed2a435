"""The demo's page, and where it may be reached; Gradio is imported where it is used."""

import html
import ipaddress
import os
import signal
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from PIL import Image

from g2rpo_ray.common.device import describe_device
from g2rpo_ray.common.errors import InputError, RunError
from g2rpo_ray.common.secrets import redacted
from g2rpo_ray.common.stop import StopRequested
from g2rpo_ray.config import Config
from g2rpo_ray.evaluation.demo.studio import (
    MOST_STEPS,
    DemoError,
    Drawn,
    Studio,
    checkpoints,
    read_asked,
)
from g2rpo_ray.evaluation.scoring.judges import Score, Unscored
from g2rpo_ray.run.paths import run_folder
from g2rpo_ray.tracking.report.page import heldout_prompts
from g2rpo_ray.tracking.report.render import PIXELATED_BELOW, render
from g2rpo_ray.tracking.report.run_folder import read_run_folder
from g2rpo_ray.training.settings import size_words

USER, PASSWORD = "G2RPO_DEMO_USER", "G2RPO_DEMO_PASSWORD"
WAITING = 20
"""Presses of the button that may wait; the next one is refused with a message."""
CACHE_S = 3600
"""Drawn pictures that browsers may still ask for are deleted after it."""
ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals beside Ctrl-C; who started it with nohup ignores the last."""
CSS = """
.pixels img, img.small { image-rendering: pixelated }
.pixels img { width: 100%; height: 100%; object-fit: contain }
.scores { width: 100%; font-variant-numeric: tabular-nums } .scores th { text-align: left }
.scores .up { color: #2f8f63 } .scores .down { color: #b3372f }
.heldout { display: inline-block; width: 280px; margin: 8px; vertical-align: top }
.heldout div { display: inline-block; width: 49% } .heldout img { width: 100% }
"""


def serve(config: Config, host: str, port: int) -> None:
    """Load all, serve the page until Ctrl-C or another signal that ends it.

    Raises:
        StopRequested: it was another one.
        DemoError: Gradio is missing, a login is, or address or port cannot be used.
        InputError: as of ``Studio``.
    """
    # Gradio's own folder is one for all users of the machine: the first one's. Read when imported.
    with _raised(ENDING), TemporaryDirectory(prefix="g2rpo-demo-") as drawn:
        os.environ.setdefault("GRADIO_TEMP_DIR", drawn)
        _serve(config, host, port)


@contextmanager
def _raised(signals: Sequence[int]) -> Iterator[None]:
    """Those of ``signals`` that would end the process where it is, as StopRequested."""
    ours = [number for number in signals if signal.getsignal(number) is signal.SIG_DFL]

    def end(number: int, _frame: FrameType | None) -> None:
        for each in ours:
            # Again, as by ``timeout`` to the process and its group: what is cleared up stays so.
            signal.signal(each, signal.SIG_IGN)
        raise StopRequested(number)

    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _serve(config: Config, host: str, port: int) -> None:
    try:
        import gradio  # noqa: F401
    except ImportError as error:
        raise DemoError(f"the page needs Gradio ({error}): install g2rpo-ray[demo]") from error
    login = read_login(host, os.environ)
    check_port(host, port)
    setting = "rollout.gpus_per_worker"
    device = describe_device(config.rollout.gpus_per_worker, setting)
    scorers, size = len(config.rewards), size_words(config)
    print(f"loading the model and {scorers} scorers; drawing {size} on: {device}", flush=True)
    page = build(Studio(config))
    launch(page, host, port, login)
    try:
        print(f"demo: {page.local_url} ({'login' if login else 'no login'}; Ctrl-C ends it)",
              flush=True)  # fmt: skip
        threading.Event().wait()
    finally:
        page.close(verbose=False)


def launch(page: Any, host: str, port: int, login: tuple[str, str] | None) -> None:
    """Serve from a thread of its own, to those that know the login.

    Raises:
        DemoError: another process took the port meanwhile.
    """
    import gradio as gr

    # Gradio's own theme fetches its fonts from another host.
    theme = gr.themes.Default(font=("system-ui", "sans-serif"), font_mono=("monospace",))
    # Gradio asks its own server whether it is there; a proxy would look for it on its own machine.
    direct = (urllib.request.getproxies().get("no"), host, "localhost")
    os.environ["no_proxy"] = ",".join(filter(None, direct))
    try:
        page.launch(
            server_name=host, server_port=port, auth=login, share=False, quiet=True, theme=theme,
            prevent_thread_lock=True, show_error=True, css=CSS, footer_links=[], ssr_mode=False,
            enable_monitoring=False, mcp_server=False,
        )  # fmt: skip
    except OSError as error:
        raise DemoError(f"--host {host} --port {port}: {error}; choose another --port") from error


def read_login(host: str, environment: Mapping[str, str]) -> tuple[str, str] | None:
    """User and password; None where only this machine reaches the page and none are set.

    Raises:
        DemoError: there is none, or half of one, and there must be.
    """
    user, password = environment.get(USER, ""), environment.get(PASSWORD, "")
    if user and password:
        return user, password
    if user or password:
        raise DemoError(f"{USER if password else PASSWORD} is not set: a login is both")
    if not _is_loopback(host):
        raise DemoError(
            f"--host {host}: others can reach this address, so the page needs a login: set {USER} "
            f"and {PASSWORD} in the environment. Allowed without: 127.0.0.1, to which a tunnel "
            "leads (ssh -L)"
        )
    return None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_port(host: str, port: int) -> None:
    """Before anything is loaded, which takes longer.

    Raises:
        DemoError: another process has the port, or this machine has no such address.
    """
    try:
        family = socket.getaddrinfo(host, None)[0][0]
        with socket.socket(family) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((host, port))
    except (OSError, OverflowError) as error:
        raise DemoError(
            f"--host {host} --port {port}: cannot be listened on: {error}. Name a --port from 1024 "
            "to 65535 that no other process has, and an address of this machine"
        ) from error


def build(studio: Studio) -> Any:
    """The page: a ``gradio.Blocks``."""
    import gradio as gr

    config = studio.config
    folder, steps = run_folder(config), config.evaluation.steps
    width, height = config.sampling.width, config.sampling.height
    look: dict[str, Any] = {
        "format": "png", "height": 400, "interactive": False, "buttons": ["download", "fullscreen"],
        "elem_classes": ["pixels"] if max(width, height) < PIXELATED_BELOW else [],
    }  # fmt: skip

    def draw(*asked: object, progress: Any = gr.Progress()) -> Iterator[tuple]:  # noqa: B008
        try:
            yield from draw_both(studio, asked, progress)
        except (InputError, RunError) as error:
            text = html.escape(redacted(str(error)))
            raise gr.Error(text, duration=None, print_exception=False) from error

    # Pages of other origins shall not ask for anything, fonts of other hosts are not asked for.
    with gr.Blocks(
        title=f"{folder.name} · g2rpo demo",
        analytics_enabled=False,
        delete_cache=(CACHE_S, CACHE_S),
    ) as page:
        state = gr.Markdown(elem_id="state")
        prompt = gr.Textbox(label="Prompt", lines=2, max_lines=6, autofocus=True, elem_id="prompt")
        with gr.Row():
            checkpoint = gr.Dropdown(checkpoints(config), value="last", label="Checkpoint")
            seed = gr.Number(0, label="Seed", precision=0)
            count = gr.Slider(1, MOST_STEPS, steps, step=1, label="Steps")
            share = gr.Slider(
                0, 1, 1, step=0.05, label="Hybrid share",
                info="of the steps, by the trained weights; the rest by the base model",
            )  # fmt: skip
        button = gr.Button("Draw", variant="primary", elem_id="draw")
        outputs = []
        with gr.Row():
            for name in ("base", "trained"):
                with gr.Column():
                    outputs += [
                        gr.Image(label=name, show_label=True, elem_id=name, **look),
                        gr.HTML(elem_id=f"{name}-scores"),
                    ]
        gr.Markdown("### Held-out prompts, as the run drew them")
        heldout = gr.HTML(elem_id="heldout")
        asked = [prompt, seed, count, share, checkpoint]
        gr.on(
            [button.click, prompt.submit], draw, asked, outputs,
            api_visibility="private", concurrency_limit=1, show_progress_on=outputs[::2],
        )  # fmt: skip
        page.load(
            lambda: (describe(config), heldout_page(folder)),
            outputs=[state, heldout],
            api_visibility="private",
        )
        # A run that trains has others by now.
        checkpoint.focus(
            lambda: gr.Dropdown(checkpoints(config)), outputs=checkpoint, api_visibility="private"
        )
    return page.queue(max_size=WAITING, default_concurrency_limit=1)


def draw_both(
    studio: Studio, asked: tuple[object, ...], progress: Callable[..., object]
) -> Iterator[tuple]:
    """The four outputs, as each of the two pictures is there.

    Args:
        asked: of ``read_asked``, without the configuration.
        progress: called with ``(done, total)`` and ``desc``.

    Raises:
        InputError, RunError: something cannot be drawn.
    """
    wanted = read_asked(studio.config, *asked)
    drawn: list[Drawn] = []
    for trained in (False, True):
        what = "trained weights" if trained else "base model"
        progress((0, wanted.steps), desc=what, unit="steps")

        def on_step(done: int, what: str = what) -> None:
            progress((done, wanted.steps), desc=what, unit="steps")

        drawn.append(studio.draw(wanted, trained, on_step))
        shown = [part for one in drawn for part in _outputs(studio.config, one, drawn[0])]
        yield tuple(shown + [None, ""] * (2 - len(drawn)))


def _outputs(config: Config, drawn: Drawn, base: Drawn) -> list[object]:
    first = {} if drawn is base else base.scores
    order = sorted(drawn.scores, key=lambda name: (name not in config.trained_rewards, name))
    scores = {}
    for name in order:
        score = drawn.scores[name]
        why = (score.cause or "no answer to this prompt") if isinstance(score, Unscored) else ""
        scores[name] = {"score": _number(score), "base": _number(first.get(name)), "why": why}
    table = render(
        "demo_scores.html", "g2rpo_ray.evaluation", scores=scores, trained=config.trained_rewards
    )
    heading = html.escape(drawn.label)
    note = f"<p>{html.escape(drawn.note)}</p>" if drawn.note else ""
    return [Image.fromarray(drawn.picture), f"<b>{heading}</b>{note}{table}"]


def _number(score: Score | None) -> float | None:
    return None if isinstance(score, Unscored) else score


def describe(config: Config) -> str:
    """The run, and how far it is."""
    folder, made = run_folder(config), checkpoints(config)
    trained = " + ".join(config.trained_rewards)
    text = f"## {folder.name}\n{config.algorithm} on {trained}, {config.iterations} iterations. "
    if not (folder / "summary.json").exists():
        text += "The run has not ended: *last* is its newest checkpoint when you draw. "
    return text + ("" if made[1:] else "It has no checkpoint yet: the base model alone is drawn.")


def heldout_page(folder: Path) -> str:
    """The pictures of held-out prompts that the run kept, as HTML."""
    prompts = heldout_prompts(read_run_folder(folder))
    return str(render("demo_heldout.html", "g2rpo_ray.evaluation", prompts=prompts))
